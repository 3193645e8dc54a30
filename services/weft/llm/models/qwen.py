"""Qwen 2 to 3, without experts and with.

Qwen 2 and 2.5 are Llama with biases of queries, keys and values, and windows in some layers: Yang et al., "Qwen2
Technical Report", 2024, https://arxiv.org/abs/2407.10671. Qwen 3 has norms of queries and keys instead of biases: Yang
et al., "Qwen3 Technical Report", 2025, https://arxiv.org/abs/2505.09388.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.experts import GGUF_COUNTS, MixtureConfig
from weft.llm.models.fields import SLIDING, count, fault, flag, layer_types
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


class Qwen2Moe(MixtureConfig, Qwen2):
    """Configuration of Qwen 2 with experts, and one beside them that every token has."""

    architecture = "Qwen2MoeForCausalLM"
    defaults: ClassVar = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "qkv_bias": True,
    }
    ignored = (*Qwen2.ignored, "output_router_logits")
    gguf = GgufLayout(
        "qwen2moe",
        counts={
            **GGUF_COUNTS,
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    )

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        if values.get("use_sliding_window") and values.get("layer_types") is None:
            raise fault("use_sliding_window", "false where there is no layer_types", True)
        shared_size, has_bias = count(values, "shared_expert_intermediate_size"), flag(values, "qkv_bias")
        return super().fields_of(values) | {"shared_size": shared_size, "has_qkv_bias": has_bias}


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


class Qwen3Moe(MixtureConfig, Qwen3):
    """Configuration of Qwen 3 with experts."""

    architecture = "Qwen3MoeForCausalLM"
    defaults: ClassVar = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_window_layers": 0,
    }
    ignored = (*Qwen3.ignored, "output_router_logits")
    gguf = GgufLayout(
        "qwen3moe",
        counts={**GGUF_COUNTS, "moe_intermediate_size": "expert_feed_forward_length"},
        derived=lambda config: {"norm_topk_prob": True},
    )

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_of(values) | {"sliding_layers": ()}  # all of them, if there is a window
