"""Batch formation: the outcomes that authors of a config.pbtxt expect, with the time in the test's hands."""

from dataclasses import dataclass

import pytest

from weft_common.signature import ModelSignature, TensorSpec
from weft_common.tensors import WireTensor
from weft_serving.scheduler.batcher import batch_key, make_batcher, varying_inputs
from weft_serving.scheduler.queue import PriorityQueue
from weft_serving.scheduler.settings import QueuePolicy, SchedulerSettings

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
    key: object = None


def _run(make_request, arrivals, *, num_to_hold=0, **settings):
    """Executions as (seconds, rows of the members), with as many free instances as there are batches."""
    settings = _settings(**settings)
    queue, batcher = PriorityQueue(settings), make_batcher(settings, num_to_hold=num_to_hold)
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
def test_outcomes(make_request, arrivals, expected):
    """max_batch_size 8, preferred [2, 6], delay 10 s: arrivals lead to these executions."""
    assert expected == _run(make_request, arrivals)


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ([A((1,))], [(0, [1])]),
        ([A((3,))], [(0, [3])]),
        ([A((1,) * 5)], [(0, [1] * 2), (0, [1] * 2), (0, [1])]),
        ([A((5, 5))], [(0, [5]), (0, [5])]),
    ],
)
def test_no_delay_never_waits(make_request, arrivals, expected):
    """With a delay of 0 everything queued is sent at once, in the largest preferred prefixes."""
    assert expected == _run(make_request, arrivals, max_queue_delay_us=0)


def test_late_batch_takes_all_that_fits(make_request):
    """Once the oldest waited for the delay, preferred sizes no longer matter."""
    settings = _settings()
    queue, batcher = PriorityQueue(settings), make_batcher(settings)
    for _ in range(9):
        queue.add(make_request(), 0)
    assert 6 == len(batcher.next_batch(queue, 0).requests)
    assert 8 == len(batcher.next_batch(queue, DELAY_S * S).requests)


def test_no_preferred_sizes_means_the_maximum(make_request):
    """Without preferred sizes a batch goes when it is full, or late."""
    executions = _run(make_request, [A((4,)), A((4,), 1), A((5,), 2), A((5,), 3)], preferred_batch_sizes=())
    assert [(1, [4, 4]), (3, [5]), (13, [5])] == executions


def test_batch_mixes_levels(make_request):
    """Level 1 comes first in a batch, and lower levels fill the rest; the delay counts from the oldest of them."""
    settings = _settings(priority_levels=2, default_priority_level=2, preferred_batch_sizes=())
    queue, batcher = PriorityQueue(settings), make_batcher(settings)
    low, high = make_request(2), make_request(2, priority=1)
    queue.add(low, 0)
    queue.add(high, 5 * S)
    assert DELAY_S * S == batcher.next_batch(queue, 5 * S).wait_until_ns
    assert [high, low] == batcher.next_batch(queue, DELAY_S * S).requests


def test_delayed_request_is_late(make_request):
    """A request that its policy put back does not wait for a delay again."""
    settings = _settings(default_policy=QueuePolicy("DELAY", DELAY_S * 1_000_000))
    queue, batcher = PriorityQueue(settings), make_batcher(settings)
    old, new = make_request(), make_request(3)
    queue.add(old, 0)
    queue.expire(DELAY_S * S)
    queue.add(new, DELAY_S * S)
    assert [new, old] == batcher.next_batch(queue, DELAY_S * S).requests


def test_draining_does_not_wait(make_request):
    """With ``may_wait=False`` neither delay nor hold keeps a request back."""
    settings = _settings()
    queue, batcher = PriorityQueue(settings), make_batcher(settings, num_to_hold=4)
    queue.add(make_request(3), 0)
    assert ([], None) == batcher.next_batch(queue, 0)
    assert 1 == len(batcher.next_batch(queue, 0, may_wait=False).requests)


def test_hold_until_queued(make_request):
    """Nothing is formed before the number to hold is reached, and everything is decided by the table afterwards."""
    assert [(3, [1] * 6), (13, [1])] == _run(make_request, [A((1,) * 4), A((1,) * 3, 3)], num_to_hold=6)
    assert [] == _run(make_request, [A((2,))], num_to_hold=2)


def test_one_request_at_a_time(make_request):
    """A model without dynamic_batching gets one request at a time, in order, and never waits."""
    assert [(0, [1]), (0, [3]), (0, [1])] == _run(make_request, [A((1, 3, 1))], is_batching=False)


def test_no_batch_dimension(make_request):
    """A model without batch dimension that has dynamic_batching is executed one by one too."""
    executions = _run(make_request, [A((1, 1))], max_batch_size=0, preferred_batch_sizes=())
    assert [(0, [1]), (0, [1])] == executions


def _signature(max_batch_size=8, *specs):
    return ModelSignature("m", "1", "", max_batch_size, specs, ())


def test_varying_inputs():
    """Only inputs of variable shape, and optional ones, can keep requests apart; none can without batches."""
    specs = TensorSpec("A", "FP32", (2,)), TensorSpec("B", "FP32", (-1, 3)), TensorSpec("C", "FP32", (1,), True)
    assert ("B", "C") == varying_inputs(_signature(8, *specs))
    assert () == varying_inputs(_signature(8, specs[0]))
    assert () == varying_inputs(_signature(0, *specs))


def test_batch_key():
    """Keys are equal for any batch size and order of inputs, and differ by row shape and by the set of inputs."""

    def tensor(*shape):
        return WireTensor("FP32", shape, b"")

    names = ("B", "C")
    key = batch_key({"B": tensor(4, 7, 3), "C": tensor(4, 1)}, names)
    assert key == batch_key({"C": tensor(2, 1), "A": tensor(2, 9), "B": tensor(2, 7, 3)}, names)
    assert key != batch_key({"B": tensor(4, 8, 3), "C": tensor(4, 1)}, names)
    assert key != batch_key({"B": tensor(4, 7, 3)}, names)
