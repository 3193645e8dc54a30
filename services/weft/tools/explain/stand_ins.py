"""Stand-ins in a plan that is explained: for models, for nodes inside a node, and for conditions."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, UnavailableError, WeftError
from weft.base.tensors import WireTensor
from weft.base.validation import check_names
from weft.language.description import slot_name, target_text
from weft.language.plan import CallPlan, Condition, Frame, NodePlan, StepPlan
from weft.language.request_scope import RequestScope
from weft.router.steps import Node, NoResponses, Run
from weft.router.target import TargetModel
from weft.tools.explain.evaluator import (
    SOME_ROWS,
    Evaluator,
    Knowledge,
    Unknown,
    Verdict,
    key_of,
    placeholder,
    resolved,
    vague,
)
from weft.tools.explain.paths import FAILS, LACKS, LATE, ORDER, STREAM, Call, Evaluation, ExecutionPath, OpenText, Site

#: The condition that asks for another round of its node.
AGAIN = "again"
#: Later than any timer of a node; asyncio waits for a day at most.
_LATE_S = 80_000.0


class NodeOutcome(Protocol):
    """What a node inside does: ``error`` if it fails for certain, else ``outputs`` by slot, unless it may be empty."""

    error: WeftError | None
    outputs: Mapping[int, WireTensor | None]
    may_be_empty: bool


@dataclass(slots=True)
class Environment:
    """What the stand-ins share.

    Attributes:
        outcome: Of a node inside, its frame and the nanoseconds that it has: what it does; None where it is not
            studied yet.
        gives: Whether an answer has an optional output, where that is known: by path of the step and name.
    """

    evaluator: Evaluator
    outcome: Callable[[NodePlan, Frame, int | None], NodeOutcome | None]
    gives: Mapping[str, bool]
    path: ExecutionPath = field(init=False)

    def seen(self, tensor: WireTensor | None, *, is_flag: bool = False) -> WireTensor | None:
        """A tensor as conditions and nodes inside see it; a flag says whether a step has answered."""
        if self.path.is_vague and is_flag:
            return Unknown.of("BOOL", Knowledge((1,), SOME_ROWS, may_be_absent=True), (1,))
        return vague(tensor) if self.path.is_vague and tensor is not None else resolved(tensor)


class StandIn:
    """Where a stand-in stands: it takes part in what is decided on the path.

    Args:
        is_tried: Whether something else follows if it fails.
    """

    def __init__(self, environment: Environment, step: StepPlan, node: NodePlan, is_tried: bool) -> None:
        self.environment = environment
        self.step = step
        self.node = node
        self._is_tried = is_tried
        self._watches_time = any(one.min_remaining_ms for one in node.steps)

    async def arrive(self, call: Call, deadline_ns: int | None = None) -> None:
        """The call is made, and answered now or later. Raises UnavailableError if it fails on this path."""
        path, step = self.environment.path, self.step
        path.calls.append(call)
        if step.shadow is not None:
            return
        site = (id(step), "call")
        if self._is_tried and path.ask((site, FAILS), (f"whether {step.name} answers",), cause=FAILS, step=step):
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

    def lacks(self, output: str, origins: tuple[str, ...]) -> bool:
        """Whether the answer is without an output that it need not have, on this path."""
        key = f"{self.step.path}/{output}"
        if key in self.environment.gives:
            return not self.environment.gives[key]
        return self.environment.path.ask((key, LACKS), origins, cause=LACKS, step=self.step) == 1


class StandInModel:
    """Answers with placeholders of the declared signature; a target as any other."""

    address = ""

    def __init__(self, name: str, place: StandIn, call: CallPlan) -> None:
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
        step, path = self._place.step, self._place.environment.path
        await self._place.arrive(Call(step), context.deadline_ns)
        if path.ask((id(step), STREAM), (f"the responses of {self._of}",), cause=STREAM, step=step) == 0:
            yield self._answer(call)

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """None."""
        return []

    async def close(self) -> None:
        """Nothing is open."""

    def _answer(self, call: InferCall) -> InferResult:
        check_names(call, self._signature)
        is_batched, tensors = self._signature.max_batch_size > 0, list(call.inputs.values())
        num_rows = tensors[0].shape[0] if is_batched and tensors and tensors[0].shape else 1
        is_open = self._place.environment.path.is_vague or any(
            isinstance(tensor, Unknown) and tensor.known.shape[:1] == (-1,) for tensor in tensors
        )
        rows = num_rows if is_batched else None
        asked = {output.name for output in call.outputs}
        outputs: dict[str, WireTensor] = {
            spec.name: placeholder(spec, rows, self._origins[spec.name], is_open=is_open)
            for spec in self._signature.outputs
            if not spec.is_optional
            or (spec.name in asked and not self._place.lacks(spec.name, (self._origins[spec.name],)))
        }
        return InferResult(call.model_name, call.model_version, call.request_id, {}, outputs)


class StandInNode(Node):
    """A node inside the one that runs: it was explained, and does what is known of it."""

    def __init__(self, plan: NodePlan, place: StandIn) -> None:
        super().__init__(plan)
        self._place = place

    @override
    async def run(self, run: Run) -> None:
        environment, plan = self._place.environment, self.plan
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
        await self._place.arrive(Call(self._place.step, limit_ns, frame, error), run.deadline_ns)
        if error is not None:
            raise error.with_message(error.message)
        step = self._place.step
        about = (f"the responses of {step.name} -> {target_text(plan)}",)
        if outcome.may_be_empty and path.ask((id(step), STREAM), about, cause=STREAM, step=step):
            run.request.stream = NoResponses()
            return
        for name, slot in plan.outputs:
            run.frame[slot] = self._settled(name, outcome.outputs[slot])

    def _settled(self, name: str, tensor: WireTensor | None) -> WireTensor | None:
        if not isinstance(tensor, Unknown) or not tensor.known.may_be_absent:
            return tensor
        if self._place.lacks(name, tensor.known.origins):
            return None
        return Unknown.of(tensor.datatype, replace(tensor.known, may_be_absent=False), tensor.shape)


class OpenCondition:
    """A condition that has a value as far as that is known, and else any that the path has."""

    def __init__(self, condition: Condition, site: Site, environment: Environment) -> None:
        self.source = condition.source
        self.tensors = condition.tensors
        self.is_test = condition.is_test
        self._condition = condition
        self._site = site
        self._environment = environment
        self._verdicts: dict[Hashable, Verdict] = {}

    def evaluate(self, frame: Frame, request: RequestScope) -> bool | str:
        """As ``Condition.evaluate``."""
        seen = self._seen(frame)
        key = tuple(key_of(seen[slot]) for _, slot in self.tensors)
        if key not in self._verdicts:
            self._verdicts[key] = self._environment.evaluator.verdict(self._condition, seen)
        verdict = self._verdicts[key]
        self._note(Evaluation([verdict]))
        value: bool | str = self._values([verdict])[0]
        return value

    def evaluate_rows(
        self, frame: Frame, request: RequestScope, num_rows: int, numbers: Sequence[int] | None = None
    ) -> Sequence[bool | str]:
        """As ``Condition.evaluate_rows``."""
        rows = range(num_rows) if numbers is None else numbers
        seen = self._seen(frame)
        verdicts = self._environment.evaluator.row_verdicts(self._condition, seen, num_rows, rows)
        self._note(Evaluation(verdicts, rows))
        values = self._values(verdicts)
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

    def _note(self, evaluation: Evaluation) -> None:
        path = self._environment.path
        path.verdicts[self._site].append(evaluation)
        if self._site[1] == AGAIN:
            path.rounds.append(len(path.calls))

    def _values(self, verdicts: Sequence[Verdict]) -> list[Any]:
        failing = next((verdict for verdict in verdicts if verdict.fails), None)
        if failing is not None:
            raise InvalidArgumentError(failing.error)
        origins = tuple(dict.fromkeys(origin for verdict in verdicts for origin in verdict.depends_on))
        is_open, path = not all(verdict.is_known for verdict in verdicts), self._environment.path
        value: object = None
        if is_open and not self.is_test:
            value = OpenText.of(path, self._site, origins)
        elif is_open:
            value = (path.ask(self._site, origins) == 0) is not (self._site[1] == AGAIN)
        return [verdict.value if verdict.is_known else value for verdict in verdicts]
