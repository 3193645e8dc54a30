"""Spans as a collector receives them: what is sampled and what failed, with W3C context in and out."""

import asyncio
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import INVALID_SPAN
from tests.unit.v2.builders import make_request

from weft.base.errors import ERROR_BY_CODE, InternalError, InvalidArgumentError, NotFoundError
from weft.base.observing import telemetry

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"


@pytest.fixture
def trace(monkeypatch, otlp_collector):
    """Switches tracing on at a rate; ``collected()`` ends it and gives every span that was exported."""

    def switch_on(rate="1"):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", rate)
        assert telemetry.configure("weft.test")

        def collected():
            telemetry.shutdown()
            return list(otlp_collector.spans)

        return collected

    yield switch_on
    telemetry.shutdown()


def parent(traceparent, **headers):
    return telemetry.extract({"traceparent": traceparent, **headers})


@pytest.mark.parametrize("is_disabled", [False, True])
def test_off(monkeypatch, otlp_collector, is_disabled):
    """Without an endpoint, or with the SDK disabled, nothing is recorded: one invalid span, no context, no metadata."""
    if is_disabled:
        monkeypatch.setenv("OTEL_SDK_DISABLED", "TRUE")
    else:
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    assert not telemetry.configure("weft.test")
    assert not telemetry.is_enabled()
    context = parent(SAMPLED)
    span = telemetry.start_span("s", parent=context, attributes={"a": 1}, links=[INVALID_SPAN])
    assert span is INVALID_SPAN
    telemetry.end_span(span, NotFoundError("x"))
    assert ({}, "") == (telemetry.inject(telemetry.context_of(span, context)), telemetry.trace_id_of(context))


@pytest.mark.parametrize("rate", ["often", "-0.1", "1.1", "nan"])
def test_bad_rate_is_refused(monkeypatch, otlp_collector, rate):
    """A rate that is no share is an error with variable, value and range."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", rate)
    with pytest.raises(
        InvalidArgumentError, match=f"OTEL_TRACES_SAMPLER_ARG must be a number from 0 to 1, got '{rate}'"
    ):
        telemetry.configure("weft.test")
    assert not telemetry.is_enabled()


def test_spans_go_by_http_too(monkeypatch):
    """The protocol of the environment; another one is refused with those that there are."""
    received: queue.Queue[ExportTraceServiceRequest] = queue.Queue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.put(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
        with pytest.raises(InvalidArgumentError, match="must be one of grpc, http/protobuf, got 'http/json'"):
            telemetry.configure("weft.test")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        assert telemetry.configure("weft.test")
        telemetry.end_span(telemetry.start_span("s", parent=None))
        telemetry.shutdown()
        assert "s" == received.get(timeout=10).resource_spans[0].scope_spans[0].spans[0].name
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["weft.test", "mine"])
def test_span_arrives_with_everything(trace, monkeypatch, name):
    """Name, kind, times, attributes, links and the service, which the environment renames, arrive at the collector."""
    if name == "mine":
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
    collected = trace()
    other = telemetry.start_span("other", parent=None)
    span = telemetry.start_span(
        "s", parent=None, kind=telemetry.CLIENT, attributes={"n": 3, "t": "x"}, links=[other], start_unix_ns=10
    )
    telemetry.end_span(other)
    telemetry.end_span(span, end_unix_ns=25)
    first, second = collected()
    assert ("other", "INTERNAL", "s", "CLIENT") == (first.name, first.kind, second.name, second.kind)
    assert ({"n": 3, "t": "x"}, 10, 25) == (second.attributes, second.start_unix_ns, second.end_unix_ns)
    assert [(first.trace_id, first.span_id)] == second.links
    assert ("", "UNSET", []) == (second.parent_span_id, second.status, second.events)
    assert first.trace_id != second.trace_id
    assert name == second.resource["service.name"]
    assert 0 < first.start_unix_ns <= first.end_unix_ns


def test_context_travels_in_and_out(trace):
    """A span continues the caller's trace, its child is its child, and the next service gets the span as parent."""
    collected = trace()
    incoming = parent(SAMPLED, tracestate="vendor=1")
    span = telemetry.start_span("s", parent=incoming)
    context = telemetry.context_of(span, incoming)
    child = telemetry.start_span("c", parent=context)
    outgoing = telemetry.inject(context)
    telemetry.end_span(child)
    telemetry.end_span(span)
    sent_child, sent = collected()
    assert (TRACE_ID, PARENT_ID, "vendor=1") == (sent.trace_id, sent.parent_span_id, sent.trace_state)
    assert (TRACE_ID, sent.span_id) == (sent_child.trace_id, sent_child.parent_span_id)
    assert {"traceparent": f"00-{TRACE_ID}-{sent.span_id}-01", "tracestate": "vendor=1"} == outgoing


