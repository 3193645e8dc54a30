"""The switch: runs the first step whose case or test holds."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, ClassVar

from typing_extensions import override

from weft.base.errors import InvalidArgumentError, WeftError
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import Scope
from weft.language.description import cases_text, condition_text
from weft.language.path_form import PathForm
from weft.language.plan import Condition, Description, End, Frame, StepPlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.conditions import Purpose
from weft.language.types.expression import read_expression
from weft.router.operators.alternatives import (
    AlternativesKind,
    AlternativesNode,
    RowFrames,
    branch_flows,
    of_rows,
    only_branch,
    record_rows,
)
from weft.router.reporting.path import NodeRecord
from weft.router.steps.node import Node, NodeParts, OperatorPlan
from weft.router.steps.run import Run
from weft.router.steps.step import Step
from weft.router.tasks import Fork
from weft.router.tensors import Rows
from weft_protos import graph_pb2 as pb

_ON = Purpose("on", ("string", "int", "bool"))
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
#: A client may send a value of megabytes; no more of it goes into a message.
_MAX_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class SwitchPlan(OperatorPlan):
    """A switch.

    Attributes:
        on: Compared with the cases of the steps; None if each step has a test.
        per_row: Rows of the batch may take different steps. Every tensor of the node has a batch dimension.
    """

    kind: ClassVar[str] = "switch"
    path_form: ClassVar[PathForm] = PathForm.of("[", "]", only_branch)
    watches: ClassVar[frozenset[str]] = frozenset({"when"})

    on: Condition | None = None
    per_row: bool = False

    @property
    @override
    def conditions(self) -> tuple[Condition, ...]:
        return () if self.on is None else (self.on,)

    @override
    def node(self, parts: NodeParts) -> Node:
        return (SwitchNodeByRow if self.per_row else SwitchNode)(self, parts)

    @override
    def describe(self) -> Description:
        on = (f"on {condition_text(self.on)}",) if self.on is not None else ()
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows),
            entry=End("each row: first that holds" if self.per_row else "first that holds", on),
            exit=End("rows in order again" if self.per_row else "its answer"),
            flows=branch_flows(self, map(_test_text, self.steps)),
        )


def _test_text(step: StepPlan) -> str:
    if step.is_otherwise:
        return "otherwise"
    if step.when is not None:
        return f"when {condition_text(step.when)}"
    return f"case {cases_text(step.cases)}"


class SwitchKind(AlternativesKind):
    """The switch in graph files: fields, checks, compilation."""

    plan = SwitchPlan
    step_fields = frozenset({"case", "otherwise"})
    chooses_by_when = True

    @override
    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        return [("on", message.switch.on)]

    @override
    def why_no_default(self, step: pb.Step) -> str:
        """A step that is not chosen does not contribute to the answer, so a default only makes sense for failures."""
        if step.dependency == pb.Step.SOFT:
            return ""
        return "on a HARD step of a switch, whose failure fails the node; make it 'dependency: SOFT'"

    @override
    def own_fields(self, builder: NodeBuilder, scope: Scope) -> dict[str, Any]:
        on = builder.condition(scope, f"{scope.node.kind_path}.on", _ON)
        if on is not None and on.type_name in ("bool", "int"):
            _check_cases(scope, on.type_name, builder.report)
        return {"on": on}

    @override
    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Report steps that are never chosen (G013), and requests that choose none (G012), for any model answers."""
        switch = node.message.switch
        cases: dict[str, str] = {}
        tests: dict[str, str] = {}
        otherwise = otherwise_path = certain = ""
        for step in node.steps:
            message, path = step.message, step.path
            given = [name for name in ("when", "case", "otherwise") if getattr(message, name)]
            if len(given) != 1:
                have = " and ".join(f"'{name}'" for name in given) or "none"
                text = f"step '{step.name}' must have one of 'when', 'case' and 'otherwise'; it has {have}"
                report.error("G013", file, path, text)
            if certain and not message.otherwise:
                text = f"step '{step.name}' is never chosen: '{certain}' before it always is"
                report.error("G013", file, path, text)
            for i, case in enumerate(message.case):
                if case in cases:
                    text = f"case '{case}' is taken by step '{cases[case]}' already"
                    report.error("G013", file, f"{path}.case[{i}]", text)
                cases.setdefault(case, step.name)
            if message.case and not switch.on:
                text = (
                    "'case' has no effect in a switch without 'on'; give it the value to compare: on: 'text(inputs.X)'"
                )
                report.error("G018", file, f"{path}.case[0]", text, is_name=True)
            if message.otherwise:
                if otherwise:
                    report.error("G013", file, f"{path}.otherwise", f"step '{otherwise}' is 'otherwise' already")
                otherwise, otherwise_path = otherwise or step.name, otherwise_path or f"{path}.otherwise"
            if message.when:
                if message.when in tests:
                    text = f"step '{tests[message.when]}' has the same test, so this one is never chosen"
                    report.error("G013", file, f"{path}.when", text)
                tests.setdefault(message.when, step.name)
                constant = read_expression(message.when).constant
                certain = certain or (step.name if constant else "")
                if constant is False:
                    text = f"step '{step.name}' is never chosen: 'when' is always false"
                    report.error("G013", file, f"{path}.when", text)
        if switch.on and not cases:
            text = "'on' has no effect: no step has a 'case'"
            report.error("G018", file, f"{node.kind_path}.on", text, is_name=True)
        if not otherwise and not certain and not _decides_all(node):
            text = (
                f"switch '{node.name}' has no 'otherwise': a request that matches no step fails with INVALID_ARGUMENT; "
                "to answer it, give one step 'otherwise: true'"
            )
            report.warning("G012", file, node.kind_path, text)
        elif otherwise and certain:
            text = f"step '{otherwise}' is never chosen: '{certain}' always is"
            report.error("G013", file, otherwise_path, text, is_name=True)


