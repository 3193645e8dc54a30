"""Qwen 2 and 2.5: Llama with biases of queries, keys and values, and windows in some layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.fields import SLIDING, count, fault, layer_types
from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.gguf import GgufLayout


class Qwen2(TransformerConfig):
    """Configuration of Qwen 2."""

    architecture = "Qwen2ForCausalLM"
    defaults: ClassVar = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
    # where use_sliding_window is false, or layer_types is given
    ignored: ClassVar[tuple[str, ...]] = ("sliding_window", "max_window_layers")
    gguf = GgufLayout("qwen2")

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        window, layers = _sliding_layers(values)
        own = {"has_qkv_bias": True, "has_output_bias": False, "sliding_window": window, "sliding_layers": layers}
        return super().fields_of(values) | own


def _sliding_layers(values: Mapping[str, Any]) -> tuple[int, tuple[bool, ...]]:
    types, num_layers = layer_types(values), count(values, "num_hidden_layers")
    window = count(values, "sliding_window", 4096) if values.get("use_sliding_window", False) else 0
    if types is None:
        first = values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise fault("max_window_layers", "a whole number of layers", first)
        return window, tuple(index >= first for index in range(num_layers)) if window else ()
    if SLIDING in types and not window:
        raise fault("use_sliding_window", f"true where layer_types has '{SLIDING}'", False)
    return window, tuple(kind == SLIDING for kind in types) if window else ()
