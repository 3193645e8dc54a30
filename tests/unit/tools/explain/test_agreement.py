"""What is explained is what the router does: random requests, explained and executed."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.random_drawing import graphs_of_any_batch, num_examples
from tests.unit.router.random_graph_text import plan_of
from tests.unit.router.random_graphs import WIDTH
from tests.unit.router.virtual_clock import VirtualClock, virtual_clock_of_loop
from tests.unit.tools.explain.explanation import explained
from tests.unit.tools.explain.taken import taken_steps
from tests.unit.tools.graphs import PLANS as GRAPHS
from tests.unit.tools.graphs import compiled, text_graph

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import UnavailableError, WeftError
from weft.base.signature import TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, WireTensor, bytes_tensor, decode, encode
from weft.base.validation import check_names
from weft.language import GraphPlan
from weft.language.plan import CallPlan, NodePlan
from weft.language.request_scope import RequestScope
from weft.router.executor import GraphExecutor
from weft.router.operators.splitter import SplitterPlan
from weft.router.reporting.path import PATH_HEADER
from weft.router.runtime import Runtime
from weft.tools.explain.evaluator import Evaluator, Known
from weft.tools.explain.question import Question
from weft.tools.explain.render import ExplainedStep, StepOutcome, count_calls
from weft.tools.explain.tree import explain

WORDS = ["de", "en", "nl", "x", "a" * 4500]
EVERYTHING = text_graph(
    """node { name: "root" sequence {
  step { name: "lid" model_name: "lang_id" when: 'get(parameters, "lang", "") != "de"'
         default { output: "LANG" text: "de" dims: [ 1 ] } }
  step { name: "pick" node: "bandit" }
  step { name: "race" node: "race" when: 'has(inputs.HINT) || steps.lid.ok' dependency: SOFT
         default { output: "LABEL" text: "none" dims: [ 1 ] } }
  step { name: "copy" model_name: "format_label" input_map { key: "P" value: "PROBS" }
         when: 'get(parameters, "tier", "") == "free"' shadow { percent: 50 } } } }
node { name: "bandit" splitter { bandit { algorithm: THOMPSON }
  step { name: "rows" node: "rows" }
  step { name: "loop" node: "loop" }
  step { name: "odd" model_name: "bert_en" when: 'has(inputs.HINT)' dependency: SOFT
         default { output: "PROBS" number: [ 1, 0, 0 ] dims: [ 3 ] } } } }
node { name: "rows" cascade { per_row: true
  step { name: "short" model_name: "bert_de" accept: 'max(outputs.PROBS) > 0.5' when: 'size(text(inputs.TEXT)) < 10' }
  step { name: "sticky" node: "sticky" accept: 'outputs.PROBS[0] > 0.3' dependency: SOFT }
  step { name: "last" node: "by_text" } } }
node { name: "sticky" splitter { sticky_by: 'get(parameters, "k", "")'
  step { name: "one" model_name: "xlmr" weight: 2 }
  step { name: "two" node: "by_text" } } }
node { name: "by_text" switch { per_row: true on: 'text(inputs.TEXT)'
  step { name: "de" case: "de" model_name: "bert_de" fallback { model_name: "xlmr" } }
  step { name: "en" case: "en" case: "nl" model_name: "bert_en" dependency: SOFT
         default { output: "PROBS" number: [ 0, 0, 1 ] dims: [ 3 ] } }
  step { name: "rest" otherwise: true model_name: "xlmr" } } }
node { name: "loop" output [ { name: "PROBS" data_type: TYPE_FP32 dims: [ 3 ] } ] sequence {
  step { name: "draft" node: "by_text" }
  step { name: "say" model_name: "format_label" input_map { key: "P" value: "PROBS" } }
  loop { while: 'max(outputs.PROBS) < 0.5' max_iterations: 3 carry { key: "LABEL" value: "TEXT" } } } }
node { name: "race" ensemble {
  step { name: "a" model_name: "format_label" input_map { key: "P" value: "PROBS" } }
  step { name: "b" node: "again" }
  combine { output: "LABEL" method: FIRST } } }
