"""Batch formation: the outcomes that authors of a config.pbtxt expect, with the time in the test's hands."""

from dataclasses import dataclass
from typing import Any

import pytest
from tests.unit.serving.builders import make_request

from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import LengthBuckets, SchedulerSettings, WaitPolicy
from weft.serving.scheduler.batcher import make_batcher

S = 1_000_000_000
DELAY_S = 10


def _settings(**settings):
    return SchedulerSettings(
        **{
            "max_batch_size": 8,
            "is_batching": True,
            "preferred_batch_sizes": (2, 6),
            "max_queue_delay_us": DELAY_S * 1_000_000,
            **settings,
        }
    )


@dataclass
class Arrival:
    """Requests of ``rows`` that are queued together at ``time_s``."""

    rows: tuple[int, ...]
    time_s: float = 0
    key: Any = None


def _run(arrivals, *, num_to_hold=0, buckets=None, **settings):
    """Executions as (seconds, rows of the members), with as many free instances as there are batches."""
    scheduling = _settings(**settings)
    queue = PriorityQueue(scheduling)
    batcher = make_batcher(scheduling, buckets, num_to_hold=num_to_hold)
    executions = []
    pending = sorted(arrivals, key=lambda arrival: arrival.time_s)
    now_ns = 0
    while True:
        while pending and pending[0].time_s * S <= now_ns:
            arrival = pending.pop(0)
            for rows in arrival.rows:
                queue.add(make_request(rows, key=arrival.key), now_ns)
        decision = batcher.next_batch(queue, now_ns)
        if decision.requests:
            queue.take(decision.requests, now_ns)
            executions.append((now_ns / S, [request.num_rows for request in decision.requests]))
            continue
        times = [int(pending[0].time_s * S)] if pending else []
        if decision.wait_until_ns is not None:
            assert decision.wait_until_ns > now_ns
            times.append(decision.wait_until_ns)
        if not times:
            return executions
        now_ns = min(times)


A = Arrival


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        pytest.param([A((2,)), A((6,), 1)], [(0, [2]), (1, [6])], id="preferred sizes go at once"),
        pytest.param([A((2, 6))], [(0, [2]), (0, [6])], id="preferred sizes queued together are not joined"),
        pytest.param([A((3,))], [(10, [3])], id="another size goes after the delay"),
        pytest.param([A((7,))], [(0, [7])], id="above the largest preferred goes at once"),
        pytest.param([A((8,))], [(0, [8])], id="the maximum goes at once"),
        pytest.param([A((1,)), A((3,), 1)], [(10, [1, 3])], id="the delay counts from the oldest member"),
        pytest.param(
            [A((1,), 0, "a"), A((3,), 1, "a"), A((1,), 2, "b")],
            [(2, [1, 3]), (12, [1])],
            id="another shape sends what is pending at once",
        ),
        pytest.param([A((1,) * 6)], [(0, [1] * 6)], id="the largest preferred prefix wins"),
        pytest.param([A((1, 1))], [(0, [1, 1])], id="two make the small preferred size"),
        pytest.param([A((4, 4))], [(0, [4]), (10, [4])], id="a prefix that would pass the largest preferred goes"),
        pytest.param([A((3, 5))], [(0, [3]), (10, [5])], id="the maximum is no reason to pass the preferred sizes"),
        pytest.param([A((1, 4, 1, 2))], [(0, [1, 4, 1]), (0, [2])], id="order is never changed for a better fit"),
        pytest.param([A((1,) * 7)], [(0, [1] * 6), (10, [1])], id="what is left waits for its own delay"),
        pytest.param([A((1, 1)), A((1,) * 6, 0, "b")], [(0, [1, 1]), (0, [1] * 6)], id="each shape has its batch"),
        pytest.param(
            [A((1,), 0, "a"), A((1,), 0, "b"), A((1,), 0, "a")],
            [(0, [1]), (0, [1]), (10, [1])],
            id="a misfit is not skipped",
        ),
    ],
)
def test_outcomes(arrivals, expected):
    """max_batch_size 8, preferred [2, 6], delay 10 s: arrivals lead to these executions."""
    assert expected == _run(arrivals)


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ([A((1,))], [(0, [1])]),
        ([A((3,))], [(0, [3])]),
        ([A((1,) * 5)], [(0, [1] * 2), (0, [1] * 2), (0, [1])]),
        ([A((5, 5))], [(0, [5]), (0, [5])]),
    ],
)
def test_no_delay_never_waits(arrivals, expected):
    """With a delay of 0 everything queued is sent at once, in the largest preferred prefixes."""
    assert expected == _run(arrivals, max_queue_delay_us=0)


