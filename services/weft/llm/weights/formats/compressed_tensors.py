"""compressed-tensors, as llm-compressor and vLLM save it: packed codes of 4 and 8 bits, 8-bit whole numbers, or fp8.

Of a module ``X`` with ``b`` bits: ``X.weight_packed`` int32 ``[out, in b / 32]``, the lowest bits first, or
``X.weight`` int8; ``X.weight_scale`` ``[out, groups]``; ``X.weight_zero_point``, packed along the outputs or int8;
``X.weight_g_idx``, the group of each input; ``X.weight_shape``. Codes are packed plus half of their range.
"""

from dataclasses import dataclass, field

import torch
from typing_extensions import override

from weft.llm.weights.checkpoint import Module, ReadWeight, StoredTensor, WeightFormat, bytes_of, halves_of, scales_of
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
        groups = module.num_groups("weight_scale", 1)
        scales = module.find("weight_scale")
        is_whole = scales is not None and scales.shape == (1, 1)
        wanted = {"weight_scale": StoredTensor((1 if is_whole else outputs, groups))}
        if (packed := module.find("weight_packed")) is not None:
            bits = _bits(packed, inputs)
            if inputs * bits % 32:
                raise module.wrong("weight_packed", f"of a multiple of {32 // bits} inputs", inputs)
            wanted["weight_packed"] = StoredTensor((outputs, inputs * bits // 32), ("I32",))
            zeros = StoredTensor((-(-outputs * bits // 32), groups), ("I32",))
        else:
            wanted["weight"] = StoredTensor(module.shape, ("I8",))
            zeros = StoredTensor((outputs, groups), ("I8",))
        if module.find("weight_zero_point") is not None:
            wanted["weight_zero_point"] = zeros
        if module.find("weight_g_idx") is not None:
            wanted["weight_g_idx"] = StoredTensor((inputs,), ("I32", "I64"))
        return wanted

    @override
    def read(self, module: Module) -> ReadWeight:
        if self.float8.is_quantized(module):
            return self.float8.read(module)
        outputs, inputs = module.shape
        scales = scales_of(module.read("weight_scale").expand(outputs, -1).t())
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
                zeros = unsigned(stored).t()
            else:
                narrow = bytes_of(stored.t()).flatten(1)
                zeros = (halves_of(narrow) if bits == 4 else narrow)[:, :outputs]
            zeros = zeros.to(scales.dtype).contiguous()
        return QuantizedWeight(
            codes=pack(codes, bits),
            scales=scales,
            zeros=zeros,
            lookup=None,
            group_size=group_size,
            shape=module.shape,
            num_bits=bits,
            permutation=permutation,
        )


def _bits(packed: StoredTensor, inputs: int) -> int:
    columns = packed.shape[1] if len(packed.shape) == 2 else 0
    return next((bits for bits in NUM_BITS if columns * 32 == inputs * bits), NUM_BITS[0])
