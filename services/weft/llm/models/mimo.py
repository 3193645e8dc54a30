"""MiMo: Qwen 2 with a layer that predicts the token after the next, which drafts (MTP).

Xiaomi, "MiMo: Unlocking the Reasoning Potential of Language Model", 2025, https://arxiv.org/abs/2505.07608.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, cast

from typing_extensions import override

from weft.llm import ops
from weft.llm.models.decoder import LayerSettings, StepInput
from weft.llm.models.heads import HeadConfig, HeadLayer, renamed
from weft.llm.models.qwen import Qwen2
from weft.llm.weights.gguf import GgufLayout
from weft.llm.weights.parts import EMBEDDING, LM_HEAD, Part, layer_prefix

if TYPE_CHECKING:
    from torch import Tensor

    from weft_kernels.blocks.layout import KVLayer

_HEADS = "model.mtp_layers."


class MimoHeadLayer(HeadLayer):
    """A decoder layer whose input is joined from states and embeddings, each normed."""

    def __init__(
        self, settings: LayerSettings, weights: "Mapping[str, Tensor]", linear: Mapping[str, ops.Linear]
    ) -> None:
        super().__init__(settings, weights, linear)
        self._norms = [weights[f"{settings.prefix}{name}_layernorm.weight"] for name in ("hidden", "token")]
        self._join = linear[settings.prefix + "input_proj.weight"]

    @override
    def forward(
        self, hidden: "Tensor", residual: "Tensor | None", step: StepInput, kv_layer: "KVLayer"
    ) -> "tuple[Tensor, Tensor]":
        width = hidden.shape[1]
        both = hidden.new_empty(len(hidden), 2 * width)
        both[:, :width], _ = ops.rms_norm(cast("Tensor", residual), self._norms[0], self._eps)
        both[:, width:], _ = ops.rms_norm(hidden, self._norms[1], self._eps)
        return super().forward(self._join(both), None, step, kv_layer)


class MimoHead(HeadConfig):
    """Its first MTP layer; embeddings and LM head are the model's."""

    architecture = "MiMo MTP"
    layer_class = MimoHeadLayer

    @override
    def weight_parts(self) -> dict[str, list[Part]]:
        parts = {name: part for name, part in super().weight_parts().items() if name not in (EMBEDDING, LM_HEAD)}
        own = f"{_HEADS}0."
        return renamed(parts, {layer_prefix(0): own, "model.norm.": f"{own}final_layernorm."})

    @override
    def layer_parts(self, prefix: str) -> dict[str, list[Part]]:
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}{name}_layernorm.weight": (self.hidden_size,) for name in ("hidden", "token")
        } | {prefix + "input_proj.weight": (self.hidden_size, 2 * self.hidden_size)}
        return super().layer_parts(prefix) | {name: [Part(name, shape)] for name, shape in shapes.items()}

    @override
    def derived_tensors(self) -> list[str]:
        return ["model.", "lm_head."]


class Mimo(Qwen2):
    """Configuration of MiMo."""

    architecture = "MiMoForCausalLM"
    gguf = GgufLayout()
    mtp_head: ClassVar = MimoHead

    @override
    def derived_tensors(self) -> list[str]:
        return [*super().derived_tensors(), _HEADS]
