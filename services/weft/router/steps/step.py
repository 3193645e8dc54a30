"""``Step``, which runs an action with condition, fallbacks and defaults, and ``ShadowStep`` for background copies."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from opentelemetry.trace import Span
from typing_extensions import override

from weft.base.errors import WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.language.plan import OK, Condition, Frame, ShadowPlan, StepPlan
from weft.language.pruning import slots_read
from weft.router.reporting.counters import StepCounters
from weft.router.reporting.path import SKIPPED, NodeRecord, StepRecord
from weft.router.reporting.spans import end_step_span, start_step_span, step_attributes
from weft.router.runtime import Runtime
from weft.router.steps.action import Action, ConditionFailedError, Defaults, ErrorContext
from weft.router.steps.mirror import Comparison, Mirror
from weft.router.steps.responses import close_streams, responses_of, stream_of
from weft.router.steps.run import Run

#: (name of the metric after ``weft_graph_step_``, help) of what is counted here.
FALLBACK_COUNTERS = (("fallbacks", "Runs in which a fallback was tried"),)
SHADOW_COUNTERS = (
    ("shadows_sent", "Copies of requests that were sent"),
    ("shadows_failed", "Copies of requests that failed"),
    ("shadows_dropped", "Copies that were not sent: the step or the router was busy"),
)

#: Metadata that is added to the calls of a shadow.
SHADOW_HEADER = "x-graph-shadow"
#: Timeout of a copy whose step has none.
DEFAULT_TIMEOUT_MS = 30_000
_NS_PER_MS = 1_000_000

_log = get_logger("weft.router.shadows")


class Step:
    """An executable step.

    Args:
        when: Decides whether the step runs; None if there is none or the node evaluates it.
        timeout_ms: Of the action; 0 if there is none or a wrapper applies it.
        fallbacks: Tried in this order after a failure; they have no fallbacks of their own.
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
        timeout_ms: int = 0,
        fallbacks: Sequence["Step"] = (),
    ) -> None:
        self.plan = plan
        self.error_context = error_context
        self.action = action
        self.defaults = defaults
        self._name = plan.name
        self._path = plan.path
        self._target = action.target
        self._model = action.model
        self._version = action.version
        self._when = when
        self._timeout_ns = timeout_ms * _NS_PER_MS
        self._fallbacks = tuple(fallbacks)
        self._is_soft = plan.is_soft
        self._may_recover = plan.is_soft or bool(self._fallbacks)
        self._ok_slot = plan.ok_slot
        self._clock_ns = clock_ns
        self._counters = counters
        self._observe_s = counters.latency.observe
        self._span_attributes = step_attributes(plan.name, plan.path) | action.span_attributes

    async def run(self, run: Run) -> bool:
        """Run the step, or skip it.

        Returns:
            True: its outputs, or those of a fallback, are in the frame. False: ``when`` is false, or a soft step
                failed; its outputs are absent or have their defaults.

        No task is left when it returns, raises or is cancelled.
        """
        is_due = self._when is None or self.error_context.holds(self._when, run, self._path)
        record = StepRecord(self._name, self._path, self._clock_ns(), self._target, self._model, self._version)
        run.record.steps.append(record)
        if not is_due:
            record.status = SKIPPED
            self._counters.count_failure(SKIPPED)
            self.defaults.fill(run.frame)
            return False
        span = None
        if run.request.is_traced:
            span = start_step_span(self._path, self.action.kind, self._span_attributes, run.context)
            run = run.under(telemetry.context_of(span, run.context))
        failure: BaseException | None = None
        try:
            try:
                limited = run.until(record.start_ns + self._timeout_ns) if self._timeout_ns else run
                await self.action.act(limited, record)
                record.end_ns = end_ns = self._clock_ns()
                record.status = "OK"
                self._observe_s((end_ns - record.start_ns) / 1e9)
                has_answered = True
            except WeftError as error:
                self._failed(record, error)
                if not self._may_recover or isinstance(error, ConditionFailedError):
                    raise
                has_answered = await self._recover(error, run, record)
            except BaseException as error:
                self._failed(record, error)
                raise
        except BaseException as error:
            failure = error
            raise
        finally:
            if span is not None:
                self._end_span(span, run, record, failure)
            del failure  # it holds this frame
        if has_answered:
            if self._ok_slot >= 0:
                run.frame[self._ok_slot] = OK
            return True
        self.defaults.fill(run.frame)
        return False

    def _end_span(self, span: Span, run: Run, record: StepRecord, failure: BaseException | None) -> None:
        stream = None if failure is not None else stream_of(record, run)
        if stream is None:
            end_step_span(span, record, failure)
        else:
            stream.when_over(partial(end_step_span, span, record))

    def _failed(self, record: StepRecord, error: BaseException) -> None:
        record.end_ns = self._clock_ns()
        if isinstance(error, WeftError):
            record.status = error.code
        elif not isinstance(error, asyncio.CancelledError):
            record.status = "INTERNAL"
        self._counters.count_failure(record.status)

    async def _recover(self, failure: WeftError, run: Run, record: StepRecord) -> bool:
        """Run the fallbacks: True if one answered, False if none did and the step is soft."""
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
                        stream = stream_of(record, run)
                        if stream is not None:
                            stream.is_soft = self._is_soft
                        return True
                except ConditionFailedError:
                    raise
                except WeftError as error:
                    last = error
                    unplaced = error.message.removeprefix(self.error_context.prefix)
                    unplaced = unplaced.removeprefix(f"{fallback.action.where}: ")
                    text += f"; fallback {fallback.plan.name}: {error.code}: {unplaced}"
            record.status = last.code
            is_out_of_time = last.code == "DEADLINE_EXCEEDED" and self._is_past(run.request.scope.deadline_ns)
            if not self._is_soft or is_out_of_time:
                raise last.with_message(text) from failure
            record.error = text
            record.is_missing = True
            return False
        finally:
            last = failure  # an error that holds a frame that holds the error is freed late

    def _is_past(self, deadline_ns: int | None) -> bool:
        return deadline_ns is not None and self._clock_ns() >= deadline_ns


