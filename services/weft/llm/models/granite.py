"""Granite 3: Llama with factors on embeddings, scores of attention, the residual stream and logits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.gguf import GgufLayout

if TYPE_CHECKING:
    from torch import Tensor

#: Its factors by their names in ``config.json``, with their names in GGUF files.
_FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


@dataclass(frozen=True)
class Granite(TransformerConfig):
    """Configuration of Granite 3.

    Attributes:
        attention_multiplier: Factor on scores of attention, in place of one from the width of a head.
        residual_multiplier: Factor on what attention and MLP add to the residual stream.
        logits_scaling: Logits are divided by it.
    """

    architecture = "GraniteForCausalLM"
    defaults: ClassVar = {"max_position_embeddings": 2048, **dict.fromkeys(_FACTORS, 1.0)}
    gguf = GgufLayout("granite", has_pairs=True, numbers=_FACTORS)
    factors = tuple(_FACTORS)

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    @property
    @override
    def embedding_scale(self) -> float:
        return float(self.embedding_multiplier)

    @property
    @override
    def attention_scale(self) -> float:
        return float(self.attention_multiplier)

    @property
    @override
    def residual_scale(self) -> float:
        return float(self.residual_multiplier)

    @override
    def final_logits(self, logits: "Tensor") -> "Tensor":
        return logits.div_(self.logits_scaling)
