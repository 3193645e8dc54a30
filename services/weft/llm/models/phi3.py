"""Phi 3 and 4: Llama with fused projections in its files, LongRoPE, and a part of each head rotated.

Microsoft, "Phi-3 Technical Report", 2024, https://arxiv.org/abs/2404.14219; Ding et al., "LongRoPE", 2024,
https://arxiv.org/abs/2402.13753.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from weft.llm.models.fields import count
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.rope import rope_of_config
from weft.llm.weights.parts import Part, fused_shape


class Phi3(TransformerConfig):
    """Configuration of Phi 3 and 4."""

    architecture = "Phi3ForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    }
    ignored = ("attention_bias", "mlp_bias")
    has_partial_rotation = True

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        window = count(values, "sliding_window") if values.get("sliding_window") is not None else 0
        if window >= count(values, "max_position_embeddings"):
            window = 0  # as the models of 128k have it: layers with one give up planning ahead, among others
        own = {"has_qkv_bias": False, "has_output_bias": False, "sliding_window": window}
        return super().fields_of(values) | own

    @classmethod
    @override
    def rope_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        renamed = {"su": "longrope", "yarn": "longrope"}  # by which its first files meant LongRoPE
        found = {**values}
        for place in ("rope_scaling", "rope_parameters"):
            rope = values.get(place)
            if isinstance(rope, Mapping):
                kind = rope.get("rope_type") or rope.get("type") or "default"
                found[place] = {**rope, "rope_type": renamed.get(kind, kind)}
        return rope_of_config(found)

    @override
    def layer_parts(self, prefix: str) -> dict[str, list[Part]]:
        parts = super().layer_parts(prefix)
        for name in (f"{prefix}self_attn.qkv_proj.weight", f"{prefix}mlp.gate_up_proj.weight"):
            parts[name] = [Part(name, fused_shape(parts[name]))]
        return parts