node { name: "again" sequence {
  step { name: "clf" model_name: "xlmr" output_map { key: "PROBS" value: "NEW" } }
  step { name: "say" model_name: "format_label" input_map { key: "P" value: "NEW" } } } }""",
    outputs="PROBS LABEL",
)
ABSENT = """name: "g" max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output [ { name: "PROBS" data_type: TYPE_FP32 dims: 3 }, { name: "Q" data_type: TYPE_FP32 dims: 3 optional: true },
         { name: "H" data_type: TYPE_FP32 dims: 4 optional: true }, { name: "G" data_type: TYPE_FP32 dims: 4 },
         { name: "K" data_type: TYPE_FP32 dims: 4 optional: true }, { name: "B" data_type: TYPE_FP32 dims: 4 } ]
node { name: "root" sequence {
  step { name: "first" model_name: "unsure" output_map [ { key: "PROBS" value: "P" }, { key: "HINT" value: "H" } ] }
  step { name: "then" model_name: "hinted" input_map { key: "HINT" value: "H" } output_map { key: "PROBS" value: "Q" }
         when: 'has(inputs.H)' }
  step { name: "filled" model_name: "unsure" output_map [ { key: "PROBS" value: "R" }, { key: "HINT" value: "G" } ]
         default { output: "G" number: [ 0, 0, 0, 1 ] dims: [ 4 ] } }
  step { name: "one" model_name: "hinted" input_map { key: "HINT" value: "G" } output_map { key: "PROBS" value: "S" }
         when: 'has(inputs.G) && max(inputs.G) >= 0.0' }
  step { name: "inside" node: "side" output_map { key: "HINT" value: "K" } }
  step { name: "below" node: "side" output_map { key: "HINT" value: "B" }
         default { output: "B" number: [ 0, 0, 0, 1 ] dims: [ 4 ] } }
  step { name: "last" node: "either" after: "one" } } }
node { name: "side" output { name: "HINT" data_type: TYPE_FP32 dims: 4 optional: true } switch { per_row: true
  step { name: "de" when: 'text(inputs.TEXT) == "de"' model_name: "unsure" }
  step { name: "rest" otherwise: true node: "deep" } } }
node { name: "deep" output { name: "HINT" data_type: TYPE_FP32 dims: 4 optional: true } sequence {
  step { name: "a" model_name: "unsure" } } }
