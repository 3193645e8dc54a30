"""Requests above max_batch_size that are executed in parts."""

import asyncio
import gc
import time

import numpy as np
import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo, Poisoned

from weft.base.core import CallContext, InferCall
from weft.base.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from weft.base.tensors import decode, encode
from weft.serving.queues.settings import WaitPolicy
from weft.serving.request.request import MAX_PARTS, SplitRequest

MS = 1_000_000


def _numbers(rows):
    """A call whose row i has the number i."""
    return InferCall("echo", request_id="r", inputs={"IN": encode(np.arange(rows, dtype=np.float32).reshape(rows, 1))})


async def _queued(model, call, context=None):
    task = asyncio.create_task(model.infer(call, context or CallContext()))
    await asyncio.sleep(0)
    return task


async def test_rows_come_back_in_order(serve):
    """20 rows are executed as 8, 8 and 4, and answered as 20 in their order, with the request's id."""
    model = await serve(Echo, is_batching=True, can_split=True)
    result = await model.infer(_numbers(20), CallContext())
    assert list(range(20)) == decode(result.outputs["OUT"]).ravel().tolist()
    assert [8] * 16 + [4] * 4 == decode(result.outputs["COUNT"]).ravel().tolist()
    assert "r" == result.request_id


async def test_parts_share_batches(serve, gate):
    """The rest of a large request is executed together with other requests."""
    model = await serve(gate.backend, is_batching=True, can_split=True)
    first = await _queued(model, make_call(9))
    await gate.entered()
    tasks = [await _queued(model, make_call(value, rows=10)) for value in (1, 2)]
    gate.open()
    await asyncio.gather(first, *tasks)
    assert [[9], [1], [1], [2], [2]] == gate.batches
    tasks = [
        asyncio.create_task(model.infer(make_call(value, rows=rows), CallContext()))
        for value, rows in ((3, 10), (4, 6))
    ]
    await asyncio.gather(*tasks)
    assert [[3], [3, 4]] == gate.batches[5:]


async def test_counted_once(serve):
    """A request that was split is one request of its rows; its executions are counted each."""
    model = await serve(
        Echo, is_batching=True, can_split=True, num_instances=2, priority_levels=2, default_priority_level=2
    )
    await model.infer(make_call(rows=20), CallContext())
    statistics = model.statistics
    assert ([2], True) == (list(statistics.request_latency), 0 < statistics.success.total_ns < 60_000 * MS)
    assert (1, 20, 3) == (statistics.success.count, statistics.inference_count, statistics.execution_count)
    assert (1, 1) == (statistics.queue.count, statistics.compute_infer.count)
    parts = (statistics.queue, statistics.compute_input, statistics.compute_infer, statistics.compute_output)
    assert sum(part.total_ns for part in parts) <= statistics.success.total_ns
    assert (0, {2: 0}) == (statistics.pending_count, statistics.count_pending_by_level())


async def test_without_the_parameter_it_is_refused(serve):
    """By default a request above max_batch_size is INVALID_ARGUMENT; with it, only wrong shapes are."""
    model = await serve(Echo, is_batching=True)
    with pytest.raises(InvalidArgumentError, match="batch-size must be <= 8"):
        await model.infer(make_call(rows=9), CallContext())
    model = await serve(Echo, is_batching=True, can_split=True)
    with pytest.raises(InvalidArgumentError, match=r"request batch-size must be <= 8192 .* got 8193"):
        await model.infer(make_call(rows=8 * MAX_PARTS + 1), CallContext())


async def test_one_part_fails(serve):
    """The request fails once, with the rows that failed; what others put into the same batches is answered."""
    model = await serve(Poisoned, is_batching=True, can_split=True)
    Poisoned.is_repeatable = True
    large, other = (asyncio.create_task(model.infer(call, CallContext())) for call in (_numbers(20), make_call(2)))
    with pytest.raises(InternalError, match=r"^rows 8 to 15 of 20: .*error id"):
        await large
    assert 2 == decode((await other).outputs["OUT"])[0, 0]
    assert (1, {"BACKEND": 1}) == (model.statistics.success.count, model.statistics.failures_by_reason)


async def test_failure_stops_the_other_parts(serve, gate):
    """After the first part failed the waiting ones are not executed."""

    class Fails(gate.backend):  # type: ignore[name-defined]
        is_repeatable = False

        def run(self, inputs, num_rows):
            raise InvalidArgumentError("no")

    model = await serve(Fails, can_split=True)
    task = await _queued(model, make_call(1, rows=30))
    gate.open()
    with pytest.raises(InvalidArgumentError, match=r"^rows 0 to 7 of 30: no"):
        await task
    await model.stop(grace_s=5)
    assert 2 >= len(gate.batches)
    assert {"OTHER": 1} == model.statistics.failures_by_reason


