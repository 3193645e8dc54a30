"""A small Llama: its training, and how well it predicts."""

import math
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from recipes.muon import Muon
from recipes.progress import steps

Ids = NDArray[np.int64]

CONTEXT = 512  # tokens

_NUM_STEPS = 150
_ROWS_PER_STEP = 2
_MATRIX_RATE, _EMBEDDING_RATE = 1e-2, 8e-3
_WARM_UP_SHARE = 0.05
_MAX_GRADIENT_NORM = 1.0


def new_model(*, vocab_size: int, end_id: int, seed: int = 0) -> Any:
    """An untrained ``LlamaForCausalLM`` of 2 million parameters: 4 layers, 6 query heads over 2 of keys and values.

    Args:
        vocab_size: Tokens; the embedding of inputs and outputs is one matrix.
        end_id: The token before and after a text.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
    )
    llama: Any = transformers.LlamaForCausalLM
    return llama(config)


def train(model: Any, ids: Ids, *, num_steps: int = _NUM_STEPS, seed: int = 0) -> None:
    """The model has seen ``num_steps`` times 1024 tokens; the rate rises for a while, then falls as a cosine.

    Muon turns the matrices within the layers (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon), AdamW
    the embedding and the gains. After 123k tokens that left 5.65 nats per held-out token, AdamW alone 6.31.

    Args:
        model: Of ``new_model``; changed in place.
        ids: The texts one after another, ``[num_ids]``.
        num_steps: Updates of the weights.
        seed: Of the order in which it sees the texts.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in a fixed order; two threads of a busy machine mostly wait for one another
    rows = _rows(ids)
    generator = torch.Generator().manual_seed(seed)
    num_rounds = -(-num_steps * _ROWS_PER_STEP // len(rows))
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(num_rounds)])
    optimizers = _optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_rate(step / num_steps))
        for optimizer in optimizers
    ]
    for step in steps(num_steps, "training the language model"):
        loss = _nats(model, rows[order[step * _ROWS_PER_STEP : (step + 1) * _ROWS_PER_STEP]]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRADIENT_NORM)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()
    torch.set_num_threads(num_threads)


def nats_per_token(model: Any, ids: Ids) -> float:
    """Mean of -log p of each token given those before it, in rows of ``CONTEXT``; the first of a row is not counted."""
    with torch.inference_mode():
        return float(torch.cat([_nats(model, rows) for rows in _rows(ids).split(_ROWS_PER_STEP)]).mean())


def unigram_nats_per_token(training: Ids, held_out: Ids, *, vocab_size: int) -> float:
    """The same for a model that knows how frequent each token is, and nothing of what stands before it."""
    counts = np.bincount(training, minlength=vocab_size) + 1
    return float(-np.log(counts / counts.sum())[held_out].mean())


def _rows(ids: Ids) -> torch.Tensor:
    """int64 ``[num_rows, CONTEXT]``; ids that fill no row are left out."""
    return torch.from_numpy(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)


def _nats(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """-log p of each id after the first of its row, float32 ``[num_rows * (CONTEXT - 1)]``."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    nats: torch.Tensor = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return nats


def _optimizers(model: Any) -> list[Any]:
    """Muon for the matrices within the layers; AdamW for the embedding, which is a table, and for the gains."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    optim: Any = torch.optim
    return [
        Muon(matrices, _MATRIX_RATE),
        optim.AdamW(others, lr=_EMBEDDING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _share_of_rate(progress: float) -> float:
    """From a small part of the rate to all of it, then down to a twentieth; ``progress`` is 0 to 1."""
    if progress < _WARM_UP_SHARE:
        return (progress + 0.01) / (_WARM_UP_SHARE + 0.01)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (progress - _WARM_UP_SHARE) / (1 - _WARM_UP_SHARE))) / 2
