"""Decoupled graphs in which something goes wrong, is given up, or is replaced."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.stream_targets import Plans, collected, counting, numbers, stream_of, stream_target

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError, RemoteError, ResourceExhaustedError
from weft.language.plan import DefaultPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime


@pytest.fixture
def target() -> Any:
    return stream_target()


@pytest.fixture
def build() -> Plans:
    return Plans()


@pytest.mark.parametrize("limit", [1, 2, 9])
async def test_a_failing_stream_ends_after_its_responses(build: Plans, target: Any, limit: int) -> None:
    """The error tells of the step, as that of any call; the path shows which failed."""
    target.streams["llm"] = counting(2, RemoteError("INTERNAL", "boom"))
    context = CallContext()
    plan = build.chat(max_inflight_responses=limit)
    got, error = await collected(stream_of(plan, target, context=context))
    assert [1, 2] == numbers(got)
    assert ("INTERNAL", "g/1: root/llm -> llm@1: boom") == (error.code, error.message)
    assert [("x-graph-path", "root.pre;llm!;post")] == context.trailing_metadata
    assert 0 == make.num_other_tasks()


@pytest.mark.parametrize("limit", [1, 2, 9])
async def test_a_failure_after_the_stream_cancels_it(build: Plans, target: Any, limit: int) -> None:
    """Responses before it are delivered; the model is told to stop, and the path shows the response that failed."""

    async def post(call: InferCall, context: CallContext) -> dict[str, Any]:
        if call.inputs["IN"] == make.tensor(3):
            raise RemoteError("UNAVAILABLE", "gone")
        return {"OUT": call.inputs["IN"]}

    async def endless(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        for number in range(1, 9):
            yield make.tensor(number)
        await asyncio.Event().wait()

    target.streams["llm"] = endless
    target.answers["post"] = post
    context = CallContext()
    plan = build.chat(max_inflight_responses=limit)
    got, error = await collected(stream_of(plan, target, context=context))
    assert [1, 2] == numbers(got)
    assert ("UNAVAILABLE", "g/1: root/post -> post@1: gone") == (error.code, error.message)
    assert [("x-graph-path", "root.pre;llm~;post!")] == context.trailing_metadata
    assert (["llm"], 0, 0) == (target.cancelled, target.num_open, make.num_other_tasks())


@pytest.mark.parametrize("earlier", [2, 3])
async def test_of_several_failures_the_first_in_order_counts(build: Plans, target: Any, earlier: int) -> None:
    """Whichever came earlier; error and path tell of the same one. Both happen before the first response is taken."""
    failed = {2: asyncio.Event(), 3: asyncio.Event()}

    async def fail(number: int, code: str) -> None:
        if number != earlier:
            await failed[earlier].wait()
        failed[number].set()
        raise RemoteError(code, f"number {number}")

    async def post(call: InferCall, context: CallContext) -> dict[str, Any]:
        if call.inputs["IN"] == make.tensor(3):
            await fail(3, "INTERNAL")
        return {"OUT": call.inputs["IN"]}

    async def last(call: InferCall, context: CallContext) -> dict[str, Any]:
        if call.inputs["IN"] == make.tensor(1):
            await asyncio.gather(*(event.wait() for event in failed.values()))
        if call.inputs["IN"] == make.tensor(2):
            await fail(2, "UNAVAILABLE")
        return {"OUT": call.inputs["IN"]}

    target.streams["llm"] = counting(3)
    target.answers |= {"post": post, "last": last}
    context = CallContext()
    steps = (build.stream("llm", "X", "t"), build.step("post", "t", "p"), build.step("last", "p", "Y"))
    plan = build.graph(*steps, max_inflight_responses=3)
    got, error = await collected(stream_of(plan, target, context=context))
    assert ([1], "g/1: root/last -> last@1: number 2") == (numbers(got), error.message)
    assert [("x-graph-path", "root.llm~;post;last!")] == context.trailing_metadata


async def test_a_failure_beside_the_stream_closes_it(build: Plans, target: Any) -> None:
    """A stream whose first response is there waits for the steps beside it; when one fails it is cancelled."""

    async def side(call: InferCall, context: CallContext) -> dict[str, Any]:
        await target.has_made.wait()
        raise RemoteError("INTERNAL", "boom")

    target.streams["llm"] = counting(2)
    target.answers["side"] = side
    plan = build.graph(build.stream("llm", "X", "Y"), build.step("side", "X", "s"), outputs={"Y": "Y", "S": "s"})
    got, error = await collected(stream_of(plan, target))
    assert ([], "INTERNAL") == (got, error.code)
    assert (1, ["llm"], 0) == (target.num_made, target.cancelled, target.num_open)


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("num_taken", [0, 1, 2, 5])
async def test_a_client_that_leaves_ends_everything(build: Plans, target: Any, limit: int, num_taken: int) -> None:
    """Closed after any number of responses: no call, no task, and the limits are free again."""
    target.streams["llm"] = counting(5)
    plan = build.chat(max_inflight_responses=limit, max_inflight=0)
    plan = replace(plan, root=replace(plan.root, max_inflight=1))
    executor = GraphExecutor(plan, Runtime({"model": target}))
    for _ in range(3):
        async with aclosing(stream_of(executor, target)) as results:
            for _ in range(num_taken):
                await anext(results)
        assert (0, 0) == (target.num_open, make.num_other_tasks())


async def test_the_deadline_holds_for_the_whole_stream(build: Plans, target: Any) -> None:
    """Of graph, step and client the earliest, for the stream and for all that follows."""
    target.streams["llm"] = counting(2)
    plan = build.graph(build.stream("llm", "X", "t", timeout_ms=50), build.step("post", "t", "Y"), timeout_ms=100)
    now_ns = 1_000_000_000
    executor = GraphExecutor(plan, Runtime({"model": target}, clock_ns=lambda: now_ns))
    await collected(stream_of(executor, target))
    assert [now_ns + 50_000_000] + [now_ns + 100_000_000] * 2 == [seen.deadline_ns for seen in target.contexts]
    target.contexts.clear()
    await collected(stream_of(executor, target, context=CallContext(deadline_ns=now_ns + 5)))
    assert {now_ns + 5} == {seen.deadline_ns for seen in target.contexts}


async def test_a_stream_is_opened_again_only_before_its_first_response(build: Plans, target: Any) -> None:
    """A failure before it is worth another attempt; one after it is the client's."""
    failures = [0, 0, 2]

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        for number in range(failures.pop(0)):
            yield make.tensor(number)
        raise RemoteError("UNAVAILABLE", "gone")

    target.streams["llm"] = script
    retry = RetryPlan(4, 0, frozenset({"UNAVAILABLE"}), 20)
    plan = build.graph(build.stream("llm", "X", "t", retry=retry), build.step("post", "t", "Y"))
    got, error = await collected(stream_of(plan, target))
    assert ([0, 1], "g/1: root/llm -> llm@1: gone") == (numbers(got), error.message)
    assert [] == failures
    assert 3 == target.called().count("llm")


