"""EAGLE-3 and MTP heads in plain torch, from their published definitions: to check the engine's, and to train some.

A head's weights have the names of its checkpoint, the target's those of a Llama. Every function takes whole texts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]


class Sizes(NamedTuple):
    """Numbers of heads and their width, base of the rotary embedding, and the number under the root of norms."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float = 10000.0
    eps: float = 1e-6


class Entries(NamedTuple):
    """Keys and values of a layer, ``[T, num_kv_heads, head_dim]``."""

    keys: Tensor
    values: Tensor


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of rows."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float32) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _project(x: Tensor, weights: Weights, name: str) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _attention(
    x: Tensor, weights: Weights, prefix: str, sizes: Sizes, first: int, past: Entries | None
) -> tuple[Tensor, Entries]:
    """Causal attention of rows at positions from ``first`` on, behind the entries of all positions before."""
    q, k, v = (
        _project(x, weights, f"{prefix}self_attn.{name}_proj").view(len(x), -1, sizes.head_dim) for name in "qkv"
    )
    positions = torch.arange(first, first + len(x))
    q, k = _rotated(q, positions, sizes.theta), _rotated(k, positions, sizes.theta)
    if past is not None:
        k, v = torch.cat((past.keys, k)), torch.cat((past.values, v))
    num_shared = sizes.num_heads // sizes.num_kv_heads
    keys, values = (part.repeat_interleave(num_shared, 1).transpose(0, 1) for part in (k, v))
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * sizes.head_dim**-0.5
    is_hidden = torch.arange(len(k))[None] > torch.arange(len(k) - len(x), len(k))[:, None]
    mixed = scores.masked_fill(is_hidden, -torch.inf).softmax(-1) @ values
    return _project(mixed.transpose(0, 1).reshape(len(x), -1), weights, f"{prefix}self_attn.o_proj"), Entries(k, v)


