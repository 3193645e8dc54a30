"""Writers of quantised folders, each by the words of its format, with the numbers that the folder stands for.

Codes, scales and zero points are random: what is written has no error of rounding, so reading it has to be exact.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from weft.llm.config import TransformerConfig
from weft.llm.models.experts import MixtureConfig
from weft.llm.models.llama import Llama, Mixtral
from weft.llm.weights.parts import Part

CONFIG = Llama(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
EXPERTS = Mixtral(**vars(CONFIG) | {"num_experts": 4, "num_chosen": 2, "expert_size": CONFIG.intermediate_size})
GROUP_SIZE = 32

Tensors = dict[str, torch.Tensor]


class Written(NamedTuple):
    """A weight as its format stores it, and its numbers, float64 ``[out, in]``."""

    tensors: Tensors
    numbers: np.ndarray


Writer = Callable[[str, tuple[int, int], np.random.Generator], Written]


def save_folder(
    folder: Path,
    writer: Writer,
    quantization: dict[str, Any] | None,
    *,
    is_plain: Callable[[str], bool] = lambda module: module == "lm_head",
    config: TransformerConfig = CONFIG,
) -> Tensors:
    """Write a folder, with random codes; returns every weight by its name in a plain folder, as numbers."""
    random = np.random.default_rng(0)
    tensors, numbers = {}, {}
    for part in all_parts(config):
        module = part.name.removesuffix(".weight")
        if len(part.shape) == 1 or module.endswith(("model.embed_tokens", ".gate")) or is_plain(module):
            scale = 1.0 if part.name.endswith("norm.weight") else 0.2
            tensors[part.name] = torch.tensor(random.normal(1 if scale == 1.0 else 0, scale, part.shape)).float()
            numbers[part.name] = tensors[part.name]
            continue
        written = writer(module, (part.shape[0], part.shape[1]), random)
        tensors |= written.tensors
        numbers[part.name] = torch.tensor(written.numbers).float()
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(config, quantization)))
    return numbers


def all_parts(config: TransformerConfig) -> list[Part]:
    """Every tensor of a folder that is not quantised."""
    return [part for parts in config.weight_parts().values() for part in parts]


def config_json(config: TransformerConfig, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """``config.json`` of the model."""
    values: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "float32",
    }
    if isinstance(config, MixtureConfig):
        values |= {"num_local_experts": config.num_experts, "num_experts_per_tok": config.num_chosen}
    return values if quantization is None else values | {"quantization_config": quantization}


def _packed(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """int32 words of ``32 / bits`` codes along ``axis``; ``order`` has the code of each place, lowest first."""
    per_word = 32 // bits
    words = []
    for start in range(0, codes.shape[axis], per_word):
        word = np.zeros(np.delete(codes.shape, axis), np.uint64)
        for place in range(per_word):
            index = start + (order[place] if order else place)
            if index < codes.shape[axis]:
                word |= np.take(codes, index, axis).astype(np.uint64) << np.uint64(bits * place)
        words.append(word.astype(np.uint32).view(np.int32))
    return torch.from_numpy(np.stack(words, axis))


def _half(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.uniform(0.002, 0.03, shape).astype(np.float16)


def g_idx(module: str, inputs: int) -> np.ndarray:
    """Group of each input, the same for modules that have the same input."""
    layer, kind = module.split(".")[2], "down" if "down" in module else "o" if "o_proj" in module else "other"
    input_name = module if ".experts." in module else kind
    order = np.random.default_rng([int(layer), sum(input_name.encode()), inputs]).permutation(inputs)
    groups = np.empty(inputs, np.int32)
    groups[order] = np.arange(inputs) // GROUP_SIZE
    return groups


def gptq(
    bits: int = 4,
    *,
    is_symmetric: bool = False,
    is_v2: bool = False,
    has_order: bool = False,
    group_size: int = GROUP_SIZE,
) -> Writer:
    """GPTQ, of AutoGPTQ's version or of GPTQModel's second."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        outputs, inputs = shape
        count = inputs // group_size
        codes = random.integers(0, 2**bits, (inputs, outputs))
        zeros = random.integers(1, 2**bits, (count, outputs))
        if is_symmetric:
            zeros[:] = 2 ** (bits - 1)
        scales = _half(random, (count, outputs))
        groups = g_idx(module, inputs) if has_order else (np.arange(inputs) // group_size).astype(np.int32)
        tensors = {
            f"{module}.qweight": _packed(codes, bits, 0),
            f"{module}.qzeros": _packed(zeros if is_v2 else zeros - 1, bits, 1),
            f"{module}.scales": torch.from_numpy(scales),
            f"{module}.g_idx": torch.from_numpy(groups),
        }
        return Written(tensors, ((codes - zeros[groups]) * scales[groups].astype(np.float64)).T)

    return write


def awq(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
    """AWQ of version "gemm"."""
    outputs, inputs = shape
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes = random.integers(0, 16, (inputs, outputs))
    zeros = random.integers(0, 16, (inputs // GROUP_SIZE, outputs))
    scales = _half(random, zeros.shape)
    tensors = {
        f"{module}.qweight": _packed(codes, 4, 1, order),
        f"{module}.qzeros": _packed(zeros, 4, 1, order),
        f"{module}.scales": torch.from_numpy(scales),
    }
    spread = [array.repeat(GROUP_SIZE, 0) for array in (zeros, scales.astype(np.float64))]
    return Written(tensors, ((codes - spread[0]) * spread[1]).T)


def bitsandbytes4(*, is_double: bool, block: int = 64, table: str = "nf4") -> Writer:
    """NF4 or FP4, the scales as numbers or as codes of 8 bits."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        count = shape[0] * shape[1]
        values = np.sort(np.random.default_rng(1).uniform(-1, 1, 16)).astype(np.float32)
        codes = random.integers(0, 16, count)
        state: dict[str, Any] = {"quant_type": table, "blocksize": block, "dtype": "float32", "shape": list(shape)}
        prefix = f"{module}.weight"
        blocks = -(-count // block)
        tensors = {
            prefix: torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8)).view(-1, 1),
            f"{prefix}.quant_map": torch.from_numpy(values),
        }
        if is_double:
            outer_block = 16
            scale_codes = random.integers(0, 256, blocks).astype(np.uint8)
            scale_values = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
            outer = random.uniform(0.01, 0.1, -(-blocks // outer_block)).astype(np.float32)
            state |= {"nested_blocksize": outer_block, "nested_dtype": "float32", "nested_offset": 0.15}
            tensors |= {
                f"{prefix}.absmax": torch.from_numpy(scale_codes),
                f"{prefix}.nested_absmax": torch.from_numpy(outer),
                f"{prefix}.nested_quant_map": torch.from_numpy(scale_values),
            }
            scales = scale_values[scale_codes] * outer[np.arange(blocks) // outer_block] + 0.15
        else:
            scales = random.uniform(0.05, 0.3, blocks).astype(np.float32)
            tensors[f"{prefix}.absmax"] = torch.from_numpy(scales)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors[f"{prefix}.quant_state.bitsandbytes__{table}"] = torch.from_numpy(text)
        numbers = values[codes].astype(np.float64) * scales[np.arange(count) // block]
        return Written(tensors, numbers.reshape(shape))

    return write


def bitsandbytes8(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
    """LLM.int8()."""
    codes = random.integers(-127, 128, shape).astype(np.int8)
    magnitudes = random.uniform(0.1, 0.4, shape[0]).astype(np.float32)
    tensors = {
        f"{module}.weight": torch.from_numpy(codes),
        f"{module}.SCB": torch.from_numpy(magnitudes),
        f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Written(tensors, codes * magnitudes[:, None].astype(np.float64) / 127)


def float8(scale_name: str, scale_shape: Callable[[int, int], tuple[int, ...]]) -> Writer:
    """E4M3 with scales of a shape; where both axes have blocks these are of 48 outputs and 32 inputs."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        weight = torch.tensor(random.normal(0, 20, shape)).to(torch.float8_e4m3fn)
        scales = torch.tensor(random.uniform(0.002, 0.02, scale_shape(*shape))).float()
        spread = scales.double().numpy()
        if spread.ndim == 2 and spread.shape[1] > 1:
            spread = spread.repeat(48, 0)[: shape[0]].repeat(32, 1)[:, : shape[1]]
        elif spread.ndim == 1 and spread.size > 1:
            spread = spread[:, None]
        tensors = {f"{module}.weight": weight, f"{module}.{scale_name}": scales}
        return Written(tensors | {f"{module}.input_scale": torch.ones(1)}, weight.double().numpy() * spread)

    return write


def compressed(
    bits: int = 4, *, has_zeros: bool = False, has_order: bool = False, is_packed: bool = True, is_whole: bool = False
) -> Writer:
    """compressed-tensors of whole numbers: packed with groups, or int8 with a scale for each output, or one for all."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        outputs, inputs = shape
        count = inputs // GROUP_SIZE if is_packed else 1
        half = 2 ** (bits - 1)
        codes = random.integers(-half, half, shape)
        zeros = random.integers(-half, half, (outputs, count)) if has_zeros else np.zeros((outputs, count), int)
        scales = _half(random, (1, 1) if is_whole else (outputs, count))
        groups = np.arange(inputs) // (inputs // count)
        tensors = {f"{module}.weight_scale": torch.from_numpy(scales.flatten() if is_whole else scales)}
        if has_order:
            groups = g_idx(module, inputs)
            tensors[f"{module}.weight_g_idx"] = torch.from_numpy(groups)
        if is_packed:
            tensors[f"{module}.weight_packed"] = _packed(codes + half, bits, 1)
            tensors[f"{module}.weight_shape"] = torch.tensor(shape)
        else:
            tensors[f"{module}.weight"] = torch.from_numpy(codes.astype(np.int8))
        if has_zeros:
            packed = _packed(zeros + half, bits, 0) if is_packed else torch.from_numpy(zeros.astype(np.int8))
            tensors[f"{module}.weight_zero_point"] = packed
        return Written(tensors, (codes - zeros[:, groups]) * scales[:, groups].astype(np.float64))

    return write


def _compressed_config(kind: str, bits: int = 4) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "type": "int"}, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": False, "desc_act": False}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32]}
_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

#: Every format, by name: its writer and its ``quantization_config``.
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq": (gptq(), _GPTQ),
    "gptq symmetric": (gptq(is_symmetric=True), _GPTQ | {"sym": True}),
    "gptq one group": (gptq(group_size=64), _GPTQ | {"group_size": -1}),
    "gptq act-order": (gptq(has_order=True), _GPTQ | {"desc_act": True}),
    "gptq v2": (gptq(is_v2=True), _GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq 8 bits": (gptq(8), _GPTQ | {"bits": 8}),
    "gptq 8 bits act-order": (gptq(8, has_order=True), _GPTQ | {"bits": 8, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm", "zero_point": True}),
    "nf4": (bitsandbytes4(is_double=False), _NF4),
    "nf4 double": (bitsandbytes4(is_double=True), _NF4 | {"bnb_4bit_use_double_quant": True}),
    "nf4 blocks across outputs": (bitsandbytes4(is_double=True, block=512), _NF4),
    "nf4 blocks of one element": (bitsandbytes4(is_double=False, block=1), _NF4),
    "fp4": (bitsandbytes4(is_double=False, table="fp4"), _NF4 | {"bnb_4bit_quant_type": "fp4"}),
    "bitsandbytes 8 bits": (bitsandbytes8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "fp8": (float8("weight_scale", lambda outputs, inputs: ()), _FP8),
    "fp8 by output": (float8("weight_scale", lambda outputs, inputs: (outputs, 1)), {"quant_method": "fbgemm_fp8"}),
    "fp8 by block": (float8("weight_scale_inv", lambda outputs, inputs: (-(-outputs // 48), inputs // 32)), _BLOCKS),
    "compressed": (compressed(), _compressed_config("pack-quantized")),
    "compressed asymmetric": (compressed(has_zeros=True), _compressed_config("pack-quantized")),
    "compressed act-order": (compressed(has_order=True), _compressed_config("pack-quantized")),
    "compressed 8 bits": (compressed(8, has_zeros=True), _compressed_config("pack-quantized", 8)),
    "compressed int8": (compressed(8, is_packed=False), _compressed_config("int-quantized", 8)),
    "compressed int8, one scale": (
        compressed(8, is_packed=False, is_whole=True),
        _compressed_config("int-quantized", 8),
    ),
    "compressed fp8 by block": (
        float8("weight_scale", lambda outputs, inputs: (-(-outputs // 48), inputs // 32)),
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "block_structure": "48x32"}}},
        },
    ),
    "compressed fp8": (
        float8("weight_scale", lambda outputs, inputs: (outputs, 1)),
        _compressed_config("float-quantized", 8),
    ),
}
