"""A random graph as a file, and the models that it calls."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from tests.unit.router.naive_types import may_be_absent, outputs_that_may_be_absent
from tests.unit.router.random_graphs import (
    WIDTH,
    Model,
    Node,
    Step,
    Test,
    default_row,
    models_within,
    nodes_within,
)
from tests.unit.router.stream_targets import stream_target
from tests.unit.router.virtual_clock import virtual_clock_of_loop

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, bytes_tensor, decode, encode
from weft.language import GraphPlan, GraphSource
from weft.language.syntax.file import GraphError
from weft.router.combine import METHODS
from weft.router.compile import compile_graph
from weft.router.operators.collector import CollectorPlan
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.map import MapPlan
from weft.router.operators.splitter import SplitterPlan
from weft.router.operators.switch import SwitchPlan
from weft.router.tensors import with_batch, without_batch

MAX_BATCH_SIZE = 64


@lru_cache(16)
def plan_of(root: Node) -> GraphPlan:
    """The graph's plan. Raises GraphError where the language does not allow it."""
    return compile_graph(GraphSource(text_of(root), "graph.pbtxt"), Catalog(root), Graphs(root))


def files_of(root: Node) -> str:
    """The graph's file and those of the graphs that it runs."""
    return "\n".join(map(text_of, [root, *Graphs(root).nodes.values()]))


def is_allowed(root: Node) -> bool:
    """Whether the language allows the graph; what else is wrong with it is raised.

    Something may be absent where it must not (G010), a branch has the test of an earlier one (G013), or streams cannot
    be joined (G019, G040), a default stands for what is always there (G018), a map reads no list (G028).
    """
    try:
        plan_of(root)
    except GraphError as error:
        codes = {found.code for found in error.diagnostics if found.severity == "error"}
        if not codes <= {"G010", "G013", "G018", "G019", "G028", "G040"}:
            raise
        return False
    return True


def text_of(root: Node) -> str:
    """The graph as a file."""
    name = root.name if root.is_graph else "g"
    head = f'name: "{name}" platform: "graph" max_batch_size: {MAX_BATCH_SIZE * root.is_batched}'
    within = nodes_within(root, of_file=True)
    nodes = [(_map if node.kind is MapPlan else _node)(node, is_root=node is root) for node in within]
    return "\n".join([head, *_signature(root), *nodes]) + "\n"


def _signature(node: Node) -> list[str]:
    absent = outputs_that_may_be_absent(node)
    outputs = [_tensor("output", name, is_optional=name in absent) for name in node.outputs]
    return [_tensor("input", "X"), _tensor("input", "E", is_optional=True), *outputs]


def _tensor(field: str, name: str, *, is_optional: bool = False) -> str:
    return f'{field} {{ name: "{name}" data_type: TYPE_UINT8 dims: [ {WIDTH} ]{" optional: true" * is_optional} }}'


def _node(node: Node, *, is_root: bool) -> str:
    absent = may_be_absent(node)
    parts = [f"step {{ {_step(node, step, absent)} }}" for step in node.steps]
    if node.kind is SwitchPlan and any(step.value for step in node.steps):
        parts.append("on: 'min(inputs.X) % 3'")
    if node.kind is CollectorPlan:
        parts += [f"by: {node.piece}", *(f'join: "{name}"' for name in node.joins)]
    for field in ("quorum", "straggler_ms", "count", "max_bytes"):
        if value := getattr(node, field):
            parts.append(f"{field}: {value}")
    parts += [f'answer_after: "{name}"' for name in node.answer_after]
    parts += ["per_row: true"] * node.per_row + ["ordered: true"] * node.is_ordered
    if node.kind is EnsemblePlan:
        method = next(name for name, method in METHODS.items() if method is node.method)
        custom = ""
        if node.custom is not None:
            maps = f"{_pairs('input_map', [('S', 'Y')])} {_pairs('output_map', [('OUT', 'Y')])}"
            custom = f'custom {{ model_name: "{node.custom.name}" {maps} }}'
        parts.append(f'combine {{ output: "Y" method: {method} {custom} }}')
    if node.again is not None:
        space = "outputs" if node.again.name not in ("X", "E") else "inputs"
        carry = f'carry {{ key: "{node.carries}" value: "X" }}' if node.carries else ""
        test = _cel(node.again, absent, space)
        parts.append(f"loop {{ while: '{test}' max_iterations: {node.max_iterations} {carry} }}")
    declared = "" if is_root else " ".join(_signature(node) if node.is_declared else _signature(node)[:2])
    body = "\n    ".join(parts)
    for tensor, name in node.in_place:
        said = rf'(value: "|output: "|carry {{ key: "|inputs\.|outputs\.){tensor}\b'
        body = re.sub(said, rf"\g<1>{name}", body)
    return f'node {{ name: "{"root" if is_root else node.name}" {declared}\n  {node.kind.kind} {{\n    {body} }} }}'


