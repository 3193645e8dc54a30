"""Weights of a model whose greedy output is known, for tests of the engine."""

import numpy as np
import numpy.typing as npt
import torch

from weft.base.errors import InvalidArgumentError
from weft.llm.config import TransformerConfig
from weft.llm.models.weights import Weights, random_weights
from weft.llm.weights.parts import EMBEDDING, LM_HEAD


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
    """Weights whose greedy output is known, while the forward pass runs all operations.

    Token ``t`` is followed by ``permutation(...)[t]``: rows of the embedding are random unit vectors, the LM head's row
    of each token is the embedding of its predecessor, and the outputs of attention and MLP are scaled down by
    ``epsilon``. The embeddings of ``config`` must not be tied.
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
    """The successor of each token in the output of a permutation model, ``[vocab_size]``.

    ``cycle_len``: period of the output, a divisor of ``vocab_size``; 0: that. ``corrupted``: share of the tokens whose
    successor differs from that with 0, as in a draft model with this error rate.
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
