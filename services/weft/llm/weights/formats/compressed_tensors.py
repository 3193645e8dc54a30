"""compressed-tensors, as llm-compressor and vLLM save it: packed codes of 4 and 8 bits, 8-bit whole numbers, or fp8.

Of a module ``X`` with ``b`` bits: ``X.weight_packed`` int32 ``[out, in b / 32]``, the lowest bits first, or
``X.weight`` int8; ``X.weight_scale`` ``[out, groups]`` or one for all; ``X.weight_zero_point``, packed along the
outputs or int8; ``X.weight_g_idx``, the group of each input; ``X.weight_shape``. Codes are packed plus half of their
range.
"""

from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from typing_extensions import override

from weft.llm.weights.checkpoint import Module, StoredTensor, WeightFormat
from weft.llm.weights.codes import ReadWeight, bytes_of, halves_of, scales_of
from weft.llm.weights.formats.bitsandbytes import unsigned
from weft.llm.weights.formats.float8 import Float8
from weft_kernels.linear.quantized import NUM_BITS, QuantizedWeight, pack


@dataclass(frozen=True)
class CompressedTensors(WeightFormat):
    """Reader of compressed-tensors; the type of each layer is that of its tensors.

    Attributes:
        float8: Reader of its layers of 8-bit floating point.
    """

    float8: Float8 = field(default_factory=Float8)
    name = "compressed-tensors"
    ignored = (*Float8.ignored, "weight_shape", "input_zero_point", "weight_g_idx")

    @override
    def is_quantized(self, module: Module) -> bool:
        if module.find("weight_packed") is not None or self.float8.is_quantized(module):
            return True
        stored = module.find("weight")
        return stored is not None and stored.dtypes == ("I8",)

    @override
    def tensors(self, module: Module) -> dict[str, StoredTensor]:
        if self.float8.is_quantized(module):
            return self.float8.tensors(module)
        outputs, inputs = module.shape
        scales, zero_point = module.find("weight_scale"), module.find("weight_zero_point")
        groups = 1 if _is_whole(scales) else module.num_groups("weight_scale", 1)
        wanted = {"weight_scale": scales if _is_whole(scales) else StoredTensor((outputs, groups))}
        if (packed := module.find("weight_packed")) is not None:
            bits = _bits(packed, inputs)
            if inputs * bits % 32:
                raise module.wrong("weight_packed", f"of a multiple of {32 // bits} inputs", inputs)
            wanted["weight_packed"] = StoredTensor((outputs, inputs * bits // 32), ("I32",))
            zeros = StoredTensor((-(-outputs * bits // 32), groups), ("I32",))
        else:
            wanted["weight"] = StoredTensor(module.shape, ("I8",))
            shape = zero_point.shape if _is_whole(scales) and _is_whole(zero_point) else (outputs, groups)
            zeros = StoredTensor(shape, ("I8",))
        if zero_point is not None:
            wanted["weight_zero_point"] = zeros
        if module.find("weight_g_idx") is not None:
            wanted["weight_g_idx"] = StoredTensor((inputs,), ("I32", "I64"))
        return wanted

    @override
    def read(self, module: Module) -> ReadWeight:
        if self.float8.is_quantized(module):
            return self.float8.read(module)
        outputs, inputs = module.shape
        scales = scales_of(_of_outputs(module.read("weight_scale"), outputs).t())
        group_size = inputs // scales.shape[0]
        if (packed := module.find("weight_packed")) is None:
            bits, codes = 8, unsigned(module.read("weight"))
        else:
            bits, codes = _bits(packed, inputs), bytes_of(module.read("weight_packed")).flatten(1)
            codes = halves_of(codes) if bits == 4 else codes
        codes = codes.t()
        permutation, zeros = module.permutation("weight_g_idx", group_size), None
        if permutation is not None:
            codes = codes[permutation]
        if module.find("weight_zero_point") is not None:
            stored = module.read("weight_zero_point")
            if stored.dtype == torch.int8:
                zeros = unsigned(_of_outputs(stored, outputs)).t()
            else:
                narrow = bytes_of(stored.t()).flatten(1)
                zeros = (halves_of(narrow) if bits == 4 else narrow)[:, :outputs]
            zeros = zeros.to(scales.dtype).contiguous()
        return QuantizedWeight(
            codes=pack(codes, bits),
            scales=scales,
            zeros=zeros,
            group_size=group_size,
            shape=module.shape,
            num_bits=bits,
            permutation=permutation,
        )


def _is_whole(stored: StoredTensor | None) -> TypeGuard[StoredTensor]:
    """Whether there is one number for all outputs."""
    return stored is not None and stored.shape in ((), (1,), (1, 1))


def _of_outputs(stored: torch.Tensor, outputs: int) -> torch.Tensor:
    """``[out, groups]``, of a tensor that may have one number for all."""
    return stored.reshape(1, 1).expand(outputs, 1) if stored.numel() == 1 else stored


def _bits(packed: StoredTensor, inputs: int) -> int:
    columns = packed.shape[1] if len(packed.shape) == 2 else 0
    return next((bits for bits in NUM_BITS if columns * 32 == inputs * bits), NUM_BITS[0])
