"""Base of node kinds whose steps are alternatives: every step can give the node's outputs.

The steps see only the node's inputs and write to the same slots. With ``per_row``, rows of a batch may take different
steps: a step gets a frame with some of the rows, and the answers are merged into the node's frame.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from weft.base.errors import InternalError, InvalidArgumentError, RemoteError, WeftError
from weft.base.tensors import WireTensor
from weft.language.compiler.names import NodeNames, target_path
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import Scope, owner_text
from weft.language.compiler.state import check_rows
from weft.language.description import given, offered, shadow_flows
from weft.language.path_form import StepOutcome
from weft.language.plan import OK, Condition, Flow, Frame, NodePlan, StepPlan
from weft.language.pruning import slots_read
from weft.language.syntax.file import NodeDefinition
from weft.language.types.signatures import TensorType, merged
from weft.router.reporting.path import StepRecord
from weft.router.steps.action import ErrorContext
from weft.router.steps.node import Node, NodeParts
from weft.router.steps.run import Run
from weft.router.tensors import Rows, join, split, without_rows

#: More rows are not named in a message.
_MAX_SHOWN_ROWS = 10


class AlternativesKind(NodeKind):
    """A kind whose steps are alternatives."""

    checks_outputs = True

    @override
    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        closed = [
            (definition.name, set(step.outputs.values()))
            for definition, step in zip(node.steps, names.steps, strict=True)
            if not step.is_open
        ]
        for tensor in dict.fromkeys(tensor for step in names.steps for tensor in step.outputs.values()):
            lacking = [name for name, tensors in closed if tensor not in tensors]
            if lacking:
                names.lacking[tensor] = lacking
            else:
                yield tensor

    def per_row(self, node: NodeDefinition) -> bool:
        """Whether rows of a batch may take different steps: the field ``per_row`` of the kind's message."""
        return getattr(getattr(node.message, self.name), "per_row", False)

    @override
    def why_no_stream(self, node: NodeDefinition) -> str:
        if not self.per_row(node):
            return ""
        return (
            f"with 'per_row' the rows of a batch go different ways and come together in one response; leave 'per_row' "
            f"out of '{node.name}', or send one row to a request"
        )

    def build_step(
        self, builder: NodeBuilder, scope: Scope, index: int, slots: Mapping[str, int]
    ) -> tuple[StepPlan | None, Mapping[str, TensorType], Iterable[str]]:
        """Compile one step, whose outputs go to ``slots``.

        Returns:
            Its plan, None after a reported error; the types of its outputs; the names of those that something reads.
        """
        built = builder.step(scope, index, slots)
        return built.plan, built.outputs, slots

    def own_fields(self, builder: NodeBuilder, scope: Scope) -> dict[str, Any]:
        """Plan fields specific to this kind, besides ``per_row``; called when the steps are compiled."""
        return {}

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        node, names = scope.node, scope.names
        slots = {name: scope.new_slot(name) for name in names.outputs if name in scope.call.wanted}
        scope.new_ok_slots({asked for step in names.steps for asked in step.asks})
        plans: list[StepPlan] = []
        offers: dict[str, list[TensorType]] = {}
        per_row = self.per_row(node)
        if per_row:
            _check_rows(builder, scope, scope.inputs)
            check_rows(scope, builder.names, builder.report, "with 'per_row' the rows of a request go different ways")
        for i in range(len(node.steps)):
            plan, offered, used = self.build_step(builder, scope, i, slots)
            _check_alternative(builder, scope, i, offered, declared, offers)
            if per_row:
                _check_rows(builder, scope, {name: offered[name] for name in used if name in offered})
            if plan is not None:
                plans.append(plan)
        if not names.outputs and not names.is_open:
            text = f"the steps of '{node.name}' have no output in common; rename outputs with 'output_map'"
            builder.report.error("G017", scope.file, node.kind_path, text)
        place = scope.file.place(node.kind_path)
        types = {
            name: merged(offers.get(name, []), f"output '{name}' of node '{node.name}' ({place})")
            for name in names.outputs
        }
        types |= {name: _left_out(scope, name, types[name], declared) for name in declared if name in types}
        if per_row:  # what has no batch dimension was reported
            types = {name: known if known.is_batched else known.forgotten() for name, known in types.items()}
        for name, slot in slots.items():
            scope.note(slot, name, types[name])
        own = self.own_fields(builder, scope)
        if per_row:
            own["per_row"] = True
        if len(plans) != len(node.steps):
            return None, types
        return replace(scope.node_plan(self.plan, plans, slots), **own), types