async def test_a_soft_stream_that_fails_at_once_leaves_one_response(build: Plans, target: Any) -> None:
    """With its default; the trace has the reason."""
    target.streams["llm"] = counting(0, RemoteError("UNAVAILABLE", "gone"))
    default = (DefaultPlan(1, make.tensor(9), False),)
    plan = build.graph(build.stream("llm", "X", "t", is_soft=True, defaults=default), build.step("post", "t", "Y"))
    got, error = await collected(stream_of(plan, target, parameters={"graph_trace": True}))
    assert (None, [9]) == (error, numbers(got[:-1]))
    entries = json.loads(got[-1].parameters["graph_trace"])  # type: ignore[arg-type]
    assert ["UNAVAILABLE", "OK"] == [entry["status"] for entry in entries]
    assert "gone" in entries[0]["error"]


async def test_a_soft_stream_that_fails_later_ends_early(build: Plans, target: Any) -> None:
    """Its last response, path and trace say that it is not complete."""
    target.streams["llm"] = counting(2, RemoteError("UNAVAILABLE", "gone"))
    plan = build.graph(build.stream("llm", "X", "t", is_soft=True), build.step("post", "t", "Y"))
    context = CallContext()
    got, error = await collected(stream_of(plan, target, parameters={"graph_trace": True}, context=context))
    assert (None, [1, 2]) == (error, numbers(got[:-1]))
    assert [("x-graph-path", "root.llm!;post")] == context.trailing_metadata
    assert "root/llm: UNAVAILABLE" == got[-1].parameters["graph_incomplete"]
    assert "graph_incomplete" not in got[0].parameters
    entry = json.loads(got[-1].parameters["graph_trace"])[0]  # type: ignore[arg-type]
    assert (2, "UNAVAILABLE") == (entry["responses"], entry["status"])
    assert "gone" in entry["error"]


