"""Writer of a Hugging Face folder, which appears whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.base.errors import AlreadyExistsError, NotFoundError
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import NF4_VALUES


def quantized_tensors(module: str, weight: QuantizedWeight, *, is_nf4: bool) -> dict[str, Tensor]:
    """The tensors of a module in bitsandbytes' NF4, or in compressed-tensors' ``pack-quantized``; see their readers."""
    if is_nf4:
        codes, name = weight.unpacked().t().reshape(-1), f"{module}.weight"
        shape = list(weight.shape)
        state = {"quant_type": "nf4", "blocksize": weight.group_size, "dtype": "float32", "shape": shape}
        return {
            name: (codes[::2] << 4 | codes[1::2]).unsqueeze(1),
            f"{name}.absmax": weight.scales.t().reshape(-1).float(),
            f"{name}.quant_map": torch.tensor(NF4_VALUES),
            f"{name}.quant_state.bitsandbytes__nf4": torch.frombuffer(
                bytearray(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
    tensors = {
        f"{module}.weight_packed": _words(weight.unpacked().t(), weight.num_bits),
        f"{module}.weight_scale": weight.scales.t().contiguous(),
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        missing = -weight.shape[0] % (32 // weight.num_bits)
        zeros = torch.nn.functional.pad(weight.zeros.to(torch.uint8), (0, missing))
        tensors[f"{module}.weight_zero_point"] = _words(zeros, weight.num_bits).t().contiguous()
    return tensors


def quantization_config(weight: QuantizedWeight, *, is_nf4: bool) -> dict[str, Any]:
    """``quantization_config`` of folders whose linear layers but the LM head are stored like ``weight``."""
    if is_nf4:
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


def _words(codes: Tensor, num_bits: int) -> Tensor:
    """int32 words of uint8 codes along the last axis, the first in the lowest bits."""
    narrow = codes[:, ::2] | codes[:, 1::2] << 4 if num_bits == 4 else codes
    return narrow.contiguous().view(torch.int32)


_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_SHARD_BYTES = 2**31


class FolderWriter:
    """Writes into a hidden folder beside ``output``, which ``finish`` renames; leaving the ``with`` block removes it.

    Args:
        output: Does not exist; the folder that it is in does.
        source: Folder whose other files are copied.

    Raises:
        AlreadyExistsError: ``output`` exists.
        NotFoundError: The folder that it is in does not.
        OSError: It cannot be written.
    """

    def __init__(self, output: Path, source: Path) -> None:
        if output.exists():
            raise _exists(output)
        if not output.absolute().parent.is_dir():
            raise NotFoundError(f"no folder {output.absolute().parent}, which --output should be in; make it")
        self._output = output
        self.path = output.with_name(f".{output.name}.{os.getpid()}")
        self._tensors: dict[str, Tensor] = {}
        self._index: dict[str, str] = {}
        self._num_bytes = 0
        self.path.mkdir()
        try:
            for file in source.iterdir():
                if file.is_file() and not file.name.endswith(_WEIGHTS):
                    shutil.copyfile(file, self.path / file.name)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Write tensors, or keep them until a file is full."""
        self._tensors |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._num_bytes >= _SHARD_BYTES:
            self._flush()

    def close(self, config: dict[str, Any]) -> None:
        """Write what is left, and ``config.json``."""
        if not self._index:
            self._flush("model.safetensors")
        else:
            if self._tensors:
                self._flush()
            index = {"metadata": {}, "weight_map": self._index}
            (self.path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (self.path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in self.path.glob("*.safetensors"):
            shutil.copymode(self.path / "config.json", file)  # safetensors' own is for the owner alone

    def finish(self) -> None:
        """Give the folder its name.

        Raises:
            AlreadyExistsError: Another program has made ``output`` meanwhile.
        """
        try:
            self.path.rename(self._output)
        except OSError as error:
            if self._output.exists():
                raise _exists(self._output) from error
            raise

    def _flush(self, filename: str = "") -> None:
        filename = filename or f"model-{len(set(self._index.values())) + 1:05}.safetensors"
        try:
            save_file(self._tensors, self.path / filename, {"format": "pt"})
        except SafetensorError as error:  # of a full disk, for one
            raise OSError(f"cannot write {filename} beside {self._output}: {error}") from error
        self._index |= dict.fromkeys(self._tensors, filename)
        self._tensors, self._num_bytes = {}, 0


def _exists(output: Path) -> AlreadyExistsError:
    return AlreadyExistsError(f"{output} exists; nothing was done. Remove it, or give another --output")
