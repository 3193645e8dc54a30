"""Maps beside their answers, which are kept cases in ``cases/map.txt``: limits, spans, drawings, lists."""

import asyncio
import json
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, in_turn
from tests.unit.router.graph_cases import compiled

from weft.base.core import CallContext
from weft.base.errors import WeftError
from weft.base.observing import telemetry
from weft.base.tensors import ITEMSIZE_BYTES, WireTensor, encode
from weft.language.draw.build import build_diagram
from weft.language.draw.formats import render_text
from weft.router.bandits.store import bandit_choices
from weft.router.operators.map.lists import Lists, Rows, stacked
from weft.router.reporting.path import TRACE_PARAMETER


def plan_of(step: str, more: str = "", *, batch: int = 1, head: str = "graph: LIST:INT64:-1,1 ->") -> Any:
    """A map over LIST with a model from LIST to S."""
    return compiled(f"""{head}
    model m: LIST:INT64:1 -> S:INT64:1 batch {batch}
    node {{ name: "root" map {{ over: "LIST" step {{ name: "s" model_name: "m" {step} }} {more} }} }}""")


def lists(size: int) -> dict[str, WireTensor]:
    """The inputs: so many rows."""
    return {"LIST": encode(np.arange(size, dtype=np.int64).reshape(size, 1))}


def test_paths_of_maps_pass_no_bandit() -> None:
    """Of a map without rows, and of one whose rows went different ways."""
    root = compiled("""graph: LIST:INT64:-1,1 ->
    model a: LIST:INT64:1 -> S:INT64:1
    node { name: "root" map { over: "LIST" step { name: "s" node: "each" } } }
    node { name: "each" switch { step { model_name: "a" otherwise: true } } }""").root
    assert [[], []] == [bandit_choices(path, root) for path in ("root*()", "root*(s#4=each[a])")]


async def test_chunks_that_wait_for_nothing_let_others_have_their_turn() -> None:
    """A thousand rows that a cache answers do not keep the event loop to themselves."""
    target, num_turns = FakeTarget(), 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    plan, rows = plan_of("policy { cache { } }", "max_inflight: 1"), {"LIST": encode(np.ones((1000, 1), int))}
    task = asyncio.create_task(others())
    await make.run(plan, target, rows)
    task.cancel()
    assert 1 == len(target.calls)
    assert num_turns > 20


async def test_one_span_has_the_counts_and_a_few_chunks_have_spans(exporter: InMemorySpanExporter) -> None:
    """Twenty chunks are one step of twenty calls, of which four are spans below it; the trace has one entry."""
    server = telemetry.start_span("weft.router/g", parent=None, kind=telemetry.SERVER)
    plan = plan_of('dependency: SOFT default { output: "S" integer: 0 }')
    target, context = FakeTarget(m=_failing_once()), CallContext(trace_context=telemetry.context_of(server))
    parameters = {TRACE_PARAMETER: True, "sequence_id": 7}
    result = await make.run(plan, target, lists(20), context=context, parameters=parameters)
    telemetry.end_span(server)
    spans = [span for span in exporter.get_finished_spans() if span.name == "step root[s]"]
    (own,) = [span for span in spans if "weft.chunks" in (span.attributes or {})]
    assert (20, 20, 1) == tuple((own.attributes or {})[f"weft.{name}"] for name in ("rows", "chunks", "failures"))
    assert [own.context.span_id] * 4 == [span.parent.span_id for span in spans if span is not own and span.parent]
    assert [7] * 20 == [call.parameters["sequence_id"] for call in target.calls]
    (entry,) = json.loads(str(result.parameters[TRACE_PARAMETER]))
    assert (20, 20, 1) == (entry["rows"], entry["chunks"], entry["failures"])


def _failing_once() -> Any:
    async def fail(call: Any, context: Any) -> Any:
        raise WeftError("gone")

    async def answer(call: Any, context: Any) -> Any:
        return {"S": call.inputs["LIST"]}

    return in_turn(answer, fail, answer)


def test_it_is_drawn() -> None:
    """From its description: what it is over, how many at once, and what becomes of the answers."""
    more = 'max_rows: 9 collect { output: "S" method: LIST }'
    text = render_text(build_diagram(plan_of("", more, batch=4)))
    for part in ("[map]", "each row of LIST", "4 rows at once", "8 chunks in work", "at most 9 rows"):
        assert part in text
    assert "S: LIST, lengths S_LENGTHS" in text