class AlternativesNode(Node):
    """A node whose steps are alternatives."""

    def __init__(self, plan: NodePlan, parts: NodeParts) -> None:
        super().__init__(plan)
        self._steps = parts.steps
        self._error_context = parts.error_context
        self._runtime = parts.runtime

    def _placed(self, error: WeftError, detail: str = "") -> WeftError:
        return self._error_context.wrap(error, f"{self.plan.path}: {detail}" if detail else self.plan.path)

    def _holds(self, test: Condition, run: Run) -> bool:
        return self._error_context.holds(test, run, self.plan.path)

    def _failure(self, record: StepRecord) -> WeftError | None:
        return RemoteError(record.status, record.error) if record.is_missing else None


class RowFrames:
    """Makes frames with some rows of a node's inputs, and merges the rows of their answers."""

    def __init__(self, plan: NodePlan, error_context: ErrorContext) -> None:
        self._plan = plan
        self._error_context = error_context
        self._names = {slot: name for name, slot in plan.inputs}
        self._ok_slots = {step.ok_slot: index for index, step in enumerate(plan.steps) if step.ok_slot >= 0}
        read = [slots_read(step) for step in plan.steps]
        self.step_slots = [[slot for slot in slots if slot in self._names] for slots in read]
        self._step_flags = [[slot for slot in slots if slot in self._ok_slots] for slots in read]
        self.output_slots = [slot for slot in dict.fromkeys(b.slot for b in plan.outputs) if slot not in self._names]

    def num_rows(self, frame: Frame) -> int:
        """Rows of the request. Raises WeftError if all inputs are absent, or differ in their number of rows."""
        shapes = {name: tensor.shape for slot, name in self._names.items() if (tensor := frame[slot]) is not None}
        counts = {shape[:1] for shape in shapes.values()}
        if not counts:
            error: WeftError = InvalidArgumentError("'per_row' needs an input that has rows; all inputs are absent")
            raise self._error_context.wrap(error, self._plan.path)
        count = counts.pop()
        if counts or not count:
            shown = ", ".join(f"{name} has shape {list(shape)}" for name, shape in shapes.items())
            error = InternalError(f"'per_row' needs inputs of the same number of rows: {shown}")
            raise self._error_context.wrap(error, self._plan.path)
        return count[0]

    def values(self, condition: Condition, view: Frame, run: Run, rows: Rows) -> Sequence[bool | str]:
        """Evaluate the condition for each row of a view. Raises ConditionFailedError, with the row's number."""
        scope = run.request.scope
        try:
            if not condition.tensors:
                return [condition.evaluate(view, scope)] * len(rows)
            return condition.evaluate_rows(view, scope, len(rows), rows)
        except InvalidArgumentError as error:
            raise self._error_context.failed(error, self._plan.path) from error

    def views(self, frame: Frame, slots: Iterable[int], groups: Sequence[Rows]) -> list[Frame]:
        """Make a frame for each group, with its rows of the tensors in ``slots``."""
        frames: list[Frame] = [[None] * len(frame) for _ in groups]
        for slot in slots:
            tensor = frame[slot]
            if tensor is not None:
                for view, part in zip(frames, split(tensor, groups), strict=True):
                    view[slot] = part
        return frames

    def step_view(self, frame: Frame, index: int, rows: Rows, answered: Sequence[Rows]) -> Frame:
        """Make a frame with some rows of all tensors that step ``index`` reads.

        Args:
            answered: For each step, the rows that it answered; ``steps.<name>.ok`` holds if it answered all of
                ``rows``.
        """
        view = self.views(frame, self.step_slots[index], [rows])[0]
        for slot in self._step_flags[index]:
            if set(answered[self._ok_slots[slot]]).issuperset(rows):
                view[slot] = OK
        return view

    def alike(self, index: int, rows: Rows, answered: Sequence[Rows]) -> list[list[int]]:
        """Group rows by the values of ``steps.<name>.ok`` that step ``index`` reads."""
        known = [set(answered[self._ok_slots[slot]]) for slot in self._step_flags[index]]
        if not known:
            return [list(rows)]
        groups: dict[tuple[bool, ...], list[int]] = {}
        for row in rows:
            groups.setdefault(tuple(row in one for one in known), []).append(row)
        return list(groups.values())

    def gather(self, frame: Frame, parts: Sequence[tuple[Rows, Rows, Frame]], num_rows: int) -> None:
        """Merge the node's outputs into ``frame``; one that is absent for some rows is absent.

        Args:
            parts: (rows, rows of the view, view): a step has answered all rows of its view, of which ``rows`` count.
                Each row of the request is in one part.

        Raises:
            InternalError: The answers cannot be merged; the message names the output.
        """
        chosen = [None if len(rows) == len(of_view) else _places(rows, of_view) for rows, of_view, _ in parts]
        for slot in self.output_slots:
            tensors = [tensor for _, _, view in parts if (tensor := view[slot]) is not None]
            if len(tensors) < len(parts):
                frame[slot] = None
                continue
            try:
                found = [
                    (rows, tensor if places is None else split(tensor, [places])[0])
                    for (rows, _, _), places, tensor in zip(parts, chosen, tensors, strict=True)
                ]
                frame[slot] = join(found, num_rows) if found else self._empty(slot)
            except WeftError as error:
                names = ", ".join(f"'{name}'" for name, output in self._plan.outputs if output == slot)
                named = error.with_message(f"output {names}: {error.message}")
                raise self._error_context.wrap(named, self._plan.path) from error

    def _empty(self, slot: int) -> WireTensor | None:
        spec = self._plan.specs.get(slot)
        return None if spec is None else without_rows(spec.datatype, spec.dims)


