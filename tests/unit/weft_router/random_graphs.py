"""Random graphs of nested nodes: what they are made of, how they are drawn, and the plan of one.

Every tensor is UINT8 of shape [rows, 8]. Every node has the input X, the optional input E and the output Y; the steps
of a sequence give the tensors t0, t1, ...; a step reads X and what ``reads`` names.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tests.unit.weft_router import make
from tests.unit.weft_router.fake_condition import FakeCondition
from tests.unit.weft_router.virtual_clock import virtual_clock_of_loop

from weft_common.core import CallContext, InferCall
from weft_common.errors import RemoteError
from weft_common.tensors import WireTensor, decode
from weft_router.combine import METHODS, CombineMethod
from weft_router.graph.plan import CallPlan, GraphPlan, NodePlan
from weft_router.kinds import KINDS
from weft_router.kinds.cascade import CascadePlan
from weft_router.kinds.ensemble import EnsemblePlan
from weft_router.kinds.map import MapPlan
from weft_router.kinds.sequence import SequencePlan
from weft_router.kinds.splitter import SplitterPlan
from weft_router.kinds.switch import SwitchPlan
from weft_router.policies.cache import CachePlan
from weft_router.policies.hedge import HedgePlan
from weft_router.policies.retry import RetryPlan

CODES = ("UNAVAILABLE", "ABORTED", "INTERNAL", "UNKNOWN")
COMBINE_METHODS = tuple(METHODS[name] for name in ("FIRST", "VOTE", "MAX", "SUM", "CUSTOM"))
WIDTH = 8


@dataclass(frozen=True)
class Test:
    """A test that holds if the first bytes of a tensor's rows add up to less than `rest` modulo 4; absent: it does not.

    Of `steps.<name>.ok` it holds if that is true.
    """

    __test__ = False

    name: str
    rest: int


@dataclass(frozen=True)
class Model:
    """A model that answers, or fails, after a while; what a flaky one does depends on when it is called."""

    index: int
    fails: bool
    is_flaky: bool = False

    @property
    def name(self) -> str:
        return f"m{self.index}"

    @property
    def code(self) -> str:
        return CODES[self.index % len(CODES)]

    def fate(self, at_ns: int) -> tuple[int, bool]:
        """How long a call takes that is made then, 1 to 100 ms and no two sums alike, and whether it fails."""
        fate = int.from_bytes(blake2b(f"{self.name}@{at_ns if self.is_flaky else 0}".encode()).digest()[:8])
        return 1_000_000 + fate % 99_000_000, fate >> 63 == 1 if self.is_flaky else self.fails

    def row(self, inputs: Mapping[str, bytes]) -> bytes:
        """What it makes of a row."""
        parts = [self.name.encode(), *(name.encode() + row for name, row in sorted(inputs.items()))]
        return blake2b(b"|".join(parts), digest_size=WIDTH).digest()


@dataclass(frozen=True)
class Step:
    """A step; `value` chooses a switch's branch by `on`."""

    name: str
    target: "Model | Node"
    reads: tuple[str, ...] = ()
    is_soft: bool = False
    has_default: bool = False
    when: Test | None = None
    accept: Test | None = None
    fallback: "Step | None" = None
    timeout_ms: int = 0
    min_remaining_ms: int = 0
    value: str = ""
    is_otherwise: bool = False
    retry: RetryPlan | None = None
    hedge: HedgePlan | None = None
    is_cached: bool = False


@dataclass(frozen=True)
class Node:
    """A node; `on` is the tensor whose first bytes, added up modulo 3, a switch compares."""

    name: str
    kind: type[NodePlan]
    steps: tuple[Step, ...]
    per_row: bool = False
    on: str = ""
    quorum: int = 0
    straggler_ms: int = 0
    method: CombineMethod = METHODS["FIRST"]
    custom: Model | None = None
    max_iterations: int = 0
    again: Test | None = None
    carries: bool = False


