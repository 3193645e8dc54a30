"""A cascade in which only the rows that are not accepted yet travel on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from typing_extensions import override

from weft.base.errors import WeftError
from weft.language.plan import Frame, NodePlan
from weft.router.operators.by_row import RowFrames, of_rows, record_rows, rows_of
from weft.router.operators.cascade.run import CascadeNode
from weft.router.steps import NodeParts, Run


@dataclass(slots=True)
class _Progress:
    """How far the rows of one request have come.

    Attributes:
        num_rows: Of the request.
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
        """For each row, the last of ``parts`` that answers it; -1 for none."""
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
        """The open rows whose ``when`` holds."""
        when = self._steps[index].plan.when
        if when is None:
            return progress.open_rows
        rows: list[int] = []
        for group in self._rows.alike(index, progress.open_rows, progress.answered):
            view = self._rows.step_view(run.frame, index, group, progress.answered)
            rows += compress(group, self._row_values(when, view, run, group))
        return sorted(rows)

    def _take_in(self, index: int, rows: list[int], view: Frame, run: Run, progress: _Progress) -> None:
        """A step has answered ``rows``; those that are not accepted stay open."""
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
        """Put each row's answer into the node's outputs."""
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
        """Why a row has no answer: the error of the last step that failed on it, else why no step ran."""
        for rows, failure in reversed(progress.failures):
            if row in rows:
                return failure.with_message(f"{failure.message}; so row {row} has no answer")
        return self._no_answer(f" for row {row}", is_late=row in progress.late_rows)
