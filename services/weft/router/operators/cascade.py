"""The cascade: alternatives that run one after another until an answer is accepted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import ClassVar

from typing_extensions import override

from weft.base.errors import DeadlineExceededError, InvalidArgumentError, WeftError
from weft.base.tensors import WireTensor
from weft.language.checks.fields import check_choices
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import Scope
from weft.language.compiler.uses import visible_outputs
from weft.language.description import condition_text, given, offered, shadow_flows, when_notes
from weft.language.path_form import PathForm, StepOutcome
from weft.language.plan import Description, End, Flow, Frame, NodePlan, StepPlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition, StepDefinition
from weft.language.types.conditions import Purpose
from weft.language.types.expression import read_expression
from weft.language.types.signatures import TensorType
from weft.router.operators.alternatives import AlternativesKind, AlternativesNode, RowFrames, of_rows, record_rows
from weft.router.steps.node import Node, NodeParts, OperatorPlan
from weft.router.steps.run import OpenStream, Run
from weft_protos import graph_pb2 as pb

_ACCEPT = Purpose("accept")
_NS_PER_MS = 1_000_000


def _last_answer(steps: Sequence[StepOutcome]) -> str:
    return next((step.name for step in reversed(steps) if step.has_answered), "")


@dataclass(frozen=True, slots=True)
class CascadePlan(OperatorPlan):
    """A cascade.

    Attributes:
        per_row: Rows of the batch may take different steps. Every tensor of the node has a batch dimension.
    """

    kind: ClassVar[str] = "cascade"
    path_form: ClassVar[PathForm] = PathForm.of("<", ">", _last_answer)
    watches: ClassVar[frozenset[str]] = frozenset({"when", "min_remaining_ms"})

    per_row: bool = False

    @override
    def followers(self) -> Sequence[Sequence[int]]:
        last = len(self.steps) - 1
        return [(i + 1,) if i < last else () for i in range(len(self.steps))]

    @override
    def first_lost(self, lost: Sequence[int]) -> int | None:
        hard = next((index for index in lost if not self.steps[index].is_soft), None)
        return lost[0] if hard is None and len(lost) == len(self.steps) else hard

    @override
    def node(self, parts: NodeParts) -> Node:
        return (CascadeNodeByRow if self.per_row else CascadeNode)(self, parts)

    @override
    def describe(self) -> Description:
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows),
            entry=End("each row: in order until accepted" if self.per_row else "in order until accepted"),
            exit=End("first accepted, else the last answer"),
            flows=(*self._flows(), *shadow_flows(self)),
        )

    def _flows(self) -> Iterator[Flow]:
        onward: list[str] = []
        for index, step in enumerate(self.steps):
            is_last = index == len(self.steps) - 1
            yield Flow(index - 1 if index else None, index, (*onward, *when_notes(step)), given(step))
            accept = (f"accept {condition_text(step.accept)}",) if step.accept is not None and not is_last else ()
            yield Flow(index, None, accept, offered(step), gives=True)
            onward = ["not accepted, or failed" if step.is_soft else "not accepted"]


class CascadeKind(AlternativesKind):
    """The cascade in graph files: fields, checks, compilation."""

    plan = CascadePlan
    step_fields = frozenset({"accept"})
    sees_answers = True

    @override
    def why_no_default(self, step: pb.Step) -> str:
        return "in a cascade, where a step without an answer is passed over; give it to the step that runs this node"

    @override
    def build_step(
        self, builder: NodeBuilder, scope: Scope, index: int, slots: Mapping[str, int]
    ) -> tuple[StepPlan | None, Mapping[str, TensorType], Mapping[str, int]]:
        """Compile a step and its ``accept``; a failed or skipped step offers no outputs, since it is passed over."""
        step = scope.node.steps[index]
        path = f"{step.path}.accept"
        accept_slots = _accept_slots(scope, index, path, slots)
        own = {**slots, **accept_slots}
        built = builder.step(scope, index, own)
        for name, slot in accept_slots.items():
            scope.note(slot, name, built.answered[name])
        bindings = visible_outputs(scope, path, built.answered, own)
        accept = builder.condition(scope, path, _ACCEPT, builder.narrowing(scope, step), outputs=bindings)
        return built.plan and replace(built.plan, accept=accept), built.answered, own

    @override
    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        check_choices(file, node, [("per_row", self.per_row(node))], report)

    @override
    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Report steps behind one that always answers, constant tests, and an unused test of the last step."""
        certain = ""
        for step in node.steps:
            if certain:
                text = (
                    f"step '{step.name}' is never reached: the answer of '{certain}' always counts; give that one an "
                    "'accept'"
                )
                report.error("G013", file, step.path, text)
            accept = step.message.accept
            constant = read_expression(accept).constant if accept else None
            if constant is not None:
                what = (
                    "always true, as without it" if constant else "always false, so that no answer of the step counts"
                )
                cure = "write a test of 'outputs', for example max(outputs.PROBS) >= 0.9"
                report.error("G013", file, f"{step.path}.accept", f"'accept' is {what}; {cure}")
            elif accept and step is node.steps[-1]:
                text = (
                    "'accept' of the last step has no effect: there is no step to go on to, so its answer counts anyway"
                )
                report.warning("G018", file, f"{step.path}.accept", text)
            if not certain and not accept and not _may_pass(file, node, step):
                certain = step.name


