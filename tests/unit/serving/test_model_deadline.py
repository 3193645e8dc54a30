"""A served model that knows how long it takes."""

import asyncio
import sys
import time
from dataclasses import replace

import pytest
import uvloop
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo, Raises

from weft.base.core import CallContext
from weft.base.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from weft.base.signature import ModelSignature
from weft.base.tensors import decode
from weft.serving.runtime.dispatcher import Alarm
from weft.serving.scheduler.admission import MIN_MEASUREMENTS

MS = 1_000_000


def _within(milliseconds):
    return CallContext(deadline_ns=time.monotonic_ns() + int(milliseconds * MS))


@pytest.fixture
def slow():
    """A backend that takes 20 ms and counts its executions."""

    class Slow(Echo):
        num_executed = 0

        def execute(self, batch):
            time.sleep(0.02)
            type(self).num_executed += 1
            return super().execute(batch)

    return Slow


async def _measured(serve, backend, **settings):
    model = await serve(backend, is_batching=True, **settings)
    for _ in range(MIN_MEASUREMENTS):
        await model.infer(make_call(), CallContext())
    return model


async def test_refused_at_the_door(serve, slow):
    """What cannot finish in time by the measured median is refused at once, counted as REJECTED, and never executed."""
    model = await _measured(serve, slow)
    context = _within(10)
    with pytest.raises(DeadlineExceededError, match=r"^cannot finish inside its deadline: "):
        await model.infer(make_call(), context)
    assert time.monotonic_ns() < context.deadline_ns
    await model.infer(make_call(), _within(10_000))
    assert (MIN_MEASUREMENTS + 1, {"REJECTED": 1}) == (slow.num_executed, model.statistics.failures_by_reason)


async def test_not_refused_before_it_is_measured(serve, slow):
    """The first requests are executed, however short their deadline is."""
    model = await serve(slow, is_batching=True)
    await model.infer(make_call(), _within(10))
    assert 1 == slow.num_executed


async def test_failures_are_no_measurements(serve):
    """Executions that answered nobody do not count as fast ones."""
    model = await serve(Raises)
    outcomes = [model.infer(make_call(), CallContext()) for _ in range(MIN_MEASUREMENTS)]
    await asyncio.gather(*outcomes, return_exceptions=True)
    assert 0 == model.times.median_ns(1, time.monotonic_ns())


async def test_delay_ends_before_the_deadline(serve):
    """A batch that would wait for a minute goes while its member can still be answered in time."""
    model = await serve(Echo, is_batching=True, max_queue_delay_us=60_000_000)
    context = _within(500)
    await model.infer(make_call(), context)
    assert time.monotonic_ns() < context.deadline_ns


@pytest.fixture
def signature(signature: ModelSignature, request: pytest.FixtureRequest) -> ModelSignature:
    """That of the model of ``serve``; with ``TAKING`` it takes batches of no rows."""
    return replace(signature, allows_empty_batch=getattr(request, "param", False))


TAKING = pytest.mark.parametrize("signature", [True], indirect=True)


async def test_a_model_that_does_not_say_so_refuses_them(serve):
    """With the shape that came, those that are allowed, and the cure."""
    model = await serve(Echo)
    text = r"got \[0,2\].*batch size, 1 to 8\. A model takes .* its configuration has the parameter 'allow_empty_batch'"
    with pytest.raises(InvalidArgumentError, match=text):
        await model.infer(make_call(rows=0), CallContext())


@TAKING
async def test_a_model_that_takes_them_answers_with_no_rows(serve):
    """The backend runs, and its outputs have no rows and their declared dims."""
    model = await serve(Echo)
    result = await model.infer(make_call(rows=0), CallContext())
    assert {"OUT": (0, 2), "COUNT": (0, 1)} == {name: one.shape for name, one in result.outputs.items()}


@TAKING
async def test_they_share_batches_with_others(serve, gate):
    """A request of no rows between two others changes nothing for these."""
    gate.open()
    model = await serve(Echo, preferred_batch_sizes=(8,), max_queue_delay_us=20_000)
    results = await asyncio.gather(
        *(model.infer(make_call(value, rows), CallContext()) for value, rows in ((1, 2), (0, 0), (3, 1)))
    )
    assert [[1, 1], [], [3]] == [decode(result.outputs["OUT"])[:, 0].tolist() for result in results]


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


def _run(new_loop, main):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request):
    """Maker of an event loop of each kind."""
    return request.param


@pytest.fixture(params=["timerfd", "call_later"])
def _kind(request, monkeypatch):
    """Runs a test with each kind of timer."""
    if request.param == "call_later":
        monkeypatch.setattr(sys, "platform", "other")
    elif sys.platform != "linux":
        pytest.skip("timerfd is Linux's")


@pytest.mark.usefixtures("_kind")
def test_rings_at_the_earliest_time(new_loop):
    """Of several times the earliest counts; after it rang it can be set again, also to a time that has passed."""

    async def main():
        rings = asyncio.Queue()
        alarm = Alarm(asyncio.get_running_loop(), lambda: rings.put_nowait(time.monotonic_ns()))
        now_ns = time.monotonic_ns()
        for at_ms in (10_000, 5, 7_000):
            alarm.set(now_ns + at_ms * MS, now_ns)
        assert await asyncio.wait_for(rings.get(), 5) - now_ns >= 4 * MS
        for at_ms in (12, 0):
            alarm.set(now_ns + at_ms * MS, time.monotonic_ns())
            await asyncio.wait_for(rings.get(), 5)
        assert rings.empty()
        alarm.close()

    _run(new_loop, main)


@pytest.mark.usefixtures("_kind")
def test_closed_alarm_is_silent(new_loop):
    """A closed alarm does not ring, and can be closed again."""

    async def main():
        loop = asyncio.get_running_loop()
        rings, later = [], asyncio.Event()
        alarm = Alarm(loop, lambda: rings.append(1))
        now_ns = time.monotonic_ns()
        alarm.set(now_ns + 2 * MS, now_ns)
        alarm.close()
        alarm.close()
        loop.call_later(0.01, later.set)
        await later.wait()
        assert [] == rings

    _run(new_loop, main)
