"""8-bit floating point with scales for a tensor, for outputs or for blocks; read as plain numbers.

Micikevicius et al., "FP8 formats for deep learning", 2022. Of a module ``X``: ``X.weight`` E4M3 or E5M2 ``[out, in]``,
and ``X.weight_scale`` or, where a block of both axes has a scale, ``X.weight_scale_inv``: the factors of the weight, in
spite of the name. Scales of activations are not used: they are computed in the type of the engine.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.llm.weights.checkpoint import Module, StoredTensor, WeightFormat

_TYPES = ("F8_E4M3", "F8_E5M2")
_SCALE_TYPES = ("F32", "F16", "BF16", "F8_E8M0")
_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True)
class Float8(WeightFormat):
    """Reader of 8-bit floating point.

    Attributes:
        block: Outputs and inputs of blocks that share a scale, if any.
    """

    block: tuple[int, int] = (128, 128)
    name = "fp8"
    ignored = ("input_scale", "k_scale", "v_scale", "output_scale")  # of activations, and of keys and values

    @override
    def is_quantized(self, module: Module) -> bool:
        stored = module.find("weight")
        return stored is not None and stored.dtypes[0].startswith("F8_")

    @override
    def tensors(self, module: Module) -> dict[str, StoredTensor]:
        scales = _scales_name(module)
        stored = module.find(scales)
        outputs, inputs = module.shape
        rows, columns = self.block
        allowed = [(), (1,), (1, 1), (outputs,), (outputs, 1), (-(-outputs // rows), -(-inputs // columns))]
        if stored is None or stored.shape not in allowed:
            shapes = ", ".join(str(list(each)) for each in allowed)
            got = "no such tensor" if stored is None else list(stored.shape)
            raise module.wrong(scales, f"a tensor of one of the shapes {shapes}", got)
        return {"weight": StoredTensor(module.shape, _TYPES), scales: StoredTensor(stored.shape, _SCALE_TYPES)}

    @override
    def read(self, module: Module) -> torch.Tensor:
        outputs, inputs = module.shape
        scales, weight = module.read(_scales_name(module)).float(), module.read("weight").float()
        if scales.numel() == 1:
            return weight.mul_(scales.flatten())
        if scales.dim() == 1 or scales.shape == (outputs, 1):
            return weight.mul_(scales.view(-1, 1))
        rows, columns = (min(side, most) for side, most in zip(self.block, module.shape, strict=True))
        return weight.mul_(scales.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs])


def _scales_name(module: Module) -> str:
    return next((name for name in _SCALES if module.find(name) is not None), _SCALES[0])
