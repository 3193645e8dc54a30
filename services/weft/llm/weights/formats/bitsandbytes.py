"""bitsandbytes, as transformers saves it: tables of 4 bits (NF4, FP4), and 8 bits with a scale for each output.

Dettmers et al., "QLoRA", 2023. 4 bits, of a module ``X``: ``X.weight`` uint8 ``[out in / 2, 1]``, rows of the weight
one after another, the first element in the high half; ``X.weight.absmax``, the scale of each block of elements;
``X.weight.quant_map``, the table; ``X.weight.quant_state.bitsandbytes__nf4``, JSON as uint8. With double quantisation
the scales are codes of 8 bits, with a table, scales and an offset of their own. 8 bits: ``X.weight`` int8
``[out, in]`` and ``X.SCB``, the largest magnitude of each output.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from weft.llm.weights.checkpoint import Checkpoint, ReadWeight, StoredTensor, WeightFormat, halves_of, wrong
from weft_kernels.linear.quantized import QuantizedWeight, pack

_TABLES = ("nf4", "fp4")
_MAX_OFFSET = 1e30


@dataclass(frozen=True)
class BitsAndBytes4(WeightFormat):
    """Reader of NF4 and FP4."""

    name = "bitsandbytes, 4 bits"

    def is_quantized(self, module: str, checkpoint: Checkpoint) -> bool:
        """Whether the weight has scales or a state."""
        names = [f"{module}.weight.absmax", *(_state_name(module, table) for table in _TABLES)]
        return any(checkpoint.find(name) is not None for name in names)

    def tensors(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> dict[str, StoredTensor]:
        """Codes, scales, table and state; of double quantisation those of the scales as well."""
        prefix, count = f"{module}.weight", shape[0] * shape[1]
        name, state = _state(module, checkpoint)
        block = _block(name, state, "blocksize", count)
        wanted = {
            prefix: StoredTensor((-(-count // 2), 1), ("U8",)),
            f"{prefix}.quant_map": StoredTensor((16,), ("F32",)),
            name: checkpoint.find(name) or StoredTensor((0,)),
        }
        if state.get("shape", list(shape)) != list(shape):
            raise wrong(name, f"of a weight of shape {list(shape)}", state["shape"])
        blocks = -(-count // block)
        if "nested_blocksize" not in state:
            return wanted | {f"{prefix}.absmax": StoredTensor((blocks,), ("F32",))}
        nested = -(-blocks // _block(name, state, "nested_blocksize", blocks))
        return wanted | {
            f"{prefix}.absmax": StoredTensor((blocks,), ("U8",)),
            f"{prefix}.nested_absmax": StoredTensor((nested,), ("F32",)),
            f"{prefix}.nested_quant_map": StoredTensor((256,), ("F32",)),
        }

    def read(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> ReadWeight:
        """The weight; as numbers where a block spans several outputs, or is of odd size."""
        outputs, inputs = shape
        prefix = f"{module}.weight"
        name, state = _state(module, checkpoint)
        block, count = int(state["blocksize"]), outputs * inputs
        scales = checkpoint.read(f"{prefix}.absmax")
        if "nested_blocksize" in state:
            outer = checkpoint.read(f"{prefix}.nested_absmax").repeat_interleave(int(state["nested_blocksize"]))
            table = checkpoint.read(f"{prefix}.nested_quant_map")
            offset = state.get("nested_offset")
            if not isinstance(offset, int | float) or offset is True or not abs(offset) < _MAX_OFFSET:
                raise wrong(name, "JSON with a finite number 'nested_offset'", offset)
            scales = table[scales.int()] * outer[: len(scales)] + offset
        packed = checkpoint.read(prefix).flatten()
        codes = halves_of(packed >> 4 | packed << 4)[:count]
        table = checkpoint.read(f"{prefix}.quant_map")
        if inputs % block or block % 2:
            spread = scales.repeat_interleave(block)[:count]
            return (table[codes.int()] * spread).view(shape)
        return QuantizedWeight(
            codes=pack(codes.view(shape).t(), 4),
            scales=scales.view(outputs, -1).t().contiguous(),
            zeros=None,
            lookup=table,
            group_size=block,
            shape=shape,
            num_bits=4,
        )


@dataclass(frozen=True)
class BitsAndBytes8(WeightFormat):
    """Reader of LLM.int8()."""

    name = "bitsandbytes, 8 bits"

    def is_quantized(self, module: str, checkpoint: Checkpoint) -> bool:
        """Whether the weight is of whole numbers or has scales."""
        stored = checkpoint.find(f"{module}.weight")
        return checkpoint.find(f"{module}.SCB") is not None or (stored is not None and stored.dtypes == ("I8",))

    def tensors(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> dict[str, StoredTensor]:
        """Codes and largest magnitudes."""
        return {
            f"{module}.weight": StoredTensor(shape, ("I8",)),
            f"{module}.SCB": StoredTensor((shape[0],), ("F32", "F16", "BF16")),
        }

    def read(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> QuantizedWeight:
        """The weight."""
        magnitudes = checkpoint.read(f"{module}.SCB").float()
        return QuantizedWeight(
            codes=unsigned(checkpoint.read(f"{module}.weight")).t().contiguous(),
            scales=(magnitudes / 127).unsqueeze(0),
            zeros=None,
            lookup=None,
            group_size=shape[1],
            shape=shape,
            num_bits=8,
        )

    def ignored(self, module: str) -> Iterable[str]:
        """The order of elements, which is by row in every file."""
        return (f"{module}.weight_format",)


def unsigned(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes around 128 of int8 codes around 0."""
    return codes.view(torch.uint8) ^ 128


def _state_name(module: str, table: str) -> str:
    return f"{module}.weight.quant_state.bitsandbytes__{table}"


def _state(module: str, checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """The name of the tensor with the description of the weight, and the description."""
    names = [_state_name(module, table) for table in _TABLES]
    name = next((each for each in names if checkpoint.find(each) is not None), "")
    if not name:
        raise wrong(names[0], "there, as JSON in uint8", "no such tensor")
    tensor = checkpoint.read(name)
    try:
        state = json.loads(tensor.numpy().tobytes()) if tensor.dtype == torch.uint8 else None
    except (ValueError, RecursionError) as error:
        raise wrong(name, "JSON in uint8", error) from error
    if not isinstance(state, dict):
        raise wrong(name, "a JSON object in uint8", f"{tensor.dtype} with {type(state).__name__}")
    return name, state


def _block(name: str, state: dict[str, Any], field: str, most: int) -> int:
    block = state.get(field)
    if type(block) is not int or not 0 < block <= max(most, 2**20):
        raise wrong(name, f"JSON with a number of elements '{field}'", block)
    return block
