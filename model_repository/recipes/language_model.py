"""A small Llama: its training, and how well it predicts."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu

from recipes.muon import Muon
from recipes.progress import steps

Ids = NDArray[np.int64]

CONTEXT = 512  # tokens

#: Its shape, as ``config.json`` has it: 4 layers, 6 query heads over 2 of keys and values; 2 million parameters.
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
ROPE_THETA = 10000.0

_NUM_STEPS = 150
_ROWS_PER_STEP = 2
_MATRIX_RATE, _EMBEDDING_RATE = 1e-2, 8e-3
_WARM_UP_SHARE = 0.05
_MAX_GRADIENT_NORM = 1.0


class Llama(nn.Module):
    """Ids ``[num_rows, length]`` to logits ``[num_rows, length, vocab_size]``; its weights have the names of Llama's.

    Args:
        vocab_size: Tokens; the embedding of inputs and outputs is one matrix.
        seed: Of the weights.
    """

    def __init__(self, *, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = int(SHAPE["hidden_size"])
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(vocab_size, width),
                "layers": nn.ModuleList(_Layer(width) for _ in range(int(SHAPE["num_hidden_layers"]))),
                "norm": _norm(width),
            }
        )
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=SHAPE["initializer_range"])

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the token after each."""
        model: Any = self.model
        half = int(SHAPE["head_dim"]) // 2
        angles = torch.arange(ids.shape[1]).outer(ROPE_THETA ** -(torch.arange(half) / half)).repeat(1, 2)
        hidden = model.embed_tokens(ids)
        for layer in model.layers:
            hidden = layer(hidden, angles.cos(), angles.sin())
        return linear(model.norm(hidden), model.embed_tokens.weight)


def _norm(width: int) -> nn.RMSNorm:
    return nn.RMSNorm(width, eps=SHAPE["rms_norm_eps"])


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(width), _Mlp(width)
        self.input_layernorm, self.post_attention_layernorm = _norm(width), _norm(width)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosines, sines)
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        heads, shared = (
            int(SHAPE[name] * SHAPE["head_dim"]) for name in ("num_attention_heads", "num_key_value_heads")
        )
        self.q_proj, self.o_proj = nn.Linear(width, heads, bias=False), nn.Linear(heads, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, shared, bias=False) for _ in range(2))

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        products = (product(hidden) for product in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (one.unflatten(2, (-1, cosines.shape[1])).transpose(1, 2) for one in products)
        q, k = (one * cosines + _turned(one) * sines for one in (q, k))
        found = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return mixed


def _turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = int(SHAPE["intermediate_size"])
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return mixed


def train(model: Llama, ids: Ids, *, num_steps: int = _NUM_STEPS, seed: int = 0) -> None:
    """The model has seen ``num_steps`` times 1024 tokens; the rate rises for a while, then falls as a cosine.

    Muon turns the matrices within the layers (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon), AdamW
    the embedding and the gains. After 123k tokens that left 5.65 nats per held-out token, AdamW alone 6.31.

    Args:
        model: Changed in place.
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


def nats_per_token(model: Llama, ids: Ids) -> float:
    """Mean of -log p of each token given those before it, in rows of ``CONTEXT``; the first of a row is not counted."""
    with torch.inference_mode():
        return float(torch.cat([_nats(model, rows) for rows in _rows(ids).split(_ROWS_PER_STEP)]).mean())


def unigram_nats_per_token(training: Ids, held_out: Ids, *, vocab_size: int) -> float:
    """The same for a model that knows how frequent each token is, and nothing of what stands before it."""
    counts = np.bincount(training, minlength=vocab_size) + 1
    return float(-np.log(counts / counts.sum())[held_out].mean())


def _rows(ids: Ids) -> Tensor:
    """int64 ``[num_rows, CONTEXT]``; ids that fill no row are left out."""
    return torch.from_numpy(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)


def _nats(model: Llama, rows: Tensor) -> Tensor:
    """-log p of each id after the first of its row, float32 ``[num_rows * (CONTEXT - 1)]``."""
    logits = model(rows[:, :-1])
    nats: Tensor = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return nats


def _optimizers(model: Llama) -> list[Any]:
    """Muon for the matrices within the layers; AdamW for the embedding, which is a table, and for the gains."""
    matrices = [weight for weight in model.model["layers"].parameters() if weight.ndim > 1]
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