@pytest.mark.parametrize("batch", [0, 64])
@pytest.mark.parametrize("lead", [(), (1,), (4,)])
@pytest.mark.parametrize("counts", ["", 'lengths: "NUM" max_rows: 64'])
async def test_ten_million_rows_are_refused_before_anything_is_made_of_them(
    batch: int, lead: tuple[int, ...], counts: str
) -> None:
    """Whether they count or are padding; nothing is called, and no memory is taken for rows."""
    target = FakeTarget()
    head = f"graph: LIST:INT64:-1,1 NUM:INT64:1 ->{' batch 4' if lead else ''}"
    plan = plan_of("", counts, batch=batch, head=head)
    shape = (*lead, 10_000_000 // sum(lead or (1,)), 1)
    inputs = {"LIST": WireTensor("INT64", shape, bytes(80_000_000)), "NUM": encode(np.ones((*lead, 1), np.int64))}
    tracemalloc.start()
    try:
        text = r"g/1: root: 10000000 rows, padding included, .* higher 'max_rows'"
        with pytest.raises(WeftError, match=text) as caught:
            await make.run(plan, target, inputs)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert ("INVALID_ARGUMENT", []) == (caught.value.code, target.calls)


@pytest.mark.parametrize(
    ("step", "more", "size", "is_taken"),
    [
        ("", "", 65_536, True),
        ("", "", 65_537, False),
        ("", "max_rows: 65537", 65_537, True),
        ('when: "size(inputs.LIST) == 0" default { output: "S" integer: 0 }', "", 65_537, False),
        ('when: "size(inputs.LIST) == 0"', "", 65_537, True),
    ],
)
async def test_rows_have_a_limit_that_a_map_may_raise(step: str, more: str, size: int, is_taken: bool) -> None:
    """65,536 rows of all lists, those of a default too, unless `max_rows` is more; without a default none are made."""
    plan = plan_of(step, more, batch=4096, head="graph: LIST:INT64:-1,1 -> S?:INT64:-1,1")
    if is_taken:
        outputs = (await make.run(plan, FakeTarget(), lists(size))).outputs
        assert ({} if step else {"S": (size, 1)}) == {name: tensor.shape for name, tensor in outputs.items()}
    else:
        with pytest.raises(WeftError, match=f"{size} rows"):
            await make.run(plan, FakeTarget(), lists(size))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("datatype", ["BYTES", "FP16", "BF16", "BOOL"])
def test_chunks_of_any_size_make_the_lists_again(datatype: str, seed: int) -> None:
    """Rows without dims or of none, empty strings, empty lists: what counts stays, and padding is zeros."""
    chance = random.Random(seed)
    dims = chance.choice([(), (0,), (2,), (1, 2)])
    lists = Lists(size=chance.randint(0, 4), lengths=(), is_batched=chance.random() < 0.6)
    lengths = [chance.randint(0, lists.size) for _ in range(chance.randint(1, 3) if lists.is_batched else 1)]
    lists = Lists(lists.size, lengths, lists.is_batched)

    def values() -> bytes:
        if datatype == "BYTES":
            texts = [chance.choice([b"", b"x", b"\x00\xff", b"long" * 5]) for _ in range(int(np.prod(dims)))]
            return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        return chance.randbytes(int(np.prod(dims)) * ITEMSIZE_BYTES[datatype])

    filling = bytes(int(np.prod(dims)) * (4 if datatype == "BYTES" else ITEMSIZE_BYTES[datatype]))
    table = [[values() for _ in range(lists.size)] for _ in lengths]
    flat = [row for own, length in zip(table, lengths, strict=True) for row in own[:length]]
    rows = Rows(WireTensor(datatype, (*lists.shape, *dims), b"".join(b"".join(own) for own in table)), lists)
    parts, start = [], 0
    while start < len(flat):
        stop = min(len(flat), start + chance.randint(1, 3))
        parts.append(rows.part(start, stop, is_batched=True))
        assert (b"".join(flat[start:stop]), (stop - start, *(dims or (1,)))) == (bytes(parts[-1].data), parts[-1].shape)
        start = stop
    if parts:
        padded = [
            row if i < length else filling
            for own, length in zip(table, lengths, strict=True)
            for i, row in enumerate(own)
        ]
        whole = stacked(parts, lists)
        assert (b"".join(padded), (*lists.shape, *(dims or (1,)))) == (bytes(whole.data), whole.shape)
