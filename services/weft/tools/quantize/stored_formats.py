"""Codes as the tensors of a folder: compressed-tensors for linear codes, bitsandbytes for NF4."""

import json
from typing import Any

import torch
from torch import Tensor

from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import NF4_VALUES


def compressed_tensors(module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of a module in compressed-tensors' format ``pack-quantized``; see the reader of that name."""
    per_word = 32 // weight.num_bits
    tensors = {
        f"{module}.weight_packed": _words(weight.unpacked().t(), weight.num_bits),
        f"{module}.weight_scale": weight.scales.t().contiguous(),
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        missing = -weight.shape[0] % per_word
        zeros = torch.nn.functional.pad(weight.zeros.to(torch.uint8), (0, missing))
        tensors[f"{module}.weight_zero_point"] = _words(zeros, weight.num_bits).t().contiguous()
    return tensors


def compressed_tensors_config(weight: QuantizedWeight) -> dict[str, Any]:
    """``quantization_config`` of folders whose linear layers but the LM head are stored like ``weight``."""
    is_whole = weight.group_size == weight.shape[1]
    weights = {
        "num_bits": weight.num_bits,
        "type": "int",
        "symmetric": weight.zeros is None,
        "strategy": "channel" if is_whole else "group",
        "group_size": None if is_whole else weight.group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def bitsandbytes(module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of a module in bitsandbytes' NF4; see the reader of that name."""
    codes = weight.unpacked().t().reshape(-1)
    state = {
        "quant_type": "nf4",
        "blocksize": weight.group_size,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    name = f"{module}.weight"
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        name: (codes[::2] << 4 | codes[1::2]).unsqueeze(1),
        f"{name}.absmax": weight.scales.t().reshape(-1).float(),
        f"{name}.quant_map": torch.tensor(NF4_VALUES),
        f"{name}.quant_state.bitsandbytes__nf4": text,
    }


def bitsandbytes_config() -> dict[str, Any]:
    """``quantization_config`` of folders whose linear layers but the LM head are NF4."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    }


def _words(codes: Tensor, num_bits: int) -> Tensor:
    """int32 words of uint8 codes along the last axis, the first in the lowest bits."""
    narrow = codes[:, ::2] | codes[:, 1::2] << 4 if num_bits == 4 else codes
    return narrow.contiguous().view(torch.int32)
