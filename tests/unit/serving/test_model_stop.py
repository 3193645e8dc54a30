"""Stopping a served model: who is still answered, who is refused, and what becomes of a model that hangs."""

import asyncio

import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo

from weft.base.core import CallContext
from weft.base.errors import UnavailableError
from weft.base.tensors import decode


def _start(model, call):
    return asyncio.create_task(model.infer(call, CallContext()))


async def test_stop_drains(serve, gate):
    """Running and queued requests are answered, new ones refused, and the backend is closed afterwards."""
    model = await serve(gate.backend, is_batching=True)
    first = _start(model, make_call(0))
    await gate.entered()
    rest = [_start(model, make_call(value)) for value in (1, 2)]
    await asyncio.sleep(0)
    stopping = asyncio.create_task(model.stop(grace_s=10))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="is not at ready state"):
        await model.infer(make_call(3), CallContext())
    assert 0 == gate.closed
    gate.open()
    results = await asyncio.gather(first, *rest)
    await stopping
    assert [0, 1, 2] == [decode(result.outputs["OUT"])[0, 0] for result in results]
    assert 1 == gate.closed


async def test_stop_does_not_wait_for_a_batch_to_fill(serve):
    """A request that waits for others is executed at once when the model is stopped."""
    model = await serve(Echo, is_batching=True, max_queue_delay_us=60_000_000)
    task = _start(model, make_call(7))
    await asyncio.sleep(0)
    await asyncio.wait_for(model.stop(grace_s=10), 5)
    assert 7 == decode((await task).outputs["OUT"])[0, 0]


async def test_grace_ends(serve, gate, caplog):
    """After the grace, whoever still waits is refused; a model that hangs is told to give up, and closed if it does."""
    model = await serve(gate.backend, is_batching=True)
    running = _start(model, make_call(0))
    await gate.entered()
    (members,) = model._running.values()
    queued = _start(model, make_call(1))
    await asyncio.sleep(0)
    await asyncio.wait_for(model.stop(grace_s=0.01), 5)
    errors = await asyncio.gather(running, queued, return_exceptions=True)
    assert [UnavailableError, UnavailableError] == [type(error) for error in errors]
    assert members[0].is_cancelled
    assert "instance echo_0 still runs" in caplog.text
    assert ([[0]], 0, 2) == (gate.batches, model.statistics.pending_count, model.statistics.fail.count)
    gate.open()
    await asyncio.wait_for(model._instances[0]._closed, 5)
    assert 1 == gate.closed


async def test_stop_twice(serve):
    """A model that is stopped can be stopped again."""
    model = await serve(Echo)
    await model.stop(grace_s=1)
    await asyncio.wait_for(model.stop(grace_s=1), 5)


async def test_cancelled_requests_do_not_hold_up_a_stop(serve, gate):
    """When the last waiting request is cancelled, the stop goes on."""
    model = await serve(gate.backend, is_batching=True)
    running = _start(model, make_call(0))
    await gate.entered()
    queued = _start(model, make_call(1))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(model.stop(grace_s=60))
    await asyncio.sleep(0)
    queued.cancel()
    gate.open()
    await asyncio.wait_for(stopping, 5)
    assert (0, 1) == (decode((await running).outputs["OUT"])[0, 0], gate.closed)
