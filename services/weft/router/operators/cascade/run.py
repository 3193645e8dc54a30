"""Steps one after another until an answer is accepted; row by row, what is not accepted yet travels on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from typing_extensions import override

from weft.base.errors import DeadlineExceededError, InvalidArgumentError, WeftError
from weft.base.tensors import WireTensor
from weft.language.plan import Frame, NodePlan, StepPlan
from weft.router.operators.alternatives import AlternativesNode
from weft.router.operators.by_row import RowFrames, of_rows, record_rows, rows_of
from weft.router.steps import NodeParts, OpenStream, Run

_NS_PER_MS = 1_000_000


class CascadeNode(AlternativesNode):
    """Runs steps in declared order until one answers and its ``accept`` holds.

    A step is passed over if its ``when`` is false, or less than its ``min_remaining_ms`` is left; a SOFT step that
    fails too. If no answer is accepted the latest one counts, if there is none the error of the last step that failed.

    A step that streams is judged by its first response; if it is accepted, so are the others. A stream without a
    response is not accepted where there is an ``accept``. What was not accepted waits unread until there is a better
    answer.
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
                has_answered = False
                if plan.when is not None and not self._holds(plan.when, run):
                    pass
                elif self._lacks_time(plan, run.deadline_ns):
                    is_late = True
                else:
                    num_records = len(records)
                    try:
                        has_answered = await step.run(run)
                    except WeftError as error:
                        if latest is not None and self._is_out_of_time(plan, error):
                            break
                        raise
                    if not has_answered:
                        failure = self._failure(records[num_records])
                if not has_answered:
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

    def _is_out_of_time(self, plan: StepPlan, error: WeftError) -> bool:
        """Whether a SOFT step failed because the time of the whole request is over: an answer in hand will do."""
        return plan.is_soft and error.code == "DEADLINE_EXCEEDED"

    def _no_answer(self, rows: str = "", *, is_late: bool) -> WeftError:
        return self._placed(no_answer(self.plan, rows, is_late=is_late))


def no_answer(plan: NodePlan, rows: str = "", *, is_late: bool) -> WeftError:
    """The error of a cascade of which no step ran."""
    if is_late:
        return DeadlineExceededError(
            f"cascade '{plan.name}' has no answer{rows}: less time is left than 'min_remaining_ms' of its steps "
            "asks for; give the request more time, or a step without that limit"
        )
    tests = ", ".join(f"'{step.name}' {step.when.source!r}" for step in plan.steps if step.when)
    return InvalidArgumentError(
        f"no step of cascade '{plan.name}' is for this request{rows}: no 'when' holds of {tests}"
    )


@dataclass(slots=True)
class _Progress:
    """How far the rows of one request have come.

    Attributes:
        open_rows: Not accepted yet, ascending.
        parts: Rows and the frame with their answer, in the order of the answers.
        answered: For each step, the rows that it answered.
        failures: Rows, and why a step did not answer them.
        late_rows: Rows that a step was passed over for, because too little time was left.
    """

    num_rows: int
    open_rows: list[int]
    answered: list[Sequence[int]]
    parts: list[tuple[list[int], Frame]] = field(default_factory=list)
    failures: list[tuple[list[int], WeftError]] = field(default_factory=list)
    late_rows: set[int] = field(default_factory=set)

    def latest(self) -> list[int]:
        latest = [-1] * self.num_rows
        for number, (rows, _) in enumerate(self.parts):
            for row in rows:
                latest[row] = number
        return latest


class CascadeNodeByRow(CascadeNode):
    """Runs each step with the rows that no step before it had an accepted answer for.

    For each row it is as for the whole request in ``CascadeNode``. A row that ends without any answer fails the
    request.
    """

    def __init__(self, plan: NodePlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        self._rows = RowFrames(plan)

    @override
    async def run(self, run: Run) -> None:
        records = run.record.steps
        try:
            num_rows = self._rows.num_rows(run.frame)
        except WeftError as error:
            raise self._placed(error) from error
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
                if self._is_out_of_time(step.plan, error) and -1 not in progress.latest():
                    break
                raise of_rows(error, rows, num_rows) from error
            finally:
                record_rows(records[num_records:], len(rows))
            if has_answered:
                self._take_in(index, rows, view, run, progress)
            elif (failure := self._failure(records[num_records])) is not None:
                progress.failures.append((rows, failure))
        self._gather(run.frame, progress)

    def _rows_for(self, index: int, run: Run, progress: _Progress) -> list[int]:
        when = self._steps[index].plan.when
        if when is None:
            return progress.open_rows
        rows: list[int] = []
        for group in self._rows.alike(index, progress.open_rows, progress.answered):
            view = self._rows.step_view(run.frame, index, group, progress.answered)
            rows += compress(group, self._row_values(when, view, run, group))
        return sorted(rows)

    def _take_in(self, index: int, rows: list[int], view: Frame, run: Run, progress: _Progress) -> None:
        accept = self._steps[index].plan.accept
        accepted = rows if accept is None else list(compress(rows, self._row_values(accept, view, run, rows)))
        progress.answered[index] = rows
        progress.parts.append((rows, view))
        if len(accepted) == len(progress.open_rows):
            progress.open_rows = []
        else:
            gone = set(accepted)
            progress.open_rows = [row for row in progress.open_rows if row not in gone]

    def _gather(self, frame: Frame, progress: _Progress) -> None:
        owned: dict[int, list[int]] = {}
        for row, number in enumerate(progress.latest()):
            if number < 0:
                raise self._no_row_answer(row, progress)
            owned.setdefault(number, []).append(row)
        slots = self._rows.output_slots
        try:
            parts = [
                (rows, rows_of(progress.parts[number][1], progress.parts[number][0], rows, slots))
                for number, rows in owned.items()
            ]
            self._rows.gather(frame, parts, progress.num_rows)
        except WeftError as error:
            raise self._placed(error) from error

    def _no_row_answer(self, row: int, progress: _Progress) -> WeftError:
        for rows, failure in reversed(progress.failures):
            if row in rows:
                return failure.with_message(f"{failure.message}; so row {row} has no answer")
        return self._no_answer(f" for row {row}", is_late=row in progress.late_rows)
