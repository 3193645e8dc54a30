"""Weights of a ``LlamaModel``: loaded from a Hugging Face folder, or random.

Projections with the same input are fused into one tensor, because one large matrix product is faster than several small
ones: queries, keys and values (``qkv_proj``), gate and up (``gate_up_proj``).
"""

from pathlib import Path
from typing import NamedTuple

import torch

from weft_model.llm.model.checkpoint import Checkpoint
from weft_model.llm.model.model_config import TransformerConfig

Weights = dict[str, torch.Tensor]

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Part(NamedTuple):
    """A tensor of a Hugging Face folder; the parts of a fused weight are concatenated along the first dimension."""

    name: str
    shape: tuple[int, ...]


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


def load_folder(
    path: Path, config: TransformerConfig, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Weights:
    """Load the weights from the safetensors files of a Hugging Face folder.

    Names, shapes and types of all tensors are validated before any is read.

    Args:
        path: The folder.
        config: Its model.
        dtype: Type of the result; None: ``config.dtype``.
        device: Device of the result; tensors are copied one by one, so the CPU holds one at a time.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is truncated, or a tensor is missing, unexpected or of another shape; the message
            has its name, the expected and the actual shape.
    """
    dtype = dtype or getattr(torch, config.dtype)
    layout = weight_parts(config)
    weights: Weights = {}
    with Checkpoint.open(path) as checkpoint:
        checkpoint.check({part.name: part.shape for parts in layout.values() for part in parts}, _ignored(config))
        for name, parts in layout.items():
            weight = torch.empty(_shape(parts), dtype=dtype, device=device)
            row = 0
            for part in parts:
                weight[row : row + part.shape[0]].copy_(checkpoint.read(part.name))
                row += part.shape[0]
            weights[name] = weight
    return weights


def is_matmul_weight(name: str, weight: torch.Tensor) -> bool:
    """Whether ``weight`` is a matrix of a product, and not the embedding, a norm or a bias."""
    return weight.dim() == 2 and name != EMBEDDING


def bias_of(name: str) -> str:
    """Name of the bias beside the weight ``name``."""
    return name.removesuffix("weight") + "bias"


def random_weights(
    config: TransformerConfig, seed: int, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Weights:
    """Normal random weights that keep activations near 1: matrices scaled by their input width, norms 1, biases 0.1.

    Args:
        config: The model.
        seed: The same seed gives the same weights on the same type of device.
        dtype: Type of the result; None: ``config.dtype``.
        device: Device of the generator and the result.
    """
    dtype = dtype or getattr(torch, config.dtype)
    generator = torch.Generator(device).manual_seed(seed)
    weights: Weights = {}
    for name, parts in weight_parts(config).items():
        shape = _shape(parts)
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
            continue
        scale = 0.1 if name.endswith(".bias") else shape[-1] ** -0.5
        weights[name] = torch.randn(shape, generator=generator, dtype=dtype, device=device).mul_(scale)
    return weights


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


def _shape(parts: list[Part]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _ignored(config: TransformerConfig) -> list[str]:
    """Tensors that a checkpoint may contain and that are derived from others."""
    frequencies = [f"{layer_prefix(index)}self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)]
    return [*frequencies, LM_HEAD] if config.tie_word_embeddings else frequencies
