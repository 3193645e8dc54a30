"""The router's own nodes, with stand-ins for what only a mesh has: models, chance, time, and values nobody knows.

A plan is rewritten once, field by field, whatever its nodes are: every condition asks what is known of the tensors that
it reads, every call goes to a stand-in, and policies that would repeat calls, keep or refuse them are left out.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import InvalidArgumentError, UnavailableError
from weft_common.tensors import WireTensor
from weft_router.assembly import Assembly
from weft_router.budgets.shadow_pool import ShadowPool
from weft_router.graph.description import slot_name, target_text
from weft_router.graph.plan import BanditPlan, CallPlan, Condition, Frame, GraphPlan, NodePlan, ShadowPlan, StepPlan
from weft_router.runtime import Runtime
from weft_router.scope import RequestScope
from weft_router.steps import Node, Run
from weft_router.target import TargetModel
from weft_tools.explain.judge import Judge, Verdict
from weft_tools.explain.values import SOME_ROWS, Knowledge, Known, Unknown, placeholder, resolved, small, vague
from weft_tools.explain.ways import FAILS, LATE, ORDER, STREAM, Call, Evaluation, OpenChance, OpenText, Site, Way

if TYPE_CHECKING:
    from weft_tools.explain.study import Study

#: The condition that asks for another round of its node.
AGAIN = "again"
#: Later than any timer of a node; asyncio waits for a day at most.
_LATE_S = 80_000.0


@dataclass(slots=True)
class Scene:
    """What the stand-ins share.

    Attributes:
        judge: Evaluates conditions.
        outcome: Of a node inside, its frame and the nanoseconds that it has: what it does; None where it is not
            studied yet.
        way: The way that is followed now.
        targets: The stand-ins of models.
        nodes: The rewritten node in the place of a step, by the step's identity.
        places: Where the rewritten nodes inside stand, by their identity.
    """

    judge: Judge
    outcome: "Callable[[NodePlan, Frame, int | None], Study | None]"
    way: Way = field(init=False)
    targets: dict[str, "StandInModel"] = field(default_factory=dict)
    nodes: dict[int, NodePlan] = field(default_factory=dict)
    places: dict[int, "_Stand"] = field(default_factory=dict)

    def assembly(self, plan: GraphPlan, root: NodePlan) -> "_OneNode":
        """Makes the nodes of the rewritten ``root`` of a graph."""
        runtime = Runtime(self.targets, lambda: self.way.clock_ns, OpenChance(lambda: self.way))
        runtime.shadows = _OpenShadows(self)
        return _OneNode(replace(plan, root=root, cache=None), runtime, self)

    def seen(self, tensor: WireTensor | None, *, is_flag: bool = False) -> WireTensor | None:
        """A tensor as conditions and nodes inside see it; a flag says whether a step has answered."""
        if self.way.is_vague and is_flag:
            return Unknown.of("BOOL", Knowledge((1,), SOME_ROWS, may_be_absent=True), (1,))
        return vague(tensor) if self.way.is_vague and tensor is not None else resolved(tensor)

    def node(self, plan: NodePlan) -> NodePlan:
        """The node, and all in it, with stand-ins."""
        return cast(NodePlan, self._fields(plan, plan, plan, max_inflight=0))

    def _step(self, step: StepPlan, node: NodePlan, *, is_tried: bool = False) -> StepPlan:
        """A step of ``node``; with ``is_tried`` it makes a difference whether it fails."""
        is_tried = is_tried or step.is_soft or step.fallback is not None
        action: CallPlan | NodePlan
        if isinstance(step.action, CallPlan):
            target, signature = str(len(self.targets)), step.action.signature
            self.targets[target] = StandInModel(target, _Stand(self, step, node, is_tried), step.action)
            outputs = tuple(replace(spec, dims=small(spec.dims)) for spec in signature.outputs)
            action = replace(step.action, target=target, signature=replace(signature, outputs=outputs))
        else:
            action = self.node(step.action)
            self.nodes[id(step)] = action
            self.places[id(action)] = _Stand(self, step, node, is_tried)
        fallback = None if step.fallback is None else self._step(step.fallback, node, is_tried=step.is_soft or is_tried)
        shadow = None if step.shadow is None else ShadowPlan(100, 0)
        kept = {"action": action, "fallback": fallback, "shadow": shadow}
        return cast(StepPlan, self._fields(step, step, node, **kept, policies=(), max_inflight=0))

    def _fields(self, value: Any, owner: StepPlan | NodePlan, node: NodePlan, **kept: Any) -> Any:
        """A dataclass whose fields are rewritten, but for ``kept``, which are given."""
        changes = dict(kept)
        for one in fields(value):
            if one.init and one.name not in kept:
                old = getattr(value, one.name)
                new = self._part(old, one.name, owner, node)
                if new is not old:
                    changes[one.name] = new
        return replace(value, **changes) if changes else value

    def _part(self, value: Any, name: str, owner: StepPlan | NodePlan, node: NodePlan) -> Any:
        """What is in a field."""
        if hasattr(value, "evaluate_rows"):
            return _OpenCondition(value, (id(owner), name), self)
        if isinstance(value, StepPlan):
            return self._step(value, node)
        if isinstance(value, WireTensor):
            return Known(*value)
        if isinstance(value, BanditPlan):
            return None  # any step may be drawn
        if isinstance(value, tuple):
            parts = [self._part(item, name, owner, node) for item in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return self._fields(value, owner, node) if is_dataclass(value) and not isinstance(value, type) else value


class _Stand:
    """Where a stand-in stands: it takes part in what is decided on the way.

    Args:
        scene: Shared.
        step: That it is the action of.
        node: Around the step.
        is_tried: Whether something else follows if it fails.
    """

    def __init__(self, scene: Scene, step: StepPlan, node: NodePlan, is_tried: bool) -> None:
        self.scene = scene
        self.step = step
        self.node = node
        self._is_tried = is_tried
        self._watches_time = any(one.min_remaining_ms for one in node.steps)

    async def arrive(self, call: Call, deadline_ns: int | None = None) -> None:
        """The call is made, and answered now or later. Raises UnavailableError if it fails on this way."""
        way, step = self.scene.way, self.step
        way.calls.append(call)
        if step.shadow is not None:
            return
        site = (id(step), "call")
        if self._is_tried and way.ask((site, FAILS), (f"whether {step.name} answers",), cause=FAILS, step=step):
            raise UnavailableError("it may fail")
        is_timed, call_id = self._watches_time and deadline_ns is not None, len(way.calls)
        if way.pending:
            way.meeting |= {*way.pending, call_id}
        way.pending.add(call_id)
        try:
            await asyncio.sleep(0)
            cause = LATE if is_timed else ORDER if call_id in way.meeting else ""
            if cause and way.ask((site, LATE), (f"whether {step.name} is late",), cause=cause, step=step):
                if deadline_ns is not None:
                    way.clock_ns = max(way.clock_ns, deadline_ns - 1)
                await asyncio.sleep(_LATE_S)
        except asyncio.CancelledError:
            way.cancelled.add(step.name)
            raise
        finally:
            way.pending.discard(call_id)


class StandInModel:
    """Answers with placeholders of the declared signature; a target as any other.

    Args:
        name: Of the target.
        place: Where it stands.
        call: As planned.
    """

    address = ""

    def __init__(self, name: str, place: _Stand, call: CallPlan) -> None:
        self.name = name
        self._place = place
        self._signature = call.signature
        step, node = place.step, place.node
        slots = dict(step.outputs)
        tensors = {spec.name: slot_name(node, slots.get(spec.name, -1)) or spec.name for spec in call.signature.outputs}
        self._of = f"{step.name} -> {target_text(call)}"
        self._origins = {name: f"{tensor} of {self._of}" for name, tensor in tensors.items()}

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As ``Target.infer``."""
        await self._place.arrive(Call(self._place.step), context.deadline_ns)
        return self._answer(call)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``Target.stream_infer``: one response, or none."""
        step, way = self._place.step, self._place.scene.way
        await self._place.arrive(Call(step), context.deadline_ns)
        if way.ask((id(step), STREAM), (f"the responses of {self._of}",), cause=STREAM, step=step) == 0:
            yield self._answer(call)

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """None."""
        return []

    async def close(self) -> None:
        """Nothing is open."""

    def _answer(self, call: InferCall) -> InferResult:
        is_batched, tensors = self._signature.max_batch_size > 0, list(call.inputs.values())
        num_rows = tensors[0].shape[0] if is_batched and tensors and tensors[0].shape else 1
        is_open = self._place.scene.way.is_vague or any(
            isinstance(tensor, Unknown) and tensor.known.shape[:1] == (-1,) for tensor in tensors
        )
        outputs: dict[str, WireTensor] = {
            spec.name: placeholder(spec, num_rows if is_batched else None, self._origins[spec.name], is_open=is_open)
            for spec in self._signature.outputs
        }
        return InferResult(call.model_name, call.model_version, call.request_id, {}, outputs)


class _StandInNode(Node):
    """A node inside the one that runs: it was explained, and does what is known of it."""

    def __init__(self, plan: NodePlan, place: _Stand) -> None:
        super().__init__(plan)
        self._place = place

    async def run(self, run: Run) -> None:
        """As ``Node.run``."""
        scene, plan = self._place.scene, self.plan
        way = scene.way
        frame: Frame = [None] * plan.num_slots
        for _, slot in plan.inputs:
            frame[slot] = scene.seen(run.frame[slot])
        limit_ns = None if run.deadline_ns is None else run.deadline_ns - way.clock_ns
        outcome = scene.outcome(plan, frame, limit_ns)
        if outcome is None:
            way.missing = way.missing or (plan, frame, limit_ns)
            raise UnavailableError("it is explained first")
        error = outcome.error
        await self._place.arrive(Call(self._place.step, limit_ns, frame, error), run.deadline_ns)
        if error is not None:
            raise error.with_message(error.message)
        for slot, tensor in outcome.outputs.items():
            run.frame[slot] = tensor


class _OneNode(Assembly):
    """Makes a node as the router does, but for the nodes inside it.

    Args:
        plan, runtime: As of ``Assembly``.
        scene: Has the rewritten nodes.
    """

    def __init__(self, plan: GraphPlan, runtime: Runtime, scene: Scene) -> None:
        super().__init__(plan, runtime)
        self.plan = plan
        self._scene = scene
        self._opened: NodePlan | None = None

    def opened(self, plan: NodePlan) -> Node:
        """The node itself, ready to run."""
        self._opened = plan
        return self.node(plan)

    def node(self, plan: NodePlan, graph: str = "") -> Node:
        """As ``Assembly.node``."""
        return super().node(plan, graph) if plan is self._opened else _StandInNode(plan, self._scene.places[id(plan)])


class _OpenCondition:
    """A condition that has a value as far as that is known, and else any that the way has.

    Args:
        condition: The condition.
        site: Where it stands.
        scene: Shared.
    """

    def __init__(self, condition: Condition, site: Site, scene: Scene) -> None:
        self.source = condition.source
        self.tensors = condition.tensors
        self.is_test = condition.is_test
        self._condition = condition
        self._site = site
        self._scene = scene

    def evaluate(self, frame: Frame, request: RequestScope) -> bool | str:
        """As ``Condition.evaluate``."""
        verdict = self._scene.judge.verdict(self._condition, self._seen(frame))
        self._note(Evaluation([verdict]))
        value: bool | str = self._values([verdict])[0]
        return value

    def evaluate_rows(
        self, frame: Frame, request: RequestScope, num_rows: int, numbers: Sequence[int] | None = None
    ) -> Sequence[bool | str]:
        """As ``Condition.evaluate_rows``."""
        rows = range(num_rows) if numbers is None else numbers
        seen = self._seen(frame)
        verdicts = self._scene.judge.row_verdicts(self._condition, seen, num_rows, rows)
        self._note(Evaluation(verdicts, rows))
        values = self._values(verdicts)
        is_one = num_rows == 1 and all(
            tensor.known.shape[:1] != (-1,) for _, slot in self.tensors if isinstance(tensor := seen[slot], Unknown)
        )
        if not is_one and not all(verdict.is_known for verdict in verdicts):
            self._scene.way.is_vague = True
        return values

    def _seen(self, frame: Frame) -> Frame:
        seen = frame.copy()
        for name, slot in self.tensors:
            seen[slot] = self._scene.seen(frame[slot], is_flag=name.startswith("steps."))
        return seen

    def _note(self, evaluation: Evaluation) -> None:
        way = self._scene.way
        way.verdicts[self._site].append(evaluation)
        if self._site[1] == AGAIN:
            way.rounds.append(len(way.calls))

    def _values(self, verdicts: Sequence[Verdict]) -> list[Any]:
        """A value for each verdict; those that are not known are the same."""
        failing = next((verdict for verdict in verdicts if verdict.fails), None)
        if failing is not None:
            raise InvalidArgumentError(failing.error)
        origins = tuple(dict.fromkeys(origin for verdict in verdicts for origin in verdict.depends_on))
        is_open, way = not all(verdict.is_known for verdict in verdicts), self._scene.way
        value: object = None
        if is_open and not self.is_test:
            value = OpenText.of(way, self._site, origins)
        elif is_open:
            value = (way.ask(self._site, origins) == 0) is not (self._site[1] == AGAIN)
        return [verdict.value if verdict.is_known else value for verdict in verdicts]


class _OpenShadows(ShadowPool):
    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self._scene = scene

    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """``work`` is done when the node has run."""
        self._scene.way.copies.append(work)
