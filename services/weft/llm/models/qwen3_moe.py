"""Qwen 3 with experts: a router's choice of many small ones in every layer, or in some.

Yang et al., "Qwen3 Technical Report", 2025, https://arxiv.org/abs/2505.09388.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.experts import GGUF_COUNTS, MixtureConfig
from weft.llm.models.qwen3 import Qwen3
from weft.llm.weights.gguf import GgufLayout


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
