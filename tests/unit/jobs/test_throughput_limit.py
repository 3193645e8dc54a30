"""The limit of a job's requests, against servers that are simulated."""

import heapq
import random
from collections.abc import Callable
from itertools import count

import pytest

from weft.jobs.window import ThroughputLimit

#: When a request that is sent now, with so many in flight, ends; None: it is refused.
Server = Callable[[int, int], int | None]
MS = 1_000_000


def _workers(num: int, service_ms: float, seed: int, *, spread: float = 0.2, refused_above: int = 0) -> Server:
    """``num`` requests at once, each for about ``service_ms``; above a number in flight it refuses."""
    draw = random.Random(seed)
    free_ns = [0] * num

    def end_ns(now_ns: int, num_inflight: int) -> int | None:
        if refused_above and num_inflight > refused_above:
            return None
        start_ns = max(heapq.heappop(free_ns), now_ns)
        end_ns = start_ns + int(service_ms * MS * draw.lognormvariate(0.0, spread))
        heapq.heappush(free_ns, end_ns)
        return end_ns

    return end_ns


def _batches(most: int, batch_ms: float, row_ms: float) -> Server:
    """Requests that wait share the next batch, which takes ``batch_ms`` and ``row_ms`` for each."""
    batch: list[int] = [0, 0, 0]  # start, end, members

    def end_ns(now_ns: int, num_inflight: int) -> int:
        if now_ns >= batch[0] or batch[2] >= most:  # the last one has begun, or is full
            batch[:] = max(now_ns, batch[1]), max(now_ns, batch[1]) + int(batch_ms * MS), 0
        batch[1] += int(row_ms * MS)
        batch[2] += 1
        return batch[0] + int((batch_ms + most * row_ms) * MS)

    return end_ns


def _run(
    limit: ThroughputLimit, server: Server, duration_s: float, *, demand: int = 10**6, start_s: float = 0.0
) -> None:
    """Keep as many in flight as the limit, or ``demand``, lets through."""
    now_ns, order = int(start_s * 1e9), count()
    inflight: list[tuple[int, int, bool]] = []
    while now_ns < (start_s + duration_s) * 1e9:
        while len(inflight) < min(limit.limit, demand):
            limit.enter(now_ns)
            end_ns = server(now_ns, len(inflight) + 1)
            refused_ns = now_ns + MS
            heapq.heappush(inflight, (end_ns if end_ns is not None else refused_ns, next(order), end_ns is None))
        now_ns, _, is_refused = heapq.heappop(inflight)
        limit.leave(now_ns, is_refused=is_refused)
    for (*_,) in inflight:
        limit.leave(now_ns)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_workers", [1, 4, 24])
def test_it_becomes_what_the_servers_can_work_on(num_workers: int, seed: int) -> None:
    """From as many as they work on at once to twice that, as it knows powers of two; also where all starts too high."""
    limit = ThroughputLimit(256, 16)
    server = _workers(num_workers, 5.0, seed)
    _run(limit, server, 30.0)
    assert num_workers <= limit.limit <= max(2 * num_workers, 2)


def test_it_grows_for_batches_until_they_are_full() -> None:
    """A batch of one takes nearly as long as one of 32, so that all that is in flight pays."""
    limit = ThroughputLimit(256, 16)
    _run(limit, _batches(32, 10.0, 0.2), 60.0)
    assert 32 <= limit.limit <= 128


def test_it_follows_servers_that_become_more_and_fewer() -> None:
    """Up within half a minute, and down again."""
    limit = ThroughputLimit(256, 16)
    _run(limit, _workers(4, 5.0, 0), 30.0)
    _run(limit, _workers(32, 5.0, 1), 60.0, start_s=30.0)
    assert 32 <= limit.limit <= 64
    _run(limit, _workers(2, 5.0, 2), 60.0, start_s=90.0)
    assert 1 <= limit.limit <= 4


def test_noise_does_not_make_it_wander() -> None:
    """Requests that take from a third to three times as long: mostly within a factor of two of what is right."""
    limits = []
    limit, server = ThroughputLimit(256, 16), _workers(8, 5.0, 3, spread=0.6)
    for minute in range(20):
        _run(limit, server, 15.0, start_s=15.0 * minute)
        limits.append(limit.limit)
    assert sum(8 <= one <= 32 for one in limits[2:]) >= 14


def test_refusals_make_it_smaller_and_the_maximum_holds() -> None:
    """A server that refuses above six in flight is not asked for more for long; a maximum is never passed."""
    limit = ThroughputLimit(64, 16)
    _run(limit, _workers(16, 5.0, 0, refused_above=6), 60.0)
    assert limit.limit <= 8
    for maximum in (1, 3):
        limit = ThroughputLimit(maximum, 16)
        _run(limit, _workers(16, 5.0, 0), 20.0)
        assert limit.limit == maximum


def test_a_limit_that_is_not_used_stays() -> None:
    """Few requests say nothing of more."""
    limit = ThroughputLimit(64, 16)
    _run(limit, _workers(16, 5.0, 0), 60.0, demand=2)
    assert limit.limit == 16
