"""Steps one after another until an answer is accepted."""

from typing_extensions import override

from weft.base.errors import DeadlineExceededError, InvalidArgumentError, WeftError
from weft.base.tensors import WireTensor
from weft.language.plan import NodePlan, StepPlan
from weft.router.operators.alternatives import AlternativesNode
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