def _mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    gate, up = (_project(x, weights, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
    return _project(functional.silu(gate) * up, weights, f"{prefix}mlp.down_proj")


def _layer(
    x: Tensor, stream: Tensor, weights: Weights, prefix: str, sizes: Sizes, first: int, past: Entries | None
) -> tuple[Tensor, Entries]:
    mixed, entries = _attention(x, weights, prefix, sizes, first, past)
    stream = stream + mixed
    after = normed(stream, weights[f"{prefix}post_attention_layernorm.weight"], sizes.eps)
    return stream + _mlp(after, weights, prefix), entries


def llama_states(tokens: Tensor, weights: Weights, sizes: Sizes, num_layers: int) -> list[Tensor]:
    """Embeddings, the output of each layer, and the last one normed; each ``[T, hidden_size]``."""
    states = [weights["model.embed_tokens.weight"][tokens]]
    for index in range(num_layers):
        prefix, x = f"model.layers.{index}.", states[-1]
        first = normed(x, weights[f"{prefix}input_layernorm.weight"], sizes.eps)
        states.append(_layer(first, x, weights, prefix, sizes, 0, None)[0])
    return [*states, normed(states[-1], weights["model.norm.weight"], sizes.eps)]


class PlainEagle3:
    """An EAGLE-3 head: three states of the target are joined into one, beside which lies the next token's embedding."""

    def __init__(
        self,
        weights: Weights,
        sizes: Sizes,
        embedding: Tensor,
        *,
        prefix: str = "midlayer.",
        norms_before_residual: bool = False,
    ) -> None:
        self.weights = weights
        self._sizes, self._embedding, self._prefix = sizes, embedding, prefix
        self._norms_before_residual = norms_before_residual

    def states(self, target: list[Tensor]) -> Tensor:
        """From three states of the target, ``[T, hidden_size]`` each."""
        return _project(torch.cat(target, -1), self.weights, "fc")

    def step(self, tokens: Tensor, states: Tensor, first: int, past: Entries | None) -> tuple[Tensor, Tensor, Entries]:
        """Logits of the tokens after ``tokens``, states, and entries; ``first``: position of the first state."""
        weights, prefix, eps = self.weights, self._prefix, self._sizes.eps
        embedded = normed(self._embedding[tokens], weights[f"{prefix}input_layernorm.weight"], eps)
        own = normed(states, weights[f"{prefix}hidden_norm.weight"], eps)
        stream = own if self._norms_before_residual else states
        states, entries = _layer(torch.cat((embedded, own), -1), stream, weights, prefix, self._sizes, first, past)
        return _project(normed(states, weights["norm.weight"], eps), weights, "lm_head"), states, entries


class PlainMtp:
    """An MTP layer as MiMo has it; LM head and embeddings are the target's."""

    def __init__(self, weights: Weights, sizes: Sizes, embedding: Tensor, lm_head: Tensor) -> None:
        self.weights = weights
        self._sizes, self._embedding, self._lm_head = sizes, embedding, lm_head

    def states(self, target: list[Tensor]) -> Tensor:
        """The target's last state."""
        return target[-1]

    def step(self, tokens: Tensor, states: Tensor, first: int, past: Entries | None) -> tuple[Tensor, Tensor, Entries]:
        """As ``PlainEagle3.step``."""
        weights, prefix, eps = self.weights, "model.mtp_layers.0.", self._sizes.eps
        own = normed(states, weights[f"{prefix}hidden_layernorm.weight"], eps)
        embedded = normed(self._embedding[tokens], weights[f"{prefix}token_layernorm.weight"], eps)
        stream = _project(torch.cat((own, embedded), -1), weights, f"{prefix}input_proj")
        x = normed(stream, weights[f"{prefix}input_layernorm.weight"], eps)
        stream, entries = _layer(x, stream, weights, prefix, self._sizes, first, past)
        states = normed(stream, weights[f"{prefix}final_layernorm.weight"], eps)
        return functional.linear(states, self._lm_head), states, entries


PlainHead = PlainEagle3 | PlainMtp


def greedy_drafts(
    head: PlainHead, tokens: Tensor, states: Tensor, num_drafts: int, target_ids: Tensor | None = None
) -> list[int]:
    """The likeliest tokens behind a text, one after the other; ``states``: of all its tokens but the last.

    ``target_ids``: the target's token for each that the head drafts.
    """
    logits, own, entries = head.step(tokens[1:], states, 0, None)
    drafts: list[int] = []
    while True:
        best = int(logits[-1].argmax())
        drafts.append(best if target_ids is None else int(target_ids[best]))
        if len(drafts) == num_drafts:
            return drafts
        logits, own, entries = head.step(torch.tensor(drafts[-1:]), own[-1:], len(entries.keys), entries)


def train(
    head: PlainHead,
    tokens: Tensor,
    target: list[Tensor],
    labels: Callable[[int, int], Tensor],
    num_steps: int,
    *,
    num_windows: int = 4,
    window: int = 128,
    depth: int = 3,
    learning_rate: float = 3e-3,
) -> None:
    """Train a head in place on a text and the target's states of it; each step unrolls ``depth`` drafts.

    ``target``: as ``head.states`` takes them; ``labels``: of a range of positions, the tokens to guess or their
    probabilities.
    """
    parameters = [weight.requires_grad_() for weight in head.weights.values()]
    adam = torch.optim.AdamW(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, learning_rate, num_steps)
    generator = torch.Generator().manual_seed(0)
    last = len(tokens) - window - depth
    for _ in range(num_steps):
        losses = []
        for start in torch.randint(0, last, (num_windows,), generator=generator).tolist():
            states = head.states([part[start : start + window] for part in target])
            for ahead in range(1, depth + 1):
                first, end = start + ahead, start + ahead + window
                logits, states, _ = head.step(tokens[first:end], states, ahead - 1, None)
                losses.append(functional.cross_entropy(logits, labels(first + 1, end + 1)))
        adam.zero_grad()
        torch.stack(losses).mean().backward()
        adam.step()
        schedule.step()
    for weight in parameters:
        weight.requires_grad_(False)
