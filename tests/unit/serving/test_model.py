"""A served model: batching, cancellation, timeouts, overload and stop, with a backend that waits at a gate."""

import asyncio
import threading
import time

import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import CannotLoad, Echo, Raises

from weft.base.core import CallContext
from weft.base.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from weft.base.tensors import decode
from weft.serving.backends.base import InstanceContext
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy
from weft.serving.runtime.model import ServedModel

MS = 1_000_000
#: Requests may ask for a shorter queue timeout than that of the model.
SHORTER = WaitPolicy(default_timeout_us=60_000_000, allow_timeout_override=True)


def _value(result):
    return decode(result.outputs["OUT"])[0, 0]


def _start(model, call, *, deadline_ms=None):
    deadline_ns = None if deadline_ms is None else time.monotonic_ns() + deadline_ms * MS
    return asyncio.create_task(model.infer(call, CallContext(deadline_ns=deadline_ns)))


async def _queued(model, *calls, **options):
    """Tasks of calls that have been admitted, in this order."""
    tasks = [_start(model, call, **options) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def _busy(model, gate, call):
    """The task of a call that is executed and waits at the gate."""
    (task,) = await _queued(model, call)
    await gate.entered()
    return task


async def test_answer(serve):
    """A request is answered with its outputs, its id, and the model's name and version."""
    model = await serve(Echo)
    result = await model.infer(make_call(5, rows=2), CallContext())
    assert ("echo", "1", "r5", 5) == (result.model_name, result.model_version, result.request_id, _value(result))


async def test_bad_request_is_refused(serve):
    """A request that does not fit the signature, or has a priority that is no number, is refused and counted."""
    model = await serve(Echo)
    with pytest.raises(InvalidArgumentError, match="batch-size must be <= 8"):
        await model.infer(make_call(rows=9), CallContext())
    with pytest.raises(InvalidArgumentError, match="priority"):
        await model.infer(make_call(priority="high"), CallContext())
    assert {"OTHER": 2} == model.statistics.failures_by_reason


async def test_waiting_requests_share_a_batch(serve, gate):
    """What is queued while the instance is busy is executed as one batch, split again, in the order of arrival."""
    model = await serve(gate.backend, is_batching=True)
    first = await _busy(model, gate, make_call(0))
    rest = await _queued(model, *(make_call(value, rows=2) for value in (1, 2, 3)))
    gate.open()
    results = await asyncio.gather(first, *rest)
    assert [[0], [1, 2, 3]] == gate.batches
    assert [0, 1, 2, 3] == [_value(result) for result in results]
    assert [1, 6, 6, 6] == [decode(result.outputs["COUNT"])[0, 0] for result in results]


async def test_requests_of_one_turn_share_a_batch(serve, gate):
    """Requests that arrive together are one batch even without a delay."""
    model = await serve(gate.backend, is_batching=True)
    gate.open()
    await asyncio.gather(*(model.infer(make_call(value), CallContext()) for value in range(4)))
    assert [[0, 1, 2, 3]] == gate.batches


async def test_without_dynamic_batching_each_runs_alone(serve, gate):
    """A model without dynamic_batching executes one request at a time."""
    model = await serve(gate.backend)
    gate.open()
    await asyncio.gather(*(model.infer(make_call(value), CallContext()) for value in range(3)))
    assert [[0], [1], [2]] == gate.batches


async def test_other_shapes_do_not_mix(serve, gate):
    """Requests of different row shape are not put into one batch."""
    model = await serve(gate.backend, is_batching=True)
    gate.open()
    calls = [make_call(0, columns=2), make_call(1, columns=2), make_call(2, columns=3)]
    await asyncio.gather(*(model.infer(call, CallContext()) for call in calls))
    assert [[0, 1], [2]] == gate.batches


async def test_delay_fills_a_batch(serve, gate):
    """A batch that is not full waits for more, and goes when it is full."""
    model = await serve(gate.backend, is_batching=True, max_queue_delay_us=60_000_000)
    gate.open()
    (first,) = await _queued(model, make_call(1, rows=3))
    (second,) = await _queued(model, make_call(2, rows=5))
    await asyncio.gather(first, second)
    assert [[1, 2]] == gate.batches


async def test_delay_ends(serve):
    """A batch that does not fill up goes after the delay, not before."""
    model = await serve(Echo, is_batching=True, max_queue_delay_us=3000)
    start_ns = time.monotonic_ns()
    await model.infer(make_call(), CallContext())
    assert time.monotonic_ns() - start_ns >= 3 * MS


async def test_hold_until_queued(serve, gate, monkeypatch):
    """With WEFT_DELAY_SCHEDULER nothing runs until so many requests are queued; then nothing is held any more."""
    monkeypatch.setenv("WEFT_DELAY_SCHEDULER", "3")
    model = await serve(gate.backend, is_batching=True)
    gate.open()
    tasks = [(await _queued(model, make_call(value)))[0] for value in range(3)]
    await asyncio.gather(*tasks)
    await model.infer(make_call(9), CallContext())
    assert [[0, 1, 2], [9]] == gate.batches


async def test_cancel_one_of_four_in_the_queue(serve, gate):
    """A request cancelled in the queue is never executed; the three others of its batch are answered."""
    model = await serve(gate.backend, is_batching=True)
    first = await _busy(model, gate, make_call(0))
    tasks = await _queued(model, *(make_call(value) for value in (1, 2, 3, 4)))
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert 3 == model.statistics.pending_count
    gate.open()
    results = await asyncio.gather(first, tasks[0], tasks[2], tasks[3])
    assert [0, 1, 3, 4] == [_value(result) for result in results]
    assert [[0], [1, 3, 4]] == gate.batches


async def test_cancel_one_of_four_that_run(serve, gate):
    """A request cancelled while its batch runs is flagged for the backend; the three others are answered."""
    model = await serve(gate.backend, is_batching=True)
    tasks = await _queued(model, *(make_call(value) for value in (1, 2, 3, 4)))
    await gate.entered()
    (members,) = model._running.values()
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert [False, True, False, False] == [request.is_cancelled for request in members]
    gate.open()
    assert [1, 3, 4] == [_value(result) for result in await asyncio.gather(tasks[0], tasks[2], tasks[3])]
    assert (3, {"CANCELED": 1}) == (model.statistics.success.count, model.statistics.failures_by_reason)


async def test_cancel_after_the_answer_counts_once(serve, monkeypatch):
    """A cancel in the turn of the loop in which the answer came is not counted a second time."""
    model = await serve(Echo)
    task = _start(model, make_call())
    count = model.recorder.succeeded
    monkeypatch.setattr(model.recorder, "succeeded", lambda *args: (count(*args), task.cancel()))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (1, 0) == (model.statistics.success.count, model.statistics.fail.count)


async def test_queue_timeout_while_busy(serve, gate):
    """A queued request times out while the only instance is busy, and is never executed."""
    model = await serve(gate.backend, is_batching=True, default_policy=SHORTER)
    first = await _busy(model, gate, make_call(1))
    with pytest.raises(DeadlineExceededError, match=r"^Request timeout expired$"):
        await model.infer(make_call(2, timeout=5000), CallContext())
    gate.open()
    await first
    assert ([[1]], {"REJECTED": 1}) == (gate.batches, model.statistics.failures_by_reason)


async def test_deadline_while_busy(serve, gate):
    """A request's own deadline takes effect while the only instance is busy, and costs the others nothing."""
    model = await serve(gate.backend, is_batching=True)
    first = await _busy(model, gate, make_call(1))
    (late,) = await _queued(model, make_call(2), deadline_ms=5)
    (other,) = await _queued(model, make_call(3), deadline_ms=60_000)
    with pytest.raises(DeadlineExceededError, match="deadline passed before execution"):
        await late
    gate.open()
    assert [1, 3] == [_value(result) for result in await asyncio.gather(first, other)]
    assert [[1], [3]] == gate.batches


async def test_deadlines_while_a_batch_is_held(serve, monkeypatch):
    """Requests that nothing executes expire one after another, each at its own deadline."""
    monkeypatch.setenv("WEFT_DELAY_SCHEDULER", "3")
    model = await serve(Echo, is_batching=True)
    tasks = await _queued(model, make_call(1), deadline_ms=5) + await _queued(model, make_call(2), deadline_ms=10)
    errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert [DeadlineExceededError] * 2 == [type(error) for error in errors]


async def test_delayed_request_is_executed_last(serve, gate, monkeypatch):
    """With DELAY a request that waited too long runs after one that came later, and is answered."""
    policy = WaitPolicy("DELAY", default_timeout_us=60_000_000, allow_timeout_override=True)
    model = await serve(gate.backend, is_batching=True, preferred_batch_sizes=(1,), default_policy=policy)
    first = await _busy(model, gate, make_call(0))
    expire, is_expired = model.queue.expire, asyncio.Event()
    monkeypatch.setattr(model.queue, "expire", lambda now_ns: (expire(now_ns), is_expired.set())[0])
    (late,) = await _queued(model, make_call(1, timeout=1))
    await asyncio.wait_for(is_expired.wait(), 5)
    (other,) = await _queued(model, make_call(2))
    gate.open()
    await asyncio.gather(first, late, other)
    assert [[0], [2], [1]] == gate.batches


async def test_full_queue_refuses_at_once(serve, gate):
    """Over max_queue_size a request is refused with a hint, while the ones before it are answered."""
    model = await serve(gate.backend, is_batching=True, default_policy=WaitPolicy(max_queue_size=2))
    first = await _busy(model, gate, make_call(0))
    rest = await _queued(model, make_call(1), make_call(2))
    with pytest.raises(ResourceExhaustedError, match="Exceeds maximum queue size") as raised:
        await model.infer(make_call(3), CallContext())
    assert raised.value.retry_after_ms > 0
    gate.open()
    assert [0, 1, 2] == [_value(result) for result in await asyncio.gather(first, *rest)]
    assert {"REJECTED": 1} == model.statistics.failures_by_reason


async def test_retry_hint_follows_the_model(serve, gate):
    """The hint of a full queue is the measured time of a request, for each that waits, shared by the instances."""
    model = await serve(gate.backend, default_policy=WaitPolicy(max_queue_size=3))
    gate.open(1)
    await model.infer(make_call(0), CallContext())
    await gate.entered()
    statistics = model.statistics
    parts = (statistics.compute_input, statistics.compute_infer, statistics.compute_output)
    assert sum(part.total_ns for part in parts) == model.retry_after._request_ns
    model.retry_after._request_ns = 50.0 * MS
    running = await _busy(model, gate, make_call(1))
    rest = await _queued(model, make_call(2), make_call(3), make_call(4))
    with pytest.raises(ResourceExhaustedError) as raised:
        await model.infer(make_call(5), CallContext())
    assert 150 == raised.value.retry_after_ms
    gate.open()
    await asyncio.gather(running, *rest)


async def test_free_instance_is_not_a_full_queue(serve, gate):
    """Requests that a free instance is about to take do not fill the queue for those that come with them."""
    model = await serve(
        gate.backend,
        num_instances=2,
        is_batching=True,
        preferred_batch_sizes=(1,),
        default_policy=WaitPolicy(max_queue_size=1),
    )
    gate.open()
    results = await asyncio.gather(*(model.infer(make_call(value), CallContext()) for value in range(2)))
    assert [0, 1] == [_value(result) for result in results]


async def test_priorities(serve, gate):
    """Level 1 is executed before level 2, whatever came first."""
    model = await serve(
        gate.backend, is_batching=True, preferred_batch_sizes=(1,), priority_levels=2, default_priority_level=2
    )
    first = await _busy(model, gate, make_call(0))
    rest = await _queued(model, make_call(1), make_call(2, priority=2), make_call(3, priority=1))
    gate.open()
    await asyncio.gather(first, *rest)
    assert [[0], [3], [1], [2]] == gate.batches


async def test_two_instances_run_at_once(serve):
    """Two instances execute at the same time, each on its own thread."""
    barrier = threading.Barrier(2, timeout=10)

    class Meets(Echo):
        def execute(self, batch):
            barrier.wait()
            return super().execute(batch)

    model = await serve(Meets, num_instances=2)
    results = await asyncio.gather(*(model.infer(make_call(value), CallContext()) for value in range(4)))
    assert [0, 1, 2, 3] == [_value(result) for result in results]


async def test_failure_leaves_nobody_waiting(serve):
    """When a model raises, every member of the batch is answered, and the next request too."""
    model = await serve(Raises, is_batching=True)
    calls = [model.infer(make_call(value), CallContext()) for value in range(3)]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [InternalError] * 3 == [type(error) for error in errors]
    with pytest.raises(InternalError):
        await model.infer(make_call(), CallContext())
    assert {"BACKEND": 4} == model.statistics.failures_by_reason


async def test_load_failure(model_context, gate):
    """A model of which one instance cannot load does not start; it says why and closes the others."""
    places = [InstanceContext("echo_0"), InstanceContext("echo_1")]

    class SecondFails(gate.backend):  # type: ignore[name-defined]
        def load(self):
            if self.instance.name == "echo_1":
                CannotLoad.load(self)

    model = ServedModel(model_context, SecondFails, SchedulerSettings(8), places)
    with pytest.raises(InternalError, match=r"instance echo_1: OSError: weights.bin is not there"):
        await model.start()
    assert 1 == gate.closed
    with pytest.raises(UnavailableError, match="is not at ready state"):
        await model.infer(make_call(), CallContext())


async def test_not_started(model_context):
    """A model that was never started refuses requests and can be stopped."""
    model = ServedModel(model_context, Echo, SchedulerSettings(8), [InstanceContext("echo_0")])
    with pytest.raises(UnavailableError, match="is not at ready state"):
        await model.infer(make_call(), CallContext())
    await model.stop(grace_s=0)


def test_bad_settings(model_context):
    """Settings that cannot be served are refused before anything is loaded."""
    settings = SchedulerSettings(8, is_batching=True, preferred_batch_sizes=(9,))
    with pytest.raises(InvalidArgumentError, match="got 9"):
        ServedModel(model_context, Echo, settings, [InstanceContext("echo_0")])
