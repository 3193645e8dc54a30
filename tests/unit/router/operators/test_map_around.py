"""Maps among other parts of the language: policies, nodes, graphs, spans, intermediates, deadlines, cancels."""

import asyncio

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.unit.router import make
from tests.unit.router.map_graphs import BATCHED, HEAD, READ, Target, answer, compiled, lists, numbers, outputs
from tests.unit.router.text_graphs import Others
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import WeftError
from weft.base.observing import telemetry
from weft.router.bandits.store import bandit_choices
from weft.router.reporting.path import PATH_HEADER, TRACE_PARAMETER
from weft.tools.draw.build import build_diagram
from weft.tools.draw.formats import render_text


async def test_policies_of_the_step_are_those_of_each_chunk() -> None:
    """A chunk is tried again alone; a fallback that takes fewer rows makes the chunks smaller."""
    step = 'model_name: "fail@4" policy { retry { attempts: 2 } } fallback { model_name: "sum@2" }'
    target, context = Target(), CallContext()
    inputs = {"LIST": numbers([1, 0], [13, 0], [2, 0], [3, 0]), "ADD": numbers(0)}
    assert {"S": [[1], [13], [2], [3]]} == await outputs(compiled(READ % (step, "")), target, inputs, context=context)
    assert {("fail@4", 3), ("sum@2", 1)} == {(name, target.called().count(name)) for name in set(target.called())}
    assert "root*(s#4!>sum@2)" == dict(context.trailing_metadata)[PATH_HEADER]


async def test_a_fallback_without_batching() -> None:
    """The chunks have one row then, and the answers of both have the same form."""
    step = 'model_name: "fail@4" fallback { model_name: "sum@0" }'
    inputs = {"LIST": numbers([1, 0], [13, 0], [2, 0]), "ADD": numbers(0)}
    assert {"S": [[1], [13], [2]]} == await outputs(compiled(READ % (step, "")), Target(), inputs)


async def test_equal_chunks_are_answered_by_the_cache() -> None:
    """Three equal rows are one call; the key sees a row."""
    target = Target()
    plan = compiled(READ % ("model_name: 'sum@1' policy { cache { ttl_ms: 0 key: 'string(inputs.LIST[0])' } }", ""))
    assert {"S": [[1], [1], [1]]} == await outputs(plan, target, {"LIST": numbers(*[[1, 0]] * 3), "ADD": numbers(0)})
    assert 1 == len(target.calls)


async def test_a_shadow_gets_copies_of_each_chunk() -> None:
    """Rows, as the step does."""
    nodes = """node { name: "root" map { over: "LIST" step { name: "s" model_name: "sum@2" }
               step { name: "copy" model_name: "text@4" shadow { percent: 100 } } } }"""
    target = Target()
    await outputs(compiled(nodes), target, lists(4))
    await asyncio.sleep(0.01)
    assert [(2, 2), (2, 2)] == [call.inputs["LIST"].shape for call in target.calls if call.model_name == "text@4"]


INNER = """name: "inner" platform: "graph" %s
input [ { name: "LIST" data_type: TYPE_INT64 dims: [ 2 ] }, { name: "ADD" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "S" data_type: TYPE_INT64 dims: [ 1 ] } ]
node { name: "root" sequence { step { model_name: "%s" } } }"""


@pytest.mark.parametrize("head", [HEAD, BATCHED])
@pytest.mark.parametrize(("inner", "model"), [("max_batch_size: 3", "sum@4"), ("", "sum@4"), ("", "sum@0")])
async def test_a_map_over_a_graph(head: str, inner: str, model: str) -> None:
    """Whatever of both graphs and the model have a batch dimension; where all have, rows travel together."""
    others = Others({"inner": INNER % (inner, model)})
    plan = compiled('node { name: "root" map { over: "LIST" step { name: "s" graph: "inner" } } }', head, others)
    target, inputs = Target(), dict(lists(5, add=1))
    if head == BATCHED:
        inputs = {"LIST": numbers([[0, 0], [1, 10]], [[2, 20], [3, 30]]), "ADD": numbers([1], [1])}
    found = (await outputs(plan, target, inputs))["S"]
    assert ([[[1], [12]], [[23], [34]]] if head == BATCHED else [[1], [12], [23], [34], [45]]) == found
    assert (2 if inner else sum(map(len, found)) if head == BATCHED else 5) == len(target.calls)


async def test_a_map_over_a_node_runs_it_row_by_row_without_a_batch_dimension() -> None:
    """Conditions inside see one row."""
    nodes = """
    node { name: "root" map { over: "LIST" step { name: "s" node: "each" } } }
    node { name: "each" switch { step { name: "big" when: "inputs.LIST[0] > 2" model_name: "sum@4" }
                                 step { name: "rest" otherwise: true model_name: "sum@0" } } }
    """
    target, context = Target(), CallContext()
    plan = compiled(nodes)
    assert {"S": [[0], [11], [22], [33]]} == await outputs(plan, target, lists(4), context=context)
    assert ["sum@0", "sum@0", "sum@0", "sum@4"] == sorted(target.called())
    path = dict(context.trailing_metadata)[PATH_HEADER]
    assert "root*(s#4=each[rest])" == path
    assert [] == bandit_choices(path, plan.root)