@pytest.mark.parametrize("header", ["", "garbage", f"00-{'0' * 32}-{PARENT_ID}-01", f"ff-{TRACE_ID}-{PARENT_ID}-01"])
def test_bad_traceparent_starts_a_trace(trace, header):
    """A header that is no valid traceparent is ignored: the span is a root."""
    collected = trace()
    telemetry.end_span(telemetry.start_span("s", parent=parent(header)))
    (span,) = collected()
    assert "" == span.parent_span_id
    assert TRACE_ID != span.trace_id


@pytest.mark.parametrize(("rate", "header", "exported"), [("0", SAMPLED, ["c", "s"]), ("1", UNSAMPLED, [])])
def test_the_callers_sampling_is_honoured_at_any_rate(trace, rate, header, exported):
    """A request that comes sampled is traced with its children, one that comes unsampled is not."""
    collected = trace(rate)
    span = telemetry.start_span("s", parent=parent(header))
    telemetry.end_span(telemetry.start_span("c", parent=telemetry.context_of(span)))
    telemetry.end_span(span)
    assert exported == [span.name for span in collected()]


def test_unsampled_spans_are_exported_only_with_an_error(trace):
    """At rate 0 a span that ends well, or by its caller's fault, is dropped; one with status ERROR is exported."""
    collected = trace("0")
    root = telemetry.start_span("root", parent=None)
    context = telemetry.context_of(root)
    telemetry.end_span(telemetry.start_span("good", parent=context))
    telemetry.end_span(telemetry.start_span("wrong", parent=context), NotFoundError("nothing"))
    telemetry.end_span(telemetry.start_span("bad", parent=context), InternalError("broken"))
    outgoing = telemetry.inject(context)
    telemetry.end_span(root)
    (span,) = collected()
    assert ("bad", f"{root.get_span_context().trace_id:032x}") == (span.name, span.trace_id)
    assert 0 == int(outgoing["traceparent"][-2:], 16) & 1  # the bit that says sampled


def test_rate_is_a_share(trace):
    """At rate 0.5 some traces are kept and some are not, each as a whole."""
    collected = trace("0.5")
    for _ in range(200):
        root = telemetry.start_span("root", parent=None)
        telemetry.end_span(telemetry.start_span("child", parent=telemetry.context_of(root)))
        telemetry.end_span(root)
    spans = collected()
    roots = {span.trace_id for span in spans if span.name == "root"}
    assert 50 < len(roots) < 150
    assert roots == {span.trace_id for span in spans if span.name == "child"}


def test_error_is_in_status_event_and_attributes(trace):
    """A failed span has status ERROR with the text, the exception as event, the gRPC status and the error id."""
    collected = trace()
    internal = InternalError("model 'm' failed")
    for error in (internal, ValueError("secret")):
        telemetry.end_span(telemetry.start_span("s", parent=None), error)
    ours, other = collected()
    assert ("ERROR", internal.message) == (ours.status, ours.status_message)
    assert {
        "rpc.grpc.status_code": 13,
        "error.type": "INTERNAL",
        "weft.error_id": internal.error_id,
    } == ours.attributes
    ((name, event),) = ours.events
    assert ("exception", internal.message) == (name, event["exception.message"])
    assert ("ERROR", "ValueError", "UNKNOWN") == (other.status, other.status_message, other.attributes["error.type"])


@pytest.mark.parametrize("cls", ERROR_BY_CODE.values(), ids=lambda cls: cls.__name__)
def test_what_the_caller_did_wrong_is_no_error_of_who_answers(trace, cls):
    """As OpenTelemetry's conventions for gRPC have it: of a SERVER six statuses are ERROR, of a CLIENT all but OK."""
    collected = trace()
    for kind in (telemetry.SERVER, telemetry.INTERNAL, telemetry.CLIENT):
        telemetry.end_span(telemetry.start_span("s", parent=None, kind=kind), cls("what it was"))
    spans = collected()
    fault = cls.code in ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
    assert [fault, fault, True] == [span.status == "ERROR" for span in spans]
    assert {grpc.StatusCode[cls.code].value[0]} == {span.attributes["rpc.grpc.status_code"] for span in spans}


