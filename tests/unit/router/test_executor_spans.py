"""Spans of a graph: one a step, parents and children across calls, errors on them."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn
from tests.unit.router.graph_cases import compiled

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.base.observing import telemetry
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime
from weft.router.target import TargetModel

#: A call, then a switch with one call.
SWITCHED = """node { name: "root" sequence {
  step { model_name: "lid" output_map { key: "Y" value: "T" } }
  step { name: "clf" node: "by" input_map { key: "X" value: "T" } } } }
node { name: "by" switch { on: "'de'" step { name: "de" model_name: "bert" case: "de" } } }"""
LID, CLF, BERT = "step root/lid", "step root/clf", "step root/clf/by[de]"


def one(more: str) -> str:
    return f'node {{ name: "root" sequence {{ step {{ name: "a" model_name: "m" {more} }} }} }}'


async def traced(
    exporter: InMemorySpanExporter, plan: str | GraphExecutor, target: FakeTarget | None = None, **headers: str
) -> dict[str, list[ReadableSpan]]:
    """Spans of one request by name, those that ended first first."""
    exporter.clear()
    server = telemetry.start_span("weft.router/g", parent=None, kind=telemetry.SERVER)
    context = CallContext(trace_context=telemetry.context_of(server), headers=headers)
    with contextlib.suppress(RemoteError):
        await make.run(compiled(plan) if isinstance(plan, str) else plan, target, context=context)
    telemetry.end_span(server)
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def parent_of(context: CallContext) -> str:
    """The span that a call carries: trace and span."""
    return telemetry.inject(context.trace_context)["traceparent"][3:-3]


def id_of(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}-{span.context.span_id:016x}"


def facts(spans: list[ReadableSpan], attribute: str = "") -> list[Any]:
    """Kind and status of each, and an attribute."""
    return [
        (span.kind.name, span.status.status_code.name, *([(span.attributes or {}).get(attribute)] if attribute else []))
        for span in spans
    ]


async def test_every_step_has_a_span_under_that_of_its_node(exporter: InMemorySpanExporter) -> None:
    """Calls are CLIENT, nodes INTERNAL; the tree is that of the graph."""
    spans = await traced(exporter, SWITCHED, FakeTarget())
    (server,), (lid,), (clf,), (bert,) = (spans[name] for name in ("weft.router/g", LID, CLF, BERT))
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
    spans = await traced(exporter, SWITCHED, target, traceparent="00-old", **{"x-user-id": "7"})
    assert id_of(spans[LID][0]) == parent_of(target.contexts[0])
    assert {"x-user-id": "7"} == target.contexts[0].headers


async def test_a_failed_step_has_status_error_up_to_its_node(exporter: InMemorySpanExporter) -> None:
    """The message of the error, its gRPC status and an exception event are on the spans."""
    spans = await traced(exporter, SWITCHED, FakeTarget(bert=failing()))
    for (span,) in (spans[CLF], spans[BERT]):
        assert StatusCode.ERROR is span.status.status_code
        assert "g/1: root/clf/by[de] -> bert@1: gone" == span.status.description
        assert (14, "UNAVAILABLE") == (span.attributes["rpc.grpc.status_code"], span.attributes["error.type"])
        assert ["exception"] == [event.name for event in span.events]
    assert StatusCode.UNSET is spans[LID][0].status.status_code


async def test_a_model_that_is_called_itself_has_a_span_like_a_step(exporter: InMemorySpanExporter) -> None:
    """CLIENT, with the same attributes; the call carries its context, and its error is on it."""
    target = FakeTarget(lid=failing())
    server = telemetry.start_span("weft.router/lid", parent=None, kind=telemetry.SERVER)
    context = CallContext(trace_context=telemetry.context_of(server), headers={"traceparent": "00-old"})
    model = TargetModel(make.signature("lid", version="3"), True)
    with pytest.raises(RemoteError):
        await make.infer_of_model(target, model, InferCall("lid"), context)
    (span,) = exporter.get_finished_spans()
    assert (SpanKind.CLIENT, server.get_span_context().span_id) == (span.kind, span.parent.span_id)
    assert ("lid", "3", "model") == tuple(
        span.attributes[key] for key in ("weft.model", "weft.model_version", "weft.target")
    )
    assert "gone" == span.status.description
    assert (id_of(span), {}) == (parent_of(target.contexts[0]), target.contexts[0].headers)


async def test_without_telemetry_a_call_has_no_trace_context() -> None:
    """Nothing is recorded, nothing injected."""
    target = FakeTarget()
    await make.run(compiled(SWITCHED), target)
    assert [None, None] == [context.trace_context for context in target.contexts]


async def test_a_soft_failure_is_an_error_of_its_span_alone(exporter: InMemorySpanExporter) -> None:
    """The step's span has status and message; those above it have not."""
    graph = """graph: X -> Y?
    node { name: "root" sequence { step { name: "a" node: "inner" } } }
    node { name: "inner" sequence { step { model_name: "i" dependency: SOFT } } }"""
    spans = await traced(exporter, graph, FakeTarget(i=failing()))
    (failed,) = spans["step root/a/inner/i"]
    assert [("CLIENT", "ERROR", 14)] == facts([failed], "rpc.grpc.status_code")
    assert "g/1: root/a/inner/i -> i@1: gone" == failed.status.description
    assert [("INTERNAL", "UNSET"), ("SERVER", "UNSET")] == facts(spans["step root/a"] + spans["weft.router/g"])


