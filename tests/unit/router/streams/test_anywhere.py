"""Decoupled models anywhere in a graph: a node streams what the step streams that answers in its place."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import answering, failing
from tests.unit.router.stream_targets import (
    collected,
    compiled,
    counting,
    numbers,
    stream_of,
    stream_target,
)

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime


@pytest.fixture
def target() -> Any:
    return stream_target()


def root(kind: str, body: str, more: str = "") -> str:
    return f'node {{ name: "root" {kind} {{ {body} }} }} {more}'


def step(model: str, more: str = "", name: str = "") -> str:
    return f'step {{ name: "{name or model}" model_name: "{model}" {more} }}'


async def responses(text: str, target: Any, **options: Any) -> tuple[list[float | None], Any, str]:
    """Values of all responses, the error at the end, and the path; nothing is left behind."""
    context = CallContext()
    got, error = await collected(stream_of(compiled(text), target, context=context, **options))
    assert (0, 0) == (target.num_open, make.num_other_tasks())
    if error is None:
        assert [result.is_final for result in got] == [False] * (len(got) - 1) + [True]
    return numbers(got, "OUT"), error, dict(context.trailing_metadata)["x-graph-path"]


SPLIT = root("splitter", step("a", "weight: 1"))
NESTED = root("sequence", 'step { name: "n" node: "in" }', f'node {{ name: "in" sequence {{ {step("a")} }} }}')
CHAIN = root(
    "sequence",
    'step { name: "n" node: "in" output_map { key: "OUT" value: "T" } }'
    + step("post", 'input_map { key: "IN" value: "T" }'),
    """node { name: "in" sequence {
         step { name: "pre" model_name: "pre" output_map { key: "OUT" value: "P" } }
         step { name: "llm" model_name: "a" input_map { key: "IN" value: "P" } output_map { key: "OUT" value: "Q" } }
         step { name: "detok" model_name: "detok" input_map { key: "IN" value: "Q" } } } }""",
)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (SPLIT, "root[a]"),
        (root("switch", step("a", "otherwise: true")), "root[a]"),
        (root("cascade", step("a", "accept: 'outputs.OUT[0] > 0.5'") + step("post")), "root<a>"),
        (root("ensemble", step("a") + 'combine { output: "OUT" method: AVERAGE }'), "root{a}"),
        (NESTED, "root.n=in(a)"),
        (CHAIN, "root.n=in(pre;llm;detok);post"),
        (root("sequence", 'step { name: "s" node: "r" }', SPLIT.replace('"root"', '"r"')), "root.s=r[a]"),
    ],
)
async def test_a_node_streams_what_the_step_in_it_streams(target: Any, text: str, path: str) -> None:
    """In order, the last final, what follows once for each response, and what comes before once."""
    target.streams["a"] = counting(3)
    assert ([1, 2, 3], None, path) == await responses(text, target)
    assert 1 == target.called().count("a")
    assert target.called().count("pre") <= 1
    assert target.called().count("post") in (0, 3)


@pytest.mark.parametrize("text", [SPLIT, NESTED, CHAIN])
async def test_a_stream_without_a_response_is_one_of_the_node(target: Any, text: str) -> None:
    """Nothing follows it but the end."""
    target.streams["a"] = counting(0)
    values, error, _ = await responses(text, target)
    assert ([], None, 0) == (values, error, target.called().count("post"))


async def test_a_branch_that_does_not_stream_gives_one_response(target: Any) -> None:
    """Which branch it is, is seen by the request; what follows runs once."""
    text = root(
        "sequence",
        'step { name: "s" node: "w" output_map { key: "OUT" value: "T" } }'
        + step("post", 'input_map { key: "IN" value: "T" }'),
        'node { name: "w" switch { step { name: "one" when: \'inputs.IN[0] < 1.0\' model_name: "one" } '
        f"{step('a', 'otherwise: true')} }} }}",
    )
    assert ([0], None, "root.s=w[one];post") == await responses(text, target)


@pytest.mark.parametrize("num_sent", [0, 1, 2])
async def test_a_fallback_replaces_a_stream_that_has_sent_nothing(target: Any, num_sent: int) -> None:
    """After its first response a failure ends the stream: what was sent cannot be taken back."""
    target.streams["a"] = counting(num_sent, RemoteError("UNAVAILABLE", "gone"))
    target.streams["b"] = counting(2)
    values, error, path = await responses(root("sequence", step("a", 'fallback { model_name: "b" }')), target)
    if num_sent:
        assert (list(range(1, num_sent + 1)), "UNAVAILABLE", "root.a!") == (values, error.code, path)
    else:
        assert ([1, 2], None, "root.a!>b") == (values, error, path)


async def test_a_fallback_may_stream_where_its_step_does_not(target: Any) -> None:
    """The graph is decoupled: as often as the step answers it gives one response."""
    text = root("sequence", step("one", 'fallback { model_name: "a" }'))
    target.streams["a"] = counting(2)
    assert ([0], None, "root.one") == await responses(text, target)
    target.answers["one"] = failing("UNAVAILABLE", "gone")
    assert ([1, 2], None, "root.one!>a") == await responses(text, target)


@pytest.mark.parametrize("model", ["a", "one"])
async def test_a_soft_step_may_fail_late(target: Any, model: str) -> None:
    """Before a response its default stands in; later the stream ends with a response that says so, a fallback's too."""
    soft = 'dependency: SOFT default { output: "OUT" number: 7 dims: [ 1 ] } fallback { model_name: "b" }'
    for num_sent in (0, 2):
        target.answers["one"] = failing("UNAVAILABLE", "gone")
        target.streams["a"] = counting(0, RemoteError("UNAVAILABLE", "gone"))
        target.streams["b"] = counting(num_sent, RemoteError("INTERNAL", "boom"))
        values, error, _ = await responses(root("sequence", step(model, soft)), target)
        assert ([1, 2, None] if num_sent else [7], None) == (values, error)


