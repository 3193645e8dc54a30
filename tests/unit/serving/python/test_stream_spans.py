"""Spans of requests of a decoupled model."""

import threading
import time

from opentelemetry.trace import StatusCode
from tests.unit.serving.python.python_models import FINAL, TIMEOUT_S, call, response

from weft.base.core import CallContext
from weft.base.observing import telemetry
from weft.serving.request.request import Work


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
    decoupled = model.decoupled
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
