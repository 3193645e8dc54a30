"""Mistral: Llama with one window in all layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.fields import FULL, SLIDING, count, fault, layer_types
from weft.llm.models.model_config import TransformerConfig


class Mistral(TransformerConfig):
    """Configuration of Mistral."""

    architecture = "MistralForCausalLM"
    defaults: ClassVar = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }
    nullable = ("sliding_window",)  # null: none

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        window = 0 if values["sliding_window"] is None else count(values, "sliding_window")
        types = layer_types(values)
        if types is not None and set(types) != {SLIDING if window else FULL}:
            raise fault("layer_types", "the same for all layers of this architecture", types)
        own = {"has_qkv_bias": False, "has_output_bias": False, "sliding_window": window}
        return super().fields_of(values) | own