def _map(node: Node, *, is_root: bool) -> str:
    """A map among the steps that make its lists, and one tensor of its lists."""
    assert node.split is not None
    assert node.join is not None
    name = "root" if is_root else node.name
    made = _pairs("output_map", [("LIST", "L"), ("COUNT", "C")])
    joined = _pairs("input_map", [("X", "X"), ("L", "LISTS")]) + _pairs("output_map", [("OUT", "Y")])
    each = [("Y", "LISTS")]
    collect = ""
    if node.collects_lists:
        joined += _pairs(" input_map", [("N", "LENGTHS")])
        each.append(("Y_LENGTHS", "LENGTHS"))
        collect = 'collect { output: "Y" method: LIST }'
    over = 'over: "L"' + ' lengths: "C"' * node.has_lengths
    sizes = {"max_batch_size": node.chunk_rows, "max_inflight": node.max_inflight}
    sizes_text = " ".join(f"{field}: {value}" for field, value in sizes.items() if value)
    return "\n".join(
        [
            f'node {{ name: "{name}" {"" if is_root else " ".join(_signature(node))}\n  sequence {{',
            f'    step {{ name: "split" model_name: "{node.split.name}" {made} }}',
            f'    step {{ name: "each" node: "{node.name}m" {_pairs("output_map", each)} }}',
            f'    step {{ name: "join" model_name: "{node.join.name}" {joined} }} }} }}',
            f'node {{ name: "{node.name}m"\n  map {{ {over} {sizes_text} {collect}',
            f"    step {{ {_step(node, node.steps[0], frozenset('E'))} }} }} }}",
        ]
    )


def _step(node: Node, step: Step, absent: frozenset[str], *, is_fallback: bool = False) -> str:
    parts = [] if is_fallback else [f'name: "{step.name}"']
    if isinstance(step.target, Node):
        parts.append(f'{"graph" if step.target.is_graph else "node"}: "{step.target.name}"')
    else:
        parts.append(f'model_name: "{step.target.name}"')
    unsaid = isinstance(step.target, Model) and step.target.index % 2  # wired by name
    mapped = {tensor for tensor, _ in node.in_place}
    said = [(name, tensor) for name, tensor in step.inputs if not unsaid or name != tensor or tensor in mapped]
    parts += [_pairs("input_map", said), _pairs("output_map", step.outputs)]
    parts += [f'constant {{ input: "{name}" integer: {list(row)} }}' for name, row in step.constants]
    if step.when:
        parts.append(f"when: '{' && '.join(_cel(test, absent) for test in step.when)}'")
    if step.accept is not None:
        parts.append(f"accept: '{_cel(step.accept, outputs_absent(step), 'outputs')}'")
    if step.value:
        parts.append(f'case: "{step.value}"')
    parts += ["otherwise: true"] * step.is_otherwise + ["dependency: SOFT"] * step.is_soft
    for tensor in step.defaults:
        parts.append(f'default {{ output: "{tensor}" integer: {list(default_row(step, tensor))} dims: [ {WIDTH} ] }}')
    if node.kind is SplitterPlan and not is_fallback:
        parts.append(f"weight: {1e6 if step is node.steps[-1] else 1e-6}")
    parts += [f'after: "{name}"' for name in step.after]
    if step.fallback is not None:
        parts.append(f"fallback {{ {_step(node, step.fallback, absent, is_fallback=True)} }}")
    return " ".join(filter(None, [*parts, _policy(step)]))