class _Draw:
    """Draws one graph; every model and node gets a number of its own."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.count = 0
        self.num_hedged = 0

    def number(self) -> int:
        self.count += 1
        return self.count

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def test(self, names: tuple[str, ...]) -> Test:
        return Test(self.draw(st.sampled_from(names)), self.draw(st.integers(1, 4)))

    def model(self) -> Model:
        return Model(self.number(), fails=self.chance(20), is_flaky=self.chance(20))

    def target(self, depth: int) -> Model | Node:
        return self.node(depth - 1) if depth > 0 and self.chance(40) else self.model()

    def tried(self, depth: int) -> tuple[Model | Node, dict[str, Any]]:
        """A target and the policies around it; within a hedge nothing is kept, because its calls would share it."""
        hedge = HedgePlan(self.draw(st.integers(0, 60)), self.draw(st.integers(1, 3))) if self.chance(12) else None
        self.num_hedged += hedge is not None
        target = self.target(depth)
        self.num_hedged -= hedge is not None
        retry = None
        if self.chance(15):
            codes = self.draw(st.sets(st.sampled_from((*CODES, "DEADLINE_EXCEEDED")), min_size=2))
            retry = RetryPlan(
                self.draw(st.integers(2, 3)), self.draw(st.sampled_from((0, 15))), frozenset(codes), 100.0
            )
        is_cached = self.chance(15) and not self.num_hedged
        return target, {"retry": retry, "hedge": hedge, "is_cached": is_cached}

    def fallback(self, name: str, reads: tuple[str, ...]) -> Step:
        target, policies = self.tried(0)
        return Step(name, target, reads, **policies)

    def step(self, index: int, depth: int, seen: tuple[str, ...], tests: tuple[str, ...], **more: Any) -> Step:
        target, policies = self.tried(depth)
        reads = tuple(name for name in seen if self.chance(40))[: 1 if isinstance(target, Node) else 2]
        is_soft, has_when = self.chance(35), self.chance(20)
        step = Step(
            f"s{index}",
            target,
            reads,
            is_soft=is_soft,
            has_default=(is_soft or has_when) and self.chance(40),
            when=self.test(tests) if has_when else None,
            timeout_ms=self.draw(st.integers(20, 150)) if self.chance(15) else 0,
            fallback=self.fallback(f"f{index}", reads) if self.chance(15) else None,
            **policies,
        )
        return replace(step, **more)

    def node(self, depth: int) -> Node:
        name, size = f"n{self.number()}", self.draw(st.integers(1, 4))
        kind = self.draw(st.sampled_from([kind.plan for kind in KINDS.values() if kind.plan is not MapPlan]))
        if kind is SequencePlan:
            return self.sequence(name, size, depth)
        steps = []
        for index in range(size):
            tests = ("X", "E", *(f"steps.s{i}.ok" for i in range(index) if kind is CascadePlan))
            steps.append(self.step(index, depth, ("E",), tests))
        if kind is SwitchPlan:
            return self.switch(name, steps)
        if kind is EnsemblePlan:
            method = self.draw(st.sampled_from(COMBINE_METHODS))
            return Node(
                name,
                kind,
                tuple(steps),
                quorum=self.draw(st.integers(0, size)),
                straggler_ms=self.draw(st.sampled_from((0, 10, 40))),
                method=method,
                custom=self.model() if method is METHODS["CUSTOM"] else None,
            )
        if kind is CascadePlan:
            for index in range(size):
                accept = Test("Y", self.draw(st.integers(0, 4))) if index < size - 1 else None
                limit_ms = self.draw(st.integers(20, 150)) if self.chance(20) else 0
                steps[index] = replace(steps[index], accept=accept, min_remaining_ms=limit_ms, has_default=False)
            return Node(name, kind, tuple(steps), per_row=self.chance(50))
        return Node(name, kind, tuple(steps))

    def sequence(self, name: str, size: int, depth: int) -> Node:
        """A loop that carries t0 over always has it."""
        steps = []
        for index in range(size):
            before = tuple(f"t{i}" for i in range(index))
            oks = tuple(f"steps.s{i}.ok" for i in range(index))
            steps.append(self.step(index, depth, ("E", *before), ("X", "E", *before, *oks)))
        if not self.chance(25):
            return Node(name, SequencePlan, tuple(steps))
        carries = self.chance(70)
        if carries:
            steps[0] = Step("s0", self.model(), steps[0].reads)
        again = self.test(("X", *(f"t{i}" for i in range(size))))
        most = self.draw(st.integers(1, 3))
        return Node(name, SequencePlan, tuple(steps), max_iterations=most, again=again, carries=carries)

    def switch(self, name: str, steps: list[Step]) -> Node:
        """Some branches have tests, some values, the last one may be the one for the rest."""
        for index, step in enumerate(steps):
            if step.when is None and index == len(steps) - 1 and self.chance(70):
                steps[index] = replace(step, is_otherwise=True)
            elif step.when is None:
                steps[index] = replace(step, value=str(index % 3))
        return Node(name, SwitchPlan, tuple(steps), per_row=self.chance(50), on="X")


@st.composite
def graphs(draw: st.DrawFn) -> Node:
    """A root node with up to two levels of nodes in it."""
    return _Draw(draw).node(2)


def plan_of(root: Node) -> GraphPlan:
    """The graph's plan."""
    return make.graph(_node_plan(root), max_batch_size=64)


def scripts_of(node: Node) -> dict[str, Any]:
    """For each model of a graph what it answers."""
    scripts = {}
    for step in node.steps:
        for one in (step, step.fallback):
            if one is not None and isinstance(one.target, Node):
                scripts |= scripts_of(one.target)
            elif one is not None:
                scripts[one.target.name] = _script(one.target)  # type: ignore[arg-type]
    if node.custom is not None:
        scripts[node.custom.name] = _script(node.custom)
    return scripts


