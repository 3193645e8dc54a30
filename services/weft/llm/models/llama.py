"""Llama 1 to 3 and models published as Llama; Mistral, with one window in all layers; Mixtral, Mistral with experts.

Jiang et al., "Mixtral of Experts", 2024, https://arxiv.org/abs/2401.04088.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.experts import GGUF_COUNTS, MixtureConfig
from weft.llm.models.fields import FULL, SLIDING, count, fault, layer_types
from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.gguf import GgufLayout


class Llama(TransformerConfig):
    """Configuration of Llama, the base case of ``TransformerConfig``."""

    architecture = "LlamaForCausalLM"
    defaults: ClassVar = {"max_position_embeddings": 2048}
    gguf = GgufLayout("llama", has_pairs=True)


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