async def test_a_soft_node_may_fail_late(target: Any) -> None:
    """A HARD step inside fails the node, and the soft step around it ends there."""
    target.streams["a"] = counting(2, RemoteError("UNAVAILABLE", "gone"))
    soft = 'dependency: SOFT default { output: "OUT" number: 7 dims: [ 1 ] }'
    assert ([1, 2, None], None, "root.n=in(a!)!") == await responses(
        NESTED.replace('node: "in"', f'node: "in" {soft}'), target
    )


async def test_a_stream_is_tried_again_before_its_first_response(target: Any) -> None:
    """A retry of the step around a node too; after the first response there is no other attempt."""
    tries = iter([counting(0, RemoteError("UNAVAILABLE", "gone")), counting(2, RemoteError("UNAVAILABLE", "late"))])

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        async for answer in next(tries)(call, context):
            yield answer

    target.streams["a"] = script
    text = NESTED.replace('node: "in"', 'node: "in" policy { retry { attempts: 3 } }')
    values, error, _ = await responses(text, target)
    assert ([1, 2], "UNAVAILABLE") == (values, error.code)
    assert "late" in error.message
    assert 2 == len(target.calls)


@pytest.mark.parametrize("text", [root("sequence", step("a", "policy { hedge { after_ms: 5 } }")), None])
async def test_hedging_a_stream_keeps_the_first_that_speaks(target: Any, text: str | None, virtual_clock: Any) -> None:
    """The other is cancelled, whether it has begun to speak or not."""
    starts: list[int] = []

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        number = len(starts)
        starts.append(number)
        await asyncio.sleep(0.05 if number == 0 else 0.001)
        for value in (1, 2):
            yield make.tensor(10 * number + value)
            await asyncio.sleep(0.1)

    target.streams["a"] = script
    text = text or NESTED.replace('node: "in"', 'node: "in" policy { hedge { after_ms: 5 } }')
    values, error, _ = await responses(text, target)
    assert ([11, 12], None, ["a"]) == (values, error, target.cancelled)


async def test_a_hedged_step_is_one_run_of_its_limit(target: Any, virtual_clock: Any) -> None:
    """As one that does not stream; the stream that is kept counts as long as it is open."""

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        number = len(target.calls)
        await asyncio.sleep(0.05 / number)
        yield make.tensor(number)
        await asyncio.sleep(0.1)

    target.streams["a"] = script
    text = root("sequence", step("a", "policy { hedge { after_ms: 5 } max_inflight: 1 }"))
    executor = GraphExecutor(compiled(text), Runtime({"model": target}))
    async with aclosing(stream_of(executor, target)) as results:
        assert [2] == numbers([await anext(results)], "OUT")
        _, error = await collected(stream_of(executor, target))
        assert error is not None
        assert "RESOURCE_EXHAUSTED" == error.code
    got, error = await collected(stream_of(executor, target))
    assert (1, None) == (len(numbers(got, "OUT")), error)


ACCEPT = "accept: 'outputs.OUT[0] > 1.5'"


