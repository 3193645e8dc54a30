"""Spans of a graph: one a step, parents and children across calls, errors on them."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.base.observing import telemetry
from weft.language.plan import GraphPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.switch import SwitchPlan
from weft.router.policies.cache import CachePlan
from weft.router.policies.hedge import HedgePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime
from weft.router.target import TargetModel


def switched() -> GraphPlan:
    """A call, then a switch with one call."""
    on = FakeCondition(lambda request, frame: "de")
    branches = [make.step("de", "bert", {"IN": "T"}, {"OUT": "P"}, cases=("de",))]
    inner = make.node("by_language", SwitchPlan, branches, inputs=["T"], outputs=["P"], on=on)
    steps = [make.step("lid", "lid", {"IN": "X"}, {"OUT": "T"}), make.step("clf", inner, {"T": "T"}, {"P": "P"})]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["P"]))


async def traced(target: FakeTarget, headers: dict[str, str] | None = None) -> None:
    server = telemetry.start_span("weft.router/g", parent=None, kind=telemetry.SERVER)
    context = CallContext(trace_context=telemetry.context_of(server), headers=headers or {})
    try:
        await make.run(switched(), target, context=context)
    finally:
        telemetry.end_span(server)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_every_step_has_a_span_under_that_of_its_node(exporter: InMemorySpanExporter) -> None:
    """Calls are CLIENT, nodes INTERNAL; the tree is that of the graph."""
    await traced(FakeTarget())
    spans = by_name(exporter)
    server, lid, clf, bert = (
        spans[name] for name in ("weft.router/g", "step root/lid", "step root/clf", "step by_language/de")
    )
    assert [SpanKind.CLIENT, SpanKind.INTERNAL, SpanKind.CLIENT] == [lid.kind, clf.kind, bert.kind]
    assert [server.context.span_id] * 2 == [lid.parent.span_id, clf.parent.span_id]
    assert clf.context.span_id == bert.parent.span_id
    assert {
        "rpc.system": "grpc",
        "rpc.service": "inference.GRPCInferenceService",
        "rpc.method": "ModelInfer",
        "rpc.grpc.status_code": 0,
        "weft.step": "lid",
        "weft.path": "root/lid",
        "weft.model": "lid",
        "weft.model_version": "1",
        "weft.target": "model",
        "server.address": "fake:1",
        "weft.attempt": 1,
    } == dict(lid.attributes)
    assert {"weft.step": "clf", "weft.path": "root/clf", "weft.branch": "de"} == dict(clf.attributes)


async def test_the_call_carries_the_context_of_its_own_span(exporter: InMemorySpanExporter) -> None:
    """The next service's span becomes a child of the step's; the client's old trace headers are not forwarded."""
    target = FakeTarget()
    await traced(target, {"traceparent": "00-old", "x-user-id": "7"})
    lid = by_name(exporter)["step root/lid"]
    context = target.contexts[0]
    parent = telemetry.inject(context.trace_context)["traceparent"]
    assert parent.startswith(f"00-{lid.context.trace_id:032x}-{lid.context.span_id:016x}-")
    assert {"x-user-id": "7"} == context.headers


async def test_a_failed_step_has_status_error_up_to_its_node(exporter: InMemorySpanExporter) -> None:
    """The message of the error, its gRPC status and an exception event are on the spans."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, Any]:
        raise RemoteError("UNAVAILABLE", "gone")

    with pytest.raises(RemoteError):
        await traced(FakeTarget(bert=fail))
    spans = by_name(exporter)
    for name in ("step root/clf", "step by_language/de"):
        assert StatusCode.ERROR is spans[name].status.status_code
        assert "g/1: by_language/de -> bert@1: gone" == spans[name].status.description
        assert 14 == spans[name].attributes["rpc.grpc.status_code"]
        assert "UNAVAILABLE" == spans[name].attributes["error.type"]
        assert ["exception"] == [event.name for event in spans[name].events]
    assert StatusCode.UNSET is spans["step root/lid"].status.status_code


async def test_a_model_that_is_called_itself_has_a_span_like_a_step(exporter: InMemorySpanExporter) -> None:
    """CLIENT, with the same attributes; the call carries its context, and its error is on it."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, Any]:
        raise RemoteError("UNAVAILABLE", "gone")

    target = FakeTarget(lid=fail)
    server = telemetry.start_span("weft.router/lid", parent=None, kind=telemetry.SERVER)
    context = CallContext(trace_context=telemetry.context_of(server), headers={"traceparent": "00-old"})
    model = TargetModel(make.signature("lid", version="3"), True)
    with pytest.raises(RemoteError):
        await make.infer_of_model(target, model, InferCall("lid"), context)
    span = by_name(exporter)["step lid"]
    assert (SpanKind.CLIENT, server.get_span_context().span_id) == (span.kind, span.parent.span_id)
    assert ("lid", "3", "model") == tuple(
        span.attributes[key] for key in ("weft.model", "weft.model_version", "weft.target")
    )
    assert "lid@3: gone" == span.status.description
    assert f"{span.context.span_id:016x}" in telemetry.inject(target.contexts[0].trace_context)["traceparent"]
    assert {} == target.contexts[0].headers


async def test_without_telemetry_a_call_has_no_trace_context() -> None:
    """Nothing is recorded, nothing injected."""
    target = FakeTarget()
    await make.run(switched(), target)
    assert [None, None] == [context.trace_context for context in target.contexts]


def one(**options: Any) -> GraphPlan:
    """X -> a (model m) -> Y."""
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, **options)]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))