def outputs_absent(step: Step) -> frozenset[str]:
    """Which tensors of an answer of a step may be absent."""
    absent = frozenset[str]()
    for one in step.chain:
        inner = outputs_that_may_be_absent(one.target) if isinstance(one.target, Node) else one.target.leaves_out
        absent |= {tensor for name, tensor in one.outputs if name in inner}
    return absent


def _policy(step: Step) -> str:
    parts = [f"{field}: {value}" for field in ("timeout_ms", "min_remaining_ms") if (value := getattr(step, field))]
    if step.retry:
        codes = " ".join(f'on: "{code}"' for code in sorted(step.retry.codes))
        attempts = f"attempts: {step.retry.attempts} backoff_ms: {step.retry.backoff_ms}"
        parts.append(f"retry {{ {attempts} {codes} budget_percent: 100 }}")
    if step.hedge:
        parts.append(f"hedge {{ after_ms: {step.hedge.after_ms} max_extra: {step.hedge.max_extra} }}")
    parts += ["cache { max_mib: 1024 }"] * step.is_cached
    return f"policy {{ {' '.join(parts)} }}" if parts else ""


def _cel(test: Test, absent: frozenset[str], space: str = "inputs") -> str:
    if test.is_of_step:
        asked = f"{test.name}.ok" if test.rest else f"has({test.name})"
        return f"{'!' * test.is_not}{asked}"
    name = f"{space}.{test.name}"
    if not test.rest:
        return f"{'!' * test.is_not}has({name})"
    compared = f"min({name}) % 4 < {test.rest}"
    if test.name in absent:
        compared = f"has({name}) && {compared}"
    return f"!({compared})" if test.is_not else compared


def _pairs(field: str, entries: Any) -> str:
    return " ".join(f'{field} {{ key: "{key}" value: "{value}" }}' for key, value in entries)


class Graphs:
    """The graphs that a graph runs, at any depth."""

    def __init__(self, root: Node) -> None:
        self.nodes = {node.name: node for node in nodes_within(root) if node.is_graph}

    def find(self, name: str, version: str) -> GraphSource | None:
        """As `GraphLookup.find`."""
        node = self.nodes.get(name)
        return None if node is None else GraphSource(text_of(node), f"{name}/graph.pbtxt", name)

    def names(self) -> list[str]:
        """As `GraphLookup.names`."""
        return list(self.nodes)


class Catalog:
    """The models of a graph."""

    def __init__(self, root: Node) -> None:
        self.models = {model.name: model for model in models_within(root)}
        self.lists = {node.split.name for node in nodes_within(root) if node.split is not None}
        self.joins = {node.join.name: node.collects_lists for node in nodes_within(root) if node.join is not None}
        self.stacked = {node.custom.name: len(node.steps) for node in nodes_within(root) if node.custom is not None}

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """As `Catalog.find`."""
        model = self.models.get(model_name)
        if model is None:
            return None
        inputs = [replace(_spec(name), is_optional=name in model.optional) for name in model.required + model.optional]
        if size := self.stacked.get(model_name):
            inputs = [TensorSpec("S", "UINT8", (size, WIDTH)), TensorSpec("MASK", "BOOL", (size,))]
        outputs = [replace(_spec(name), is_optional=name in model.leaves_out) for name in model.outputs]
        if model_name in self.lists:
            outputs = [TensorSpec("LIST", "UINT8", (-1, WIDTH)), TensorSpec("COUNT", "INT32", (1,))]
        if model_name in self.joins:
            inputs[1] = replace(inputs[1], dims=(-1,) if self.joins[model_name] else (-1, WIDTH))
            if self.joins[model_name]:
                inputs[2] = TensorSpec("N", "INT64", (-1,), inputs[2].is_optional)
        if model.is_ragged:
            outputs = [replace(output, dims=(-1,)) for output in outputs]
        given = (tuple(inputs), tuple(outputs), model.streams)
        batch = MAX_BATCH_SIZE if model.takes_batches else 0
        return "model", ModelSignature(model_name, "1", "", batch, *given)

    def names(self) -> list[str]:
        """As `Catalog.names`."""
        return list(self.models)