async def test_a_cascade_judges_the_first_response(target: Any) -> None:
    """Accepted, all responses are the answer; else the stream is left unread and closed, and the next step answers."""
    target.streams |= {"a": counting(3), "b": counting(2)}
    text = root("cascade", step("a", ACCEPT) + step("b", ACCEPT.replace("1.5", "0.5")) + step("big"))
    values, error, path = await responses(text, target)
    assert ([1, 2], None, "root<a~;b>") == (values, error, path)
    assert (["a"], 0) == (target.cancelled, target.called().count("big"))


async def test_an_answer_in_hand_is_a_stream_too(target: Any) -> None:
    """What was not accepted counts where no later step answers."""
    target.streams["a"] = counting(3)
    target.answers["big"] = failing("UNAVAILABLE", "gone")
    text = root("cascade", step("a", ACCEPT) + step("big", "dependency: SOFT"))
    assert ([1, 2, 3], None, "root<a;big!>") == await responses(text, target)


async def test_a_stream_that_says_nothing_is_not_accepted(target: Any) -> None:
    """The cascade goes on; where nothing else answers it is the answer."""
    target.streams |= {"a": counting(0), "b": counting(2)}
    assert ([1, 2], None, "root<a;b>") == await responses(root("cascade", step("a", ACCEPT) + step("b")), target)
    target.answers["big"] = failing("UNAVAILABLE", "gone")
    text = root("cascade", step("a", ACCEPT) + step("big", "dependency: SOFT"))
    assert ([], None, "root<a;big!>") == await responses(text, target)


