"""The loss of a candidate with the interval that the rows at hand leave open."""

import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_NUM_RESAMPLES = 2000
_LEVEL = 0.95
#: What n rows leave open beside what they show, as events among n: with 95 % confidence an event that was seen k times
#: has a probability below (k + UNSEEN[k]) / n (Poisson). A bootstrap, which draws what was seen, is blind to it.
UNSEEN = (3.0, 3.75, 4.30, 4.76, 5.16, 5.52, 5.85, 6.15, 6.44, 6.71)
#: Numbers that are drawn at once.
_MAX_DRAWN = 1 << 22


class Scores(NamedTuple):
    """How good the answers to each row are, shape ``[num_rows]``, float64.

    Attributes:
        original: Of the original's answers.
        candidate: Of the candidate's.
        is_relative: The loss is a share of the original's mean score, else the difference of the means.
    """

    original: NDArray[np.float64]
    candidate: NDArray[np.float64]
    is_relative: bool = True


class Loss(NamedTuple):
    """What a candidate loses.

    Attributes:
        value: Of all rows together.
        low, high: Interval that the loss lies in with 95 % confidence. Where fewer than ten rows are worse, its upper
            end leaves room for rows like none of these, each of which loses all.
        num_rows: That were judged.
        num_worse: Rows whose answer scores less than the original's.
    """

    value: float
    low: float
    high: float
    num_rows: int
    num_worse: int


def seeded(seed: int, purpose: str) -> np.random.Generator:
    """A generator of random numbers whose draws do not depend on what others draw."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def loss_of(scores: Scores, seed: int) -> Loss:
    """The loss, and its percentile bootstrap interval over the rows, wider where few are worse.

    The same seed gives the same interval.

    Args:
        scores: Finite, of at least one row.
        seed: Not negative.
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
    unseen = value + UNSEEN[num_worse] / num_rows if num_worse < len(UNSEEN) else value
    # A bootstrap of few rows may miss its own sample.
    return Loss(float(value), float(min(low, value)), float(max(high, value, min(unseen, 1.0))), num_rows, num_worse)


def _loss(original: Any, candidate: Any, is_relative: bool) -> Any:
    if not is_relative:
        return original - candidate
    # Where the original scores nothing there is nothing to lose.
    return np.divide(original - candidate, original, out=np.zeros_like(original), where=original > 0)
