"""Gemma 3 (text): Gemma 2 without soft caps; five of six layers have a window and a rotary embedding of their own.

Gemma Team, "Gemma 3 Technical Report", 2025, https://arxiv.org/abs/2503.19786.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.fields import fault
from weft.llm.models.gemma2 import Gemma2, scalar_of_gguf
from weft.llm.models.rope import checked_rope, rope_of_config


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
