"""The accuracy gate: a candidate's loss, which candidates may be written, and the pick. Pure computation."""

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_NUM_RESAMPLES = 2000
_LEVEL = 0.95
#: What n rows leave open beside what they show, as events among n: with 95 % confidence an event that was seen k times
#: has a probability below (k + _UNSEEN[k]) / n (Poisson). A bootstrap, which draws what was seen, is blind to it.
_UNSEEN = (3.0, 3.75, 4.30, 4.76, 5.16, 5.52, 5.85, 6.15, 6.44, 6.71)
#: Numbers that are drawn at once.
_MAX_DRAWN = 1 << 22
#: A candidate is faster if it saves at least this share of the time; less is within what a machine's noise moves.
MIN_SAVING = 0.05
#: Shares of the original's time that differ by no more are equal.
_SAME = 0.01


class Scores(NamedTuple):
    """Score of the answers to each row, shape ``[num_rows]``, float64.

    The loss is a share of the original's mean score, or else the difference of the means.
    """

    original: NDArray[np.float64]
    candidate: NDArray[np.float64]
    is_relative: bool = True


class Loss(NamedTuple):
    """Loss of a candidate.

    Attributes:
        value: Of all rows together.
        low, high: 95 % confidence interval of the loss. If fewer than ten rows are worse, its upper end allows for
            unseen rows that lose everything.
        num_rows: That were judged.
        num_worse: Rows whose answer scores less than the original's.
    """

    value: float
    low: float
    high: float
    num_rows: int
    num_worse: int


def seeded(seed: int, purpose: str) -> np.random.Generator:
    """A random generator whose draws are independent of those for other purposes."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def loss_of(scores: Scores, seed: int) -> Loss:
    """Loss of at least one row with finite scores, and its percentile bootstrap interval over the rows.

    The same seed, which is not negative, gives the same interval.
    """
    original, candidate = scores.original, scores.candidate
    num_rows = len(original)
    random = seeded(seed, "bootstrap")
    losses: list[Any] = []
    drawn = 0
    while drawn < _NUM_RESAMPLES:
        num = min(max(1, _MAX_DRAWN // num_rows), _NUM_RESAMPLES - drawn)
        rows = random.integers(num_rows, size=(num, num_rows))
        losses.append(_loss(original[rows].mean(axis=1), candidate[rows].mean(axis=1), scores.is_relative))
        drawn += num
    tail = 100 * (1 - _LEVEL) / 2
    low, high = np.percentile(np.concatenate(losses), [tail, 100 - tail])
    value = _loss(original.mean(keepdims=True), candidate.mean(keepdims=True), scores.is_relative)[0]
    num_worse = int((candidate < original).sum())
    unseen = value + _UNSEEN[num_worse] / num_rows if num_worse < len(_UNSEEN) else value
    # A bootstrap of few rows may miss its own sample.
    return Loss(float(value), float(min(low, value)), float(max(high, value, min(unseen, 1.0))), num_rows, num_worse)


def _loss(original: Any, candidate: Any, is_relative: bool) -> Any:
    if not is_relative:
        return original - candidate
    # Where the original scores nothing there is nothing to lose.
    return np.divide(original - candidate, original, out=np.zeros_like(original), where=original > 0)


def refusal(loss: Loss, max_loss: float) -> str:
    """Return why a candidate with this loss is refused, "" if it passes.

    The upper end of the interval decides: a small loss over few rows proves little.
    """
    if loss.high <= max_loss:
        return ""
    if loss.value > max_loss:
        return f"it loses {loss.value:.2%}, {max_loss:.2%} is allowed"
    return (
        f"it may lose up to {loss.high:.2%}, {max_loss:.2%} is allowed: {loss.num_rows} held-out rows cannot tell; "
        f"{_needs(loss, max_loss)}"
    )


def _needs(loss: Loss, max_loss: float) -> str:
    """How many rows like these, whose loss is not above the limit, would show that: as advice."""
    if max_loss <= max(loss.value, 0.0):
        return "no number of rows shows that"
    num_rows = _UNSEEN[0] / max_loss
    if loss.num_worse:  # four times the rows halve the interval
        num_rows = max(num_rows, loss.num_rows * ((loss.high - loss.value) / (max_loss - loss.value)) ** 2)
    about = "about " if loss.num_worse else ""
    return f"needs {about}{math.ceil(round(num_rows, 3))} rows: give more data, or raise --held-out-rows"


class GateCandidate(NamedTuple):
    """A candidate that passed the gate; its time, by the objective, is a share of the original's."""

    name: str
    time_ratio: float
    size_bytes: int


def pick(contenders: Sequence[GateCandidate]) -> tuple[str, str]:
    """The fastest passing candidate, of equals the smallest; or "" and why there is none."""
    if not contenders:
        return "", "no candidate passes the gate"
    best = min(contenders, key=lambda one: one.time_ratio)
    if best.time_ratio > 1 - MIN_SAVING:
        return "", (
            f"no candidate that passes the gate is faster: the best, {best.name}, takes {best.time_ratio:.4g} of the "
            f"original's time, and {1 - MIN_SAVING:.2f} or less counts as faster"
        )
    limit = min(best.time_ratio + _SAME, 1 - MIN_SAVING)
    return min((one for one in contenders if one.time_ratio <= limit), key=lambda one: one.size_bytes).name, ""
