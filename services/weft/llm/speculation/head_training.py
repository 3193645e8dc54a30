"""Trains Medusa heads on the hidden states of a frozen model: ``train_heads``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from weft.base.errors import InvalidArgumentError
from weft.llm.models.model import TransformerModel
from weft.llm.speculation.medusa import Head

#: Tokens of a text whose hidden states are computed at once; each starts without context.
_WINDOW = 256
_WINDOWS_PER_STEP = 8
_BLOCK_SIZE = 16
#: First positions of a window that accuracy leaves out: with little context every prediction is poor.
_NUM_UNMEASURED = 16
_ROWS_PER_MEASUREMENT = 512
_HELD_OUT_SHARE = 0.1
_WARM_UP_STEPS = 50
#: Of top-k accuracy.
TOP_KS = (1, 3, 5)


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """How to train heads. The defaults take about a minute for a model of 2 million parameters on one CPU core.

    Attributes:
        num_heads: Heads, and so the most drafts of a step.
        batch_size: Positions of the text in each step.
        learning_rate: Largest; it rises for 50 steps and then falls to 0, linearly.
        seed: Of the initial weights and of the batches.

    Raises:
        InvalidArgumentError: A number is out of its range.
    """

    num_heads: int = 4
    num_steps: int = 600
    batch_size: int = 256
    learning_rate: float = 8e-3
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {"num_heads": 16, "num_steps": 1_000_000, "batch_size": 65536}
        for name, most in bounds.items():
            if not 1 <= getattr(self, name) <= most:
                raise InvalidArgumentError(f"{name} must be from 1 to {most}, got {getattr(self, name)}")
        if not 0 < self.learning_rate <= 1:
            raise InvalidArgumentError(f"learning_rate must be above 0 and at most 1, got {self.learning_rate}")


class HeadAccuracy(NamedTuple):
    """Accuracy of a head on held-out text, given the tokens before; shares from 0 to 1.

    Attributes:
        top_k: The text's token is among the 1, 3, 5 likeliest (``TOP_KS``).
        agreement: Its likeliest token is the model's: a draft at temperature 0 is accepted.
        overlap: Shared probability of both distributions; drafts at temperature 1 are accepted a little less often.
    """

    top_k: tuple[float, ...]
    agreement: float
    overlap: float


class _Windows(NamedTuple):
    """Token ids, int64 ``[n, L]``, and their hidden states, ``[n, L, H]``."""

    token_ids: Tensor
    hidden: Tensor


class _Rows(NamedTuple):
    """Some positions: their hidden states ``[N, H]``; the tokens after each, ``[N, num_heads + 1]``; and theirs."""

    hidden: Tensor
    following: Tensor
    targets: Tensor


def train_heads(
    model: TransformerModel,
    embedding: Tensor,
    lm_head: Tensor,
    token_ids: npt.NDArray[np.int64],
    training: HeadTraining,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[list[Head], list[HeadAccuracy]]:
    """Train heads by cross entropy, so that the LM head predicts from their states what it predicts from the model's.

    The targets are the model's distributions, not the text's tokens, because drafts must match the model. The last
    tenth of the text is held out. A text of a million tokens takes ``4 * hidden_size`` MB of memory.

    Args:
        embedding: Its embedding, ``[vocab_size, hidden_size]``, on its device.
        token_ids: The text, ``[n]``.
        on_step: Called after each step with its number from 1 and its loss in nats per token.

    Returns:
        Heads in float32, and the accuracy of each.

    Raises:
        InvalidArgumentError: The text is too short for one window to train on and one to measure on.
    """
    window = min(_WINDOW, model.config.max_context_len)
    num_windows = len(token_ids) // window
    if num_windows < 2 or window <= _NUM_UNMEASURED + training.num_heads + 1:
        raise InvalidArgumentError(
            f"the text must have at least {2 * window} tokens, to train on and to measure on, got {len(token_ids)}; "
            f"give a longer one"
        )
    num_held_out = max(round(_HELD_OUT_SHARE * num_windows), 1)
    windows = _hidden_states(model, token_ids[: num_windows * window].reshape(num_windows, window))
    generator = torch.Generator().manual_seed(training.seed)
    embedding, lm_head = embedding.float(), lm_head.float()
    # Adam's steps are as long for all weights: with embeddings as large as states both parts learn at the same pace.
    ratio = float(windows.hidden[0].float().norm(dim=-1).mean() / embedding.norm(dim=-1).mean().clamp(min=1e-6))
    scaled = embedding * ratio
    heads = _new_heads(embedding, training.num_heads, generator)
    own = _Windows(*(part[:-num_held_out] for part in windows))
    optimizer = torch.optim.AdamW([part for head in heads for part in head], lr=training.learning_rate)
    for step in range(training.num_steps):
        warmth = min(1.0, (step + 1) / _WARM_UP_STEPS)
        optimizer.param_groups[0]["lr"] = training.learning_rate * warmth * (1 - step / training.num_steps)
        rows = torch.randint(len(own.token_ids), (training.batch_size,), generator=generator)
        columns = torch.randint(window - training.num_heads - 1, (training.batch_size,), generator=generator)
        loss = _loss(heads, scaled, lm_head, _taken(own, rows, columns, training.num_heads))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step(step + 1, loss.item() / training.num_heads)
    held_out = _Windows(*(part[-num_held_out:] for part in windows))
    heads = [Head(head.state.detach(), head.token.detach() * ratio, head.bias.detach()) for head in heads]
    return heads, _accuracy(heads, embedding, lm_head, held_out)


def _hidden_states(model: TransformerModel, token_ids: npt.NDArray[np.int64]) -> _Windows:
    (num_windows, window), device = token_ids.shape, model.device
    ids = torch.from_numpy(token_ids).to(device)
    hidden = torch.empty(num_windows, window, model.config.hidden_size, dtype=model.dtype, device=device)
    num_blocks = -(-window // _BLOCK_SIZE)
    kv = model.new_kv(1 + _WINDOWS_PER_STEP * num_blocks, _BLOCK_SIZE)
    for first in range(0, num_windows, _WINDOWS_PER_STEP):
        chunk = ids[first : first + _WINDOWS_PER_STEP]
        count = len(chunk)
        tables = (1 + torch.arange(count * num_blocks, device=device)).view(count, num_blocks)
        slots = (tables.unsqueeze(2) * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, device=device)).view(count, -1)
        rows = model.forward(
            chunk.reshape(-1),
            torch.arange(window, dtype=torch.int32, device=device).repeat(count),
            kv,
            tables.int(),
            torch.arange(0, (count + 1) * window, window, dtype=torch.int32, device=device),
            torch.full((count,), window, dtype=torch.int32, device=device),
            slots[:, :window].reshape(-1),
            window,
            window,
        )
        hidden[first : first + count] = rows.view(count, window, -1)
    return _Windows(ids, hidden)


def _new_heads(embedding: Tensor, num_heads: int, generator: torch.Generator) -> list[Head]:
    """Initial heads: they pass the state on and hardly use the token."""
    width = embedding.shape[1]
    heads = []
    for _ in range(num_heads):
        noise = 0.01 * torch.randn(2, width, width, generator=generator).to(embedding.device)
        state = torch.cat([torch.eye(width, device=embedding.device), noise[0]])
        parts = Head(state, noise[1], torch.zeros(width, device=embedding.device))
        heads.append(Head(*(part.requires_grad_() for part in parts)))
    return heads


def _taken(windows: _Windows, rows: Tensor, columns: Tensor, num_heads: int) -> _Rows:
    ahead = columns.unsqueeze(1) + torch.arange(1, num_heads + 2)
    hidden = windows.hidden[rows, columns].float()
    return _Rows(
        hidden, windows.token_ids[rows.unsqueeze(1), ahead], windows.hidden[rows.unsqueeze(1), ahead[:, :-1]].float()
    )


def _states(heads: list[Head], embedding: Tensor, rows: _Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """The estimate of each head and the model's own state, given the text's tokens between."""
    state = rows.hidden
    for index, head in enumerate(heads):
        state = head.advance(state, embedding[rows.following[:, index]])
        yield state, rows.targets[:, index]


def _loss(heads: list[Head], embedding: Tensor, lm_head: Tensor, rows: _Rows) -> Tensor:
    loss = torch.zeros((), device=embedding.device)
    for state, target in _states(heads, embedding, rows):
        with torch.no_grad():
            wanted = functional.linear(target, lm_head).softmax(1)
        loss = loss + functional.cross_entropy(functional.linear(state, lm_head), wanted)
    return loss


def _accuracy(heads: list[Head], embedding: Tensor, lm_head: Tensor, windows: _Windows) -> list[HeadAccuracy]:
    columns = torch.arange(_NUM_UNMEASURED, windows.token_ids.shape[1] - len(heads) - 1)
    places = torch.cartesian_prod(torch.arange(len(windows.token_ids)), columns)
    sums = np.zeros((len(heads), len(TOP_KS) + 2))
    with torch.no_grad():
        for chunk in places.split(_ROWS_PER_MEASUREMENT):
            rows = _taken(windows, chunk[:, 0], chunk[:, 1], len(heads))
            for index, (state, target) in enumerate(_states(heads, embedding, rows)):
                guess, truth = (functional.linear(each, lm_head).softmax(1) for each in (state, target))
                best = guess.topk(min(TOP_KS[-1], guess.shape[1]), dim=1).indices
                is_hit = best == rows.following[:, index + 1 : index + 2]
                found = [is_hit[:, :k].any(1).sum() for k in TOP_KS]
                found += [(best[:, 0] == truth.argmax(1)).sum(), torch.minimum(guess, truth).sum()]
                sums[index] += [float(each) for each in found]
    shares = (sums / len(places)).tolist()
    return [HeadAccuracy(tuple(row[: len(TOP_KS)]), *row[len(TOP_KS) :]) for row in shares]
