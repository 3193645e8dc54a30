"""Qwen 3: Qwen 2 with norms of queries and keys instead of biases."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.fields import flag
from weft.llm.models.qwen2 import Qwen2
from weft.llm.weights.gguf import GgufLayout


class Qwen3(Qwen2):
    """Configuration of Qwen 3."""

    architecture = "Qwen3ForCausalLM"
    defaults: ClassVar = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}
    gguf = GgufLayout("qwen3")

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        has_bias = flag(values, "attention_bias")
        own = {"has_qk_norm": True, "has_qkv_bias": has_bias, "has_output_bias": has_bias}
        return super().fields_of(values) | own