def _may_pass(file: GraphFile, node: NodeDefinition, step: StepDefinition) -> bool:
    """Whether the cascade may continue after a step without ``accept``."""
    message = step.message
    policies = (message.policy, node.message.policy, file.message.policy)
    around = policies if message.model_name else policies[:1]
    has_limit = any(policy.min_remaining_ms for policy in around)
    return bool(message.when) or message.dependency == pb.Step.SOFT or has_limit


def _accept_slots(scope: Scope, index: int, path: str, slots: Mapping[str, int]) -> dict[str, int]:
    """Slots that only the ``accept`` of a step reads."""
    condition = scope.names.conditions.get(path)
    references = condition.expression.references if condition else []
    read = {ref.name for ref in references if ref.space == "outputs" and ref.name not in slots}
    offered_names = scope.names.steps[index].outputs.values()
    return {name: scope.new_slot(name) for name in sorted(read) if name in offered_names}


class CascadeNode(AlternativesNode):
    """Runs steps in declared order until one answers and its ``accept`` holds.

    It passes over a step whose ``when`` is false, that has less than its ``min_remaining_ms`` left, or that is SOFT and
    fails. If no answer is accepted, the latest one counts; without any, the error of the last failed step is raised.

    A step that streams is judged by its first response. A stream without responses is not accepted if there is an
    ``accept``. A stream that was not accepted stays open, unread, until a later step gives a better answer.
    """

    def __init__(self, plan: NodePlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        outputs = {slot for _, slot in plan.outputs}
        self._lacking = [outputs.difference(slot for _, slot in step.outputs) for step in plan.steps]

    @override
    async def run(self, run: Run) -> None:
        frame, request, records = run.frame, run.request, run.record.steps
        latest: list[WireTensor | None] | None = None
        failure: WeftError | None = None
        unread: OpenStream | None = None  # of the latest answer
        is_late = False
        try:
            for step, lacking in zip(self._steps, self._lacking, strict=True):
                plan = step.plan
                if plan.when is not None and not self._holds(plan.when, run):
                    continue
                if self._lacks_time(plan, run.deadline_ns):
                    is_late = True
                    continue
                num_records = len(records)
                try:
                    has_answered = await step.run(run)
                except WeftError as error:
                    if latest is not None and _is_out_of_time(plan, error):
                        break
                    raise
                if not has_answered:
                    failure = self._failure(records[num_records])
                    continue
                for slot in lacking:  # optional outputs of an answer that was not accepted
                    frame[slot] = None
                stream = request.stream
                if plan.accept is None:
                    return
                is_empty = stream is not None and not stream.num_responses
                if not is_empty and self._holds(plan.accept, run):
                    return
                if latest is None or not is_empty:
                    latest = [frame[slot] for _, slot in self.plan.outputs]
                    stream, unread, request.stream = unread, stream, None
                if stream is not None:
                    request.stream = None
                    await stream.close()
            if latest is None:
                raise failure or self._no_answer(is_late=is_late)
            for (_, slot), tensor in zip(self.plan.outputs, latest, strict=True):
                frame[slot] = tensor
            unread, request.stream = None, unread
        finally:
            if unread is not None:
                await unread.close()

    def _lacks_time(self, plan: StepPlan, deadline_ns: int | None) -> bool:
        if not plan.min_remaining_ms or deadline_ns is None:
            return False
        return deadline_ns - self._runtime.clock_ns() < plan.min_remaining_ms * _NS_PER_MS

    def _no_answer(self, rows: str = "", *, is_late: bool) -> WeftError:
        """Error message if no step ran: too little time, or no ``when`` is true."""
        name = self.plan.name
        if is_late:
            late = DeadlineExceededError(
                f"cascade '{name}' has no answer{rows}: less time is left than 'min_remaining_ms' of its steps "
                "asks for; give the request more time, or a step without that limit"
            )
            return self._placed(late)
        tests = ", ".join(f"'{step.name}' {step.when.source!r}" for step in self.plan.steps if step.when)
        text = f"no step of cascade '{name}' is for this request{rows}: no 'when' holds of {tests}"
        return self._placed(InvalidArgumentError(text))


def _is_out_of_time(plan: StepPlan, error: WeftError) -> bool:
    """Whether a SOFT step failed because the request's deadline has passed; an earlier answer is then returned."""
    return plan.is_soft and error.code == "DEADLINE_EXCEEDED"


@dataclass(slots=True)
class _Progress:
    """Progress of the rows of one request.

    Attributes:
        parts: Rows and the frame with their answer, in the order of the answers.
        answered: For each step, the rows that it answered.
        late_rows: Rows that skipped a step because too little time was left.
    """

    num_rows: int
    open_rows: list[int]
    answered: list[Sequence[int]]
    parts: list[tuple[list[int], Frame]] = field(default_factory=list)
    failures: list[tuple[list[int], WeftError]] = field(default_factory=list)
    late_rows: set[int] = field(default_factory=set)

    def latest(self) -> list[int]:
        """For each row, the last of ``parts`` that answers it; -1 for none."""
        latest = [-1] * self.num_rows
        for number, (rows, _) in enumerate(self.parts):
            for row in rows:
                latest[row] = number
        return latest


class CascadeNodeByRow(CascadeNode):
    """Runs each step with the rows that have no accepted answer yet.

    For each row the rules of ``CascadeNode`` apply. A row without any answer fails the request.
    """

    def __init__(self, plan: NodePlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        self._rows = RowFrames(plan, parts.error_context)

    @override
    async def run(self, run: Run) -> None:
        records = run.record.steps
        num_rows = self._rows.num_rows(run.frame)
        progress = _Progress(num_rows, list(range(num_rows)), [()] * len(self._steps))
        for index, step in enumerate(self._steps):
            if not progress.open_rows:
                break
            rows = self._rows_for(index, run, progress)
            if not rows:
                continue
            if self._lacks_time(step.plan, run.deadline_ns):
                progress.late_rows.update(rows)
                continue
            view = self._rows.step_view(run.frame, index, rows, progress.answered)
            num_records = len(records)
            try:
                has_answered = await step.run(run.with_frame(view))
            except WeftError as error:
                if _is_out_of_time(step.plan, error) and -1 not in progress.latest():
                    break
                raise of_rows(error, rows, num_rows) from error
            finally:
                record_rows(records[num_records:], len(rows))
            if has_answered:
                self._take_in(index, rows, view, run, progress)
            elif (failure := self._failure(records[num_records])) is not None:
                progress.failures.append((rows, failure))
        owned: dict[int, list[int]] = {}
        for row, number in enumerate(progress.latest()):
            if number < 0:
                raise self._no_row_answer(row, progress)
            owned.setdefault(number, []).append(row)
        self._rows.gather(run.frame, [(rows, *progress.parts[number]) for number, rows in owned.items()], num_rows)

    def _rows_for(self, index: int, run: Run, progress: _Progress) -> list[int]:
        when = self._steps[index].plan.when
        if when is None:
            return progress.open_rows
        rows: list[int] = []
        for group in self._rows.alike(index, progress.open_rows, progress.answered):
            view = self._rows.step_view(run.frame, index, group, progress.answered)
            rows += compress(group, self._rows.values(when, view, run, group))
        return sorted(rows)

    def _take_in(self, index: int, rows: list[int], view: Frame, run: Run, progress: _Progress) -> None:
        """Record the answer of a step for ``rows``; those not accepted remain open."""
        accept = self._steps[index].plan.accept
        accepted = rows if accept is None else list(compress(rows, self._rows.values(accept, view, run, rows)))
        progress.answered[index] = rows
        progress.parts.append((rows, view))
        if len(accepted) == len(progress.open_rows):
            progress.open_rows = []
        else:
            gone = set(accepted)
            progress.open_rows = [row for row in progress.open_rows if row not in gone]

    def _no_row_answer(self, row: int, progress: _Progress) -> WeftError:
        """The error of the last step that failed on the row, else that no step ran."""
        for rows, failure in reversed(progress.failures):
            if row in rows:
                return failure.with_message(f"{failure.message}; so row {row} has no answer")
        return self._no_answer(f" for row {row}", is_late=row in progress.late_rows)
