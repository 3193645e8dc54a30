"""``preserve_ordering``: answers leave in the order of arrival, across instances."""

import asyncio
import threading

import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo

from weft.base.core import CallContext
from weft.serving.runtime.answers import ReorderBuffer


def test_held_until_its_turn():
    """What is ready early is held until everything before it has left."""
    buffer = ReorderBuffer()
    for key in "abc":
        buffer.expect(key)
    assert [] == buffer.release("b", 2)
    assert [("a", 1), ("b", 2)] == buffer.release("a", 1)
    assert [("c", 3)] == buffer.release("c", 3)
    assert 0 == len(buffer)


def test_withdrawn_holds_nothing_up():
    """What is withdrawn lets those behind it leave, and is dropped if it becomes ready later."""
    buffer = ReorderBuffer()
    for key in "ab":
        buffer.expect(key)
    buffer.release("b", 2)
    assert [("b", 2)] == buffer.withdraw("a")
    assert [] == buffer.withdraw("a")
    assert [] == buffer.release("a", 1)
    assert 0 == len(buffer)


@pytest.fixture
def turns():
    """Events by request value: the execution of a request waits for its event; ``turns.done`` says who has run."""

    class Turns(dict):
        def __missing__(self, value):
            return self.setdefault(value, threading.Event())

    turns = Turns()

    class Waits(Echo):
        def execute(self, batch):
            assert turns[float(batch.requests[0].array("IN")[0, 0])].wait(10)
            return super().execute(batch)

    turns.backend = Waits  # type: ignore[attr-defined]
    return turns


async def _finish(model, turns, value):
    """The execution of one request has ended and was reported, and what it releases has been answered."""
    count, is_counted = model.recorder.executed, asyncio.Event()
    model.recorder.executed = lambda execution: (count(execution), is_counted.set())
    turns[value].set()
    await asyncio.wait_for(is_counted.wait(), 5)
    model.recorder.executed = count
    await asyncio.sleep(0)


def _infer(model, call, answered):
    task = asyncio.create_task(model.infer(call, CallContext()))
    task.add_done_callback(lambda _: answered.append(call.request_id))
    return task


async def test_answers_keep_the_order_of_arrival(serve, turns):
    """Three instances finish last to first; the answers leave first to last."""
    model = await serve(
        turns.backend, num_instances=3, is_batching=True, preferred_batch_sizes=(1,), preserve_ordering=True
    )
    answered = []
    tasks = [_infer(model, make_call(value), answered) for value in range(3)]
    await asyncio.sleep(0)
    for value in (2, 1):
        await _finish(model, turns, value)
        assert [] == answered
    await _finish(model, turns, 0)
    await asyncio.gather(*tasks)
    assert ["r0", "r1", "r2"] == answered


async def test_without_it_the_first_to_finish_is_answered(serve, turns):
    """By default an answer leaves when it is there."""
    model = await serve(turns.backend, num_instances=2, is_batching=True, preferred_batch_sizes=(1,))
    answered = []
    tasks = [_infer(model, make_call(value), answered) for value in range(2)]
    await asyncio.sleep(0)
    await _finish(model, turns, 1)
    await tasks[1]
    turns[0].set()
    await tasks[0]
    assert ["r1", "r0"] == answered


async def test_cancelled_request_holds_nothing_up(serve, turns):
    """When the first of two is cancelled while it runs, the second is answered at once."""
    model = await serve(
        turns.backend, num_instances=2, is_batching=True, preferred_batch_sizes=(1,), preserve_ordering=True
    )
    answered = []
    first, second = (_infer(model, make_call(value), answered) for value in range(2))
    await asyncio.sleep(0)
    await _finish(model, turns, 1)
    first.cancel()
    await asyncio.wait_for(second, 5)
    turns[0].set()
    assert ["r0", "r1"] == answered
    assert 1 == model.statistics.success.count
