"""What a process costs besides its load: two equal ones get the same load at once, and take turns with the rest.

What else the machine does slows both alike, and what differs between them cancels out over two turns.
"""

import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np

from benchmarks.requests import SEED


async def effects(
    pids: Sequence[int],
    num_rounds: int,
    extra: Callable[[int], AbstractAsyncContextManager[object]],
    load: Callable[[], Awaitable[object]],
) -> list[float]:
    """Logarithms of the ratio of CPU time with ``extra``, which takes the index of the process, to that without."""
    found = []
    for _ in range(num_rounds):
        ratios = []
        for index in random.sample((0, 1), 2):
            async with extra(index):
                before_ns = [_cpu_ns(pid) for pid in pids]
                await load()
                used_ns = [_cpu_ns(pid) - before for pid, before in zip(pids, before_ns, strict=True)]
                ratios.append(math.log(used_ns[index] / used_ns[1 - index]))
        found.append(sum(ratios) / 2)
    return found


def interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """Mean ratio without the outermost tenth of either side, and the ends of its 95 % interval by bootstrap."""

    def trimmed(rows: np.ndarray) -> np.ndarray:
        cut = rows.shape[-1] // 10
        return np.exp(np.sort(rows, axis=-1)[..., cut : rows.shape[-1] - cut].mean(axis=-1))

    drawn = np.random.default_rng(SEED).choice(logs, (4000, len(logs)))
    low, high = np.quantile(trimmed(drawn), (0.025, 0.975))
    return float(low), float(trimmed(np.array(logs))), float(high)


def _cpu_ns(pid: int) -> int:
    """CPU time of a process, of threads that have ended too; ``clock_getcpuclockid(3)`` makes the clock's number."""
    return time.clock_gettime_ns(~pid << 3 | 2)
