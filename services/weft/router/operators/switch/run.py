"""The first step whose case or test holds, of a request or of each of its rows."""

from collections.abc import Sequence
from itertools import compress

from typing_extensions import override

from weft.base.errors import InvalidArgumentError, WeftError
from weft.language.plan import Condition, Frame, NodePlan
from weft.router.fork import Fork
from weft.router.operators.alternatives import AlternativesNode
from weft.router.operators.by_row import RowFrames, of_rows, record_rows
from weft.router.reporting.path import NodeRecord
from weft.router.steps import NodeParts, Run, Step
from weft.router.tensors import Rows

#: A client may send a value of megabytes; no more of it goes into a message.
_MAX_SHOWN_CHARS = 100


class SwitchNode(AlternativesNode):
    """Runs the first step, in declared order, whose case or test holds; else the one that is ``otherwise``."""

    def __init__(self, plan: NodePlan, parts: NodeParts, on: Condition | None) -> None:
        super().__init__(plan, parts)
        self._on = on

    @override
    async def run(self, run: Run) -> None:
        await self._choose(run).run(run)

    def _choose(self, run: Run) -> Step:
        on = self._on
        value = None if on is None else self._error_context.text(on, run, self.plan.path)
        otherwise: Step | None = None
        for step in self._steps:
            branch = step.plan
            if branch.is_otherwise:
                otherwise = step
            elif branch.when is not None:
                if self._holds(branch.when, run):
                    return step
            elif value is not None and value in branch.cases:
                return step
        if otherwise is not None:
            return otherwise
        raise self._no_match(value)

    def _no_match(self, value: str | None, where: str = "") -> WeftError:
        return self._placed(no_match(self.plan, self._on, value, where))


def no_match(plan: NodePlan, on: Condition | None, value: str | None, where: str = "") -> InvalidArgumentError:
    """The error of a switch without a branch for ``value`` of ``on`` (None without one)."""
    shown = repr(value if value is None or len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "...")
    tried = f"value {shown} of {on.source!r} is no case" if on is not None else "no 'when' holds"
    return InvalidArgumentError(
        f"no branch of switch '{plan.name}' matches{where}: {tried}; branches are "
        f"{', '.join(repr(step.name) for step in plan.steps)}, and there is no 'otherwise'"
    )


class SwitchNodeByRow(SwitchNode):
    """Runs, for each row, the first step whose case or test holds; rows of the same step travel together.

    The steps run at once; the first failure cancels the others. The answers come back in the order of the rows.
    """

    def __init__(self, plan: NodePlan, parts: NodeParts, on: Condition | None) -> None:
        super().__init__(plan, parts, on)
        self._rows = RowFrames(plan)

    @override
    async def run(self, run: Run) -> None:
        rows, frame = self._rows, run.frame
        try:
            num_rows = rows.num_rows(frame)
        except WeftError as error:
            raise self._placed(error) from error
        groups = self._groups(run, num_rows)
        taken = [(index, group) for index, group in enumerate(groups) if group]
        slots = dict.fromkeys(slot for index, _ in taken for slot in rows.step_slots[index])
        views = rows.views(frame, slots, [group for _, group in taken])
        if len(taken) == 1:
            try:
                await self._steps[taken[0][0]].run(run.with_frame(views[0]))
            finally:
                record_rows(run.record.steps, num_rows)
        elif taken:
            await self._run_groups(taken, views, run, num_rows)
        try:
            parts = [(group, view) for (_, group), view in zip(taken, views, strict=True)]
            rows.gather(frame, parts, num_rows)
        except WeftError as error:
            raise self._placed(error) from error

    async def _run_groups(
        self, taken: Sequence[tuple[int, Rows]], views: Sequence[Frame], run: Run, num_rows: int
    ) -> None:
        record = run.record
        records = [NodeRecord(record.name, record.form) for _ in taken]
        fork = Fork()
        for (index, rows), view, own in zip(taken, views, records, strict=True):
            group_run = Run(view, run.request, run.deadline_ns, run.context, own)
            fork.start(self._run_group(index, rows, num_rows, group_run))
        try:
            await fork.join()
        finally:
            for (_, rows), own in zip(taken, records, strict=True):
                record_rows(own.steps, len(rows))
                record.steps += own.steps

    async def _run_group(self, index: int, rows: Rows, num_rows: int, run: Run) -> bool:
        try:
            return await self._steps[index].run(run)
        except WeftError as error:
            raise of_rows(error, rows, num_rows) from error

    def _groups(self, run: Run, num_rows: int) -> list[list[int]]:
        groups: list[list[int]] = [[] for _ in self._steps]
        open_rows = list(range(num_rows))
        on = self._on
        values: Sequence[bool | str] = ()
        if on is not None and open_rows:
            values = self._values(on, run, open_rows, num_rows)
        otherwise: list[int] | None = None
        for step, group in zip(self._steps, groups, strict=True):
            if not open_rows:
                break
            branch, when = step.plan, step.plan.when
            if branch.is_otherwise:
                otherwise = group
                continue
            if when is not None:
                group.extend(compress(open_rows, self._values(when, run, open_rows, num_rows)))
            elif values:
                group.extend(row for row in open_rows if values[row] in branch.cases)
            if group:
                chosen = set(group)
                open_rows = [row for row in open_rows if row not in chosen]
        if open_rows:
            if otherwise is None:
                row = open_rows[0]
                raise self._no_match(str(values[row]) if values else None, f" row {row}")
            otherwise += open_rows
        return groups

    def _values(self, condition: Condition, run: Run, rows: Sequence[int], num_rows: int) -> Sequence[bool | str]:
        view = run.frame
        if len(rows) < num_rows:
            view = self._rows.views(view, [binding.slot for binding in condition.tensors], [rows])[0]
        return self._row_values(condition, view, run, rows)