node { name: "either" cascade {
  step { name: "a" model_name: "unsure" accept: 'has(outputs.HINT)' }
  step { name: "b" model_name: "context" input_map { key: "HINT" value: "H" } } } }"""
TRAVELS = """name: "e" platform: "ensemble" max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output [ { name: "PROBS" data_type: TYPE_FP32 dims: 3 }, { name: "LABEL" data_type: TYPE_STRING dims: 1 } ]
ensemble_scheduling {
  step { model_name: "unsure" model_version: -1 input_map { key: "TEXT" value: "TEXT" }
         output_map { key: "HINT" value: "H" } }
  step { model_name: "hinted" model_version: -1 input_map [ { key: "TEXT" value: "TEXT" }, { key: "HINT" value: "H" } ]
         output_map { key: "PROBS" value: "PROBS" } }
  step { model_name: "format_label" model_version: -1 input_map { key: "P" value: "PROBS" }
         output_map { key: "LABEL" value: "LABEL" } } }"""
PLANS = GRAPHS | {"everything": compiled(EVERYTHING), "absent": compiled(ABSENT), "travels": compiled(TRAVELS)}


def models(node: NodePlan) -> Iterator[CallPlan]:
    """Every call that the steps of a node may make."""
    waiting = [*node.steps, *node.shadows]
    waiting += node.customs
    while waiting:
        step = waiting.pop()
        waiting += [step.fallback] if step.fallback else []
        if isinstance(step.action, CallPlan):
            yield step.action
        else:
            yield from models(step.action)


def random_tensor(spec: TensorSpec, num_rows: int, generator: random.Random) -> WireTensor:
    """A tensor as declared, with ``num_rows`` rows; 0 without a batch dimension."""
    shape = (*([num_rows] if num_rows else []), *(1 if size < 0 else size for size in spec.dims))
    if spec.datatype == "BYTES":
        return bytes_tensor([generator.choice(WORDS) for _ in range(int(np.prod(shape)))], shape)
    dtype = NUMPY_BY_DATATYPE[spec.datatype]
    values = np.random.default_rng(generator.randrange(1 << 32)).random(shape)
    if spec.name == "COUNT":  # lists have one row
        return encode((values < 0.6).astype(dtype))
    return encode((values if dtype.kind == "f" else values * 3).astype(dtype))


class Models(FakeTarget):
    """Gives random answers of the right type, or fails, after less than 1 ms.

    As a model it refuses calls without a required input, and leaves out optional outputs, if it is not said of which.
    """

    def __init__(
        self, plan: GraphPlan, generator: random.Random, share_failing: float, gives: dict[str, bool] | None = None
    ) -> None:
        super().__init__()
        self.signatures = {call.model_name: call.signature for call in models(plan.root)}
        self.generator = generator
        self.share_failing = share_failing
        self.gives = gives or {}

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        self.calls.append(call)
        signature = self.signatures[call.model_name]
        await asyncio.sleep(self.generator.random() / 1000)
        if self.generator.random() < self.share_failing:
            raise UnavailableError("down")
        check_names(call, signature)
        num_rows = next(iter(call.inputs.values())).shape[0] if signature.max_batch_size else 0
        outputs = {
            spec.name: random_tensor(spec, num_rows, self.generator)
            for spec in signature.outputs
            if not spec.is_optional or self.gives.get(spec.name, self.generator.random() < 0.5)
        }
        return InferResult(call.model_name, "1", call.request_id, {}, outputs)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncIterator[InferResult]:  # type: ignore[override]
        for _ in range(self.generator.randrange(3)):
            yield replace(await self.infer(call, context), is_final=False)


def every(entry: ExplainedStep, outcome: StepOutcome = StepOutcome.RUNS) -> Iterator[tuple[str, StepOutcome]]:
    """The path of each step and what becomes of it, all around it considered."""
    for child in entry.children:
        own = child.outcome
        inside = (
            own
            if outcome is StepOutcome.RUNS
            else StepOutcome.MAYBE
            if own in (StepOutcome.RUNS, StepOutcome.FAILS)
            else own
        )
        yield child.path, inside
        yield from every(child, inside)


def possible_errors(entry: ExplainedStep) -> Iterator[str]:
    """Errors that unknown values may lead to, of a step and all in it."""
    yield from entry.may_fail
    for child in entry.children:
        yield from possible_errors(child)


async def executed(
    plan: GraphPlan, call: InferCall, target: Models, context: CallContext, generator: random.Random
) -> tuple[set[str], str | None, list[set[str]]]:
    """Paths of the steps that ran, the error, and the names of the outputs of each response."""
    runtime = Runtime({name: target for name, _ in plan.dependencies} | {"model": target}, generator=generator)  # type: ignore[arg-type]
    runtime.is_pinning_allowed, runtime.clock_ns = True, virtual_clock_of_loop()
    failure, given = None, []
    executor = GraphExecutor(plan, runtime)
    try:
        if plan.signature.is_decoupled:
            async for response in executor.stream(call, context):
                if not response.is_final:
                    given.append(set(response.outputs))
        else:
            given.append(set((await executor.execute(call, context)).outputs))
    except WeftError as error:
        failure = f"{error.code}: {error.message}"
    await runtime.close()
    return taken_steps(dict(context.trailing_metadata)[PATH_HEADER], plan.root), failure, given


def agrees(
    root: ExplainedStep,
    taken: set[str],
    failure: str | None,
    given: list[set[str]],
    asked_for: set[str],
    *,
    is_up: bool,
) -> set[str]:
    """The steps that were certain to run, after it is sure that they and no impossible ones have.

    Answers have the outputs that are not explained to be left out.

    Args:
        root: The explanation.
        taken: Paths of the steps that ran.
        failure: The error; None where there was none.
        given: Outputs of each response.
        asked_for: Outputs of the graph that were asked for.
        is_up: Whether no model has failed.
    """
    fates = list(every(root))
    assert taken <= {
        path for path, outcome in fates if outcome not in (StepOutcome.SKIPPED, StepOutcome.PRUNED, StepOutcome.SHADOW)
    }
    if root.failure:
        assert failure is not None
        assert not is_up or root.failure.partition(":")[0] == failure.partition(":")[0]
        return set()
    for outputs in given:
        assert asked_for - outputs <= {one.name for one in root.left_out}
        assert not is_up or not outputs & {one.name for one in root.left_out if not one.depends_on}
    if not is_up:
        return set()
    assert failure is None or any(possible_errors(root))
    sure = {path for path, outcome in fates if outcome is StepOutcome.RUNS} if failure is None else set()
    assert sure <= taken
    return sure


def asked(plan: GraphPlan, generator: random.Random) -> tuple[dict[str, Any], dict[str, WireTensor]]:
    """A random request, as on the command line; and its tensors."""
    is_batched = plan.signature.max_batch_size > 0
    num_rows = generator.choice([1, 1, 1, 2, 3]) if is_batched else 0
    tensors = {
        spec.name: random_tensor(spec, num_rows, generator)
        for spec in plan.signature.inputs
        if not spec.is_optional or generator.random() < 0.5
    }
    parameters = [("lang", generator.choice(WORDS[:4])), ("tier", generator.choice(["free", "std"])), ("k", "x")]
    routes = [f"{node.name}={step.name}" for node in splitters(plan.root) for step in node.steps]
    headers = [("x-user-id", f"u{generator.randrange(99)}"), ("x-graph-route", generator.choice([*routes, ""]))]
    return {
        "inputs": [(name, json.dumps(_values(tensor))) for name, tensor in tensors.items()],
        "parameters": [one for one in parameters if generator.random() < 0.5],
        "headers": [(name, value) for name, value in headers if value and generator.random() < 0.5],
        "outputs": [spec.name for spec in plan.signature.outputs if generator.random() < 0.8],
        "remaining_ms": generator.choice([None, None, 100.0, 60_000.0]),
    }, tensors


def _values(tensor: WireTensor) -> Any:
    values = decode(tensor)
    return (
        np.vectorize(bytes.decode, otypes=[object])(values).tolist() if tensor.datatype == "BYTES" else values.tolist()
    )


def splitters(node: NodePlan) -> Iterator[NodePlan]:
    """Every splitter in a node."""
    if isinstance(node, SplitterPlan):
        yield node
    for step in node.steps:
        if isinstance(step.action, NodePlan):
            yield from splitters(step.action)


@pytest.mark.parametrize("share_failing", [0.0, 0.2])
@pytest.mark.parametrize("name", PLANS)
def test_the_router_does_what_is_explained(name, share_failing):
    """Steps that are to run have run, skipped ones have not; certain errors came, and no others but of models."""
    plan, num_certain = PLANS[name], 0
    for seed in range(min(num_examples(14), 400)):
        generator = random.Random(f"{name} {seed}")
        options, tensors = asked(plan, generator)
        root = explained(plan, **options)
        target = Models(plan, generator, share_failing)
        outputs = tuple(RequestedOutput(output, {}) for output in options["outputs"])
        call = InferCall(plan.signature.name, "", "", dict(options["parameters"]), tensors, outputs)

        async def run(
            call=call, target=target, options=options, generator=generator
        ) -> tuple[set[str], str | None, list[set[str]]]:
            VirtualClock()
            context = make.context(timeout_ms=options["remaining_ms"], headers=dict(options["headers"]))
            return await executed(plan, call, target, context, generator)

        found = asyncio.run(run())
        asked_for = {*(options["outputs"] or (spec.name for spec in plan.signature.outputs))}
        num_certain += len(agrees(root, *found, asked_for, is_up=not share_failing))
        if not plan.signature.is_decoupled:
            assert len(target.calls) <= count_calls(root).worst + count_calls(root).shadows
    assert share_failing or num_certain > 5


@settings(max_examples=num_examples(60), deadline=None)
@given(
    root=graphs_of_any_batch(),
    num_rows=st.integers(1, 3),
    has_e=st.booleans(),
    seed=st.integers(0, 99),
    is_up=st.booleans(),
)
def test_a_random_graph_is_explained_as_it_runs(root, num_rows, has_e, seed, is_up):
    """The same of graphs of any shape.

    Tests of tensors that the request brings are certain, those of others open.
    """
    plan = plan_of(root)
    generator = random.Random(seed)
    num_rows = num_rows if root.is_batched else 0
    shape = (num_rows, WIDTH) if num_rows else (WIDTH,)
    values = np.frombuffer(generator.randbytes(WIDTH * max(num_rows, 1)), np.uint8)
    tensors = {"X": encode(values.reshape(shape))}
    tensors |= {"E": tensors["X"]} if has_e else {}
    inputs = {name: Known(*tensor) for name, tensor in tensors.items()}
    entry = explain(plan, Question(Evaluator(RequestScope({}, {})), inputs, num_rows, (), {}, ()))

    async def check() -> None:
        VirtualClock()
        target = Models(plan, generator, 0.0 if is_up else 0.2)
        found = await executed(plan, InferCall("g", "", "", {}, tensors), target, CallContext(), generator)
        agrees(entry, *found, {spec.name for spec in plan.signature.outputs}, is_up=is_up)

    asyncio.run(check())
