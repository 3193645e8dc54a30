"""Random graphs under random delays, failures and cancels against a naive interpreter that runs one step at a time."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.naive_interpreter import Interpreter
from tests.unit.router.naive_values import NEVER, AmbiguousError, FailsError, Values
from tests.unit.router.random_drawing import graphs_of_any_batch, num_examples
from tests.unit.router.random_graph_text import plan_of as random_plan
from tests.unit.router.random_graph_text import scripts_of
from tests.unit.router.random_graphs import Node as GraphNode
from tests.unit.router.random_requests import inputs_of, policies, wired
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError, WeftError
from weft.base.tensors import WireTensor
from weft.language.plan import GraphPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.runtime import Runtime
from weft.router.target import Target


@dataclass(frozen=True)
class Node:
    """A step of a random graph: the earlier steps that it reads (none: the graph's input), how it behaves."""

    reads: tuple[int, ...]
    num_turns: int
    fails: bool


@st.composite
def dags(draw: st.DrawFn) -> list[Node]:
    """Up to nine steps in declared order; each reads any of the steps before it."""
    size = draw(st.integers(1, 9))
    return [
        Node(
            tuple(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else (),
            draw(st.integers(0, 4)),
            draw(st.integers(0, 9)) == 0,
        )
        for index in range(size)
    ]


def value_of(index: int, inputs: list[bytes]) -> bytes:
    """What step `index` makes of its inputs; the order of the inputs matters."""
    return blake2b(b"|".join([str(index).encode(), *inputs]), digest_size=8).digest()


def interpret(dag: list[Node], x: bytes) -> tuple[list[bytes | None], set[int]]:
    """Values of all steps one after another, and the steps that fail though everything before them succeeded."""
    values: list[bytes | None] = []
    failing = set()
    for index, node in enumerate(dag):
        inputs = [values[i] for i in node.reads] if node.reads else [x]
        if any(value is None for value in inputs):
            values.append(None)
        elif node.fails:
            failing.add(index)
            values.append(None)
        else:
            values.append(value_of(index, [value for value in inputs if value is not None]))
    return values, failing


class Models(Target):
    """Answers the steps; knows which were called, and how many calls are open."""

    name, address = "model", "fake"

    def __init__(self, dag: list[Node]) -> None:
        self.dag = dag
        self.num_open = 0
        self.called: list[int] = []

    async def infer(self, call: InferCall, context: CallContext) -> Any:
        index = int(call.model_name)
        self.num_open += 1
        self.called.append(index)
        try:
            for _ in range(self.dag[index].num_turns):
                await asyncio.sleep(0)  # one turn of the loop, no time
            if self.dag[index].fails:
                raise RemoteError("UNAVAILABLE", f"step {index} fails")
        finally:
            self.num_open -= 1
        data = value_of(index, [tensor.data for tensor in call.inputs.values()])
        return InferResult(call.model_name, "1", call.request_id, {}, {"OUT": WireTensor("FP32", (2,), data)})


def plan_of(dag: list[Node]) -> GraphPlan:
    steps = [
        make.step(f"s{index}", str(index), {f"I{i}": f"t{i}" for i in node.reads} or {"I": "X"}, {"OUT": f"t{index}"})
        for index, node in enumerate(dag)
    ]
    outputs = [f"t{index}" for index in range(len(dag))]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=outputs))


fixture_is_stateless = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@fixture_is_stateless
@given(dag=dags())
def test_concurrent_execution_equals_one_step_at_a_time(dag: list[Node]) -> None:
    """Same values where all succeed; otherwise an error of a step that could run, nothing left behind."""

    async def check() -> None:
        values, failing = interpret(dag, b"x")
        models = Models(dag)
        executor = GraphExecutor(plan_of(dag), Runtime({"model": models}))
        inputs: Mapping[str, WireTensor] = {"X": WireTensor("UINT8", (1,), b"x")}
        if failing:
            with pytest.raises(RemoteError) as caught:
                await make.run(executor, inputs=inputs)
            assert caught.value.message in {f"g/1: root/s{i} -> {i}@1: step {i} fails" for i in failing}
        else:
            result = await make.run(executor, inputs=inputs)
            assert values == [tensor.data for tensor in result.outputs.values()]
        assert (0, 0) == (models.num_open, make.num_other_tasks())

    asyncio.run(check())


@fixture_is_stateless
@given(dag=dags(), choice=st.sets(st.integers(0, 8), min_size=1))
def test_requested_outputs_have_the_values_of_a_whole_run(dag: list[Node], choice: set[int]) -> None:
    """Steps behind them run, each once, and no others."""
    wanted = sorted(index for index in choice if index < len(dag)) or [0]
    needed: set[int] = set()
    unread = list(wanted)
    while unread:
        index = unread.pop()
        needed.add(index)
        unread += dag[index].reads
    sound = [Node(node.reads, node.num_turns, fails=index not in needed) for index, node in enumerate(dag)]

    async def check() -> None:
        models = Models(sound)
        executor = GraphExecutor(plan_of(sound), Runtime({"model": models}))
        inputs: Mapping[str, WireTensor] = {"X": WireTensor("UINT8", (1,), b"x")}
        result = await make.run(executor, inputs=inputs, outputs=[f"t{index}" for index in wanted])
        values, _ = interpret([Node(node.reads, 0, fails=False) for node in dag], b"x")
        assert [values[index] for index in wanted] == [tensor.data for tensor in result.outputs.values()]
        assert sorted(needed) == sorted(models.called)

    asyncio.run(check())


