"""Weights of a ``LlamaModel``: read from a Hugging Face folder, drawn at random, or made so that the text is known.

Projections that read the same input are one tensor here: queries, keys and values (``qkv_proj``), gate and up
(``gate_up_proj``). One large product is quicker than several small ones.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weft_common.errors import InvalidArgumentError
from weft_model.llm import ops
from weft_model.llm.model.checkpoint import Checkpoint
from weft_model.llm.model.model_config import TransformerConfig

Weights = dict[str, torch.Tensor]

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Part(NamedTuple):
    """A tensor of a Hugging Face folder; parts of one weight follow one another along the first dimension."""

    name: str
    shape: tuple[int, ...]


def layer_prefix(index: int) -> str:
    """What the names of the weights of layer ``index`` begin with."""
    return f"model.layers.{index}."


def weight_parts(config: TransformerConfig) -> dict[str, list[Part]]:
    """Every weight of the model by name, and of which tensors of a folder it is made."""
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
    """The weights in the safetensors files of a Hugging Face folder.

    Names, shapes and types of all tensors are checked before any is read.

    Args:
        path: The folder.
        config: Its model.
        dtype: Type of the result; None: ``config.dtype``.
        device: Where the result goes, tensor by tensor, so that the CPU holds one at a time.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is torn, or a tensor is missing, surplus or not of its shape; the message names it,
            what was wanted and what is there.
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
            weights[name] = ops.linear_weight(weight) if is_product(name, weight) else weight
    return weights


def is_product(name: str, weight: torch.Tensor) -> bool:
    """Whether ``weight`` is multiplied with, and not looked up by row or added."""
    return weight.dim() == 2 and name != EMBEDDING


def random_weights(
    config: TransformerConfig, seed: int, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Weights:
    """Normal numbers that keep activations near 1: projections by their input's width, norms 1, biases 0.1.

    Args:
        config: The model.
        seed: The same seed gives the same weights on the same kind of device.
        dtype: Type of the result; None: ``config.dtype``.
        device: Where they are drawn and stay.
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


def permutation_weights(
    config: TransformerConfig,
    seed: int,
    *,
    epsilon: float = 0.01,
    cycle_len: int = 0,
    corrupted: float = 0.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Weights:
    """Weights of a model that takes the whole path of computing and whose greedy text is known.

    After token ``t`` comes ``permutation(...)[t]``: rows of the embedding are random unit vectors, the row of the
    logits for the next token is the embedding of the one before it, and what attention and feed-forward layers add to
    it is made small.

    Args:
        config: The model, with ``tie_word_embeddings`` false.
        seed: Of the weights and of the permutation.
        epsilon: Factor on what each layer adds; the text is as said as long as it is small.
        cycle_len: As of ``permutation``.
        corrupted: As of ``permutation``.
        dtype: Type of the result; None: ``config.dtype``.
        device: Where the result goes.

    Raises:
        InvalidArgumentError: The model ties its embeddings, so that every token would be followed by itself; or the
            permutation cannot be made.
    """
    if config.tie_word_embeddings:
        raise InvalidArgumentError("tie_word_embeddings must be false for a permutation model, got True")
    successors = permutation(config.vocab_size, seed, cycle_len=cycle_len, corrupted=corrupted)
    weights = random_weights(config, seed, dtype=dtype, device=device)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight")):
            weight.mul_(epsilon)
    embedding = weights[EMBEDDING]
    embedding.div_(embedding.norm(dim=-1, keepdim=True))
    weights[LM_HEAD][torch.from_numpy(successors).to(embedding.device)] = embedding
    return weights


def permutation(vocab_size: int, seed: int, *, cycle_len: int = 0, corrupted: float = 0.0) -> npt.NDArray[np.int64]:
    """Which token follows each token in the text of a permutation model.

    Args:
        vocab_size: Tokens.
        seed: Of the draw.
        cycle_len: After so many tokens the text repeats; divides ``vocab_size``. 0: ``vocab_size``.
        corrupted: Part of the tokens, 0 to 1, that are followed by another token than with 0, as in a draft model that
            guesses wrong so often. A single token cannot be.

    Returns:
        A permutation, shape ``[vocab_size]``.

    Raises:
        InvalidArgumentError: ``cycle_len`` does not divide ``vocab_size``, or ``corrupted`` is not from 0 to 1.
    """
    cycle_len = cycle_len or vocab_size
    if cycle_len < 0 or vocab_size % cycle_len:
        raise InvalidArgumentError(f"cycle_len must divide vocab_size = {vocab_size}, got {cycle_len}")
    if not 0 <= corrupted <= 1:
        raise InvalidArgumentError(f"corrupted must be from 0 to 1, got {corrupted}")
    random = np.random.default_rng(seed)
    cycles = random.permutation(vocab_size).reshape(-1, cycle_len)
    successors = np.empty(vocab_size, dtype=np.int64)
    successors[cycles] = np.roll(cycles, -1, axis=1)
    chosen = random.permutation(vocab_size)[: round(corrupted * vocab_size)]
    successors[chosen] = np.roll(successors[chosen], 1)
    return successors


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
    """Tensors that folders may have and that follow from others."""
    frequencies = [f"{layer_prefix(index)}self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)]
    return [*frequencies, LM_HEAD] if config.tie_word_embeddings else frequencies
