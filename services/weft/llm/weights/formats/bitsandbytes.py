"""bitsandbytes, as transformers saves it: tables of 4 bits (NF4, FP4), and 8 bits with a scale for each output.

Dettmers et al., "QLoRA", 2023. 4 bits, of a module ``X``: ``X.weight`` uint8 ``[out in / 2, 1]``, rows of the weight
one after another, the first element in the high half; ``X.weight.absmax``, the scale of each block of elements;
``X.weight.quant_map``, the table; ``X.weight.quant_state.bitsandbytes__nf4``, JSON as uint8. With double quantisation
the scales are codes of 8 bits, with a table, scales and an offset of their own. 8 bits: ``X.weight`` int8
``[out, in]`` and ``X.SCB``, the largest magnitude of each output.
"""

import json
from typing import Any

import torch
from typing_extensions import override

from weft.llm.weights.checkpoint import Module, StoredTensor, WeightFormat
from weft.llm.weights.codes import ReadWeight, halves_of
from weft_kernels.linear.quantized import QuantizedWeight, pack

_STATES = tuple(f"weight.quant_state.bitsandbytes__{table}" for table in ("nf4", "fp4"))
_MAX_OFFSET = 1e30


class BitsAndBytes4(WeightFormat):
    """Reader of NF4 and FP4."""

    name = "bitsandbytes, 4 bits"

    @override
    def is_quantized(self, module: Module) -> bool:
        return any(module.find(name) is not None for name in ("weight.absmax", *_STATES))

    @override
    def tensors(self, module: Module) -> dict[str, StoredTensor]:
        count = module.shape[0] * module.shape[1]
        name, state = _state(module)
        block = _block(module, name, state, "blocksize", count)
        if state.get("shape", list(module.shape)) != list(module.shape):
            raise module.wrong(name, f"of a weight of shape {list(module.shape)}", state["shape"])
        blocks = -(-count // block)
        wanted = {
            "weight": StoredTensor((-(-count // 2), 1), ("U8",)),
            "weight.quant_map": StoredTensor((16,), ("F32",)),
            name: module.find(name) or StoredTensor((0,)),
        }
        if "nested_blocksize" not in state:
            return wanted | {"weight.absmax": StoredTensor((blocks,), ("F32",))}
        nested = -(-blocks // _block(module, name, state, "nested_blocksize", blocks))
        return wanted | {
            "weight.absmax": StoredTensor((blocks,), ("U8",)),
            "weight.nested_absmax": StoredTensor((nested,), ("F32",)),
            "weight.nested_quant_map": StoredTensor((256,), ("F32",)),
        }

    @override
    def read(self, module: Module) -> ReadWeight:
        """The weight; dequantised if a block spans several outputs or has an odd size."""
        shape = outputs, inputs = module.shape
        name, state = _state(module)
        block, count = int(state["blocksize"]), outputs * inputs
        scales = module.read("weight.absmax")
        if "nested_blocksize" in state:
            outer = module.read("weight.nested_absmax").repeat_interleave(int(state["nested_blocksize"]))
            offset = state.get("nested_offset")
            if not isinstance(offset, int | float) or offset is True or not abs(offset) < _MAX_OFFSET:
                raise module.wrong(name, "JSON with a finite number 'nested_offset'", offset)
            scales = module.read("weight.nested_quant_map")[scales.int()] * outer[: len(scales)] + offset
        packed = module.read("weight").flatten()
        codes = halves_of(packed >> 4 | packed << 4)[:count]
        table = module.read("weight.quant_map")
        if inputs % block or block % 2:
            spread = scales.repeat_interleave(block)[:count]
            return (table[codes.int()] * spread).view(shape)
        return QuantizedWeight(
            codes=pack(codes.view(shape).t(), 4),
            scales=scales.view(outputs, -1).t().contiguous(),
            lookup=table,
            group_size=block,
            shape=shape,
            num_bits=4,
        )


class BitsAndBytes8(WeightFormat):
    """Reader of LLM.int8()."""

    name = "bitsandbytes, 8 bits"
    ignored = ("weight_format",)  # the order of elements, which is by row in every file

    @override
    def is_quantized(self, module: Module) -> bool:
        stored = module.find("weight")
        return module.find("SCB") is not None or (stored is not None and stored.dtypes == ("I8",))

    @override
    def tensors(self, module: Module) -> dict[str, StoredTensor]:
        scales = StoredTensor((module.shape[0],), ("F32", "F16", "BF16"))
        return {"weight": StoredTensor(module.shape, ("I8",)), "SCB": scales}

    @override
    def read(self, module: Module) -> QuantizedWeight:
        return QuantizedWeight(
            codes=unsigned(module.read("weight")).t().contiguous(),
            scales=(module.read("SCB").float() / 127).unsqueeze(0),
            group_size=module.shape[1],
            shape=module.shape,
            num_bits=8,
        )


def unsigned(codes: torch.Tensor) -> torch.Tensor:
    """Convert int8 codes around 0 to uint8 codes around 128."""
    return codes.view(torch.uint8) ^ 128


def _state(module: Module) -> tuple[str, dict[str, Any]]:
    """Name of the tensor that describes the weight, and the description."""
    name = next((each for each in _STATES if module.find(each) is not None), "")
    if not name:
        raise module.wrong(_STATES[0], "there, as JSON in uint8", "no such tensor")
    tensor = module.read(name)
    try:
        state = json.loads(tensor.numpy().tobytes()) if tensor.dtype == torch.uint8 else None
    except (ValueError, RecursionError) as error:
        raise module.wrong(name, "JSON in uint8", error) from error
    if not isinstance(state, dict):
        raise module.wrong(name, "a JSON object in uint8", f"{tensor.dtype} with {type(state).__name__}")
    return name, state


def _block(module: Module, name: str, state: dict[str, Any], field: str, most: int) -> int:
    block = state.get(field)
    if type(block) is not int or not 0 < block <= max(most, 2**20):
        raise module.wrong(name, f"JSON with a number of elements '{field}'", block)
    return block
