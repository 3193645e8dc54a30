"""Rows of one request that go different ways: views of a frame with some of its rows, and the way back."""

from collections.abc import Iterable, Sequence

from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.tensors import WireTensor
from weft.language.plan import OK, Frame, NodePlan
from weft.language.pruning import slots_read
from weft.router.reporting.path import StepRecord
from weft.router.tensors import Rows, join, split, without_rows

#: More rows are not named in a message.
_MAX_SHOWN_ROWS = 10


class RowFrames:
    """Makes frames with some rows of a node's inputs, and puts the answers of the rows together."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._names = {slot: name for name, slot in plan.inputs}
        self._ok_slots = {step.ok_slot: index for index, step in enumerate(plan.steps) if step.ok_slot >= 0}
        read = [slots_read(step) for step in plan.steps]
        self.step_slots = [[slot for slot in slots if slot in self._names] for slots in read]
        self._step_flags = [[slot for slot in slots if slot in self._ok_slots] for slots in read]
        self.output_slots = [slot for slot in dict.fromkeys(b.slot for b in plan.outputs) if slot not in self._names]

    def num_rows(self, frame: Frame) -> int:
        """Rows of the request.

        Raises:
            InternalError: The inputs do not have the same number of rows.
            InvalidArgumentError: All inputs are absent.
        """
        shapes = {name: tensor.shape for slot, name in self._names.items() if (tensor := frame[slot]) is not None}
        counts = {shape[:1] for shape in shapes.values()}
        if not counts:
            raise InvalidArgumentError("'per_row' needs an input that has rows; all inputs are absent")
        count = counts.pop()
        if counts or not count:
            shown = ", ".join(f"{name} has shape {list(shape)}" for name, shape in shapes.items())
            raise InternalError(f"'per_row' needs inputs of the same number of rows: {shown}")
        return count[0]

    def views(self, frame: Frame, slots: Iterable[int], groups: Sequence[Rows]) -> list[Frame]:
        """For each group a frame with its rows of the tensors in ``slots``."""
        frames: list[Frame] = [[None] * len(frame) for _ in groups]
        for slot in slots:
            tensor = frame[slot]
            if tensor is not None:
                for view, part in zip(frames, split(tensor, groups), strict=True):
                    view[slot] = part
        return frames

    def step_view(self, frame: Frame, index: int, rows: Rows, answered: Sequence[Rows]) -> Frame:
        """A frame with the rows of all that step ``index`` reads; ``steps.<name>.ok`` holds if it does for each row.

        Args:
            answered: For each step, the rows that it answered.
        """
        view = self.views(frame, self.step_slots[index], [rows])[0]
        for slot in self._step_flags[index]:
            if set(answered[self._ok_slots[slot]]).issuperset(rows):
                view[slot] = OK
        return view

    def alike(self, index: int, rows: Rows, answered: Sequence[Rows]) -> list[list[int]]:
        """The rows in groups that ``steps.<name>.ok``, as far as step ``index`` reads it, is the same for."""
        known = [set(answered[self._ok_slots[slot]]) for slot in self._step_flags[index]]
        if not known:
            return [list(rows)]
        groups: dict[tuple[bool, ...], list[int]] = {}
        for row in rows:
            groups.setdefault(tuple(row in one for one in known), []).append(row)
        return list(groups.values())

    def gather(self, frame: Frame, parts: Sequence[tuple[Rows, Frame]], num_rows: int) -> None:
        """The node's outputs are in ``frame``; one that is absent for some rows is absent.

        Args:
            parts: Rows, and the frame in which a step answered them; each row is in one of them.

        Raises:
            InternalError: Answers do not make one tensor; the message names the output.
        """
        for slot in self.output_slots:
            tensors = [(rows, tensor) for rows, view in parts if (tensor := view[slot]) is not None]
            if len(tensors) < len(parts):
                frame[slot] = None
                continue
            try:
                frame[slot] = join(tensors, num_rows) if parts else self._empty(slot)
            except WeftError as error:
                names = ", ".join(f"'{name}'" for name, output in self._plan.outputs if output == slot)
                raise error.with_message(f"output {names}: {error.message}") from error

    def _empty(self, slot: int) -> WireTensor | None:
        spec = self._plan.specs.get(slot)
        return None if spec is None else without_rows(spec.datatype, spec.dims)


def rows_of(view: Frame, rows: Rows, owned: Rows, slots: Iterable[int]) -> Frame:
    """A frame with the rows ``owned`` of a view's tensors."""
    if len(owned) == len(rows):
        return view
    places = {row: place for place, row in enumerate(rows)}
    chosen = [places[row] for row in owned]
    part: Frame = [None] * len(view)
    for slot in slots:
        tensor = view[slot]
        if tensor is not None:
            part[slot] = split(tensor, [chosen])[0]
    return part


def of_rows(error: WeftError, rows: Rows, num_rows: int) -> WeftError:
    """The error, telling which rows it is about, unless these are all ``num_rows`` of the request."""
    if len(rows) == num_rows:
        return error
    shown = [str(row) for row in rows[:_MAX_SHOWN_ROWS]]
    if len(rows) > len(shown):
        shown.append("...")
    return error.with_message(f"{error.message} (row{'s' * (len(rows) > 1)} {', '.join(shown)} of {num_rows})")


def record_rows(records: Iterable[StepRecord], num_rows: int) -> None:
    """The records of steps say how many rows they had."""
    for record in records:
        record.rows = num_rows
