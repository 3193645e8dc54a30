"""Decoupled models in processes of their own: what becomes of a stream that ends before the model has done with it."""

import asyncio
import contextlib
import itertools
import threading
import time

import pytest
from opentelemetry.trace import StatusCode
from tests.unit.serving.python.python_models import FINAL, TIMEOUT_S, call, response, values

from weft.base.core import CallContext
from weft.base.errors import DeadlineExceededError, InternalError
from weft.base.observing import telemetry
from weft.serving.request.request import Work

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
    runner = model._instances[0]._backend._process
    end_s = time.monotonic() + TIMEOUT_S
    while runner._requests:  # what nobody waits for is told behind what is
        assert time.monotonic() < end_s, runner._requests
        await asyncio.sleep(0.005)


def _context():
    return CallContext(trace_context=telemetry.context_of(telemetry.start_span("server", parent=None)))


def _named(exporter, name):
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def _ended(exporter, model, name):
    """The one span of a name, once the model has stopped."""
    await model.stop(grace_s=TIMEOUT_S)
    (span,) = _named(exporter, name)
    return span


async def test_compute_lasts_until_the_last_response(serve_python, exporter):
    """Also where ``execute`` has long returned; ``batch`` is the execution alone."""
    sent_ns = []

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()

        def later():
            for value in range(3):
                sender.send(response(pb_utils, value))
            sent_ns.append(time.time_ns())
            sender.send(flags=FINAL)

        timer = threading.Timer(0.05, later)
        timer.start()

    model = await serve_python(execute)
    results = [result async for result in model.stream(call(), _context())]
    compute, (batch,) = await _ended(exporter, model, "compute"), _named(exporter, "batch")
    assert compute.end_time >= max(sent_ns[0], batch.end_time)
    assert compute.start_time <= batch.start_time + 1_000_000
    assert len(results) == compute.attributes["weft.num_responses"]
    assert StatusCode.UNSET is compute.status.status_code


async def test_a_request_that_is_left_has_a_span(serve_python, exporter):
    """It ends with the cancel, as no error of the service."""
    goes_on = threading.Event()

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        sender.send(response(pb_utils, 1))
        goes_on.wait(TIMEOUT_S)
        sender.send(flags=FINAL)

    model = await serve_python(execute)
    results = model.stream(call(), _context())
    await anext(results)
    await results.aclose()
    goes_on.set()
    compute = await _ended(exporter, model, "compute")
    assert (1, StatusCode.UNSET) == (compute.attributes["rpc.grpc.status_code"], compute.status.status_code)
    assert 1 == compute.attributes["weft.num_responses"]


async def test_a_backend_may_say_what_it_does(serve_python, exporter, monkeypatch):
    """Name, attributes and events of the span; there is no batch of requests that it only takes over."""

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        sender.send(response(pb_utils, 1), flags=FINAL)

    model = await serve_python(execute)
    decoupled = model.answers
    opened = decoupled.open

    def opening(request):
        opened(request)
        request.describe = lambda: Work(
            "text_completion m", {"gen_ai.usage.output_tokens": 1}, [("first_token", 5, {})]
        )

    monkeypatch.setattr(decoupled, "open", opening)
    async for _ in model.stream(call(), _context()):
        pass
    span = await _ended(exporter, model, "text_completion m")
    assert 1 == span.attributes["gen_ai.usage.output_tokens"]
    assert ["first_token"] == [event.name for event in span.events]
    assert ["queue"] == [
        span.name for span in exporter.get_finished_spans() if span.name in ("queue", "batch", "compute")
    ]