def test_late_batch_takes_all_that_fits():
    """Once the oldest waited for the delay, preferred sizes no longer matter."""
    settings = _settings()
    queue, batcher = PriorityQueue(settings), make_batcher(settings)
    for _ in range(9):
        queue.add(make_request(), 0)
    assert 6 == len(batcher.next_batch(queue, 0).requests)
    assert 8 == len(batcher.next_batch(queue, DELAY_S * S).requests)


def test_no_preferred_sizes_means_the_maximum():
    """Without preferred sizes a batch goes when it is full, or late."""
    executions = _run([A((4,)), A((4,), 1), A((5,), 2), A((5,), 3)], preferred_batch_sizes=())
    assert [(1, [4, 4]), (3, [5]), (13, [5])] == executions


def test_batch_mixes_levels():
    """Level 1 comes first in a batch, and lower levels fill the rest; the delay counts from the oldest of them."""
    settings = _settings(priority_levels=2, default_priority_level=2, preferred_batch_sizes=())
    queue, batcher = PriorityQueue(settings), make_batcher(settings)
    low, high = make_request(2), make_request(2, priority=1)
    queue.add(low, 0)
    queue.add(high, 5 * S)
    assert DELAY_S * S == batcher.next_batch(queue, 5 * S).wait_until_ns
    assert [high, low] == batcher.next_batch(queue, DELAY_S * S).requests


def test_delayed_request_is_late():
    """A request that its policy put back does not wait for a delay again."""
    settings = _settings(default_policy=WaitPolicy("DELAY", DELAY_S * 1_000_000))
    queue, batcher = PriorityQueue(settings), make_batcher(settings)
    old, new = make_request(), make_request(3)
    queue.add(old, 0)
    queue.expire(DELAY_S * S)
    queue.add(new, DELAY_S * S)
    assert [new, old] == batcher.next_batch(queue, DELAY_S * S).requests


def test_draining_does_not_wait():
    """With ``may_wait=False`` neither delay nor hold keeps a request back."""
    settings = _settings()
    queue, batcher = PriorityQueue(settings), make_batcher(settings, num_to_hold=4)
    queue.add(make_request(3), 0)
    assert ([], None, None) == batcher.next_batch(queue, 0)
    assert 1 == len(batcher.next_batch(queue, 0, may_wait=False).requests)


def test_hold_until_queued():
    """Nothing is formed before the number to hold is reached, and everything is decided by the table afterwards."""
    assert [(3, [1] * 6), (13, [1])] == _run([A((1,) * 4), A((1,) * 3, 3)], num_to_hold=6)
    assert [] == _run([A((2,))], num_to_hold=2)


def test_one_request_at_a_time():
    """A model without dynamic_batching gets one request at a time, in order, and never waits."""
    assert [(0, [1]), (0, [3]), (0, [1])] == _run([A((1, 3, 1))], is_batching=False)


def test_no_batch_dimension():
    """A model without batch dimension that has dynamic_batching is executed one by one too."""
    executions = _run([A((1, 1))], max_batch_size=0, preferred_batch_sizes=())
    assert [(0, [1]), (0, [1])] == executions


