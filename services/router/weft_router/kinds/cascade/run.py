"""Steps one after another until an answer is accepted."""

from weft_common.errors import DeadlineExceededError, InvalidArgumentError, WeftError
from weft_common.tensors import WireTensor
from weft_router.graph.plan import NodePlan, StepPlan
from weft_router.kinds.alternatives import AlternativesNode
from weft_router.steps import NodeParts, Run

_NS_PER_MS = 1_000_000


class UntilAccepted(AlternativesNode):
    """Runs steps in declared order until one answers and its ``accept`` holds.

    A step is passed over if its ``when`` is false, or less than its ``min_remaining_ms`` is left; a SOFT step that
    fails too. If no answer is accepted the latest one counts, if there is none the error of the last step that failed.
    """

    def __init__(self, plan: NodePlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        outputs = {slot for _, slot in plan.outputs}
        self._lacking = [outputs.difference(slot for _, slot in step.outputs) for step in plan.steps]

    async def run(self, run: Run) -> None:
        """As ``Node.run``."""
        frame, records = run.frame, run.record.steps
        latest: list[WireTensor | None] | None = None
        failure: WeftError | None = None
        is_late = False
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
            if has_answered:
                for slot in lacking:  # optional outputs of an answer that was not accepted
                    frame[slot] = None
                if plan.accept is None or self._holds(plan.accept, run):
                    return
                latest = [frame[slot] for _, slot in self.plan.outputs]
        if latest is None:
            raise failure or self._no_answer(is_late=is_late)
        for (_, slot), tensor in zip(self.plan.outputs, latest, strict=True):
            frame[slot] = tensor

    def _lacks_time(self, plan: StepPlan, deadline_ns: int | None) -> bool:
        """Whether less is left than the step needs to be worth a try."""
        if not plan.min_remaining_ms or deadline_ns is None:
            return False
        return deadline_ns - self._runtime.clock_ns() < plan.min_remaining_ms * _NS_PER_MS

    def _is_out_of_time(self, plan: StepPlan, error: WeftError) -> bool:
        """Whether a SOFT step failed because the time of the whole request is over: an answer in hand will do."""
        return plan.is_soft and error.code == "DEADLINE_EXCEEDED"

    def _no_answer(self, rows: str = "", *, is_late: bool) -> WeftError:
        return self._placed(no_answer(self.plan, rows, is_late=is_late))


def no_answer(plan: NodePlan, rows: str = "", *, is_late: bool) -> WeftError:
    """The error of a cascade of which no step ran.

    Args:
        plan: The cascade.
        rows: For the message: `` for row 3``.
        is_late: Whether a step was passed over for lack of time.
    """
    if is_late:
        return DeadlineExceededError(
            f"cascade '{plan.name}' has no answer{rows}: less time is left than 'min_remaining_ms' of its steps "
            "asks for; give the request more time, or a step without that limit"
        )
    tests = ", ".join(f"'{step.name}' {step.when.source!r}" for step in plan.steps if step.when)
    return InvalidArgumentError(
        f"no step of cascade '{plan.name}' is for this request{rows}: no 'when' holds of {tests}"
    )
