"""Qwen 3: Qwen 2 with norms of queries and keys in place of biases."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.qwen2 import sliding_layers_of
from weft.llm.weights.gguf.model_metadata import GgufLayout


class Qwen3(TransformerConfig):
    """See the module."""

    architecture = "Qwen3ForCausalLM"
    defaults: ClassVar = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}
    gguf = GgufLayout("qwen3")

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        window, sliding_layers = sliding_layers_of(values)
        own = {"has_qk_norm": True, "sliding_window": window, "sliding_layers": sliding_layers}
        return super().fields_of(values) | own
