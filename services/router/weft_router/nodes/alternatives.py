"""What switch, splitter, ensemble and cascade have in common: steps that see only the node's inputs."""

from collections.abc import Sequence

from weft_common.errors import InvalidArgumentError, RemoteError, WeftError
from weft_router.graph.plan import Condition, Frame, NodePlan
from weft_router.reporting.path import StepRecord
from weft_router.runtime import Runtime
from weft_router.steps import ErrorContext, Node, Run, Step
from weft_router.tensors.rows import Rows


class AlternativesNode(Node):
    """A node whose steps are alternatives.

    Args:
        plan: What it is made of.
        steps: Those of the plan, in its order.
        error_context: The graph, for messages.
        runtime: Clock and chance.
    """

    def __init__(self, plan: NodePlan, steps: Sequence[Step], error_context: ErrorContext, runtime: Runtime) -> None:
        super().__init__(plan)
        self._steps = tuple(steps)
        self._error_context = error_context
        self._runtime = runtime

    def _placed(self, error: WeftError, detail: str = "") -> WeftError:
        """The error, telling that it happened in this node."""
        return self._error_context.wrap(error, f"{self.plan.path}: {detail}" if detail else self.plan.path)

    def _holds(self, test: Condition, run: Run) -> bool:
        """Whether a test of a step holds. Raises ConditionFailedError."""
        return self._error_context.holds(test, run, self.plan.path)

    def _row_values(self, condition: Condition, view: Frame, run: Run, rows: Rows) -> Sequence[bool | str]:
        """The condition's value for each of a view's rows; it is evaluated once where it reads no tensor.

        Raises:
            ConditionFailedError: It cannot be evaluated for a row; the message has the row's number.
        """
        scope = run.request.scope
        try:
            if not condition.tensors:
                return [condition.evaluate(view, scope)] * len(rows)
            return condition.evaluate_rows(view, scope, len(rows), rows)
        except InvalidArgumentError as error:
            raise self._error_context.failed(error, self.plan.path) from error

    def _failure(self, record: StepRecord) -> WeftError | None:
        """Why a soft step gave no answer; None if it did not run, has answered, or still runs."""
        return RemoteError(record.status, record.error) if record.is_missing else None
