"""Names and shapes of the weights of a ``LlamaModel``, and of the tensors of a Hugging Face folder they are made of.

Projections with the same input are fused into one tensor, because one large matrix product is faster than several small
ones: queries, keys and values (``qkv_proj``), gate and up (``gate_up_proj``).
"""

from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.part import Part

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def layer_prefix(index: int) -> str:
    """Prefix of the weight names of layer ``index``."""
    return f"model.layers.{index}."


def weight_parts(config: TransformerConfig) -> dict[str, list[Part]]:
    """Every weight of the model by name, with the checkpoint tensors that it is fused from."""
    width, vocabulary = config.hidden_size, config.vocab_size
    parts = {EMBEDDING: [Part(EMBEDDING, (vocabulary, width))]}
    for index in range(config.num_layers):
        parts.update(_layer_parts(config, layer_prefix(index)))
    parts[FINAL_NORM] = [Part(FINAL_NORM, (width,))]
    if not config.tie_word_embeddings:
        parts[LM_HEAD] = [Part(LM_HEAD, (vocabulary, width))]
    return parts


def is_matrix(name: str) -> bool:
    """Whether the weight is a matrix of a product, and not the embedding, a norm or a bias."""
    return name.endswith("proj.weight") or name == LM_HEAD


def bias_of(name: str) -> str:
    """Name of the bias beside the weight ``name``."""
    return name.removesuffix("weight") + "bias"


def fused_shape(parts: list[Part]) -> tuple[int, ...]:
    """Shape of the weight that the parts make up."""
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def derived_tensors(config: TransformerConfig) -> list[str]:
    """Tensors that a checkpoint may contain and that are derived from others."""
    frequencies = [f"{layer_prefix(index)}self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)]
    return [*frequencies, LM_HEAD] if config.tie_word_embeddings else frequencies


def _layer_parts(config: TransformerConfig, prefix: str) -> dict[str, list[Part]]:
    width, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    projections = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
    parts = {
        attention + "qkv_proj.weight": [
            Part(f"{attention}{name}.weight", (rows, width)) for name, rows in projections.items()
        ],
        mlp + "gate_up_proj.weight": [Part(f"{mlp}{name}.weight", (inner, width)) for name in ("gate_proj", "up_proj")],
    }
    if config.has_qkv_bias:
        parts[attention + "qkv_proj.bias"] = [
            Part(f"{attention}{name}.bias", (rows,)) for name, rows in projections.items()
        ]
    whole: dict[str, tuple[int, ...]] = {
        prefix + "input_layernorm.weight": (width,),
        attention + "o_proj.weight": (width, q_width),
        prefix + "post_attention_layernorm.weight": (width,),
        mlp + "down_proj.weight": (width, inner),
    }
    if config.has_qk_norm:
        whole[attention + "q_norm.weight"] = whole[attention + "k_norm.weight"] = (config.head_dim,)
    if config.has_output_bias:
        whole[attention + "o_proj.bias"] = (width,)
    return parts | {name: [Part(name, shape)] for name, shape in whole.items()}
