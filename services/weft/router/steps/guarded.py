"""A step that may be skipped, refused, replaced by another, or missing in the answer."""

from collections.abc import Callable, Sequence
from functools import partial

from typing_extensions import override

from weft.base.errors import DeadlineExceededError, WeftError
from weft.language.plan import OK, Condition, StepPlan
from weft.router.admission import InflightLimit
from weft.router.reporting.path import SKIPPED, NodeRecord, StepRecord
from weft.router.reporting.spans import end_step_span
from weft.router.reporting.step_counters import StepCounters
from weft.router.steps.base import Action, ConditionFailedError, ErrorContext
from weft.router.steps.defaults import Defaults
from weft.router.steps.run import Run
from weft.router.steps.step import Step
from weft.router.steps.step_stream import StepStream

#: As ``SHADOW_COUNTERS``.
FALLBACK_COUNTERS = (("fallbacks", "Runs in which a fallback was tried"),)
_NS_PER_MS = 1_000_000


class GuardedStep(Step):
    """A step with ``when``, limits, fallbacks, softness, or an ok slot that something reads.

    Args:
        plan, action, error_context, clock_ns, counters, defaults: As of ``Step``.
        when: Decides whether the step runs; None where the node around it looks at it, or there is none.
        min_remaining_ms: With less time left it fails without a call; 0: no limit.
        admission: Counts its runs, a stream as long as it is open; None where ``max_inflight`` is 0.
        fallbacks: Tried in this order after it has failed; they have no fallbacks of their own.
    """

    def __init__(
        self,
        plan: StepPlan,
        action: Action,
        error_context: ErrorContext,
        clock_ns: Callable[[], int],
        counters: StepCounters,
        defaults: Defaults,
        *,
        when: Condition | None = None,
        min_remaining_ms: int = 0,
        admission: InflightLimit | None = None,
        fallbacks: Sequence[Step] = (),
    ) -> None:
        super().__init__(plan, action, error_context, clock_ns, counters, defaults)
        self._when = when
        self._min_remaining_ns = min_remaining_ms * _NS_PER_MS
        self._admission = admission
        self._fallbacks = tuple(fallbacks)
        self._is_soft = plan.is_soft
        self._ok_slot = plan.ok_slot

    @override
    async def run(self, run: Run) -> bool:
        is_due = self._when is None or self.error_context.holds(self._when, run, self._path)
        record = StepRecord(self._name, self._path, self._clock_ns(), self._target, self._model, self._version)
        run.record.steps.append(record)
        if not is_due:
            record.status = SKIPPED
            self._counters.count_failure(SKIPPED)
            self.defaults.fill(run.frame)
            return False
        if not run.request.is_traced:
            return await self._run(run, record)
        span, run = self._traced(run)
        failure: BaseException | None = None
        try:
            return await self._run(run, record)
        except BaseException as error:
            failure = error
            raise
        finally:
            stream = _stream_of(record, run)
            if stream is not None and failure is None:
                stream.when_over(partial(end_step_span, span, record))
            else:
                end_step_span(span, record, failure)
            del failure  # it holds this frame

    async def _run(self, run: Run, record: StepRecord) -> bool:
        """Run the step; on failure its fallbacks, or go on without it if it is soft."""
        try:
            await self._act(run, record)
        except ConditionFailedError as error:
            self._failed(record, error)
            raise
        except WeftError as error:
            self._failed(record, error)
            has_answered = await self._recover(error, run, record)
        except BaseException as error:
            self._failed(record, error)
            raise
        else:
            record.end_ns, record.status = self._clock_ns(), "OK"
            self._counters.latency.observe((record.end_ns - record.start_ns) / 1e9)
            has_answered = True
        if not has_answered:
            self.defaults.fill(run.frame)
        elif self._ok_slot >= 0:
            run.frame[self._ok_slot] = OK
        return has_answered

    async def _act(self, run: Run, record: StepRecord) -> None:
        """Run the action within the step's limits."""
        admission = self._admission
        if admission is not None:
            try:
                admission.enter()
            except WeftError as error:
                raise self.error_context.wrap(error, self.action.where) from error
        stream: StepStream | None = None
        try:
            if self._min_remaining_ns and run.deadline_ns is not None:
                self._check_remaining(run.deadline_ns - record.start_ns)
            if self._timeout_ns:
                run = run.until(record.start_ns + self._timeout_ns)
            await self.action.act(run, record)
            stream = _stream_of(record, run)
        finally:
            if admission is not None:
                if stream is None:
                    self._leave(admission, record.start_ns)
                else:
                    stream.when_over(lambda _: self._leave(admission, record.start_ns))

    async def _recover(self, failure: WeftError, run: Run, record: StepRecord) -> bool:
        """Whether a fallback answered; False where none did and the step is soft.

        Raises:
            WeftError: Of the last that failed; the message lists each failure.
        """
        last = failure
        text = failure.message
        try:
            for fallback in self._fallbacks:
                if self._is_past(run.deadline_ns):
                    break
                if record.fallbacks is None:
                    record.fallbacks = NodeRecord(self._name)
                    record.error = failure.message
                    text += f" ({failure.code})"
                    self._counters.events["fallbacks"] += 1
                try:
                    if await fallback.run(run.with_record(record.fallbacks)):
                        stream = _stream_of(record, run)
                        if stream is not None:
                            stream.is_soft = self._is_soft
                        return True
                except ConditionFailedError:
                    raise
                except WeftError as error:
                    last = error
                    text += f"; fallback {fallback.plan.name}: {error.code}: {self._unplaced(error, fallback)}"
            record.status = last.code
            is_out_of_time = last.code == "DEADLINE_EXCEEDED" and self._is_past(run.request.scope.deadline_ns)
            if not self._is_soft or is_out_of_time:
                raise last.with_message(text) from failure
            record.error = text
            record.is_missing = True
            return False
        finally:
            last = failure  # an error that holds a frame that holds the error is freed late

    def _leave(self, admission: InflightLimit, start_ns: int) -> None:
        admission.leave(self._clock_ns() - start_ns)

    def _check_remaining(self, remaining_ns: int) -> None:
        if remaining_ns < self._min_remaining_ns:
            error = DeadlineExceededError(
                f"{max(remaining_ns, 0) / _NS_PER_MS:.0f} ms are left, and 'min_remaining_ms' of the step asks for "
                f"{self._min_remaining_ns // _NS_PER_MS}; it was not called"
            )
            raise self.error_context.wrap(error, self.action.where)

    def _is_past(self, deadline_ns: int | None) -> bool:
        return deadline_ns is not None and self._clock_ns() >= deadline_ns

    def _unplaced(self, error: WeftError, fallback: Step) -> str:
        """The message without the place, if that is this step's."""
        text = error.message.removeprefix(self.error_context.prefix)
        return text.removeprefix(f"{fallback.action.where}: ")


def _stream_of(record: StepRecord, run: Run) -> StepStream | None:
    """What the step, or the fallback that answered, has left of its stream."""
    stream = run.request.stream
    if not isinstance(stream, StepStream):
        return None
    tried = () if record.fallbacks is None else record.fallbacks.steps[-1:]
    return stream if any(stream.record is one for one in (record, *tried)) else None
