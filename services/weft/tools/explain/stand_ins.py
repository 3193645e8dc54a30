"""Stand-ins for models, nested nodes and conditions in a plan that is explained.

A plan is rewritten once, field by field, independent of node kinds: conditions use the knowledge of their tensors,
calls go to stand-ins, and policies that repeat, cache or refuse calls are removed.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol, cast

from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, UnavailableError, WeftError
from weft.base.tensors import WireTensor
from weft.base.validation import check_names
from weft.language.bandit_algorithms import BanditPlan
from weft.language.description import slot_name, target_text
from weft.language.plan import CallPlan, Condition, Frame, GraphPlan, NodePlan, ShadowPlan, StepPlan
from weft.language.request_scope import RequestScope
from weft.router.executor import Assembly
from weft.router.operators.collector.pieces import CollectorSettings
from weft.router.runtime import Runtime, ShadowPool
from weft.router.steps.node import Node
from weft.router.steps.responses import NodeResponses
from weft.router.steps.run import Run
from weft.router.target import TargetModel
from weft.tools.explain.evaluator import (
    SOME_ROWS,
    Evaluator,
    Knowledge,
    Known,
    Unknown,
    Verdict,
    key_of,
    placeholder,
    resolved,
    small,
    vague,
)
from weft.tools.explain.paths import (
    FAILS,
    LACKS,
    LATE,
    ORDER,
    STREAM,
    Call,
    Evaluation,
    ExecutionPath,
    OpenChance,
    OpenLimit,
    OpenText,
    Site,
)

#: The condition that asks for another round of its node.
AGAIN = "again"
#: Later than any timer of a node; asyncio waits for a day at most.
_LATE_S = 80_000.0
_NO_LIMIT_BYTES = 1 << 60


class NodeOutcome(Protocol):
    """Outcome of a nested node: ``error`` if it certainly fails, else ``outputs`` by slot, unless it may be empty.

    ``possible_errors`` are those that unknown values may lead to.

    If it ``calls_nothing``, it cannot fail for want of a model.
    """

    error: WeftError | None
    possible_errors: Sequence[WeftError]
    calls_nothing: bool
    outputs: Mapping[int, WireTensor | None]
    may_be_empty: bool


@dataclass(slots=True)
class Environment:
    """State shared by the stand-ins.

    Attributes:
        outcome: (nested node, its frame, its nanoseconds) -> its outcome; None if it is not studied yet.
        gives: Whether an answer has an optional output, if known: by path of the step and name.
        path: The path being followed.
    """

    evaluator: Evaluator
    outcome: Callable[[NodePlan, Frame, int | None], NodeOutcome | None]
    gives: Mapping[str, bool]
    path: ExecutionPath = field(init=False)

    def seen(self, tensor: WireTensor | None, *, is_flag: bool = False) -> WireTensor | None:
        """A tensor as conditions and nested nodes see it; ``is_flag``: it says whether a step has answered."""
        if self.path.is_vague and is_flag:
            return Unknown.of("BOOL", Knowledge((1,), SOME_ROWS, may_be_absent=True), (1,))
        return vague(tensor) if self.path.is_vague and tensor is not None else resolved(tensor)


class _Place:
    """Position of a stand-in, where it takes decisions of the path.

    ``is_tried``: the path continues differently if it fails.
    """

    def __init__(self, environment: Environment, step: StepPlan, node: NodePlan, is_tried: bool) -> None:
        self.environment = environment
        self.step = step
        self.label = f"{step.name} -> {target_text(step.action)}"
        self._is_tried = is_tried
        self._watches_time = any(one.min_remaining_ms for one in node.steps)

    async def arrive(self, call: Call, deadline_ns: int | None, *, is_sure: bool = False) -> None:
        """Make the call, answered now or later. Raises UnavailableError if it fails on this path."""
        path, step = self.environment.path, self.step
        path.calls.append(call)
        if step.shadow is not None:
            return
        site = (id(step), "call")
        is_open = self._is_tried and not is_sure
        if is_open and path.ask((site, FAILS), (f"whether {step.name} answers",), cause=FAILS, step=step):
            raise UnavailableError("it may fail")
        is_timed, call_id = self._watches_time and deadline_ns is not None, len(path.calls)
        if path.pending:
            path.meeting |= {*path.pending, call_id}
        path.pending.add(call_id)
        try:
            await asyncio.sleep(0)
            cause = LATE if is_timed else ORDER if call_id in path.meeting else ""
            if cause and path.ask((site, LATE), (f"whether {step.name} is late",), cause=cause, step=step):
                if deadline_ns is not None:
                    path.clock_ns = max(path.clock_ns, deadline_ns - 1)
                await asyncio.sleep(_LATE_S)
        except asyncio.CancelledError:
            path.cancelled.add(step.name)
            raise
        finally:
            path.pending.discard(call_id)

    def fails_by_data(self) -> bool:
        """Whether unknown values make a nested node fail on this path."""
        return self.environment.path.ask((id(self.step), "data"), (f"whether {self.step.name} answers",)) == 1

    def is_empty(self) -> bool:
        """Whether a stream gives no response on this path."""
        about = (f"the responses of {self.label}",)
        return self.environment.path.ask((id(self.step), STREAM), about, cause=STREAM, step=self.step) == 1

    def lacks(self, output: str, origins: tuple[str, ...]) -> bool:
        """Whether the answer lacks an optional output on this path."""
        key = f"{self.step.path}/{output}"
        if key in self.environment.gives:
            return not self.environment.gives[key]
        return self.environment.path.ask((key, LACKS), origins, cause=LACKS, step=self.step) == 1


class _StandInModel(_Place):
    """A target that answers with placeholders of the declared signature."""

    address = ""

    def __init__(
        self, name: str, call: CallPlan, environment: Environment, step: StepPlan, node: NodePlan, is_tried: bool
    ) -> None:
        super().__init__(environment, step, node, is_tried)
        self.name = name
        self._signature = call.signature
        slots = dict(self.step.outputs)
        names = [spec.name for spec in call.signature.outputs]
        self._origins = {one: f"{slot_name(node, slots.get(one, -1)) or one} of {self.label}" for one in names}

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        await self.arrive(Call(self.step), context.deadline_ns)
        return self._answer(call)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """One response, or none."""
        await self.arrive(Call(self.step), context.deadline_ns)
        if not self.is_empty():
            yield self._answer(call)

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        return []

    async def close(self) -> None:
        pass

    def _answer(self, call: InferCall) -> InferResult:
        check_names(call, self._signature)
        is_batched, tensors = self._signature.max_batch_size > 0, list(call.inputs.values())
        num_rows = tensors[0].shape[0] if is_batched and tensors and tensors[0].shape else 1
        is_open = self.environment.path.is_vague or any(
            isinstance(tensor, Unknown) and tensor.known.shape[:1] == (-1,) for tensor in tensors
        )
        rows = num_rows if is_batched else None
        asked = {output.name for output in call.outputs}
        outputs: dict[str, WireTensor] = {
            spec.name: placeholder(spec, rows, self._origins[spec.name], is_open=is_open)
            for spec in self._signature.outputs
            if not spec.is_optional or (spec.name in asked and not self.lacks(spec.name, (self._origins[spec.name],)))
        }
        return InferResult(call.model_name, call.model_version, call.request_id, {}, outputs)


class _StandInNode(Node):
    """Replaces a node inside the studied one, which was studied before, by its known behaviour."""

    def __init__(self, plan: NodePlan, place: _Place) -> None:
        super().__init__(plan)
        self._place = place

    @override
    async def run(self, run: Run) -> None:
        place, plan, environment = self._place, self.plan, self._place.environment
        path = environment.path
        frame: Frame = [None] * plan.num_slots
        for _, slot in plan.inputs:
            frame[slot] = environment.seen(run.frame[slot])
        limit_ns = None if run.deadline_ns is None else run.deadline_ns - path.clock_ns
        outcome = environment.outcome(plan, frame, limit_ns)
        if outcome is None:
            path.missing = path.missing or (plan, frame, limit_ns)
            raise UnavailableError("it is explained first")
        error = outcome.error
        is_sure = error is not None and outcome.calls_nothing
        await place.arrive(Call(place.step, limit_ns, frame, error), run.deadline_ns, is_sure=is_sure)
        if error is not None:
            raise error.with_message(error.message)
        if outcome.possible_errors and place.fails_by_data():
            possible = outcome.possible_errors[0]
            raise possible.with_message(possible.message)
        if outcome.may_be_empty and place.is_empty():
            await NodeResponses(_no_responses(), ()).open(run)
            return
        for name, slot in plan.outputs:
            tensor = outcome.outputs[slot]
            if isinstance(tensor, Unknown) and tensor.known.may_be_absent:  # it is there, or it is not
                known = replace(tensor.known, may_be_absent=False)
                is_absent = place.lacks(name, known.origins)
                tensor = None if is_absent else Unknown.of(tensor.datatype, known, tensor.shape)
            run.frame[slot] = tensor


async def _no_responses() -> AsyncGenerator[Run, None]:
    no_runs: tuple[Run, ...] = ()
    for run in no_runs:
        yield run


class _OpenCondition:
    """A condition with its value as far as known, else with any value that the path chooses."""

    def __init__(self, condition: Condition, site: Site, environment: Environment) -> None:
        self.source = condition.source
        self.tensors = condition.tensors
        self.is_test = condition.is_test
        self._condition = condition
        self._site = site
        self._environment = environment
        self._verdicts: dict[Hashable, Verdict] = {}

    def evaluate(self, frame: Frame, request: RequestScope) -> bool | str:
        seen = self._seen(frame)
        key = tuple(key_of(seen[slot]) for _, slot in self.tensors)
        if key not in self._verdicts:
            self._verdicts[key] = self._environment.evaluator.verdict(self._condition, seen)
        value: bool | str = self._values(Evaluation([self._verdicts[key]]))[0]
        return value

    def evaluate_rows(
        self, frame: Frame, request: RequestScope, num_rows: int, numbers: Sequence[int] | None = None
    ) -> Sequence[bool | str]:
        rows = range(num_rows) if numbers is None else numbers
        seen = self._seen(frame)
        verdicts = self._environment.evaluator.row_verdicts(self._condition, seen, num_rows, rows)
        values = self._values(Evaluation(verdicts, rows))
        is_one = num_rows == 1 and all(
            tensor.known.shape[:1] != (-1,) for _, slot in self.tensors if isinstance(tensor := seen[slot], Unknown)
        )
        if not is_one and not all(verdict.is_known for verdict in verdicts):
            self._environment.path.is_vague = True
        return values

    def _seen(self, frame: Frame) -> Frame:
        seen = frame.copy()
        for name, slot in self.tensors:
            seen[slot] = self._environment.seen(frame[slot], is_flag=name.startswith("steps."))
        return seen

    def _values(self, evaluation: Evaluation) -> list[Any]:
        """Note what was found; a value for each verdict, the same where it is not known."""
        path, verdicts = self._environment.path, evaluation.verdicts
        path.verdicts[self._site].append(evaluation)
        if self._site[1] == AGAIN:
            path.rounds.append(len(path.calls))
        failing = next((verdict for verdict in verdicts if verdict.fails), None)
        if failing is not None:
            raise InvalidArgumentError(failing.error)
        origins = tuple(dict.fromkeys(origin for verdict in verdicts for origin in verdict.depends_on))
        is_open = not all(verdict.is_known for verdict in verdicts)
        value: object = None
        if is_open and not self.is_test:
            value = OpenText.of(path, self._site, origins)
        elif is_open:
            value = (path.ask(self._site, origins) == 0) is not (self._site[1] == AGAIN)
        return [verdict.value if verdict.is_known else value for verdict in verdicts]


class Rewriter:
    """Rewrites the nodes of a plan.

    Attributes:
        targets: The stand-ins of models.
        nodes: The rewritten node that a step runs, by the step's identity.
        places: Paths of the rewritten nested nodes, by their identity.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.targets: dict[str, _StandInModel] = {}
        self.nodes: dict[int, NodePlan] = {}
        self.places: dict[int, _Place] = {}

    def node(self, plan: NodePlan) -> NodePlan:
        """The node, with stand-ins for everything in it."""
        return cast(NodePlan, self._fields(plan, plan, plan, max_inflight=0))

    def _step(self, step: StepPlan, node: NodePlan, *, is_tried: bool = False) -> StepPlan:
        """Rewrite a step of ``node``; ``is_tried``: it matters whether it fails."""
        is_tried = is_tried or step.is_soft or step.fallback is not None
        action: CallPlan | NodePlan
        if isinstance(step.action, CallPlan):
            target, signature = str(len(self.targets)), step.action.signature
            self.targets[target] = _StandInModel(target, step.action, self.environment, step, node, is_tried)
            outputs = tuple(replace(spec, dims=small(spec.dims)) for spec in signature.outputs)
            action = replace(step.action, target=target, signature=replace(signature, outputs=outputs))
        else:
            action = self.node(step.action)
            self.nodes[id(step)] = action
            self.places[id(action)] = _Place(self.environment, step, node, is_tried)
        fallback = None if step.fallback is None else self._step(step.fallback, node, is_tried=step.is_soft or is_tried)
        shadow = None if step.shadow is None else ShadowPlan(100, 0)
        kept = {"action": action, "fallback": fallback, "shadow": shadow}
        return cast(StepPlan, self._fields(step, step, node, **kept, policies=(), max_inflight=0))

    def _fields(self, value: Any, owner: StepPlan | NodePlan, node: NodePlan, **kept: Any) -> Any:
        """Rewrite the fields of a dataclass, except those given in ``kept``."""
        changes = dict(kept)
        for one in fields(value):
            if one.init and one.name not in kept:
                old = getattr(value, one.name)
                new = self._part(old, one.name, owner, node)
                if new is not old:
                    changes[one.name] = new
        return replace(value, **changes) if changes else value

    def _part(self, value: Any, name: str, owner: StepPlan | NodePlan, node: NodePlan) -> Any:
        """Rewrite the value of a field."""
        if hasattr(value, "evaluate_rows"):
            return _OpenCondition(value, (id(owner), name), self.environment)
        if isinstance(value, StepPlan):
            return self._step(value, node)
        if isinstance(value, WireTensor):
            return Known(*value)
        if isinstance(value, BanditPlan):
            return None  # any step may be drawn
        if isinstance(value, CollectorSettings):
            return replace(value, max_bytes=self._limit(value, node))
        if isinstance(value, tuple):
            parts = [self._part(item, name, owner, node) for item in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return self._fields(value, owner, node) if is_dataclass(value) and not isinstance(value, type) else value

    def _limit(self, settings: CollectorSettings, node: NodePlan) -> int:
        """The limit of a collector: a whole stream may pass it; of smaller pieces it only moves the ends."""
        if not settings.is_whole:
            return _NO_LIMIT_BYTES
        site, origins = (id(node), "max_bytes"), (f"how long the stream of {node.steps[0].name} is",)
        return OpenLimit.of(settings.max_bytes, lambda: self.environment.path.ask(site, origins) == 1)


class OneNode(Assembly):
    """Builds one node of a graph like the router, with stand-ins for the nodes inside it."""

    def __init__(self, plan: GraphPlan, rewriter: Rewriter) -> None:
        self.plan = plan
        self._rewriter = rewriter
        environment = rewriter.environment
        shadows = _LaterShadows(environment)
        chance = OpenChance(lambda: environment.path)
        super().__init__(plan, Runtime(rewriter.targets, lambda: environment.path.clock_ns, chance, shadows=shadows))
        self._opened: NodePlan | None = None

    def opened(self, plan: NodePlan) -> Node:
        """Build the node itself."""
        self._opened = plan
        return self.node(plan)

    @override
    def node(self, plan: NodePlan, graph: str = "") -> Node:
        return (
            super().node(plan, graph) if plan is self._opened else _StandInNode(plan, self._rewriter.places[id(plan)])
        )


class _LaterShadows(ShadowPool):
    def __init__(self, environment: Environment) -> None:
        super().__init__()
        self._environment = environment

    @override
    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """``work`` is done when the node has run."""
        self._environment.path.copies.append(work)