def _places(rows: Rows, of_view: Rows) -> Rows:
    places = {row: place for place, row in enumerate(of_view)}
    return [places[row] for row in rows]


def of_rows(error: WeftError, rows: Rows, num_rows: int) -> WeftError:
    """Add to an error which rows it is about, unless these are all ``num_rows`` of the request."""
    if len(rows) == num_rows:
        return error
    shown = [str(row) for row in rows[:_MAX_SHOWN_ROWS]]
    if len(rows) > len(shown):
        shown.append("...")
    return error.with_message(f"{error.message} (row{'s' * (len(rows) > 1)} {', '.join(shown)} of {num_rows})")


def record_rows(records: Iterable[StepRecord], num_rows: int) -> None:
    """Record how many rows each step had."""
    for record in records:
        record.rows = num_rows


def only_branch(steps: Sequence[StepOutcome]) -> str:
    """The name of the step that ran, if any, for the path."""
    return steps[0].name if len(steps) == 1 else ""


def branch_flows(plan: NodePlan, notes: Iterable[str]) -> tuple[Flow, ...]:
    """Edges, for drawings, of a node that runs one of its steps, each with its note."""
    flows: list[Flow] = []
    for index, (step, note) in enumerate(zip(plan.steps, notes, strict=True)):
        flows.append(Flow(None, index, (note,), given(step)))
        flows.append(Flow(index, None, tensors=offered(step), gives=True))
    return (*flows, *shadow_flows(plan))


def _check_rows(builder: NodeBuilder, scope: Scope, types: Mapping[str, TensorType]) -> None:
    file, node = scope.file, scope.node
    path = f"{node.kind_path}.per_row"
    if not file.is_batched:
        text = f"'per_row' needs a batch dimension, graph '{file.name}' has none; give it a 'max_batch_size'"
        builder.report.error("G023", file, path, text, is_name=True)
        return
    for name, known in types.items():
        if known.is_known and not known.is_batched:
            text = (
                f"'per_row' needs a batch dimension in every tensor of '{node.name}'; '{name}' is {known} and has "
                f"none, it comes from {known.origin}"
            )
            builder.report.error("G023", file, path, text, is_name=True)


def _may_lack(scope: Scope, name: str, declared: Mapping[str, TensorType]) -> bool:
    is_given = any(name in step.outputs.values() for step in scope.names.steps)
    return is_given and name in declared and declared[name].is_optional


def _left_out(scope: Scope, name: str, known: TensorType, declared: Mapping[str, TensorType]) -> TensorType:
    """Type of an output that some steps do not give."""
    steps = zip(scope.node.steps, scope.names.steps, strict=True)
    lacking = [repr(step.name) for step, own in steps if not own.is_open and name not in own.outputs.values()]
    if not lacking or not _may_lack(scope, name, declared):
        return known
    absence = f"step {' and '.join(lacking)} of node '{scope.node.name}' gives none: give the step that runs the node "
    return replace(known, is_optional=True, absence=f"{absence}a 'default' for '{name}'")


def _check_alternative(
    builder: NodeBuilder,
    scope: Scope,
    index: int,
    offered: Mapping[str, TensorType],
    declared: Mapping[str, TensorType],
    offers: dict[str, list[TensorType]],
) -> None:
    file, step = scope.file, scope.node.steps[index]
    path = target_path(step)
    for name in scope.names.outputs:
        value = offered.get(name)
        what = f"output '{name}' of {owner_text(file, scope.node)}"
        if value is None:
            if not scope.names.steps[index].is_open and not _may_lack(scope, name, declared):
                builder.missing_output(file, path, f"step '{step.name}' gives no {what}", name, offered)
            continue
        before = offers.setdefault(name, [])
        if name in declared:
            used = declared[name]
            builder.check_use(file, path, value, used, is_required=False, what=what, declared=used)
        elif not all(builder.agree(file, path, what, value, other, "alternatives") for other in before):
            continue
        before.append(value)
