"""8-bit floating point with scales for a tensor, for outputs or for blocks; read as plain numbers.

Micikevicius et al., "FP8 formats for deep learning", 2022. Of a module ``X``: ``X.weight`` E4M3 or E5M2 ``[out, in]``,
and ``X.weight_scale`` or, where a block of both axes has a scale, ``X.weight_scale_inv``: the factors of the weight, in
spite of the name. Scales of activations are not used: they are computed in the type of the engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from weft.llm.weights.checkpoint import Checkpoint, StoredTensor, WeightFormat, wrong

_TYPES = ("F8_E4M3", "F8_E5M2")
_SCALE_TYPES = ("F32", "F16", "BF16", "F8_E8M0")
_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True)
class Float8(WeightFormat):
    """Reader of 8-bit floating point.

    Attributes:
        block: Outputs and inputs of the blocks that share a scale, where they do.
    """

    block: tuple[int, int] = (128, 128)
    name = "fp8"

    def is_quantized(self, module: str, checkpoint: Checkpoint) -> bool:
        """Whether the weight has 8 bits."""
        stored = checkpoint.find(f"{module}.weight")
        return stored is not None and stored.dtypes[0].startswith("F8_")

    def tensors(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> dict[str, StoredTensor]:
        """The weight and its scales."""
        scales = self._scales_name(module, checkpoint)
        stored = checkpoint.find(scales)
        outputs, inputs = shape
        rows, columns = self.block
        allowed = [(), (1,), (1, 1), (outputs,), (outputs, 1), (-(-outputs // rows), -(-inputs // columns))]
        if stored is None or stored.shape not in allowed:
            got = "no such tensor" if stored is None else list(stored.shape)
            raise wrong(scales, f"a tensor of one of the shapes {', '.join(str(list(each)) for each in allowed)}", got)
        return {f"{module}.weight": StoredTensor(shape, _TYPES), scales: StoredTensor(stored.shape, _SCALE_TYPES)}

    def read(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> torch.Tensor:
        """The weight, float32."""
        scales = checkpoint.read(self._scales_name(module, checkpoint)).float()
        weight = checkpoint.read(f"{module}.weight").float()
        if scales.numel() == 1:
            return weight.mul_(scales.flatten())
        if scales.dim() == 1 or scales.shape == (shape[0], 1):
            return weight.mul_(scales.view(-1, 1))
        rows, columns = (min(side, most) for side, most in zip(self.block, shape, strict=True))
        return weight.mul_(scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]])

    def ignored(self, module: str) -> Iterable[str]:
        """Scales of activations and of keys and values."""
        return (f"{module}.input_scale", f"{module}.k_scale", f"{module}.v_scale", f"{module}.output_scale")

    @staticmethod
    def _scales_name(module: str, checkpoint: Checkpoint) -> str:
        names = [f"{module}.{name}" for name in _SCALES]
        return next((name for name in names if checkpoint.find(name) is not None), names[0])