def test_children_of_an_unsampled_parent_are_exported_with_an_error_alone(trace):
    """They keep trace and parent, and the next service is told that they are not sampled."""
    collected = trace()
    root = telemetry.start_span("root", parent=None)
    context = telemetry.unsampled(telemetry.context_of(root))
    telemetry.end_span(telemetry.start_span("good", parent=context))
    telemetry.end_span(telemetry.start_span("bad", parent=context), InternalError("broken"))
    outgoing = telemetry.inject(context)
    telemetry.end_span(root)
    bad, exported = collected()
    assert ("bad", "root") == (bad.name, exported.name)
    assert (exported.trace_id, exported.span_id) == (bad.trace_id, bad.parent_span_id)
    *ids, flags = outgoing["traceparent"].split("-")
    assert (["00", exported.trace_id, exported.span_id], 0) == (ids, int(flags, 16) & 1)


def test_dead_collector_does_not_hold_up_a_stop(monkeypatch):
    """With a collector that is down, the end takes no longer than the wait that is promised."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(telemetry, "SHUTDOWN_WAIT_S", 0.1)
    assert telemetry.configure("weft.test")
    telemetry.end_span(telemetry.start_span("s", parent=None))
    before_s = time.monotonic()
    telemetry.shutdown()
    assert time.monotonic() - before_s < 10
    assert not telemetry.is_enabled()


async def test_server_span_continues_the_clients_trace(trace, stub, core):
    """A request makes one SERVER span under the caller's, and the core gets it as parent for its own."""
    collected = trace("0")
    await stub.ModelInfer(make_request(), metadata=(("traceparent", SAMPLED), ("tracestate", "v=1")))
    outgoing = telemetry.inject(core.calls[0][1].trace_context)
    (span,) = await asyncio.to_thread(collected)
    assert ("weft.test/echo", "SERVER", "UNSET") == (span.name, span.kind, span.status)
    assert (TRACE_ID, PARENT_ID, "v=1") == (span.trace_id, span.parent_span_id, span.trace_state)
    assert {
        "rpc.system": "grpc",
        "rpc.method": "ModelInfer",
        "rpc.grpc.status_code": 0,
        "weft.model": "echo",
    }.items() <= span.attributes.items()
    assert f"00-{TRACE_ID}-{span.span_id}-01" == outgoing["traceparent"]


async def test_failed_request_can_be_found(trace, stub, core, caplog):
    """Client, log and span of a failed request, not sampled, share the error id and the trace id."""
    collected = trace("0")
    core.error = ValueError("secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(make_request("fail"))
    trailing = dict(caught.value.trailing_metadata())  # type: ignore[arg-type]
    (span,) = await asyncio.to_thread(collected)
    (record,) = caplog.records
    assert trailing["x-error-id"] == record.error_id == span.attributes["weft.error_id"]
    assert trailing["x-trace-id"] == record.trace_id == span.trace_id
    assert "secret" not in repr(span)


async def test_cancelled_request_ends_its_span(trace, otlp_collector, stub, core):
    """A cancelled request ends its span with CANCELLED, no error; one whose deadline passed with DEADLINE_EXCEEDED."""
    trace()
    call = stub.ModelInfer(make_request("hang"))
    await core.started.wait()
    call.cancel()
    await asyncio.wait([asyncio.ensure_future(stub.ModelInfer(make_request("hang"), timeout=0.1).code())])
    spans = await asyncio.to_thread(otlp_collector.wait_for, lambda spans: len(spans) == 2)
    assert [(1, "UNSET"), (4, "ERROR")] == [(span.attributes["rpc.grpc.status_code"], span.status) for span in spans]


async def test_each_request_of_a_stream_has_its_span(trace, stub):
    """Requests on one stream are siblings under the stream's caller, each with its status."""
    collected = trace()
    stream = stub.ModelStreamInfer(metadata=(("traceparent", SAMPLED),))
    for model_name in ("echo", "fail", "tokens"):
        await stream.write(make_request(model_name))
    await stream.done_writing()
    assert 5 == len([answer async for answer in stream])
    spans = await asyncio.to_thread(collected)
    assert {("weft.test/echo", 0), ("weft.test/fail", 5), ("weft.test/tokens", 0)} == {
        (span.name, span.attributes["rpc.grpc.status_code"]) for span in spans
    }
    assert {"ModelStreamInfer"} == {span.attributes["rpc.method"] for span in spans}
    assert {PARENT_ID} == {span.parent_span_id for span in spans}
