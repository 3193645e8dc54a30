"""Mixtral: Mistral with experts in every layer.

Jiang et al., "Mixtral of Experts", 2024, https://arxiv.org/abs/2401.04088.
"""

from typing import ClassVar

from weft.llm.models.experts import GGUF_COUNTS, MixtureConfig
from weft.llm.models.mistral import Mistral
from weft.llm.weights.gguf import GgufLayout


class Mixtral(MixtureConfig, Mistral):
    """Configuration of Mixtral."""

    architecture = "MixtralForCausalLM"
    defaults: ClassVar = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }
    ignored = ("output_router_logits", "router_jitter_noise")  # of training
    block = "block_sparse_moe."
    size_field = "intermediate_size"
    projections = ("w1", "w3", "w2")
    gguf = GgufLayout(
        "llama",
        {
            "block_sparse_moe.gate": "ffn_gate_inp",
            "block_sparse_moe.experts.w1": "ffn_gate_exps",
            "block_sparse_moe.experts.w3": "ffn_up_exps",
            "block_sparse_moe.experts.w2": "ffn_down_exps",
        },
        has_pairs=True,
        counts=GGUF_COUNTS,
    )
