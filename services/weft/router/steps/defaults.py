"""Default outputs of a step that gave no answer, or left them out of it."""

from weft.base.tensors import WireTensor
from weft.language.plan import Frame, NodePlan, StepPlan


class Defaults:
    """Puts the defaults of a step into frames.

    Args:
        plan: The step.
        node: The node around it; it says what gives the number of rows.
    """

    def __init__(self, plan: StepPlan, node: NodePlan) -> None:
        self._absent = [slot for _, slot in plan.outputs]
        if plan.ok_slot >= 0:
            self._absent.append(plan.ok_slot)
        self._defaults = plan.defaults
        specs = node.specs
        self._inputs = [(slot, len(specs[slot].dims) + 1 if slot in specs else 0) for slot in node.counting_slots]

    def fill(self, frame: Frame) -> None:
        """Set the step's outputs to their defaults, or to absent, and its ok slot to absent."""
        for slot in self._absent:
            frame[slot] = None
        for slot, tensor, is_batched in self._defaults:
            frame[slot] = _repeated(tensor, self._num_rows(frame)) if is_batched else tensor

    def complete(self, frame: Frame) -> None:
        """Set those of the step's outputs that its answer has left out to their defaults."""
        for slot, tensor, is_batched in self._defaults:
            if frame[slot] is None:
                frame[slot] = _repeated(tensor, self._num_rows(frame)) if is_batched else tensor

    def _num_rows(self, frame: Frame) -> int:
        """Rows of the request: those of the first input that has a batch dimension; 1 where none has."""
        for slot, rank in self._inputs:
            tensor = frame[slot]
            if tensor is not None and tensor.shape and rank in (0, len(tensor.shape)):
                return tensor.shape[0]
        return 1


def _repeated(row: WireTensor, num_rows: int) -> WireTensor:
    if num_rows == 1:
        return row
    return WireTensor(row.datatype, (num_rows, *row.shape[1:]), row.data * num_rows)