@pytest.mark.parametrize(
    ("deadline_s", "expected_s", "send_s"),
    [
        pytest.param(None, 2, 10, id="without a deadline the whole delay"),
        pytest.param(60, 2, 10, id="a far deadline changes nothing"),
        pytest.param(9, 2, 5, id="twice the measured time is left for the execution"),
        pytest.param(9, 0, 4.5, id="half of what is left, where nothing was measured"),
        pytest.param(3, 2, 0, id="not before its arrival"),
    ],
)
def test_deadline_shortens_the_delay(deadline_s, expected_s, send_s):
    """A request that is close to its deadline, and what is in its batch, is not held back for others."""
    settings = _settings()
    queue, batcher = PriorityQueue(settings), make_batcher(settings)
    queue.add(make_request(), 0)
    hurried = make_request(2, deadline_ns=deadline_s and deadline_s * S)
    hurried.expected_ns = expected_s * S
    queue.add(hurried, 0)
    send_ns = int(send_s * S)
    assert send_ns == (batcher.next_batch(queue, 0).wait_until_ns or 0)
    assert 2 == len(batcher.next_batch(queue, send_ns).requests)


BUCKETS = LengthBuckets((16, 32), {"X": 0})
B = {"buckets": BUCKETS, "preferred_batch_sizes": ()}


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        pytest.param([A((1,) * 3, 0, 16), A((1,), 0, 32), A((5,), 1, 16)], [(1, [1, 1, 1, 5]), (10, [1])], id="joins"),
        pytest.param([A((1,), 0, 16), A((8,), 1, 32)], [(1, [8]), (10, [1])], id="a full bucket does not wait"),
        pytest.param([A((1,), 0, 16), A((1,), 1, 32), A((1,), 2, 16)], [(10, [1, 1]), (11, [1])], id="own delays"),
        pytest.param([A((8,), 0, 16), A((8,), 0, 32)], [(0, [8]), (0, [8])], id="the first bucket goes first"),
        pytest.param([A((5, 5, 3), 0, 16)], [(0, [5]), (0, [5, 3])], id="within a bucket nobody is overtaken"),
    ],
)
def test_buckets(arrivals, expected):
    """Requests of one bucket share a batch whatever came between them, and each bucket waits for itself."""
    assert expected == _run(arrivals, **B)


def test_bucket_batches_are_found_among_many():
    """A long queue is not walked to its end."""
    settings = _settings(preferred_batch_sizes=(), max_queue_delay_us=0)
    queue, batcher = PriorityQueue(settings), make_batcher(settings, BUCKETS)
    for number in range(1100):
        queue.add(make_request(key=0 if number in (0, 1023, 1024) else number), 0)
    assert [0, 1023] == [request.sequence for request in batcher.next_batch(queue, 0).requests]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        pytest.param(16, [(0, [1] * 4), (10, [1, 1])], id="64 elements are 4 rows of 16"),
        pytest.param((32, None), [(0, [1, 1]), (0, [1, 1]), (0, [1, 1])], id="or 2 of 32"),
        pytest.param(100, [(0, [1])] * 6, id="or 1 of any length beyond"),
        pytest.param(1, [(10, [1] * 6)], id="but never more than max_batch_size"),
        pytest.param(((3,), (4,)), [(10, [1] * 6)], id="lengths that disagree have no bucket"),
    ],
)
def test_bucket_size_is_limited_by_its_elements(key, expected):
    """Batches of long rows are smaller, so that their size in elements stays within the limit."""
    buckets = LengthBuckets((16, 32), {"X": 0}, max_elements=64)
    assert expected == _run([A((1,) * 6, 0, key)], buckets=buckets, preferred_batch_sizes=())


def test_a_large_request_is_its_own_bucket_batch():
    """A request with more elements than the limit is executed alone."""
    buckets = LengthBuckets((16,), {"X": 0}, max_elements=32)
    arrivals = [A((5, 1), 0, 16)]
    assert [(0, [5]), (10, [1])] == _run(arrivals, buckets=buckets, preferred_batch_sizes=())