class ShadowStep(Step):
    """Sends copies of a share of the requests to another step; never answers and never fails."""

    def __init__(
        self, step: Step, shadow: ShadowPlan, runtime: Runtime, counters: StepCounters, mirror: Mirror | None = None
    ) -> None:
        super().__init__(step.plan, step.action, step.error_context, runtime.clock_ns, counters, step.defaults)
        self._step = step
        self._mirror = mirror
        self._share = shadow.percent / 100
        self._max_inflight = runtime.share(shadow.max_inflight)
        self._runtime = runtime
        self._slots = slots_read(step.plan)
        self._lifetime_ns = (step.plan.timeout_ms or DEFAULT_TIMEOUT_MS) * _NS_PER_MS
        self._num_inflight = 0

    @override
    async def run(self, run: Run) -> bool:
        """Return False at once; counters, not the path, show whether a copy was sent."""
        runtime = self._runtime
        if runtime.generator.random() >= self._share:
            return False
        is_full = self._max_inflight and self._num_inflight >= self._max_inflight
        if is_full or runtime.is_busy() or not runtime.shadows.has_room:
            self._counters.events["shadows_dropped"] += 1
            return False
        request, frame = run.request, run.frame
        copied: Frame = [None] * len(frame)
        for slot in self._slots:
            copied[slot] = frame[slot]
        limit_ns = runtime.clock_ns() + self._lifetime_ns
        scope = dataclasses.replace(request.scope, deadline_ns=limit_ns)
        headers: Mapping[str, str] = {**request.headers, SHADOW_HEADER: "1"}
        mirror = None if SHADOW_HEADER in request.headers else self._mirror  # a copy of a copy is not compared
        captures = None if mirror is None else mirror.captures
        copy = dataclasses.replace(request.fork(), scope=scope, headers=headers, pulls=None, captures=captures)
        self._num_inflight += 1
        self._counters.events["shadows_sent"] += 1
        own = Run(copied, copy, limit_ns, run.context, NodeRecord(self._name))
        comparison = None if mirror is None else Comparison(mirror, run)
        runtime.shadows.start(self._send(own, comparison), self._ended)
        return False

    async def _send(self, run: Run, comparison: Comparison | None) -> None:
        try:
            await self._step.run(run)
            async with contextlib.aclosing(responses_of(run)) as responses:
                async for response in responses:
                    if comparison is not None:
                        comparison.mine.add(response.request.captured.get)
            if comparison is not None:
                await comparison.end()
        except WeftError as error:
            self._counters.events["shadows_failed"] += 1
            _log.debug("shadow failed: %s: %s", error.code, error.message)
        except Exception:
            self._counters.events["shadows_failed"] += 1
            _log.exception("shadow '%s' failed", self._path)
        finally:
            await close_streams((run,))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._num_inflight -= 1
