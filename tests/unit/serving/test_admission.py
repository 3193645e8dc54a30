"""Deadlines held against measured executions, with the time in the test's hands."""

import asyncio
import threading

import pytest
from tests.unit.serving.builders import make_request
from tests.unit.serving.fake_backends import Echo

from weft.base.core import CallContext, InferCall
from weft.base.errors import DeadlineExceededError, InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, bytes_tensor, split_bytes
from weft.base.validation import validate
from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.runtime import model as intake
from weft.serving.scheduler.admission import MAX_AGE_NS, MIN_MEASUREMENTS, ExecutionTimes

MS = 1_000_000
NOW_NS = 1000 * MS


def _measured(*, num_instances=1, full_ms=0, single_ms=10, **settings):
    """Queue and admission of a model whose executions took so long lately."""
    scheduling = SchedulerSettings(**{"max_batch_size": 8, "is_batching": True, **settings})
    times = ExecutionTimes(scheduling, num_instances)
    for _ in range(MIN_MEASUREMENTS):
        times.add(1, single_ms * MS, NOW_NS)
        if full_ms:
            times.add(8, full_ms * MS, NOW_NS)
    return PriorityQueue(scheduling), times


def _is_admitted(queue, admission, request, now_ns=NOW_NS):
    try:
        admission.check(request, queue, now_ns)
    except DeadlineExceededError:
        return False
    return True


def test_median_needs_measurements():
    """Nothing is known before enough executions of about that size were measured; sizes are not mixed."""
    times = ExecutionTimes(SchedulerSettings(8))
    for number in range(MIN_MEASUREMENTS):
        assert 0 == times.median_ns(4, 0)
        times.add(3 + number % 2, 100 + number, 0)
    assert 108 == times.median_ns(3, 0) == times.median_ns(4, 0)
    assert [0, 0] == [times.median_ns(rows, 0) for rows in (2, 5)]


def test_median_forgets():
    """Measurements that are old, or followed by many others, no longer count."""
    times = ExecutionTimes(SchedulerSettings(8))
    for _ in range(MIN_MEASUREMENTS):
        times.add(1, 900, 5)
    assert (900, 0) == (times.median_ns(1, 5 + MAX_AGE_NS), times.median_ns(1, 6 + MAX_AGE_NS))
    for number in range(1000):
        times.add(1, 1000 - number, MAX_AGE_NS)
    assert 1000 - 967 == times.median_ns(1, MAX_AGE_NS)


@pytest.mark.parametrize(
    ("left_ms", "expected"), [(None, True), (30, True), (10, True), (9, False), (0, True), (-1, True)]
)
def test_a_deadline_must_leave_time_to_execute(left_ms, expected):
    """A request is refused where less than the median is left; deadlines that passed are the queue's affair."""
    deadline_ns = None if left_ms is None else NOW_NS + left_ms * MS
    request = make_request(deadline_ns=deadline_ns)
    assert expected == _is_admitted(*_measured(), request)  # type: ignore[call-arg]
    assert (10 * MS if (left_ms or 0) > 0 else 0) == request.expected_ns


def test_refusal_says_why():
    """The text has what is left, what it takes, and what waits before it."""
    queue, admission = _measured(full_ms=40)
    for _ in range(2):
        queue.add(make_request(8), NOW_NS)
    with pytest.raises(
        DeadlineExceededError,
        match=r"^cannot finish inside its deadline: 85\.5 ms are left, and by the median of the latest executions it "
        r"takes 90\.0 ms, of which 80\.0 ms go to the 16 rows that wait before it; allow more time",
    ):
        admission.check(make_request(deadline_ns=NOW_NS + 85_500_000), queue, NOW_NS)


@pytest.mark.parametrize(
    ("full_ms", "num_instances", "num_waiting", "level", "least_ms"),
    [
        pytest.param(0, 1, 5, 2, 10, id="what waits does not count where full batches were never measured"),
        pytest.param(40, 1, 1, 2, 50, id="a full batch goes before"),
        pytest.param(40, 1, 3, 2, 130, id="several do"),
        pytest.param(40, 2, 3, 2, 50, id="two instances share them, the third is rounded down"),
        pytest.param(40, 1, 3, 1, 10, id="a better level passes them"),
    ],
)
def test_waiting_requests_count(full_ms, num_instances, num_waiting, level, least_ms):
    """The full batches of its level and of better ones that are executed before a request take their time."""
    queue, admission = _measured(
        full_ms=full_ms, num_instances=num_instances, priority_levels=2, default_priority_level=2
    )
    for _ in range(num_waiting):
        queue.add(make_request(8), NOW_NS)
    outcomes = [
        _is_admitted(queue, admission, make_request(priority=level, deadline_ns=NOW_NS + ms * MS))
        for ms in (least_ms - 1, least_ms)
    ]
    assert [False, True] == outcomes


