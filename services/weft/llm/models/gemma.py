"""Gemma 2 and 3 (text).

Gemma 2 has four norms in a layer, soft caps of scores and logits, and a window in every second layer: Gemma Team, 2024,
https://arxiv.org/abs/2408.00118. Gemma 3 has no soft caps; five of six layers have a window and a rotary embedding of
their own: Gemma Team, 2025, https://arxiv.org/abs/2503.19786.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from weft.llm import ops
from weft.llm.models.decoder import DecoderLayer, LayerSettings, StepInput
from weft.llm.models.fields import count, fault, is_above_zero, sliding_layers
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.rope import checked_rope, rope_of_config
from weft.llm.weights.gguf import GgufLayout
from weft.llm.weights.parts import Part

if TYPE_CHECKING:
    from torch import Tensor

    from weft_kernels.blocks.layout import KVLayer


class Gemma2Layer(DecoderLayer):
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
        x, residual = ops.rms_norm(hidden, self._attention_norm, self._eps, residual)
        x, _ = ops.rms_norm(self.attend(x, step, kv_layer), self._attention_out_norm, self._eps)
        x, residual = ops.rms_norm(x, self._mlp_norm, self._eps, residual)
        x, _ = ops.rms_norm(self.feed_forward(x), self._mlp_out_norm, self._eps)
        return x, residual

    @override
    def activate(self, gate_up: "Tensor") -> "Tensor":
        return ops.gelu_tanh_mul(gate_up)


@dataclass(frozen=True)
class Gemma2(TransformerConfig):
    """Configuration of Gemma 2.

    Attributes:
        query_pre_attn_scalar: Scores of attention are divided by its square root.
        attn_logit_softcapping: Soft cap of scores; 0: none.
        final_logit_softcapping: Soft cap of logits; 0: none.
    """

    architecture = "Gemma2ForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    nullable = ("attn_logit_softcapping", "final_logit_softcapping")
    activation = ("hidden_activation", ("gelu_pytorch_tanh",))
    ignored = ("hidden_act", "sliding_window_size")  # which published files repeat, and transformers does not read
    layer_class = Gemma2Layer
    factors = ("query_pre_attn_scalar",)
    norm_offset = 1.0
    gguf = GgufLayout(
        "gemma2",
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        norm_offset=1.0,
        has_window=True,
        numbers={name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
        derived=lambda config: scalar_of_gguf(config, layers_of_largest=46),
    )

    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.nullable:
            if (value := getattr(self, name)) != 0.0 and not is_above_zero(value):
                raise fault(name, "a number above 0, or null", value)

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        if values.get("use_bidirectional_attention"):
            raise fault("use_bidirectional_attention", "absent or false: it is not supported", True)
        return super().fields_of(values) | {
            "sliding_window": count(values, "sliding_window"),
            "sliding_layers": sliding_layers(values, count(values, "sliding_window_pattern")),
            **{name: values.get(name) or 0.0 for name in cls.nullable},
        }

    @property
    @override
    def attention_scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    @override
    def soft_cap(self) -> float:
        return float(self.attn_logit_softcapping)

    @property
    @override
    def embedding_scale(self) -> float:
        return float(self.hidden_size**0.5)

    @override
    def final_logits(self, logits: "Tensor") -> "Tensor":
        cap = self.final_logit_softcapping
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    @override
    def layer_parts(self, prefix: str) -> dict[str, list[Part]]:
        names = [f"{prefix}{place}_feedforward_layernorm.weight" for place in ("pre", "post")]
        return super().layer_parts(prefix) | {name: [Part(name, (self.hidden_size,))] for name in names}


def scalar_of_gguf(config: Mapping[str, Any], layers_of_largest: int) -> dict[str, Any]:
    """Scale of attention; only the 27B models do not derive it from the width of a head."""
    is_largest = config["num_hidden_layers"] == layers_of_largest
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"query_pre_attn_scalar": scalar}


@dataclass(frozen=True)
class Gemma3(Gemma2):
    """Configuration of Gemma 3."""

    architecture = "Gemma3ForCausalLM"
    defaults: ClassVar = {
        **Gemma2.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    }
    gguf = Gemma2.gguf._replace(
        architecture="gemma3", numbers={}, derived=lambda config: scalar_of_gguf(config, layers_of_largest=62)
    )

    local_rope: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "local_rope", checked_rope(self.local_rope))

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        ropes = values.get("rope_parameters") or {}
        if not isinstance(ropes, Mapping):
            raise fault("rope_parameters", "an object", ropes)
        local = ropes.get("sliding_attention") or {}
        return super().fields_of(values) | {
            "has_qk_norm": True,
            "local_rope": rope_of_config({"rope_theta": values["rope_local_base_freq"], "rope_parameters": local}),
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
    def max_context_len(self) -> int:
        return self.max_position_embeddings  # of the extended model, other than with Llama