async def test_the_clients_own_deadline_is_never_softened(build: Plans, target: Any) -> None:
    """It goes up even through a soft step."""
    target.streams["llm"] = counting(1, RemoteError("DEADLINE_EXCEEDED", "late"))
    plan = build.graph(build.stream("llm", "X", "t", is_soft=True), build.step("post", "t", "Y"))
    got, error = await collected(stream_of(plan, target, context=CallContext(deadline_ns=1)))
    assert ([1], "DEADLINE_EXCEEDED") == (numbers(got), error.code)


async def test_a_stream_that_is_skipped_counts_as_one_response(build: Plans, target: Any) -> None:
    """Its outputs have their defaults."""
    default = (DefaultPlan(1, make.tensor(9), False),)
    when = FakeCondition(lambda request, frame: False)
    plan = build.graph(build.stream("llm", "X", "t", when=when, defaults=default), build.step("post", "t", "Y"))
    got, error = await collected(stream_of(plan, target))
    assert (None, [9], ["post"]) == (error, numbers(got), target.called())


async def test_a_fallback_answers_once(build: Plans, target: Any) -> None:
    """A model that is not decoupled takes over when the stream fails before its first response."""
    target.streams["llm"] = counting(0, RemoteError("UNAVAILABLE", "gone"))
    spare = make.node("root", SequencePlan, [build.step("spare", "X", "t")], inputs=["X"], outputs=["t"]).steps[0]
    plan = build.graph(build.stream("llm", "X", "t", fallback=spare), build.step("post", "t", "Y"))
    context = CallContext()
    got, error = await collected(stream_of(plan, target, context=context))
    assert (None, [0]) == (error, numbers(got))
    assert [("x-graph-path", "root.llm!>spare;post")] == context.trailing_metadata


async def test_a_limit_holds_until_the_stream_has_ended(build: Plans, target: Any) -> None:
    """`max_inflight` of the step counts open streams, not only their beginnings."""
    target.streams["llm"] = counting(3)
    plan = build.graph(build.stream("llm", "X", "t", max_inflight=1), build.step("post", "t", "Y"))
    executor = GraphExecutor(plan, Runtime({"model": target}))
    first = stream_of(executor, target)
    await anext(first)
    got, error = await collected(stream_of(executor, target))
    assert ([], True) == (got, isinstance(error, ResourceExhaustedError))
    await collected(first)
    got, error = await collected(stream_of(executor, target))
    assert ([1, 2, 3], None) == (numbers(got), error)


async def test_a_bad_response_fails_the_request(build: Plans, target: Any) -> None:
    """Each is held against what the model declares."""

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        yield make.tensor(1)
        yield make.text("no")

    target.streams["llm"] = script
    got, error = await collected(stream_of(build.chat(), target))
    assert [1] == numbers(got)
    assert isinstance(error, InternalError)
    assert "root/llm -> llm@1: output 'OUT' of model 'llm' is not as it declares: it is BYTES" in error.message
