"""Spans of a decoupled graph: few, whatever the number of responses, and no longer or shorter than what they show."""

from contextlib import aclosing
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import StatusCode
from tests.unit.router import make
from tests.unit.router.fake_target import failing, in_turn
from tests.unit.router.stream_targets import Plans, collected, compiled, counting, stream_of, stream_target

from weft.base.core import CallContext
from weft.base.errors import RemoteError
from weft.base.observing import telemetry
from weft.base.observing.trace_export import _RecordAllSampler
from weft.router.executor import GraphExecutor
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime


@pytest.fixture
def sampler() -> Sampler:
    """Spans are kept where they are sampled or failed."""
    return _RecordAllSampler(1.0)


def of(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """The sampled spans of a name."""
    return [span for span in exporter.get_finished_spans() if span.name == name]


def traced() -> CallContext:
    """A context within a SERVER span."""
    server = telemetry.start_span("server", parent=None, kind=telemetry.SERVER)
    return CallContext(trace_context=telemetry.context_of(server))


async def test_twelve_responses_are_one_span_with_events(exporter: InMemorySpanExporter) -> None:
    """What follows has a span for the first response; calls for the others go out unsampled, under the same parent."""
    target = stream_target()
    target.streams["llm"] = counting(12)
    await collected(stream_of(Plans().chat(), target, context=traced()))
    assert ["step root/post", "step root/llm"] == [
        span.name for span in exporter.get_finished_spans() if span.name != "step root/pre"
    ]
    (llm,) = of(exporter, "step root/llm")
    assert [("response", number) for number in range(1, 13)] == [
        (event.name, (event.attributes or {})["weft.response"]) for event in llm.events
    ]
    sent = [telemetry.inject(context.trace_context)["traceparent"] for context in target.contexts[2:]]
    assert [1] + [0] * 11 == [int(text[-2:], 16) & 1 for text in sent]
    assert {f"{llm.context.trace_id:032x}"} == {text.split("-")[1] for text in sent}


async def test_what_follows_a_collector_has_a_span_for_each_piece(exporter: InMemorySpanExporter) -> None:
    """Twelve responses are three pieces; the step that streams has one span."""
    target = stream_target()
    target.streams["a"] = counting(12)
    plan = compiled(
        """node { name: "root" sequence { step { name: "say" node: "pieces" output_map { key: "OUT" value: "P" } }
        step { name: "post" model_name: "post" input_map { key: "IN" value: "P" } } } }
        node { name: "pieces" collector { by: RESPONSES count: 4 join: "OUT" step { name: "llm" model_name: "a" } } }"""
    )
    await collected(stream_of(plan, target, context=traced()))
    found = [len(of(exporter, f"step root/{name}")) for name in ("say", "say/pieces[llm]", "post")]
    assert [1, 1, 3] == found


@pytest.mark.parametrize("is_retried", [False, True])
async def test_a_decoupled_step_ends_after_what_it_called(exporter: InMemorySpanExporter, is_retried: bool) -> None:
    """Its span, and that of its attempt, last as long as the stream, and not only to the first response."""
    target, build = stream_target(), Plans()
    ends_ns: list[int] = []

    async def script(call: Any, context: CallContext) -> Any:
        child = telemetry.start_span("child", parent=context.trace_context)
        for number in (1, 2, 3):
            yield make.tensor(number)
        telemetry.end_span(child)
        ends_ns.append(child.end_time)  # type: ignore[attr-defined]

    target.streams["llm"] = script
    options: dict[str, Any] = {"retry": RetryPlan(2, 0, frozenset({"UNAVAILABLE"}), 20.0)} if is_retried else {}
    plan = build.graph(build.stream("llm", "X", "t", **options), build.step("post", "t", "Y"))
    await collected(stream_of(plan, target, context=traced()))
    spans = of(exporter, "step root/llm") + of(exporter, "step root/llm attempt")
    assert 1 + is_retried == len(spans)
    assert all(span.end_time >= ends_ns[0] for span in spans)
    assert {StatusCode.UNSET} == {span.status.status_code for span in spans}


async def test_a_stream_that_fails_late_says_so_on_its_span(exporter: InMemorySpanExporter) -> None:
    """After responses that came; the span has them as events."""
    target = stream_target()
    target.streams["llm"] = counting(2, RemoteError("INTERNAL", "boom"))
    await collected(stream_of(Plans().chat(), target, context=traced()))
    (llm,) = of(exporter, "step root/llm")
    assert (StatusCode.ERROR, 13) == (llm.status.status_code, (llm.attributes or {})["rpc.grpc.status_code"])
    assert ["response", "response", "exception"] == [event.name for event in llm.events]


async def test_a_stream_that_is_left_ends_its_span(exporter: InMemorySpanExporter) -> None:
    """With status CANCELLED."""
    target = stream_target()
    target.streams["llm"] = counting(9)
    async with aclosing(stream_of(Plans().chat(), target, context=traced())) as results:
        await anext(results)
    (llm,) = of(exporter, "step root/llm")
    assert 1 == (llm.attributes or {})["rpc.grpc.status_code"]


async def test_a_stream_that_is_left_after_its_last_response_was_not_cancelled(exporter: InMemorySpanExporter) -> None:
    """Clients leave when they see the flag of the last one; nothing is withdrawn, and the step's status is OK."""
    target = stream_target()
    target.streams["llm"] = counting(2)
    async with aclosing(stream_of(Plans().chat(), target, context=traced())) as results:
        async for result in results:
            if result.is_final:
                break
    assert result.outputs
    (llm,) = of(exporter, "step root/llm")
    assert 0 == (llm.attributes or {})["rpc.grpc.status_code"]


@pytest.mark.parametrize(("stops_at_last", "code"), [(False, 1), (True, None)])
async def test_a_map_that_is_left_ends_its_span(
    exporter: InMemorySpanExporter, stops_at_last: bool, code: int | None
) -> None:
    """With status CANCELLED, unless its last response was there."""
    target = stream_target()
    target.streams["a"] = counting(2)
    text = """node { name: "root" map { over: "IN"
      step { name: "talk" model_name: "a" output_map { key: "OUT" value: "OUT" } } } }"""
    plan = compiled(text)
    async with aclosing(stream_of(plan, target, context=traced())) as results:
        async for result in results:
            if result.is_final or not stops_at_last:
                break
    (span,) = [one for one in of(exporter, "step root[talk]") if "weft.rows" in (one.attributes or {})]
    assert code == (span.attributes or {}).get("rpc.grpc.status_code")


@pytest.mark.parametrize(
    "options", [{}, {"max_inflight": 1}, {"retry": RetryPlan(2, 0, frozenset({"UNAVAILABLE"}), 20.0)}]
)
async def test_a_stream_without_a_response_ends_its_span(exporter: InMemorySpanExporter, options: Any) -> None:
    """And that of its attempt; the step counts no more as one that runs."""
    target, build = stream_target(), Plans()
    target.streams["llm"] = counting(0)
    plan = build.graph(build.stream("llm", "X", "t", **options), build.step("post", "t", "Y"))
    executor = GraphExecutor(plan, Runtime({"model": target}))
    for number in (1, 2):
        assert None is (await collected(stream_of(executor, target, context=traced())))[1]
        spans = of(exporter, "step root/llm") + of(exporter, "step root/llm attempt")
        assert number * (1 + ("retry" in options)) == len(spans)
        assert {StatusCode.UNSET} == {span.status.status_code for span in spans}


async def test_what_fails_for_a_later_response_is_recorded(exporter: InMemorySpanExporter) -> None:
    """Its span, though unsampled, ends with an error, and is exported for it."""
    target = stream_target()
    target.streams["llm"] = counting(3)

    async def echo(call: Any, context: CallContext) -> Any:
        return {output.name: next(iter(call.inputs.values())) for output in call.outputs}

    target.answers["post"] = in_turn(echo, failing("INTERNAL", "boom"))
    ended: list[Any] = []
    telemetry._state.provider.add_span_processor(_Ends(ended))  # type: ignore[union-attr]
    await collected(stream_of(Plans().chat(), target, context=traced()))
    posts = [span for span in ended if span.name == "step root/post"]
    assert [StatusCode.UNSET, StatusCode.ERROR] == [span.status.status_code for span in posts[:2]]


class _Ends(SpanProcessor):
    """Keeps every span that ends."""

    def __init__(self, ended: list[Any]) -> None:
        self._ended = ended

    def on_end(self, span: ReadableSpan) -> None:
        """Keep it."""
        self._ended.append(span)
