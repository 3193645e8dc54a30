"""A served model whose backend works on many requests at once: slots, overtaking, collected answers, cancels."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError, RequestCancelledError, ResourceExhaustedError, UnsupportedError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import decode, encode
from weft.serving.backends.base import Backend, InstanceContext, ModelContext
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy
from weft.serving.request.request import STREAMED, InferenceResponse
from weft.serving.runtime.model import ServedModel

TIMEOUT_S = 60.0
#: Of the thread's CPU time, however busy the machine is.
QUICK_S = 10.0
LEVELS = {"is_batching": True, "priority_levels": 2, "default_priority_level": 2}


class Desk(Backend):
    """Two slots; who has one is answered when the test says so."""

    can_stream = can_collect = True
    present: dict[int, Any]

    @classmethod
    def num_slots(cls, model):
        return 2

    def load(self):
        type(self).present = {}

    def execute(self, batch):
        for request in batch.requests:
            self.present[int(request.array("IN")[0])] = request
        return [STREAMED for _ in batch.requests]


def _answer(number, *, is_final=True):
    """The request in that slot gets a response with the number."""
    request = Desk.present.pop(number) if is_final else Desk.present[number]
    request.stream.deliver(InferenceResponse({"OUT": np.array([number], np.int32)}), is_final=is_final)


async def _until(claim):
    async with asyncio.timeout(TIMEOUT_S):
        for _ in iter(claim, True):
            await asyncio.sleep(0)


async def _slots(*numbers):
    """Exactly these have slots, and no other gets one."""
    await _until(lambda: set(numbers) <= Desk.present.keys())
    for _ in range(20):
        await asyncio.sleep(0)
    assert set(numbers) == Desk.present.keys()


def _call(number, **parameters):
    return InferCall("desk", inputs={"IN": encode(np.array([number], np.int32))}, parameters=parameters)


@pytest.fixture
async def serve():
    """``serve(backend=Desk, **settings)``."""
    specs = ((TensorSpec("IN", "INT32", (1,)),), (TensorSpec("OUT", "INT32", (1,)),))
    models = []

    async def start(backend=Desk, **settings):
        signature = ModelSignature("desk", "1", "x", 0, *specs, is_decoupled=True, can_collect=backend.can_collect)
        context = ModelContext(signature, Path("/nonexistent"), {}, {})
        model = ServedModel(context, backend, SchedulerSettings(0, **settings), [InstanceContext("desk_0")])
        models.append(model)
        await model.start()
        return model

    yield start
    for model in models:
        await model.stop(grace_s=0)


def _ask(model, number, **parameters):
    return asyncio.create_task(model.infer(_call(number, **parameters), CallContext()))


async def test_as_many_enter_as_there_are_slots(serve):
    """The next one enters when somebody is answered; each caller gets its own answer."""
    model = await serve()
    tasks = [_ask(model, number) for number in range(3)]
    await _slots(0, 1)
    assert (1.5, 1) == (model.statistics.occupancy(), model.statistics.pending_count)
    _answer(1)
    await _slots(0, 2)
    _answer(0)
    _answer(2)
    results = await asyncio.gather(*tasks)
    assert [0, 1, 2] == [decode(result.outputs["OUT"])[0] for result in results]
    assert (3, True) == (model.statistics.success.count, all(result.is_final for result in results))


async def test_ten_thousand_wait(serve):
    """Behind two slots, quickly: all but those that have them are cancelled, and the last is answered as if alone."""
    model = await serve()
    start_s = time.thread_time()
    tasks = [_ask(model, number) for number in range(10_000)]
    await _slots(0, 1)
    assert 9_998 == model.statistics.pending_count
    for task in tasks[2:-1]:
        task.cancel()
    await asyncio.wait(tasks[2:-1])
    assert 1 == model.statistics.pending_count
    _answer(0)
    await _slots(1, 9_999)
    _answer(9_999)
    assert [9_999] == decode((await tasks[-1]).outputs["OUT"]).tolist()
    _answer(1)
    await asyncio.gather(*tasks[:2])
    assert time.thread_time() - start_s < QUICK_S


async def test_a_better_one_enters_at_once(serve):
    """One as good as those that have slots waits."""
    model = await serve(**LEVELS)
    tasks = [_ask(model, number, priority=2) for number in (0, 1)]
    await _slots(0, 1)
    tasks += [_ask(model, 2, priority=2), _ask(model, 3, priority=1)]
    await _slots(0, 1, 3)
    for number in (0, 1, 3):
        _answer(number)
    await _slots(2)
    _answer(2)
    await asyncio.gather(*tasks)


async def test_who_leaves_gives_up_the_slot(serve):
    """And the backend is told, by the request."""
    model = await serve()
    tasks = [_ask(model, number) for number in range(4)]
    await _slots(0, 1)
    told = []
    Desk.present[0].when_cancelled(lambda: told.append(0))
    tasks[0].cancel()
    tasks[2].cancel()  # waits
    await _until(lambda: 3 in Desk.present)
    assert ([0], 2) == (told, model.statistics.failures_by_reason["CANCELED"])
    for number in (1, 3):
        _answer(number)
    assert 2 == len(await asyncio.gather(tasks[1], tasks[3]))


async def test_a_full_queue_says_when_to_come_back(serve):
    """By how long those before it took, and how many are served at once."""
    model = await serve(is_batching=True, default_policy=WaitPolicy(max_queue_size=1))
    tasks = [_ask(model, number) for number in (0, 1)]
    await _slots(0, 1)
    Desk.present[0].start_ns = time.monotonic_ns() - 60_000_000_000
    _answer(0)
    await tasks[0]
    tasks += [_ask(model, number) for number in (2, 3)]
    await _slots(1, 2)
    with pytest.raises(ResourceExhaustedError) as error:
        await model.infer(_call(4), CallContext())
    assert 30_000 == pytest.approx(error.value.retry_after_ms, rel=0.1)
    for task in tasks[1:]:
        task.cancel()


async def test_a_stream_has_every_response(serve):
    """A collected call has one; the backend knows which is which. Each may overtake others on its way out."""
    model = await serve()
    stream = model.stream(_call(0), CallContext())
    first = asyncio.create_task(anext(stream))
    await _slots(0)
    assert not Desk.present[0].is_collected
    _answer(0, is_final=False)
    assert not (await first).is_final
    _answer(0)
    last = await anext(stream)
    assert (True, True) == (last.is_final, last.is_unordered)
    task = _ask(model, 1)
    await _slots(1)
    assert Desk.present[1].is_collected
    _answer(1)
    await task


async def test_a_collected_call_without_a_response_fails(serve):
    """So does one whose response is an error."""
    model = await serve()
    for error in (None, RequestCancelledError("no")):
        task = _ask(model, 0)
        await _slots(0)
        Desk.present.pop(0).stream.deliver(error, is_final=True)
        with pytest.raises(InternalError if error is None else RequestCancelledError):
            await task


async def test_a_stop_waits_for_those_who_sit(serve):
    """And for those who wait."""
    model = await serve()
    tasks = [_ask(model, number) for number in range(3)]
    await _slots(0, 1)
    stop = asyncio.create_task(model.stop(grace_s=TIMEOUT_S))
    _answer(0)
    await _slots(1, 2)
    assert not stop.done()
    _answer(1)
    _answer(2)
    await asyncio.gather(stop, *tasks)


async def test_what_cannot_collect_refuses_unary_calls(tmp_path):
    """In the words of Triton Inference Server; one that can answers, also through the core."""
    from weft.serving.core import ServingCore

    class Strict(Desk):
        can_collect = False

    for name in ("desk", "strict"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(
            f'backend: "{name}" input {{ name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }} '
            'output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } model_transaction_policy { decoupled: true }'
        )
    core = ServingCore(tmp_path, {"desk": Desk, "strict": Strict}, num_gpus=0)
    await core.start()
    try:
        task = asyncio.create_task(core.infer(_call(5), CallContext()))
        await _until(lambda: 5 in Desk.present)
        _answer(5)
        assert [5] == decode((await task).outputs["OUT"]).tolist()
        call = _call(5)
        call.model_name = "strict"
        with pytest.raises(UnsupportedError, match="decoupled transaction policy"):
            await core.infer(call, CallContext())
    finally:
        await core.close(grace_s=TIMEOUT_S)