async def test_of_a_race_the_first_that_speaks_wins(target: Any, virtual_clock: Any) -> None:
    """The others are cancelled; a stream that ends without a response has not spoken."""

    def script(after_ms: int, *values: int) -> Any:
        async def answers(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
            await asyncio.sleep(after_ms / 1e3)
            for value in values:
                yield make.tensor(value)

        return answers

    target.streams |= {"a": script(9, 1, 2), "b": script(5, 3, 4), "c": script(1)}
    text = root("ensemble", step("a") + step("b") + step("c") + 'combine { output: "OUT" method: FIRST }')
    assert ([3, 4], None, "root{a~;b;c}") == await responses(text, target)
    target.answers["one"] = answering(9, after_ms=2)
    text = root("ensemble", step("a") + step("b") + step("one") + 'combine { output: "OUT" method: FIRST }')
    assert ([9], None, "root{a~;b~;one}") == await responses(text, target)


async def test_an_ensemble_is_combined_anew_for_each_response(target: Any) -> None:
    """One step may stream; the others are called once."""
    target.streams["a"] = counting(3)
    text = root("ensemble", step("a") + step("one") + 'combine { output: "OUT" method: SUM }')
    assert ([1, 2, 3], None, "root{a;one}") == await responses(text, target)
    assert ["a", "one"] == sorted(target.called())


@pytest.mark.parametrize(("first_ms", "expected"), [(1, [21, 22]), (50, [20])])
async def test_a_stream_counts_by_its_first_response_for_a_quorum(
    target: Any, virtual_clock: Any, first_ms: float, expected: list[float]
) -> None:
    """One that speaks too late is left out and cancelled, as any other straggler; then there is one response."""

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        await asyncio.sleep(first_ms / 1e3)
        for value in (1, 2):
            yield make.tensor(value)

    target.streams["a"] = script
    target.answers |= {"late": answering(40, after_ms=10), "two": answering(20, after_ms=3)}
    steps = "".join(step(model, "dependency: SOFT") for model in ("a", "late", "two"))
    text = root("ensemble", f'quorum: 1 straggler_ms: 5 {steps} combine {{ output: "OUT" method: SUM }}')
    path = f"root{{a{'~' * (first_ms > 5)};late~;two}}"
    assert (expected, None, path) == await responses(text, target)
    assert ("late" in target.cancelled, 0) == (True, target.num_open)


async def test_the_model_of_a_custom_is_called_for_each_response(target: Any) -> None:
    """The path shows it once."""
    target.streams["a"] = counting(2)
    target.answers["judge"] = answering(5)
    custom = 'custom { model_name: "judge" input_map { key: "IN" value: "OUT" } }'
    text = root("ensemble", step("a") + step("one") + f'combine {{ output: "OUT" method: CUSTOM {custom} }}')
    context = CallContext()
    got, error = await collected(stream_of(compiled(text), target, context=context))
    assert (None, [5, 5]) == (error, numbers(got, "OUT"))
    assert [("x-graph-path", "root{a;one;judge}")] == context.trailing_metadata
    assert 2 == target.called().count("judge")


async def test_a_shadow_of_a_stream_is_read_to_its_end(target: Any) -> None:
    """Its responses are dropped, and the graph is not decoupled."""
    target.streams["a"] = counting(3)
    plan = compiled(root("sequence", step("one") + step("a", "shadow { percent: 100 }")))
    runtime = Runtime({"model": target})
    await make.run(GraphExecutor(plan, runtime), inputs={"IN": make.tensor(0)})
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
    assert (3, 0, []) == (target.num_made, target.num_open, target.cancelled)


@pytest.mark.parametrize("text", [SPLIT, NESTED, CHAIN])
@pytest.mark.parametrize("num_taken", range(5))
async def test_a_client_that_leaves_ends_what_streams_inside(target: Any, text: str, num_taken: int) -> None:
    """After any number of responses: no call, no task, and limits are free again."""
    target.streams["a"] = counting(4)
    text = text.replace('node: "in"', 'node: "in" policy { max_inflight: 1 }').replace("sequence {", "sequence {", 1)
    executor = GraphExecutor(compiled(text), Runtime({"model": target}))
    for _ in range(2):
        async with aclosing(stream_of(executor, target)) as results:
            for _ in range(num_taken):
                await anext(results)
        assert (0, 0) == (target.num_open, make.num_other_tasks())


@pytest.mark.parametrize(
    "text",
    [
        NESTED.replace('node: "in"', 'node: "in" policy { max_inflight: 1 }'),
        NESTED.replace('name: "in"', 'name: "in" policy { max_inflight: 1 }'),
    ],
)
async def test_a_limit_of_a_node_or_a_step_counts_open_streams(target: Any, text: str) -> None:
    """As long as the stream is open, not to its first response."""
    target.streams["a"] = counting(3)
    executor = GraphExecutor(compiled(text), Runtime({"model": target}))
    async with aclosing(stream_of(executor, target)) as results:
        await anext(results)
        _, error = await collected(stream_of(executor, target))
        assert error is not None
        assert "RESOURCE_EXHAUSTED" == error.code
    got, error = await collected(stream_of(executor, target))
    assert ([1, 2, 3], None) == (numbers(got, "OUT"), error)


@pytest.mark.parametrize("limit", [1, 2])
async def test_back_pressure_reaches_the_model_in_a_node(target: Any, limit: int) -> None:
    """A model waits as long as nobody takes its responses; at most one more is read ahead."""
    target.streams["a"] = counting(9)
    text = CHAIN.replace("sequence {", f"sequence {{ max_inflight_responses: {limit} ", 1)
    async with aclosing(stream_of(compiled(text), target)) as results:
        await anext(results)
        for _ in range(50):
            await asyncio.sleep(0)
        assert target.num_made <= limit + 2


async def test_outputs_and_parameters_of_each_response_come_through(target: Any) -> None:
    """An intermediate of a step inside is that of the response; a trace says how many there were."""
    target.streams["a"] = counting(2)
    got, error = await collected(
        stream_of(compiled(CHAIN), target, outputs=("OUT", "n/in/llm/OUT"), parameters={"graph_trace": True})
    )
    assert error is None
    assert [1, 2] == numbers(got[:-1], "n/in/llm/OUT")
    trace = {entry["path"]: entry for entry in json.loads(str(got[-1].parameters["graph_trace"]))}
    assert (2, 2) == (trace["root/n"]["responses"], trace["root/n/in/llm"]["responses"])


@pytest.mark.parametrize(("model", "can_collect"), [("a", True), ("z", False)])
def test_a_graph_collects_where_its_models_do(model: str, can_collect: bool) -> None:
    """Wherever they are; responses that are merged stay several."""
    text = CHAIN.replace('model_name: "a"', f'model_name: "{model}"')
    assert (True, can_collect) == (compiled(text).signature.is_decoupled, compiled(text).signature.can_collect)
    merged = root("ensemble", step(model) + step("one") + 'combine { output: "OUT" method: MERGE }')
    assert not compiled(merged).signature.can_collect


async def test_a_request_for_one_response_collects_inside_nodes(target: Any) -> None:
    """The model is called once, for all at once."""
    executor = GraphExecutor(compiled(CHAIN), Runtime({"model": target}))
    call = InferCall("g", "", "r", inputs={"IN": make.tensor(4)})
    execution = executor.begin(call, CallContext(), is_collected=True)
    await execution.work()
    result = executor.result(execution, call)
    executor.end(execution, CallContext())
    assert {"OUT": make.tensor(4)} == result.outputs
    assert ["pre", "a", "detok", "post"] == target.called()