async def test_cancel(serve, gate):
    """A cancelled request takes all its parts out of the queue, flags the one that runs, and counts once."""
    model = await serve(gate.backend, is_batching=True, can_split=True)
    task = await _queued(model, make_call(1, rows=30))
    await gate.entered()
    (running,) = model._running.values()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ([True], 0) == ([request.is_cancelled for request in running], model.statistics.pending_count)
    gate.open()
    await model.infer(make_call(2), CallContext())
    assert [[1], [2]] == gate.batches
    assert (1, {"CANCELED": 1}) == (model.statistics.success.count, model.statistics.failures_by_reason)


async def test_deadline(serve, gate):
    """A request of which parts still wait at its deadline fails then, once, and none of them is executed later."""
    model = await serve(gate.backend, is_batching=True, can_split=True)
    context = CallContext(deadline_ns=time.monotonic_ns() + 30 * MS)
    task = await _queued(model, make_call(1, rows=30), context)
    await gate.entered()
    with pytest.raises(DeadlineExceededError, match=r"^rows 8 to 15 of 30: deadline passed before execution"):
        await task
    gate.open()
    await model.infer(make_call(2), CallContext())
    assert ([[1], [2]], {"REJECTED": 1}) == (gate.batches, model.statistics.failures_by_reason)


@pytest.mark.parametrize(
    ("rows", "expected"), [(24, "3 requests of at most 8 rows, 2 may wait"), (16, "2 requests wait already")]
)
async def test_full_queue_takes_all_parts_or_none(serve, gate, rows, expected):
    """Where the queue has no room for every part, none waits; a hint is given where that may change."""
    policy = WaitPolicy(max_queue_size=2)
    model = await serve(gate.backend, is_batching=True, can_split=True, default_policy=policy)
    first = await _queued(model, make_call(1))
    await gate.entered()
    waiting = await _queued(model, make_call(2))
    with pytest.raises(ResourceExhaustedError, match=expected) as raised:
        await model.infer(make_call(3, rows=rows), CallContext())
    assert (rows == 16) == bool(raised.value.retry_after_ms)
    assert {0: 1} == model.statistics.count_pending_by_level()
    gate.open()
    await asyncio.gather(first, waiting)
    await model.infer(make_call(4), CallContext())
    assert ([[1], [2], [4]], {"REJECTED": 1}) == (gate.batches, model.statistics.failures_by_reason)


async def test_stop_fails_it_once(serve, gate):
    """A request whose parts are not done when the grace ends fails once."""
    model = await serve(gate.backend, is_batching=True, can_split=True)
    task = await _queued(model, make_call(1, rows=30))
    await gate.entered()
    gate_opens = asyncio.get_running_loop().call_later(0.05, gate.open)
    await model.stop(grace_s=0.01)
    with pytest.raises(UnavailableError):
        await task
    assert {"BACKEND": 1} == model.statistics.failures_by_reason
    gate_opens.cancel()


async def test_order_is_kept(serve, gate):
    """With preserve_ordering a small request behind a large one is answered after it."""
    model = await serve(
        gate.backend,
        is_batching=True,
        can_split=True,
        num_instances=2,
        preserve_ordering=True,
        preferred_batch_sizes=(1,),
    )
    answered = []
    tasks = [await _queued(model, make_call(value, rows=rows)) for value, rows in ((1, 12), (2, 1))]
    for number, task in enumerate(tasks):
        task.add_done_callback(lambda _, number=number: answered.append(number))
    gate.open()
    await asyncio.gather(*tasks)
    assert [0, 1] == answered


async def test_failed_request_holds_up_no_order(serve, gate):
    """With preserve_ordering the parts of a cancelled request hold up nobody."""
    model = await serve(gate.backend, is_batching=True, can_split=True, preserve_ordering=True)
    large, small = [await _queued(model, make_call(value, rows=rows)) for value, rows in ((1, 30), (2, 1))]
    await gate.entered()
    large.cancel()
    gate.open()
    assert 2 == decode((await asyncio.wait_for(small, 5)).outputs["OUT"])[0, 0]


async def test_nothing_is_kept(serve):
    """Without the help of the garbage collector nothing of a split request is in memory once it is answered."""
    model = await serve(Echo, is_batching=True, can_split=True)
    gc.collect()
    gc.disable()
    try:
        await model.infer(_numbers(20), CallContext())
        await model.infer(_numbers(1), CallContext())  # the instance thread has let go of the last part
        assert [] == [found for found in gc.get_objects() if type(found) is SplitRequest]
    finally:
        gc.enable()
