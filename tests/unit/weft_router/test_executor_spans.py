"""Spans of a graph: one a step, parents and children across calls, errors on them."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from weft_common import telemetry
from weft_common.core import CallContext, InferCall
from weft_common.errors import RemoteError
from weft_router.graph.plan import GraphPlan, NodeKind
from weft_router.passthrough import pass_through


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Telemetry switched on; finished spans are kept in memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry._state, "provider", provider)
    monkeypatch.setattr(telemetry._state, "tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def switched(make: SimpleNamespace) -> GraphPlan:
    """A call, then a switch with one call."""
    on = make.FakeCondition(lambda request, frame: "de")
    branches = [make.step("de", "bert", {"IN": "T"}, {"OUT": "P"}, cases=("de",))]
    inner = make.node("by_language", NodeKind.SWITCH, branches, inputs=["T"], outputs=["P"], on=on)
    steps = [make.step("lid", "lid", {"IN": "X"}, {"OUT": "T"}), make.step("clf", inner, {"T": "T"}, {"P": "P"})]
    return make.graph(make.node("root", NodeKind.SEQUENCE, steps, inputs=["X"], outputs=["P"]))


async def traced(make: SimpleNamespace, target: object, headers: dict[str, str] | None = None) -> None:
    server = telemetry.start_span("weft.router/g", parent=None, kind=telemetry.SERVER)
    context = CallContext(trace_context=telemetry.context_of(server), headers=headers or {})
    try:
        await make.run(switched(make), target, context=context)
    finally:
        telemetry.end_span(server)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_every_step_has_a_span_under_that_of_its_node(
    make: SimpleNamespace, exporter: InMemorySpanExporter
) -> None:
    """Calls are CLIENT, nodes INTERNAL; the tree is that of the graph."""
    await traced(make, make.FakeTarget())
    spans = by_name(exporter)
    server, lid, clf, bert = (
        spans[name] for name in ("weft.router/g", "step root/lid", "step root/clf", "step by_language/de")
    )
    assert [SpanKind.CLIENT, SpanKind.INTERNAL, SpanKind.CLIENT] == [lid.kind, clf.kind, bert.kind]
    assert [server.context.span_id] * 2 == [lid.parent.span_id, clf.parent.span_id]
    assert clf.context.span_id == bert.parent.span_id
    assert {
        "weft.step": "lid",
        "weft.path": "root/lid",
        "weft.model": "lid",
        "weft.model_version": "1",
        "weft.target": "model",
        "server.address": "fake:1",
        "weft.attempt": 1,
    } == dict(lid.attributes)
    assert {"weft.step": "clf", "weft.path": "root/clf", "weft.branch": "de"} == dict(clf.attributes)


async def test_the_call_carries_the_context_of_its_own_span(
    make: SimpleNamespace, exporter: InMemorySpanExporter
) -> None:
    """The next service's span becomes a child of the step's; the client's old trace headers are not forwarded."""
    target = make.FakeTarget()
    await traced(make, target, {"traceparent": "00-old", "x-user-id": "7"})
    lid = by_name(exporter)["step root/lid"]
    context = target.contexts[0]
    parent = telemetry.inject(context.trace_context)["traceparent"]
    assert parent.startswith(f"00-{lid.context.trace_id:032x}-{lid.context.span_id:016x}-")
    assert {"x-user-id": "7"} == context.headers


async def test_a_failed_step_has_status_error_up_to_its_node(
    make: SimpleNamespace, exporter: InMemorySpanExporter
) -> None:
    """The message of the error, its gRPC status and an exception event are on the spans."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, object]:
        raise RemoteError("UNAVAILABLE", "gone")

    with pytest.raises(RemoteError):
        await traced(make, make.FakeTarget(bert=fail))
    spans = by_name(exporter)
    for name in ("step root/clf", "step by_language/de"):
        assert StatusCode.ERROR is spans[name].status.status_code
        assert "g/1: by_language/de -> bert@1: gone" == spans[name].status.description
        assert "UNAVAILABLE" == spans[name].attributes["rpc.grpc.status"]
        assert ["exception"] == [event.name for event in spans[name].events]
    assert StatusCode.UNSET is spans["step root/lid"].status.status_code


async def test_a_model_that_is_called_itself_has_a_span_like_a_step(
    make: SimpleNamespace, exporter: InMemorySpanExporter
) -> None:
    """CLIENT, with the same attributes; the call carries its context, and its error is on it."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, object]:
        raise RemoteError("UNAVAILABLE", "gone")

    target = make.FakeTarget(lid=fail)
    server = telemetry.start_span("weft.router/lid", parent=None, kind=telemetry.SERVER)
    context = CallContext(trace_context=telemetry.context_of(server), headers={"traceparent": "00-old"})
    with pytest.raises(RemoteError):
        await pass_through(target, "3", InferCall("lid"), context)
    span = by_name(exporter)["step lid"]
    assert (SpanKind.CLIENT, server.get_span_context().span_id) == (span.kind, span.parent.span_id)
    assert ("lid", "3", "model") == tuple(
        span.attributes[key] for key in ("weft.model", "weft.model_version", "weft.target")
    )
    assert "lid@3: gone" == span.status.description
    assert f"{span.context.span_id:016x}" in telemetry.inject(target.contexts[0].trace_context)["traceparent"]
    assert {} == target.contexts[0].headers


async def test_without_telemetry_a_call_has_no_trace_context(make: SimpleNamespace) -> None:
    """Nothing is recorded, nothing injected."""
    target = make.FakeTarget()
    await make.run(switched(make), target)
    assert [None, None] == [context.trace_context for context in target.contexts]
