"""AWQ, as AutoAWQ saves it ("gemm"): codes of 4 bits packed along the outputs, in an order of their own.

Lin et al., "AWQ", 2023. Of a module ``X``: ``X.qweight`` int32 ``[in, out / 8]``, ``X.qzeros`` int32
``[groups, out / 8]``, ``X.scales`` ``[groups, out]``. The halves of a word, lowest first, are outputs 0, 2, 4, 6, 1,
3, 5, 7.
"""

import torch
from typing_extensions import override

from weft.llm.weights.checkpoint import Module, StoredTensor, WeightFormat
from weft.llm.weights.codes import bytes_of, halves_of, scales_of
from weft_kernels.linear.quantized import QuantizedWeight, pack

#: Where each output of 8 is in a word.
_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(WeightFormat):
    """Reader of AWQ."""

    name = "awq"

    @override
    def is_quantized(self, module: Module) -> bool:
        return module.find("qweight") is not None

    @override
    def tensors(self, module: Module) -> dict[str, StoredTensor]:
        outputs, inputs = module.shape
        groups = module.num_groups("scales", 0)
        if outputs % 8 or inputs % 2:
            allowed = "of a weight with a multiple of 8 outputs and even inputs"
            raise module.wrong("qweight", allowed, list(module.shape))
        return {
            "qweight": StoredTensor((inputs, outputs // 8), ("I32",)),
            "qzeros": StoredTensor((groups, outputs // 8), ("I32",)),
            "scales": StoredTensor((groups, outputs)),
        }

    @override
    def read(self, module: Module) -> QuantizedWeight:
        scales = scales_of(module.read("scales"))
        return QuantizedWeight(
            codes=pack(_unpacked(module.read("qweight")), 4),
            scales=scales,
            zeros=_unpacked(module.read("qzeros")).to(scales.dtype),
            group_size=module.shape[1] // scales.shape[0],
            shape=module.shape,
            num_bits=4,
        )


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Unpack to uint8 ``[rows, 8 columns]``."""
    return halves_of(bytes_of(words))[..., _POSITIONS].flatten(1).contiguous()