@fixture_is_stateless
@given(dag=dags(), num_turns=st.integers(0, 25), num_cancels=st.integers(1, 3))
def test_a_cancel_at_any_moment_leaves_nothing(dag: list[Node], num_turns: int, num_cancels: int) -> None:
    """Whenever it comes, and however often, no call and no task is left, and no other error appears."""

    async def check() -> None:
        models = Models(dag)
        executor = GraphExecutor(plan_of(dag), Runtime({"model": models}))
        request = asyncio.create_task(make.run(executor, inputs={"X": WireTensor("UINT8", (1,), b"x")}))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        for _ in range(num_cancels):
            request.cancel()
            await asyncio.sleep(0)
        outcome = (await asyncio.gather(request, return_exceptions=True))[0]
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, (asyncio.CancelledError, RemoteError))
        assert (0, 0) == (models.num_open, make.num_other_tasks())

    asyncio.run(check())


def bytes_of(values: Values, names: Sequence[str]) -> dict[str, bytes]:
    """The tensors that are there."""
    return {name: b"".join(rows) for name in names if (rows := values[name]) is not None}


@settings(fixture_is_stateless, max_examples=num_examples(300))
@given(
    root=graphs_of_any_batch(),
    seed=st.integers(0, 5),
    num_rows=st.integers(1, 4),
    has_extra=st.booleans(),
    timeout_ms=st.sampled_from([0, 0, 30, 80, 150]),
    num_wanted=st.integers(0, 2),
)
def test_a_graph_answers_as_one_step_at_a_time(
    root: GraphNode, seed: int, num_rows: int, has_extra: bool, timeout_ms: int, num_wanted: int
) -> None:
    """The same output or the same status at the same moment, nothing left behind, whatever fails, is late or absent."""
    inputs = inputs_of(seed, num_rows if root.is_batched else 1, has_extra=has_extra)
    plan = random_plan(root)
    outputs = root.outputs[-num_wanted:] if num_wanted else ()

    async def check() -> None:
        clock = VirtualClock()
        start_ns = clock()
        deadline_ns = start_ns + timeout_ms * 1_000_000 if timeout_ms else NEVER
        expected: Any
        try:
            values = {"X": inputs["X"], "E": inputs.get("E")}
            ends = Interpreter(deadline_ns).node(root, values, start_ns, deadline_ns, outputs or root.outputs)
            expected, end_ns = (
                {name: b"".join(rows) for name, rows in ends.outputs.items() if rows is not None},
                ends.at,
            )
        except FailsError as failure:
            expected, end_ns = failure.code, failure.at
        target, options = FakeTarget(**scripts_of(root)), policies()
        found: Any
        try:
            context = make.context(timeout_ms=timeout_ms or None)
            tensors = wired(inputs, is_batched=root.is_batched)
            result = await make.run(plan, target, tensors, context=context, outputs=outputs, **options)
            found = {name: tensor.data for name, tensor in result.outputs.items()}
        except WeftError as error:
            found = error.code
        assert (expected, end_ns) == (found, clock())
        assert (0, 0) == (target.num_open, make.num_other_tasks())

    try:
        asyncio.run(check())
    except AmbiguousError:
        reject()


@settings(fixture_is_stateless, max_examples=num_examples(100))
@given(root=graphs_of_any_batch(), seed=st.integers(0, 5), at_ms=st.integers(0, 250), num_cancels=st.integers(1, 3))
def test_a_cancel_at_any_moment_leaves_nothing_of_a_graph(
    root: GraphNode, seed: int, at_ms: int, num_cancels: int
) -> None:
    """It ends at once, as cancelled if it was not over, and no call and no task is left."""

    async def check() -> None:
        clock = VirtualClock()
        target, options = FakeTarget(**scripts_of(root)), policies()
        rows = inputs_of(seed, 3 if root.is_batched else 1, has_extra=True)
        inputs = wired(rows, is_batched=root.is_batched)
        request = asyncio.create_task(make.run(random_plan(root), target, inputs, **options))
        await asyncio.sleep(at_ms / 1e3)
        was_over = request.done()
        for _ in range(num_cancels):
            request.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([request])
        assert was_over != request.cancelled()
        assert was_over or float(at_ms) == clock.elapsed_ms()
        assert isinstance(None if request.cancelled() else request.exception(), WeftError | None)
        assert (0, 0) == (target.num_open, make.num_other_tasks())

    asyncio.run(check())
