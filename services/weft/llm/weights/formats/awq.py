"""AWQ, as AutoAWQ saves it ("gemm"): codes of 4 bits packed along the outputs, in an order of their own.

Lin et al., "AWQ", 2023. Of a module ``X``: ``X.qweight`` int32 ``[in, out / 8]``, ``X.qzeros`` int32
``[groups, out / 8]``, ``X.scales`` ``[groups, out]``. The halves of a word, lowest first, are outputs 0, 2, 4, 6, 1,
3, 5, 7.
"""

from dataclasses import dataclass

import torch

from weft.llm.weights.checkpoint import (
    FLOATS,
    Checkpoint,
    StoredTensor,
    WeightFormat,
    bytes_of,
    halves_of,
    num_groups,
    scales_of,
    wrong,
)
from weft_kernels.linear.quantized import QuantizedWeight, pack

#: Where each output of 8 is in a word.
_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(WeightFormat):
    """Reader of AWQ."""

    name = "awq"

    def is_quantized(self, module: str, checkpoint: Checkpoint) -> bool:
        """Whether there is a ``qweight``."""
        return checkpoint.find(f"{module}.qweight") is not None

    def tensors(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> dict[str, StoredTensor]:
        """Codes, zero points and scales."""
        outputs, inputs = shape
        groups = num_groups(module, f"{module}.scales", 0, inputs, checkpoint)
        if outputs % 8 or inputs % 2:
            raise wrong(f"{module}.qweight", "of a weight with a multiple of 8 outputs and even inputs", list(shape))
        return {
            f"{module}.qweight": StoredTensor((inputs, outputs // 8), ("I32",)),
            f"{module}.qzeros": StoredTensor((groups, outputs // 8), ("I32",)),
            f"{module}.scales": StoredTensor((groups, outputs), FLOATS),
        }

    def read(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> QuantizedWeight:
        """The weight."""
        scales = scales_of(checkpoint.read(f"{module}.scales"))
        return QuantizedWeight(
            codes=pack(_unpacked(checkpoint.read(f"{module}.qweight")), 4),
            scales=scales,
            zeros=_unpacked(checkpoint.read(f"{module}.qzeros")).to(scales.dtype),
            lookup=None,
            group_size=shape[1] // scales.shape[0],
            shape=shape,
            num_bits=4,
        )


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """uint8 ``[rows, 8 columns]``."""
    return halves_of(bytes_of(words))[..., _POSITIONS].flatten(1).contiguous()