async def traced_run(
    exporter: InMemorySpanExporter, plan: GraphPlan | GraphExecutor, target: FakeTarget
) -> dict[str, list[ReadableSpan]]:
    """Spans of one request by name, those that ended first first."""
    exporter.clear()
    server = telemetry.start_span("weft.router/g", parent=None, kind=telemetry.SERVER)
    try:
        await make.run(plan, target, context=CallContext(trace_context=telemetry.context_of(server)))
    finally:
        telemetry.end_span(server)
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


async def test_a_soft_failure_is_an_error_of_its_span_alone(exporter: InMemorySpanExporter) -> None:
    """The step's span has status and message; those above it have not."""
    inner = make.node(
        "inner",
        SequencePlan,
        [make.step("i", "i", {"IN": "X"}, {"OUT": "T"}, is_soft=True)],
        inputs=["X"],
        outputs=["T"],
    )
    steps = [make.step("a", inner, {"X": "X"}, {"T": "Y"})]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))
    spans = await traced_run(exporter, plan, FakeTarget(i=failing()))
    (failed,) = spans["step inner/i"]
    assert (StatusCode.ERROR, "g/1: inner/i -> i@1: gone") == (failed.status.status_code, failed.status.description)
    assert 14 == failed.attributes["rpc.grpc.status_code"]
    for name in ("step root/a", "weft.router/g"):
        assert StatusCode.UNSET is spans[name][0].status.status_code


async def test_every_attempt_has_a_span_of_its_own(exporter: InMemorySpanExporter) -> None:
    """Numbered, the failed one an error, under the span of the step, which is none; the call carries its attempt's."""
    target = FakeTarget(m=in_turn(failing(), answering()))
    plan = one(retry=RetryPlan(2, 0, frozenset({"UNAVAILABLE"}), 20.0))
    spans = await traced_run(exporter, plan, target)
    (step,), attempts = spans["step root/a"], spans["step root/a attempt"]
    assert (2, StatusCode.UNSET, SpanKind.INTERNAL) == (
        step.attributes["weft.attempt"],
        step.status.status_code,
        step.kind,
    )
    assert [1, 2] == [span.attributes["weft.attempt"] for span in attempts]
    assert [StatusCode.ERROR, StatusCode.UNSET] == [span.status.status_code for span in attempts]
    assert [(SpanKind.CLIENT, step.context.span_id)] * 2 == [(span.kind, span.parent.span_id) for span in attempts]
    for span, context in zip(attempts, target.contexts, strict=True):
        assert f"{span.context.span_id:016x}" in telemetry.inject(context.trace_context)["traceparent"]


@pytest.mark.usefixtures("virtual_clock")
async def test_hedges_are_attempts_too(exporter: InMemorySpanExporter) -> None:
    """The one that is cancelled says so."""
    target = FakeTarget(m=in_turn(answering(after_ms=100), answering(after_ms=10)))
    spans = await traced_run(exporter, one(hedge=HedgePlan(40, 1)), target)
    attempts = sorted(spans["step root/a attempt"], key=lambda span: span.attributes["weft.attempt"])  # type: ignore[arg-type, return-value]
    assert [1, 2] == [span.attributes["weft.attempt"] for span in attempts]
    assert [StatusCode.ERROR, StatusCode.UNSET] == [span.status.status_code for span in attempts]
    assert 2 == spans["step root/a"][0].attributes["weft.attempt"]


async def test_a_kept_answer_has_no_attempt(exporter: InMemorySpanExporter) -> None:
    """The step's span says that it was a hit."""
    executor = GraphExecutor(one(cache=CachePlan(0, 1 << 20)), Runtime({"model": FakeTarget()}))
    first = await traced_run(exporter, executor, None)
    second = await traced_run(exporter, executor, None)
    assert [False, True] == [spans["step root/a"][0].attributes["weft.cache_hit"] for spans in (first, second)]
    assert [True, False] == ["step root/a attempt" in spans for spans in (first, second)]


async def test_a_fallback_is_a_child_of_the_step_that_failed(exporter: InMemorySpanExporter) -> None:
    """The step is no error if it answered; the attempt is."""
    plan = one(fallback=make.step("f", "f", {"IN": "X"}, {"OUT": "Y"}))
    spans = await traced_run(exporter, plan, FakeTarget(m=failing()))
    (step,), (attempt,), (fallback,) = (spans[f"step root/{name}"] for name in ("a", "a attempt", "f"))
    assert ("f", StatusCode.UNSET) == (step.attributes["weft.fallback"], step.status.status_code)
    assert [step.context.span_id] * 2 == [attempt.parent.span_id, fallback.parent.span_id]
    assert [StatusCode.ERROR, StatusCode.UNSET] == [span.status.status_code for span in (attempt, fallback)]


async def test_a_cascades_span_names_the_step_whose_answer_was_taken(exporter: InMemorySpanExporter) -> None:
    """The last that answered."""
    unsure = FakeCondition(lambda request, frame: False)
    members = [
        make.step("tiny", "tiny", {"IN": "X"}, {"OUT": "Y"}, accept=unsure),
        make.step("base", "base", {"IN": "X"}, {"OUT": "Y"}, accept=unsure),
        make.step("large", "large", {"IN": "X"}, {"OUT": "Y"}, is_soft=True),
    ]
    cascade = make.node("c", CascadePlan, members, inputs=["X"], outputs=["Y"])
    steps = [make.step("a", cascade, {"X": "X"}, {"Y": "Y"})]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))
    spans = await traced_run(exporter, plan, FakeTarget(large=failing()))
    assert "base" == spans["step root/a"][0].attributes["weft.branch"]


async def test_a_skipped_step_has_no_span(exporter: InMemorySpanExporter) -> None:
    """It did nothing."""
    plan = one(when=FakeCondition(lambda request, frame: False))
    assert {"weft.router/g"} == set(await traced_run(exporter, plan, FakeTarget()))