async def test_a_map_over_a_cascade_by_row() -> None:
    """In a graph with a batch dimension only the unsure rows of a chunk travel on."""
    nodes = """
    node { name: "root" map { over: "LIST" step { name: "s" node: "sure" } } }
    node { name: "sure" cascade { per_row: true
      step { name: "small" model_name: "sum@4" accept: "outputs.S[0] < 20" }
      step { name: "large" model_name: "sum@2" } } }
    """
    target = Target()
    inputs = {"LIST": numbers([[1, 0], [30, 0], [2, 0], [40, 0]]), "ADD": numbers([0])}
    with pytest.raises(WeftError, match="G009"):
        compiled(nodes, BATCHED)
    plan = compiled(nodes.replace("sum@2", "sum@4").replace("large", "again"), BATCHED)
    assert {"S": [[[1], [30], [2], [40]]]} == await outputs(plan, target, inputs)
    assert [(4, 2), (2, 2)] == target.sizes()


async def test_an_intermediate_tensor_has_the_rows_of_all_chunks() -> None:
    """Of the step, and of a step within."""
    nodes = """
    node { name: "root" sequence { step { name: "m" node: "each" } } }
    node { name: "each" map { over: "LIST" step { name: "s" node: "two" } } }
    node { name: "two" sequence { step { name: "t" model_name: "text@0" } step { name: "u" model_name: "sum@0" } } }
    """
    names = ["m/each[s]/S", "m/each[s]/two/u/S", "m/each[s]/two/t/T"]
    found = await outputs(compiled(nodes), Target(), lists(3), outputs=names)
    assert [[[0], [11], [22]]] * 2 + [[[b"[0, 0]"], [b"[1, 10]"], [b"[2, 20]"]]] == [found[name] for name in names]


async def test_one_span_has_the_counts_and_a_few_chunks_have_spans(exporter: InMemorySpanExporter) -> None:
    """Twenty chunks are one step of twenty calls, of which four are spans below it."""
    server = telemetry.start_span("weft.router/g", parent=None, kind=telemetry.SERVER)
    step = 'model_name: "fail@1" dependency: SOFT default { output: "S" integer: 0 }'
    inputs = {"LIST": numbers(*([row, 0] for row in range(20))), "ADD": numbers(0)}
    context = CallContext(trace_context=telemetry.context_of(server))
    target = Target()
    await outputs(compiled(READ % (step, "")), target, inputs, context=context)
    telemetry.end_span(server)
    spans = [span for span in exporter.get_finished_spans() if span.name == "step root[s]"]
    (own,) = [span for span in spans if "weft.chunks" in (span.attributes or {})]
    assert (20, 20, 1) == tuple((own.attributes or {})[f"weft.{name}"] for name in ("rows", "chunks", "failures"))
    assert [own.context.span_id] * 4 == [span.parent.span_id for span in spans if span is not own and span.parent]
    assert {own.context.trace_id} == {span.context.trace_id for span in spans}


async def test_the_trace_has_the_counts() -> None:
    """In one entry for all chunks."""
    result = await make.run(
        compiled(READ % ('model_name: "sum@2"', "")), Target(), lists(5), parameters={TRACE_PARAMETER: True}
    )
    trace = str(result.parameters[TRACE_PARAMETER])
    assert '"rows":5,"chunks":3,"failures":0' in trace
    assert 1 == trace.count('"path"')


async def test_a_deadline_reaches_every_chunk(virtual_clock: VirtualClock) -> None:
    """The map ends when the time of its node is over, with no call and no task left."""

    async def slow(call, context):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.02)
        return await answer(call, context)

    nodes = """node { name: "root" sequence { step { name: "m" node: "each" } } }
    node { name: "each" policy { timeout_ms: 50 }
      map { over: "LIST" max_inflight: 2 step { name: "s" model_name: "sum@1" } } }
    """
    target, start_ns = Target(), virtual_clock()
    target.answers["sum@1"] = slow
    with pytest.raises(WeftError, match="no answer") as caught:
        await outputs(compiled(nodes), target, lists(10))
    assert ("DEADLINE_EXCEEDED", 0, 0) == (caught.value.code, target.num_open, make.num_other_tasks())
    assert 50_000_000 == virtual_clock() - start_ns


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancel_at_any_turn_leaves_nothing(turns: int) -> None:
    """No call and no task."""
    target = Target()
    work = asyncio.create_task(outputs(compiled(READ % ('model_name: "sum@1"', "max_inflight: 3")), target, lists(9)))
    for _ in range(turns):
        await asyncio.sleep(0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert (0, 0) == (target.num_open, make.num_other_tasks())


def test_it_is_drawn() -> None:
    """From its description: what it is over, how many at once, and what becomes of the answers."""
    collect = 'max_rows: 9 collect { output: "R" method: LIST }'
    text = render_text(build_diagram(compiled(READ % ('model_name: "repeat@4"', collect))))
    for part in ("[map]", "each row of LIST", "4 rows at once", "8 chunks in work", "at most 9 rows"):
        assert part in text
    assert "R: LIST, lengths R_LENGTHS" in text