async def test_every_attempt_has_a_span_of_its_own(exporter: InMemorySpanExporter) -> None:
    """Numbered, the failed one an error, under the span of the step, which is none; the call carries its attempt's."""
    target = FakeTarget(m=in_turn(failing(), answering()))
    spans = await traced(exporter, one("policy { retry { attempts: 2 } }"), target)
    (step,), attempts = spans["step root/a"], spans["step root/a attempt"]
    assert [("INTERNAL", "UNSET", 2)] == facts([step], "weft.attempt")
    assert [("CLIENT", "ERROR", 1), ("CLIENT", "UNSET", 2)] == facts(attempts, "weft.attempt")
    assert [step.context.span_id] * 2 == [span.parent.span_id for span in attempts]
    assert [id_of(span) for span in attempts] == [parent_of(context) for context in target.contexts]


@pytest.mark.usefixtures("virtual_clock")
async def test_hedges_are_attempts_too(exporter: InMemorySpanExporter) -> None:
    """The one that is cancelled says so."""
    target = FakeTarget(m=in_turn(answering(after_ms=100), answering(after_ms=10)))
    spans = await traced(exporter, one("policy { hedge { after_ms: 40 } }"), target)
    attempts = sorted(facts(spans["step root/a attempt"], "weft.attempt"), key=lambda fact: fact[2])
    assert [("CLIENT", "ERROR", 1), ("CLIENT", "UNSET", 2)] == attempts
    assert [("INTERNAL", "UNSET", 2)] == facts(spans["step root/a"], "weft.attempt")


async def test_a_kept_answer_has_no_attempt(exporter: InMemorySpanExporter) -> None:
    """The step's span says that it was a hit."""
    executor = GraphExecutor(compiled(one("policy { cache { ttl_ms: 0 } }")), Runtime({"model": FakeTarget()}))
    for is_hit in (False, True):
        spans = await traced(exporter, executor)
        assert is_hit is spans["step root/a"][0].attributes["weft.cache_hit"]
        assert is_hit is not ("step root/a attempt" in spans)


async def test_a_fallback_is_a_child_of_the_step_that_failed(exporter: InMemorySpanExporter) -> None:
    """The step is no error if it answered; the attempt is."""
    spans = await traced(exporter, one('fallback { model_name: "f" }'), FakeTarget(m=failing()))
    (step,), (attempt,), (fallback,) = (spans[f"step root/{name}"] for name in ("a", "a attempt", "a>f"))
    assert [("INTERNAL", "UNSET", "f")] == facts([step], "weft.fallback")
    assert [step.context.span_id] * 2 == [attempt.parent.span_id, fallback.parent.span_id]
    assert [("CLIENT", "ERROR"), ("CLIENT", "UNSET")] == facts([attempt, fallback])


async def test_a_cascades_span_names_the_step_whose_answer_was_taken(exporter: InMemorySpanExporter) -> None:
    """The last that answered."""
    graph = """node { name: "root" sequence { step { name: "a" node: "c" } } }
    node { name: "c" cascade {
      step { model_name: "tiny" accept: "outputs.Y[0] > 5.0" } step { model_name: "base" accept: "outputs.Y[0] > 5.0" }
      step { model_name: "large" dependency: SOFT } } }"""
    spans = await traced(exporter, graph, FakeTarget(large=failing()))
    assert "base" == spans["step root/a"][0].attributes["weft.branch"]


async def test_a_skipped_step_has_no_span(exporter: InMemorySpanExporter) -> None:
    """It did nothing."""
    graph = one("when: 'inputs.X[0] > 5.0' default { output: 'Y' number: 7 }")
    assert {"weft.router/g"} == set(await traced(exporter, graph, FakeTarget()))


async def test_a_verdict_is_told_by_the_next_splitters_span(exporter: InMemorySpanExporter) -> None:
    """Once, whichever step it takes; not a change without another share."""
    graph = """node { name: "root" sequence { step { name: "ab" node: "ab" } } }
node { name: "ab" splitter { step { name: "a" model_name: "a" } step { name: "b" model_name: "b" }
  rollout { steps: [ 50, 100 ] guard { max_error_rate: 0.1 } } } }"""
    runtime = Runtime({"model": FakeTarget()})
    executor = GraphExecutor(compiled(graph), runtime)
    (rollout,) = runtime.rollouts
    rollout.follow(replace(rollout.state, phase="ROLLED_BACK", revision=1, verdict="rolled back: why"))
    found = [(await traced(exporter, executor))["step root/ab"][0].attributes or {} for _ in range(2)]
    assert ["ROLLED_BACK: rolled back: why", None] == [attributes.get("weft.rollout") for attributes in found]
    rollout.follow(replace(rollout.state, revision=2, verdict="the same"))
    assert rollout.news == ""
