"""A map over a decoupled model: responses of all rows by arrival, each with the number of its row."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import answering
from tests.unit.router.stream_targets import StreamModels, collected, stream_target

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError
from weft.base.tensors import WireTensor, decode, encode
from weft.language import GraphSource
from weft.language.plan import GraphPlan
from weft.router.compile import check_graph, compile_graph
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

STEP = 'step { name: "talk" model_name: "a" input_map { key: "IN" value: "LIST" } %s }'
MAP = f'over: "LIST" index: "ROW" {STEP}'


class Models(StreamModels):
    """`b` batches."""

    def find(self, model_name: str, version: str) -> Any:
        """As ``Catalog.find``."""
        target, signature = super().find(model_name, version)
        return target, replace(signature, max_batch_size=4 if model_name == "b" else 0)


def graph(body: str, nodes: str = "", *, batch: int = 0) -> str:
    """A graph whose root is a map of LIST."""
    return f"""name: "g" platform: "graph" max_batch_size: {batch}
      input [ {{ name: "LIST" data_type: TYPE_FP32 dims: [ -1, -1 ] }} ]
      output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }},
               {{ name: "ROW" data_type: TYPE_INT64 dims: [ {2 if batch else 1} ] }} ]
      node {{ name: "root" map {{ {body} }} }} {nodes}"""


def compiled(text: str) -> GraphPlan:
    """The plan."""
    return compile_graph(GraphSource(text, "g.pbtxt"), Models())


def rows(*values: Any) -> WireTensor:
    """The list."""
    return encode(np.asarray(values, np.float32))


async def responses(
    executor: GraphExecutor | GraphPlan, target: Any, given: WireTensor, context: CallContext | None = None
) -> tuple[list[InferResult], Any]:
    """Everything that comes, and the error."""
    if isinstance(executor, GraphPlan):
        executor = GraphExecutor(executor, Runtime({"model": target}))
    call = InferCall("g", "", "r", inputs={"LIST": given})
    return await collected(executor.stream(call, context if context is not None else CallContext()))


def told(results: list[InferResult]) -> list[tuple[list[int], float]]:
    """(row, first value) of each response but an empty one."""
    return [
        (decode(one.outputs["ROW"]).ravel().tolist(), float(decode(one.outputs["OUT"]).ravel()[0]))
        for one in results
        if not one.is_null
    ]


def repeating(pause_ms: float = 0) -> Any:
    """A row of n is answered n times, with 10 n, 10 n + 1, ...; each after n pauses."""

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        tensor = call.inputs["IN"]
        number = int(decode(tensor).ravel()[0])
        if number == 9:
            raise RemoteError("UNAVAILABLE", "gone")
        for count in range(number):
            await asyncio.sleep(number * pause_ms / 1e3)
            yield encode(decode(tensor) * 10 + count)

    return script


@pytest.fixture
def target() -> Any:
    target = stream_target()
    target.streams |= {"a": repeating(), "b": repeating()}
    return target


async def test_responses_of_all_rows_come_by_arrival(target: Any, virtual_clock: Any) -> None:
    """Those of one row in order, each with its row as an output and as a parameter; only the last is final."""
    target.streams["a"] = repeating(10)
    context = CallContext()
    got, error = await responses(compiled(graph(MAP % "")), target, rows([2], [3], [1]), context)
    assert error is None
    assert [([2], 10), ([0], 20), ([1], 30), ([0], 21), ([1], 31), ([1], 32)] == told(got)
    assert ["2", "0", "1", "0", "1", "1"] == [one.parameters["graph_row"] for one in got]
    assert [False] * 5 + [True] == [one.is_final for one in got]
    assert [("x-graph-path", "root*(talk#3)")] == context.trailing_metadata
    assert (3, 0, 0) == (len(target.calls), target.num_open, make.num_other_tasks())


async def test_rows_of_a_model_that_batches_are_sent_one_by_one(target: Any) -> None:
    """With its batch dimension on the way, and without one in the graph; what follows runs for each response."""
    text = graph(MAP.replace('"a"', '"b"') % "").replace('"root"', '"m"')
    text += """node { name: "root" sequence { step { name: "m" node: "m" output_map { key: "OUT" value: "T" } }
      step { name: "post" model_name: "post" input_map { key: "IN" value: "T" } } } }"""
    got, error = await responses(compiled(text), target, rows([1], [2]))
    assert (None, [([0], 10), ([1], 20), ([1], 21)]) == (error, sorted(told(got)))
    assert {(1, 1)} == {call.inputs["IN"].shape for call in target.calls if call.model_name == "b"}
    assert 3 == target.called().count("post")


async def test_lists_of_a_batch_number_list_and_row(target: Any) -> None:
    """A response has one row, of the list that is named."""
    text = graph(MAP.replace('"a"', '"b"') % "", batch=4)
    got, error = await responses(compiled(text), target, rows([[1], [2]], [[1], [1]]))
    assert (None, [([0, 0], 10), ([0, 1], 20), ([0, 1], 21), ([1, 0], 10), ([1, 1], 10)]) == (error, sorted(told(got)))
    assert {"0:0", "0:1", "1:0", "1:1"} == {str(one.parameters["graph_row"]) for one in got if not one.is_null}


async def test_an_empty_list_has_no_response(target: Any) -> None:
    """But the end."""
    got, error = await responses(compiled(graph(MAP % "")), target, encode(decode(rows([1]))[:0]))
    assert (None, [True], 0) == (error, [one.is_null for one in got], len(target.calls))


async def test_a_row_that_fails_ends_the_map_unless_it_is_soft(target: Any) -> None:
    """The message says which; a soft one has its default as its response, and the others go on."""
    got, error = await responses(compiled(graph(MAP % "")), target, rows([1], [9], [1]))
    assert error is not None
    assert "UNAVAILABLE" == error.code
    assert error.message.endswith("-> a@1: gone (row 1 of 3)")
    assert (0, 0) == (target.num_open, make.num_other_tasks())
    soft = 'dependency: SOFT default { output: "OUT" number: 7 dims: [ 1 ] }'
    got, error = await responses(compiled(graph(MAP % soft)), target, rows([1], [9], [1]))
    assert (None, [([0], 10), ([1], 7), ([2], 10)]) == (error, sorted(told(got)))


async def test_a_step_that_is_not_due_gives_each_row_its_default(target: Any) -> None:
    """Without a call; the last is final."""
    more = 'when: "max(inputs.LIST) > 5.0" default { output: "OUT" number: 7 dims: [ 1 ] }'
    got, error = await responses(compiled(graph(MAP % more)), target, rows([1], [2]))
    assert (None, [([0], 7), ([1], 7)], 0) == (error, told(got), len(target.calls))
    assert [False, True] == [one.is_final for one in got]


@pytest.mark.parametrize("limit", [1, 2])
async def test_so_many_rows_are_in_work(target: Any, limit: int) -> None:
    """The next row begins when one has ended; models wait for the client."""
    plan = compiled(graph(f"{MAP % ''} max_inflight: {limit}"))
    executor = GraphExecutor(plan, Runtime({"model": target}))
    call = InferCall("g", "", "r", inputs={"LIST": rows([3], [3], [3])})
    async with aclosing(executor.stream(call, CallContext())) as results:
        await anext(results)
        for _ in range(50):
            await asyncio.sleep(0)
        assert (limit, limit) == (target.num_open, len(target.calls))
        assert target.num_made <= limit + 1
    assert (0, 0) == (target.num_open, make.num_other_tasks())


async def test_a_map_of_maps_names_both_rows(target: Any) -> None:
    """Outermost first, as the parameter; a merge inside names its step as well."""
    text = graph(
        'over: "LIST" step { name: "each" node: "in" input_map { key: "L" value: "LIST" } }',
        """node { name: "in" map { over: "L" index: "ROW"
             step { name: "both" node: "both" input_map { key: "IN" value: "L" } } } }
           node { name: "both" ensemble { step { name: "a" model_name: "a" } step { name: "one" model_name: "one" }
             combine { output: "OUT" method: MERGE } } }""",
    )
    target.answers["one"] = answering(5)
    got, error = await responses(compiled(text), target, rows([1, 2]))
    assert error is None
    assert {("0/0", "a"), ("0/0", "one"), ("0/1", "a"), ("0/1", "one")} == {
        (one.parameters["graph_row"], one.parameters["graph_step"]) for one in got if not one.is_null
    }


@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_a_cancel_after_any_turn_leaves_nothing(target: Any, num_cancels: int) -> None:
    """No call, no task, no place in a limit."""
    plan = compiled(graph(f"{MAP % 'policy { max_inflight: 4 }'} max_inflight: 2"))
    for num_turns in range(200):
        executor = GraphExecutor(plan, Runtime({"model": target}))
        request = asyncio.create_task(responses(executor, target, rows([1], [2], [2])))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        is_over = request.done()
        for _ in range(num_cancels):
            request.cancel()
            await asyncio.sleep(0)
        await asyncio.wait((request,))
        assert (0, 0) == (target.num_open, make.num_other_tasks())
        got, error = await responses(executor, target, rows([1], [2], [2], [1]))
        assert (None, 6) == (error, len(told(got)))
        if is_over:
            break
    assert is_over


def test_what_is_for_lists_or_for_streams_alone_is_refused() -> None:
    """With the reason (G018)."""
    lists = graph(f'{MAP % ""} max_batch_size: 1 collect {{ output: "OUT" method: LIST }}'.replace('"a"', '"b"'))
    found = [one.message for one in check_graph(GraphSource(lists, "g.pbtxt"), Models()) if one.code == "G018"]
    assert 2 == len(found)
    assert all("where the step streams" in text for text in found)
    plain = graph(MAP.replace('"a"', '"one"') % "").replace("dims: [ -1 ]", "dims: [ -1, -1 ]")
    (text,) = [one.message for one in check_graph(GraphSource(plain, "g.pbtxt"), Models()) if one.code == "G018"]
    assert "'index' has no effect where the step gives one answer for each row" in text