def _decides_all(node: NodeDefinition) -> bool:
    """Whether there is a case for true and one for false, and no other."""
    return {case for step in node.steps for case in step.message.case} == {"true", "false"}


def _check_cases(scope: Scope, type_name: str, report: GraphReport) -> None:
    """Report cases that the value of ``on`` never equals."""
    for step in scope.node.steps:
        for i, case in enumerate(step.message.case):
            is_integer = _INTEGER.fullmatch(case) is not None
            if case not in ("true", "false") if type_name == "bool" else not is_integer:
                text = f"case '{case}' is never chosen: 'on' is {type_name}"
                report.error("G013", scope.file, f"{step.path}.case[{i}]", text)
        if step.message.otherwise and type_name == "bool" and _decides_all(scope.node):
            text = f"step '{step.name}' is never chosen: 'on' is bool, and both its values have a 'case'"
            report.error("G013", scope.file, f"{step.path}.otherwise", text, is_name=True)


class SwitchNode(AlternativesNode):
    """Runs the first step, in declared order, whose case or test holds; else the ``otherwise`` step."""

    def __init__(self, plan: SwitchPlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        self._on = plan.on

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
        shown = repr(value if value is None or len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "...")
        tried = f"value {shown} of {self._on.source!r} is no case" if self._on is not None else "no 'when' holds"
        text = (
            f"no branch of switch '{self.plan.name}' matches{where}: {tried}; branches are "
            f"{', '.join(repr(step.name) for step in self.plan.steps)}, and there is no 'otherwise'"
        )
        return self._placed(InvalidArgumentError(text))


class SwitchNodeByRow(SwitchNode):
    """For each row, runs the first step whose case or test holds; rows of the same step share a call.

    The steps run at once; the first failure cancels the others. The answers come back in the order of the rows.
    """

    def __init__(self, plan: SwitchPlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        self._rows = RowFrames(plan, parts.error_context)

    @override
    async def run(self, run: Run) -> None:
        rows, frame = self._rows, run.frame
        num_rows = rows.num_rows(frame)
        taken = [(index, group) for index, group in enumerate(self._groups(run, num_rows)) if group]
        slots = dict.fromkeys(slot for index, _ in taken for slot in rows.step_slots[index])
        views = rows.views(frame, slots, [group for _, group in taken])
        if len(taken) == 1:
            try:
                await self._steps[taken[0][0]].run(run.with_frame(views[0]))
            finally:
                record_rows(run.record.steps, num_rows)
        elif taken:
            await self._run_groups(taken, views, run, num_rows)
        parts = [(group, group, view) for (_, group), view in zip(taken, views, strict=True)]
        rows.gather(frame, parts, num_rows)

    async def _run_groups(
        self, taken: Sequence[tuple[int, Rows]], views: Sequence[Frame], run: Run, num_rows: int
    ) -> None:
        """Run each group's step; records of the steps are in declared order."""
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
        """The rows of each step."""
        groups: list[list[int]] = [[] for _ in self._steps]
        open_rows = list(range(num_rows))
        on = self._on
        values = self._values(on, run, open_rows, num_rows) if on is not None and open_rows else ()
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
        return self._rows.values(condition, view, run, rows)
