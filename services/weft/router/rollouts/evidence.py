"""Sequential tests on counts: right at every look, however often and whenever one looks.

Each test has an e-process, the wealth of a bettor against "the limit is kept": it starts at 1, and while the limit is
kept its mean is at most 1 at any time, so that it ever exceeds 1 / level with a probability of at most ``level``
(Ville). It bets on several worse rates at once, and keeps half of the money. It depends on counts alone, so that looks
at any time, over any number of routers, see the same. Outcomes need not be alike; the limit has to hold given the past.

Sources:
    Rates: H. Robbins, "Statistical methods related to the law of the iterated logarithm", 1970 (mixtures); S. Howard,
    A. Ramdas, J. McAuliffe, J. Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", 2021.
    Quantiles: S. Howard, A. Ramdas, "Sequential estimation of quantiles with applications to A/B testing and best-arm
    identification", 2022: the 99th percentile is above t if more than 1 % of the runs take longer.
    Means in [0, 1]: I. Waudby-Smith, A. Ramdas, "Estimating means of bounded random variables by betting", 2024; a bet
    on an outcome between 0 and 1 wins at least what the bets on its parts do (Jensen), so that the sum is enough.
    Two samples: for each rate that both could have, the wealth against the one times the wealth against the other;
    the least of these products is an e-process against "not worse".
"""

from functools import lru_cache
from math import ceil, log
from typing import Any

import numpy as np

from weft.router.rollouts.counts import BINS_PER_LOG

#: Share of the runs beyond the 99th percentile.
TAIL = 0.01
#: Odds of the rates that are bet on, as multiples of those of the limit.
_ODDS = np.array([1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0, 60.0, 300.0])
#: Rates that both samples could have, and that bounds are looked for among.
_RATES = 1.0 / (1.0 + np.exp(-np.linspace(-14.0, 14.0, 561)))
#: Outcomes that are asked for at most.
_MAX_NEEDED = 10_000_000


def log_wealth(bad: Any, total: Any, allowed: Any) -> Any:
    """Logarithm of the wealth against "a share of at most ``allowed`` is bad"; arrays broadcast.

    Args:
        bad: Number of bad outcomes, or the sum of outcomes in [0, 1].
        total: Number of outcomes.
        allowed: In 0..1.
    """
    bad, total, allowed = (np.asarray(one, float)[..., None] for one in (bad, total, allowed))
    inner = np.clip(allowed, 1e-12, 1.0 - 1e-12)
    worse = _ODDS * inner / (1.0 - inner + _ODDS * inner)
    bets = bad * np.log(worse / inner) + (total - bad) * np.log((1.0 - worse) / (1.0 - inner))
    top = np.maximum(bets.max(axis=-1), 0.0)
    wealth = top + np.log((np.exp(-top) + np.exp(bets - top[..., None]).mean(axis=-1)) / 2.0)
    return np.where((allowed <= 0.0) & (bad > 0.0), np.inf, wealth[..., None])[..., 0]


def log_wealth_of_worse(bad: Any, total: int, base_bad: Any, base_total: int, rate: Any = _RATES) -> float:
    """Logarithm of the wealth against "the rate is at most the base's".

    With arrays of counts beyond several thresholds, against "at each threshold the rate, or the base's, is ``rate``".
    """
    base_good = base_total - np.asarray(base_bad)
    return float(np.min(log_wealth(bad, total, rate) + log_wealth(base_good, base_total, 1.0 - rate)))


def log_wealth_of_slower(runs: dict[int, int], base_runs: dict[int, int], ratio: float) -> float:
    """Logarithm of the wealth against "the 99th percentile is at most ``ratio`` times the base's".

    In the bin of the base's percentile and above it are at least 1 % of its runs. At most 1 % of the others are above
    ``ratio`` times the upper edge of that bin.
    """
    shift = 1 + ceil(log(ratio) * BINS_PER_LOG - 1e-9)
    known = [*base_runs, *(at - shift for at in runs)]
    bins = np.arange(min(known, default=0), max(known, default=0) + 2)
    tail, base_tail = _tail(runs, bins + shift), _tail(base_runs, bins)
    return log_wealth_of_worse(tail, sum(runs.values()), base_tail, sum(base_runs.values()), TAIL)


def bounds(bad: float, total: int, log_level: float) -> tuple[float, float]:
    """Bounds of a rate that hold at every look at once, each with a probability of 1 - exp(``log_level``)."""
    above = _RATES[log_wealth(bad, total, _RATES) >= -log_level]
    below = _RATES[log_wealth(total - bad, total, 1.0 - _RATES) >= -log_level]
    return float(max(above, default=0.0)), float(min(below, default=1.0))


@lru_cache(maxsize=1000)
def num_needed(allowed: float, log_level: float) -> int:
    """Outcomes after which a clear fault is found, if as many are bad as are expected of it.

    Of a clear fault a share is bad that is three times the one ``allowed``, or 0.1 above it if that is less.
    """
    allowed = max(allowed, 0.001)
    clear = allowed + min(2.0 * allowed, 0.1, (1.0 - allowed) / 2.0)
    nums = np.unique(np.geomspace(1, _MAX_NEEDED, 2000).astype(int))
    is_found = log_wealth(clear * nums, nums, allowed) >= -log_level
    return int(nums[np.argmax(is_found)]) if is_found.any() else _MAX_NEEDED


def _tail(runs: dict[int, int], bins: Any) -> Any:
    """For each bin the number of runs in it and above it."""
    known = sorted(runs)
    from_top = np.cumsum([0, *(runs[at] for at in reversed(known))])
    return from_top[::-1][np.searchsorted(known, bins)]