def _spec(name: str) -> TensorSpec:
    """Datatype and dims of a model's tensor of that name."""
    return TensorSpec(name, "BYTES" if name == "TEXT" else "UINT8", {"TEXT": (1,), "NUMS": (-1,)}.get(name, (WIDTH,)))


def target_of(root: Node) -> Any:
    """A target with the models of a graph."""
    target = stream_target()
    for model in models_within(root):
        if model.streams:
            target.streams[model.name] = _stream(model)
        else:
            target.answers[model.name] = _script(model)
    return target


def _stream(model: Model) -> Any:
    async def stream(call: InferCall, context: CallContext) -> AsyncIterator[InferResult]:
        delay_ns, fails = model.fate(0)

        async def wait() -> None:
            clock_ns = virtual_clock_of_loop()
            assert clock_ns is not None
            left_ns = delay_ns if context.deadline_ns is None else context.deadline_ns - clock_ns()
            await asyncio.sleep(max(min(delay_ns, left_ns), 0) / 1e9)
            if left_ns < delay_ns:
                raise RemoteError("DEADLINE_EXCEEDED", f"{model.name} is late")

        for answer in model.responses(_rows_of(call, has_batch=model.takes_batches)):
            await wait()
            outputs = _shaped(_tensors(answer), has_batch=model.takes_batches)
            yield InferResult(call.model_name, "1", call.request_id, {}, outputs, is_final=False)
        await wait()
        if fails:
            raise RemoteError(model.code, f"{model.name} fails")

    return stream


def _rows_of(call: InferCall, *, has_batch: bool = True) -> list[dict[str, bytes]]:
    arrays = {name: decode(tensor if has_batch else with_batch(tensor)) for name, tensor in call.inputs.items()}
    num_rows = len(next(iter(arrays.values())))
    return [{name: _row(array[row]) for name, array in arrays.items()} for row in range(num_rows)]


def _row(values: "np.ndarray[Any, Any]") -> bytes:
    return b"".join(values) if values.dtype == object else values.tobytes()


def _lists(model: Model, rows: list[dict[str, bytes]]) -> dict[str, WireTensor]:
    lists, counts = model.lists(rows)
    data = b"".join(entry for one in lists for entry in one)
    return {
        "LIST": WireTensor("UINT8", (len(rows), len(lists[0]), WIDTH), data),
        "COUNT": encode(np.array(counts, np.int32).reshape(-1, 1)),
    }


def _tensors(answer: Mapping[str, list[bytes]]) -> dict[str, WireTensor]:
    return {
        name: bytes_tensor(rows, (len(rows), 1))
        if name == "TEXT"
        else WireTensor("UINT8", (len(rows), len(rows[0])), b"".join(rows))
        for name, rows in answer.items()
    }


def _script(model: Model) -> Any:
    has_batch = model.takes_batches

    async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        clock_ns = virtual_clock_of_loop()
        assert clock_ns is not None
        delay_ns, fails = model.fate(clock_ns())
        await asyncio.sleep(delay_ns / 1e9)
        if fails:
            raise RemoteError(model.code, f"{model.name} fails")
        if any(output.name == "LIST" for output in call.outputs):
            return _shaped(_lists(model, _rows_of(call, has_batch=has_batch)), has_batch=has_batch)
        return _shaped(_tensors(model.answer(_rows_of(call, has_batch=has_batch))), has_batch=has_batch)

    return answer


def _shaped(answer: dict[str, WireTensor], *, has_batch: bool) -> dict[str, WireTensor]:
    """The tensors, of one row without its dimension where there is none."""
    return answer if has_batch else {name: without_batch(tensor) for name, tensor in answer.items()}
