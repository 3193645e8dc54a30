"""Gemma 3 (text): four norms in a layer, and in five of six layers a window and a rotary embedding of its own.

Gemma Team, "Gemma 3 Technical Report", 2025, https://arxiv.org/abs/2503.19786.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from weft.llm import ops
from weft.llm.models.decoder import DecoderLayer, LayerSettings, StepInput
from weft.llm.models.model_config import (
    SLIDING,
    TransformerConfig,
    checked_rope,
    count,
    fault,
    layer_types,
    rope_of_config,
)
from weft.llm.weights.gguf import GgufLayout
from weft.llm.weights.parts import Part

if TYPE_CHECKING:
    from torch import Tensor

    from weft_kernels.blocks.layout import KVLayer


class Gemma3Layer(DecoderLayer):
    """A decoder layer with additional norms after attention and MLP, and GELU."""

    mlp_norm = "pre_feedforward_layernorm"

    def __init__(
        self, settings: LayerSettings, weights: "Mapping[str, Tensor]", linear: Mapping[str, ops.Linear]
    ) -> None:
        super().__init__(settings, weights, linear)
        self._attention_out_norm = weights[settings.prefix + "post_attention_layernorm.weight"]
        self._mlp_out_norm = weights[settings.prefix + "post_feedforward_layernorm.weight"]

    @override
    def forward(
        self, hidden: "Tensor", residual: "Tensor | None", step: StepInput, kv_layer: "KVLayer"
    ) -> "tuple[Tensor, Tensor]":
        x, residual = ops.rms_norm(hidden, self._input_norm, self._eps, residual)
        x, _ = ops.rms_norm(self.attend(x, step, kv_layer), self._attention_out_norm, self._eps)
        x, residual = ops.rms_norm(x, self._mlp_norm, self._eps, residual)
        x, _ = ops.rms_norm(self.feed_forward(x), self._mlp_out_norm, self._eps)
        return x, residual

    @override
    def activate(self, gate_up: "Tensor") -> "Tensor":
        return ops.gelu_tanh_mul(gate_up)


def _attention_of_gguf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Scale of attention; only the 27B model does not derive it from the width of a head."""
    is_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {"query_pre_attn_scalar": scalar}


@dataclass(frozen=True)
class Gemma3(TransformerConfig):
    """Configuration of Gemma 3.

    Attributes:
        query_pre_attn_scalar: Scores of attention are divided by its square root.
    """

    architecture = "Gemma3ForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    activation = ("hidden_activation", ("gelu_pytorch_tanh",))
    layer_class = Gemma3Layer
    norm_offset = 1.0
    gguf = GgufLayout(
        "gemma3",
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        norm_offset=1.0,
        has_window=True,
        derived=_attention_of_gguf,
    )

    local_rope: dict[str, Any] = field(default_factory=dict)
    query_pre_attn_scalar: float = 256.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "local_rope", checked_rope(self.local_rope))
        if not isinstance(self.query_pre_attn_scalar, int | float) or not self.query_pre_attn_scalar > 0:
            raise fault("query_pre_attn_scalar", "a number above 0", self.query_pre_attn_scalar)

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        for name in ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"):
            if values.get(name):
                raise fault(name, "absent or null: it is not supported", values[name])
        types, pattern = layer_types(values), count(values, "sliding_window_pattern")
        slides = [kind == SLIDING for kind in types] if types else None
        ropes = values.get("rope_parameters") or {}
        if not isinstance(ropes, Mapping):
            raise fault("rope_parameters", "an object", ropes)
        local = ropes.get("sliding_attention") or {}
        return super().fields_of(values) | {
            "has_qk_norm": True,
            "sliding_window": count(values, "sliding_window"),
            "sliding_layers": tuple(
                slides or ((index + 1) % pattern > 0 for index in range(count(values, "num_hidden_layers")))
            ),
            "local_rope": rope_of_config({"rope_theta": values["rope_local_base_freq"], "rope_parameters": local}),
            "query_pre_attn_scalar": values["query_pre_attn_scalar"],
        }

    @classmethod
    @override
    def rope_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        ropes = values.get("rope_parameters") or {}
        is_by_kind = any(isinstance(rope, Mapping) for rope in ropes.values())  # as transformers 5 writes it
        return rope_of_config({**values, "rope_parameters": ropes.get("full_attention") if is_by_kind else ropes})

    @property
    @override
    def ropes(self) -> tuple[dict[str, Any], ...]:
        return self.rope, self.local_rope

    @override
    def rope_index(self, index: int) -> int:
        return int(self.windows[index] > 0)

    @property
    @override
    def attention_scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    @override
    def embedding_scale(self) -> float:
        return float(self.hidden_size**0.5)

    @property
    @override
    def max_context_len(self) -> int:
        return self.max_position_embeddings  # of the extended model, other than with Llama

    @override
    def layer_parts(self, prefix: str) -> dict[str, list[Part]]:
        names = [f"{prefix}{place}_feedforward_layernorm.weight" for place in ("pre", "post")]
        return super().layer_parts(prefix) | {name: [Part(name, (self.hidden_size,))] for name in names}