def _script(model: Model) -> Any:
    async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        clock_ns = virtual_clock_of_loop()
        assert clock_ns is not None
        delay_ns, fails = model.fate(clock_ns())
        await asyncio.sleep(delay_ns / 1e9)
        if fails:
            raise RemoteError(model.code, f"{model.name} fails")
        arrays = {name: decode(tensor) for name, tensor in call.inputs.items()}
        num_rows = len(next(iter(arrays.values())))
        rows = [model.row({name: array[row].tobytes() for name, array in arrays.items()}) for row in range(num_rows)]
        return {"OUT": WireTensor("UINT8", (num_rows, WIDTH), b"".join(rows))}

    return answer


def _call(model: Model, inputs: Mapping[str, int]) -> CallPlan:
    specs = [make.spec(name, "UINT8", (-1,) * rank) for name, rank in inputs.items()]
    return make.call_plan(model.name, specs, [make.spec("OUT", "UINT8", (WIDTH,))], max_batch_size=64)


def _condition(test: Test | None) -> Any:
    if test is None:
        return None

    def holds(request: Any, values: Mapping[str, np.ndarray | None]) -> bool:
        array = values[test.name]
        if array is None or test.name.startswith("steps."):
            return array is not None
        return int(array[:, 0].astype(int).sum()) % 4 < test.rest

    return FakeCondition(holds, names=(test.name,))


def _step_plan(node: Node, step: Step, output: str) -> Any:
    options: dict[str, Any] = {"is_soft": step.is_soft, "timeout_ms": step.timeout_ms}
    options |= {"when": _condition(step.when), "accept": _condition(step.accept)}
    options |= {"min_remaining_ms": step.min_remaining_ms, "is_otherwise": step.is_otherwise}
    options |= {"retry": step.retry, "hedge": step.hedge, "cache": CachePlan(0, 1 << 30) if step.is_cached else None}
    if node.kind is SplitterPlan:
        options["weight"] = float(step is node.steps[-1])
    if step.value:
        options["cases"] = (step.value,)
    if step.has_default:
        options["batched_defaults"] = {output: WireTensor("UINT8", (1, WIDTH), default_row(step))}
    if step.fallback is not None:
        options["fallback"] = _step_plan(node, step.fallback, output)
    if isinstance(step.target, Node):
        inputs = {"X": "X"} | dict(zip("E", step.reads, strict=False))
        return make.step(step.name, _node_plan(step.target), inputs, {"Y": output}, **options)
    inputs = {name: name for name in ("X", *step.reads)}
    return make.step(step.name, _call(step.target, dict.fromkeys(inputs, 1)), inputs, {"OUT": output}, **options)


def _node_plan(node: Node) -> NodePlan:
    names = {SequencePlan: "t{}", EnsemblePlan: "s{}.Y"}
    outputs = [names.get(node.kind, "Y").format(index) for index in range(len(node.steps))]
    steps = [_step_plan(node, step, output) for step, output in zip(node.steps, outputs, strict=True)]
    own = {field.name for field in fields(node.kind)}
    options: dict[str, Any] = {
        name: getattr(node, name) for name in ("per_row", "quorum", "straggler_ms") if name in own
    }
    if node.on:
        options["on"] = FakeCondition(
            lambda request, values: str(int(values["X"][:, 0].astype(int).sum()) % 3), names=("X",), is_test=False
        )
    if node.again is not None:
        options["loop"] = make.loop(
            _condition(node.again), node.max_iterations, *([("t0", "X")] if node.carries else [])
        )
    if node.kind is EnsemblePlan:
        more: dict[str, Any] = {}
        if node.custom is not None:
            call = _call(node.custom, {"S": 2, "MASK": 1})
            call = replace(call, signature=replace(call.signature, inputs=_custom_inputs()))
            more = {"custom": make.step("custom", call, {"S": "S", "MASK": "MASK"}, {"OUT": "Y"})}
            more |= {"stack": "S", "mask": "MASK"}
        sources = {step.name: output for step, output in zip(node.steps, outputs, strict=True)}
        options["combines"] = [("Y", node.method, sources, more)]
    made = {"Y": outputs[-1]} if node.kind is SequencePlan else ["Y"]
    return make.node(node.name, node.kind, steps, inputs=["X", "E"], outputs=made, **options)


def _custom_inputs() -> tuple[Any, ...]:
    return (make.spec("S", "UINT8", (-1, WIDTH)), make.spec("MASK", "BOOL", (-1,)))


def default_row(step: Step) -> bytes:
    """A step's default, for each row."""
    return blake2b(step.name.encode(), digest_size=WIDTH).digest()
