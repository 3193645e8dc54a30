"""``async def execute`` of a model in a process that is not decoupled: batches of one instance beside one another."""

import asyncio
from typing import Any

import pytest
from tests.unit.serving.python.python_models import TIMEOUT_S, call, value_of

from weft.base.core import CallContext
from weft.base.errors import InternalError, InvalidArgumentError, UnavailableError
from weft.serving.backends.python import DEFAULT_LIMIT, LIMIT

#: IN says what to do. A positive number waits until so many requests are there; OUT is the most that were.
SOURCE = """
import asyncio, os, sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    num, most, changed = 0, 0, None

    async def execute(self, requests):
        self.changed = self.changed or asyncio.Condition()
        (what,) = (int(request.inputs()[0].as_numpy()[0, 0]) for request in requests)
        self.num += 1
        self.most = max(self.most, self.num)
        try:
            async with self.changed:
                self.changed.notify_all()
                if what == -1:
                    raise ValueError("secret")
                if what == -2:
                    sys.exit(4)
                if what == -3:
                    os._exit(3)
                if what == -5:
                    raise type("Own", (BaseException,), {})
                if what > 0:
                    await self.changed.wait_for(lambda: self.most >= what)
            if what == -4:
                while not requests[0].is_cancelled():
                    await asyncio.sleep(0.001)
                self.most = 77
            if what == -6:
                asyncio.get_running_loop().call_later(0.02, self.send, requests.pop().get_response_sender())
                return None
            if what == -7:
                await asyncio.sleep(0.2)
        finally:
            self.num -= 1
        return [self.out()]

    def out(self):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, 1), self.most, np.float32))])

    def send(self, sender):
        sender.send(self.out(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture
async def serve(serve_python):
    """Starts the model, in a process for each instance."""

    async def start(limit=None, **options):
        parameters = {"EXECUTION": "process"} | ({} if limit is None else {LIMIT: limit})
        return await serve_python(None, source=SOURCE, is_decoupled=False, parameters=parameters, **options)

    return start


async def _ask(model, value, **parameters):
    return value_of(await asyncio.wait_for(model.infer(call(value, **parameters), CallContext()), TIMEOUT_S))


async def test_batches_of_one_instance_wait_for_one_another(serve):
    """As many as the limit, which has a default; those beyond it wait in the queue."""
    model = await serve()
    asked = [_ask(model, DEFAULT_LIMIT) for _ in range(DEFAULT_LIMIT + 5)]
    assert [float(DEFAULT_LIMIT)] * len(asked) == await asyncio.gather(*asked)
    assert (len(asked), 1) == (model.statistics.execution_count, len(model._instances))


async def test_one_after_another(serve):
    """With a limit of one."""
    model = await serve("1")
    assert [1.0] * 5 == await asyncio.gather(*(_ask(model, 0) for _ in range(5)))


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1025", ""])
async def test_a_wrong_limit_is_a_fault_of_the_configuration(serve, limit):
    """The load says which values there are."""
    with pytest.raises(InvalidArgumentError, match=f"'{LIMIT}' must be between 1 and 1024, got '{limit}'"):
        await serve(limit)


async def test_each_batch_has_its_own_outcome(serve):
    """What one raises, or answers later, is its own; the others wait for nobody."""
    model = await serve()
    waiting = asyncio.ensure_future(_ask(model, 8))
    for value in (-1, -2, -5):
        with pytest.raises(InternalError, match="model 'm' failed to execute the request"):
            await _ask(model, value)
    assert await _ask(model, -6)
    assert await _ask(model, 0)
    assert not waiting.done()
    assert [8.0] * 8 == await asyncio.gather(waiting, *(_ask(model, 8) for _ in range(7)))


async def test_a_client_that_leaves_is_known_to_its_coroutine(serve):
    """It is not cancelled: it sees ``is_cancelled`` and goes on; the others are answered."""
    model = await serve()
    leaving = asyncio.ensure_future(_ask(model, -4))
    for _ in range(5):  # until it is sent
        await asyncio.sleep(0)
    leaving.cancel()
    assert 77.0 == await _ask(model, 77)


@pytest.mark.parametrize(("is_ordered", "order"), [(False, [1, 0]), (True, [0, 1])])
async def test_answers_leave_as_they_come_or_in_order(serve, is_ordered, order):
    """In the order in which they are ready, unless ``preserve_ordering`` says otherwise."""
    model = await serve(preserve_ordering=is_ordered)
    ended = []
    tasks = [asyncio.ensure_future(_ask(model, value)) for value in (-7, 0)]
    for number, task in enumerate(tasks):
        task.add_done_callback(lambda _, number=number: ended.append(number))
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    assert order == ended


async def test_a_process_that_dies_fails_all_that_it_executes(serve):
    """And those that wait are answered by the next one."""
    model = await serve("3")
    asked = [asyncio.ensure_future(_ask(model, value)) for value in (9, 9, -3, 0, 0)]
    outcomes: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
    assert [UnavailableError] * 3 == [type(outcome) for outcome in outcomes[:3]]
    assert all(outcome >= 1.0 for outcome in outcomes[3:])
    assert 1 == model.statistics.restart_count


async def test_a_model_that_stops_cancels_its_coroutines(serve):
    """After the grace what still executes is UNAVAILABLE, and the process is gone."""
    model = await serve()
    running = [asyncio.ensure_future(_ask(model, 9)) for _ in range(3)]
    for _ in range(5):  # until they are sent
        await asyncio.sleep(0)
    await asyncio.wait_for(model.stop(grace_s=0.1), TIMEOUT_S)
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert [UnavailableError] * 3 == [type(outcome) for outcome in outcomes]
