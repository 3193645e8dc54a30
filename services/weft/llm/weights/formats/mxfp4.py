"""MXFP4: codes of 4 bits for E2M1 numbers, with a power of two for each 32 inputs, of all experts in one tensor.

Open Compute Project, "OCP Microscaling Formats (MX) Specification", 2023. Of a weight ``X``: ``X_blocks`` uint8
``[num_experts, out, in / 32, 16]``, two inputs a byte, the first in the low half; ``X_scales`` uint8
``[num_experts, out, in / 32]``, exponents and 127.
"""

import torch
from typing_extensions import override

from weft.llm.weights.checkpoint import Module, StoredTensor, WeightFormat
from weft_kernels.linear.quantized import QuantizedWeight

_GROUP_SIZE = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4(WeightFormat):
    """Reader of MXFP4, as gpt-oss is published."""

    name = "mxfp4"

    @override
    def is_quantized(self, module: Module) -> bool:
        return bool(module.part.stored) and module.find("blocks") is not None

    @override
    def tensors(self, module: Module) -> dict[str, StoredTensor]:
        num_experts, inputs, outputs = module.part.stored
        if inputs % _GROUP_SIZE:
            raise module.wrong("blocks", f"of a weight whose inputs are a multiple of {_GROUP_SIZE}", inputs)
        scales = (num_experts, outputs, inputs // _GROUP_SIZE)
        return {
            "blocks": StoredTensor((*scales, _GROUP_SIZE // 2), ("U8",)),
            "scales": StoredTensor(scales, ("U8",)),
        }

    @override
    def read(self, module: Module) -> QuantizedWeight:
        exponents = module.part.rows(module.read("scales")).t().int()
        scales = (exponents << 23).view(torch.float32)  # the exponent of a float32 has the same offset
        if exponents.min() >= 127 - 24 and exponents.max() <= 127 + 15:
            scales = scales.half()  # exactly
        return QuantizedWeight(
            codes=module.part.rows(module.read("blocks").flatten(2)).t().contiguous(),
            scales=scales.contiguous(),
            lookup=torch.tensor([sign * magnitude for sign in (1, -1) for magnitude in _MAGNITUDES]),
            group_size=_GROUP_SIZE,
            shape=module.shape,
            num_bits=4,
        )
