"""gpt-oss: experts with a clamped SwiGLU in every layer, attention sinks, and a window in every second layer.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, https://arxiv.org/abs/2508.10925.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from weft.llm import ops
from weft.llm.models.decoder import DecoderLayer
from weft.llm.models.experts import MixtureConfig
from weft.llm.models.fields import count, sliding_layers
from weft.llm.weights.parts import Part

if TYPE_CHECKING:
    from torch import Tensor

    from weft.llm.parallel.groups import Group


class GptOssLayer(DecoderLayer):
    """A decoder layer whose experts have ``clamped_swiglu``, with these numbers."""

    alpha: float
    limit: float

    @override
    def activate(self, gate_up: "Tensor") -> "Tensor":
        return ops.clamped_swiglu(gate_up, self.alpha, self.limit)


@dataclass(frozen=True)
class GptOss(MixtureConfig):
    """Configuration of gpt-oss.

    Attributes:
        swiglu_alpha: Factor on gates within their sigmoid.
        swiglu_limit: Largest gate, and largest magnitude of what gates multiply.
    """

    architecture = "GptOssForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
    ignored = ("experts_per_token", "output_router_logits")  # repeated by published files; of training
    has_sinks = True
    size_field = "intermediate_size"
    layer_class = GptOssLayer
    factors = ("swiglu_alpha", "swiglu_limit")

    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_of(values) | {
            "sliding_window": count(values, "sliding_window"),
            "sliding_layers": sliding_layers(values, 2),
        }

    @override
    def layer(
        self,
        index: int,
        weights: "Mapping[str, Tensor]",
        linear: Mapping[str, ops.Linear],
        *,
        deterministic: bool,
        tensor: "Group | None" = None,
    ) -> DecoderLayer:
        layer = super().layer(index, weights, linear, deterministic=deterministic, tensor=tensor)
        layer.alpha, layer.limit = self.swiglu_alpha, self.swiglu_limit  # type: ignore[attr-defined]
        return layer

    @override
    def layer_parts(self, prefix: str) -> dict[str, list[Part]]:
        parts, mlp = super().layer_parts(prefix), prefix + "mlp."
        for name, outputs, inputs in (
            ("gate_up_proj", 2 * self.expert_size, self.hidden_size),
            ("down_proj", self.hidden_size, self.expert_size),
        ):
            module = f"{mlp}experts.{name}"
            stored, is_paired = (self.num_experts, inputs, outputs), name == "gate_up_proj"
            rows = self.num_experts * outputs
            parts[module + ".weight"] = [Part(module, (rows, inputs), stored, is_paired)]
            parts[module + ".bias"] = [Part(module + "_bias", (rows,), (self.num_experts, outputs), is_paired)]
        for name, shape in (("weight", (self.num_experts, self.hidden_size)), ("bias", (self.num_experts,))):
            parts[f"{mlp}gate.{name}"] = [Part(f"{mlp}router.{name}", shape)]
        return parts
