"""Qwen 2 with experts, and one beside them that every token has.

Yang et al., "Qwen2 Technical Report", 2024, https://arxiv.org/abs/2407.10671.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.experts import GGUF_COUNTS, MixtureConfig
from weft.llm.models.fields import count, fault, flag
from weft.llm.models.qwen2 import Qwen2
from weft.llm.weights.gguf import GgufLayout


class Qwen2Moe(MixtureConfig, Qwen2):
    """Configuration of Qwen 2 with experts."""

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
