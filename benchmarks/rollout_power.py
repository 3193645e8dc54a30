"""How often a rollout ends a candidate that is as good as what serves, and how many requests it needs to end a bad one.

Simulates the state machine of ``weft.router.rollouts`` with a look after each batch of requests: ``python -m
benchmarks.rollout_power``. Prints the false alarms of so many A/A rollouts, and the candidate's requests until it is
rolled back: median and 95th percentile. Latencies are lognormal (sigma 0.5).
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from weft.language.rollouts import RolloutPlan
from weft.router.rollouts.counts import BINS_PER_LOG, ArmCounts
from weft.router.rollouts.machine import ROLLED_BACK, RUNNING, RolloutState, advance, begin, share_now

_LOG_MEDIAN_NS, _SIGMA = log(50e6), 0.5
#: The 99th percentile of what serves, in milliseconds.
P99_MS = float(np.exp(_LOG_MEDIAN_NS + 2.3263 * _SIGMA)) / 1e6


@dataclass(frozen=True)
class Truth:
    """One side as it is."""

    error_rate: float = 0.01
    slowdown: float = 1.0

    def draw(self, num: int, generator: np.random.Generator) -> ArmCounts:
        """Counts of so many runs."""
        times = generator.normal(_LOG_MEDIAN_NS + log(self.slowdown), _SIGMA, num)
        bins, counts = np.unique((times * BINS_PER_LOG).astype(int), return_counts=True)
        runs = dict(zip(bins.tolist(), counts.tolist(), strict=True))
        return ArmCounts(num, int(generator.binomial(num, self.error_rate)), runs)


def simulate(
    limits: Mapping[str, float],
    candidate: Truth,
    *,
    seed: int,
    shares: Sequence[float] = (0.05, 0.2, 0.5, 1.0),
    batch: int = 500,
    looks: int = 20,
) -> tuple[RolloutState, ArmCounts]:
    """Run a rollout to its end; its last state and the candidate's counts.

    Args:
        batch: Requests of all between two looks.
        looks: How many a share lasts at least.
    """
    plan = RolloutPlan("new", 1, (1.0, 1.0), tuple(shares), looks * 1.0, limits, digest="d")
    generator, now_ns = np.random.default_rng(seed), 0
    state, mine, base = begin(plan, 0), ArmCounts(), ArmCounts()
    while state.phase == RUNNING:
        now_ns += 1_000_000_000
        num = int(generator.binomial(batch, share_now(plan, state)))
        mine, base = mine + candidate.draw(num, generator), base + Truth().draw(batch - num, generator)
        state = advance(plan, state, mine, base, now_ns)
    return state, mine


def false_alarms(num: int) -> int:
    """How many of so many A/A rollouts are rolled back; each limit is as tight as what serves allows."""
    limits = {"max_error_rate": 0.01, "max_p99_ms": P99_MS, "max_p99_ratio": 1.0}
    return sum(simulate(limits, Truth(), seed=seed)[0].phase == ROLLED_BACK for seed in range(num))


def requests_needed(limits: Mapping[str, float], candidate: Truth, share: float, num: int) -> tuple[int, int, int]:
    """Median and 95th percentile of the candidate's requests until it is rolled back; how many of ``num`` are not."""
    found = []
    for seed in range(num):
        state, mine = simulate(limits, candidate, seed=seed, shares=[share], batch=int(50 / share), looks=2000)
        found += [mine.num_requests] if state.phase == ROLLED_BACK else []
    return int(np.median(found)), int(np.quantile(found, 0.95)), num - len(found)


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aa", type=int, default=1000, help="A/A rollouts (default %(default)s)")
    parser.add_argument("--runs", type=int, default=200, help="rollouts of each bad candidate (default %(default)s)")
    options = parser.parse_args()
    print(f"A/A: {false_alarms(options.aa)} of {options.aa} rollouts were ended; stated: at most 5 %")
    for what, limits, truth in (
        ("errors 1 % -> 3 %, limit 1 %", {"max_error_rate": 0.01}, Truth(error_rate=0.03)),
        ("errors 1 % -> 3 %, limit 1.5 %", {"max_error_rate": 0.015}, Truth(error_rate=0.03)),
        ("errors 1 % -> 3 %, limit 2 %", {"max_error_rate": 0.02}, Truth(error_rate=0.03)),
        ("p99 +20 %, ratio 1.0", {"max_p99_ratio": 1.0}, Truth(slowdown=1.2)),
        ("p99 +20 %, ratio 1.05", {"max_p99_ratio": 1.05}, Truth(slowdown=1.2)),
        ("p99 +20 %, limit p99 as it was", {"max_p99_ms": P99_MS}, Truth(slowdown=1.2)),
    ):
        for share in (0.05, 0.5):
            median, p95, missed = requests_needed(limits, truth, share, options.runs)
            print(f"{what}, at {share:.0%}: {median:,} requests of the candidate (95 %: {p95:,}), {missed} not found")


if __name__ == "__main__":
    main()