def test_own_batch_grows():
    """A request that joins those that wait takes as long as a batch of that size does."""
    queue, admission = _measured(full_ms=40)
    queue.add(make_request(7), NOW_NS)
    request = make_request(deadline_ns=NOW_NS + 39 * MS)
    assert not _is_admitted(queue, admission, request)


def test_a_model_that_became_faster_is_found_out():
    """A refusal does not last: without executions its reason is forgotten."""
    queue, admission = _measured()
    late_ns = NOW_NS + MAX_AGE_NS + 1
    assert not _is_admitted(queue, admission, make_request(deadline_ns=NOW_NS + MS))
    assert _is_admitted(queue, admission, make_request(deadline_ns=late_ns + MS), late_ns)


MANY = 20_000


@pytest.fixture
def signature():
    """IN BYTES [-1] and NUMBERS FP32 [-1, -1], both optional, to OUT BYTES [-1] and COUNT INT32 [1]."""
    return ModelSignature(
        "echo",
        "1",
        "test",
        8,
        (TensorSpec("IN", "BYTES", (-1,), is_optional=True), TensorSpec("NUMBERS", "FP32", (-1, -1), is_optional=True)),
        (TensorSpec("OUT", "BYTES", (-1,)), TensorSpec("COUNT", "INT32", (1,))),
    )


@pytest.fixture
def checked_on(monkeypatch):
    """Names of the threads on which requests are checked."""
    names = []

    def watched(call, signature, **options):
        names.append(threading.current_thread().name)
        return validate(call, signature, **options)

    monkeypatch.setattr(intake, "validate", watched)
    return names


def _call(count, **tensors):
    return InferCall("echo", inputs={"IN": bytes_tensor([b"a"] * count, (1, count)), **tensors})


async def test_many_strings_are_checked_on_a_thread(serve, checked_on):
    """The event loop checks a few strings itself, and leaves many to a thread; both are answered."""
    model = await serve(Echo)
    for count in (1, MANY):
        result = await model.infer(_call(count), CallContext())
        assert count == len(split_bytes(result.outputs["OUT"].data))
    assert [True, False] == [name == threading.current_thread().name for name in checked_on]


async def test_many_strings_may_be_wrong(serve):
    """A request that is refused on the thread counts as one that is refused on the event loop."""
    model = await serve(Echo)
    call = InferCall("echo", inputs={"IN": bytes_tensor([b"a"] * (MANY - 1), (1, MANY))})
    with pytest.raises(InvalidArgumentError, match=f"expected {MANY} string elements .* got {MANY - 1}$"):
        await model.infer(call, CallContext())
    assert {"OTHER": 1} == model.statistics.failures_by_reason


async def test_a_request_cancelled_while_it_is_checked_counts(serve, monkeypatch):
    """Whoever leaves before the queue is counted too, once, and nothing is executed."""
    has_begun, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(intake, "validate", lambda *_, **__: (has_begun.set(), may_end.wait(10), 1)[2])
    model = await serve(Echo)
    task = asyncio.create_task(model.infer(_call(MANY), CallContext()))
    assert await asyncio.to_thread(has_begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    assert ({"CANCELED": 1}, 0) == (model.statistics.failures_by_reason, model.statistics.execution_count)


async def test_surplus_strings_are_not_counted(serve):
    """Strings that the shape does not announce are not looked at, so that a small shape is a small check."""
    model = await serve(Echo)
    call = InferCall("echo", inputs={"IN": bytes_tensor([b"a"] * 5, (1, 1))})
    with pytest.raises(InvalidArgumentError, match=r"expected 1 string elements .* got 2 or more"):
        await model.infer(call, CallContext())


async def test_an_empty_tensor_of_impossible_shape_is_refused(serve):
    """Beside a dimension of 0, one that no array can have is the client's fault, not the model's."""
    model = await serve(Echo)
    call = _call(1, NUMBERS=WireTensor("FP32", (1, 0, 2**62), b""))
    with pytest.raises(InvalidArgumentError, match=r"shape \[1,0,4611686018427387904\] of 'NUMBERS' is too large"):
        await model.infer(call, CallContext())
