"""Decoupled models in processes of their own: what becomes of a stream that ends before the model has done with it."""

import asyncio
import contextlib
import itertools
import time

import pytest
from tests.unit.serving.python.python_models import TIMEOUT_S, call, values

from weft.base.core import CallContext
from weft.base.errors import DeadlineExceededError, InternalError

#: IN says what to do; OUT is the number of requests that the process holds.
SOURCE = """
import gc, time
import numpy as np
import triton_python_backend_utils as pb_utils
from weft.serving.request.request import InferenceRequest


def out(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, 1), value, np.float32))])


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, what = request.get_response_sender(), int(request.inputs()[0].as_numpy()[0, 0])
            if what == 1:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros((1, 1), np.int8))]))
                for number in range(9):
                    sender.send(out(number), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if number == 8 else 0)
                continue
            if what == 2:
                raise ValueError("secret")
            if what == 3:
                return [out(1)]
            if what >= 4:
                sender.send(out(0))
                while not sender.is_cancelled():
                    time.sleep(0.001)
                if what == 4:
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            gc.collect()
            sender.send(out(sum(isinstance(found, InferenceRequest) for found in gc.get_objects())))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture
async def model(serve_python):
    """The model, in one process."""
    return await serve_python(None, source=SOURCE, is_decoupled=True, parameters={"EXECUTION": "process"})


async def test_response_of_another_datatype_is_passed_on(model):
    """As the model gave it, and those after it as well."""
    assert [0.0, *range(9)] == await asyncio.wait_for(values(model, call(1)), TIMEOUT_S)


async def test_neither_side_keeps_a_request_that_failed(model):
    """Not one whose execute raises, or returns what it must not."""
    for value in (2, 3):
        with pytest.raises(InternalError):
            await asyncio.wait_for(values(model, call(value)), TIMEOUT_S)
    await _assert_nothing_is_held(model)


async def test_neither_side_keeps_a_request_whose_client_has_left(model):
    """The model ends it by a last response, or drops its sender, when the client has left or the deadline passed."""
    for value, is_late in itertools.product((4, 5), (False, True)):
        context = CallContext(time.monotonic_ns() + 10**8) if is_late else CallContext()
        results = model.stream(call(value), context)
        await asyncio.wait_for(anext(results), TIMEOUT_S)
        if is_late:
            with contextlib.suppress(DeadlineExceededError, StopAsyncIteration):  # as the process sees it first, or not
                await asyncio.wait_for(anext(results), TIMEOUT_S)
        await results.aclose()
    await _assert_nothing_is_held(model)


async def _assert_nothing_is_held(model):
    """The process holds the request that asks for it alone, the service none once that is answered."""
    assert [1.0] == await asyncio.wait_for(values(model, call(0)), TIMEOUT_S)
    runner = model._instances[0]._abort.__self__._runner
    end_s = time.monotonic() + TIMEOUT_S
    while runner._requests:  # what nobody waits for is told behind what is
        assert time.monotonic() < end_s, runner._requests
        await asyncio.sleep(0.005)
