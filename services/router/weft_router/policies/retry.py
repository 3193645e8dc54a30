"""Further attempts after a failure."""

import asyncio

from weft_common.errors import WeftError
from weft_router.graph.plan import RetryPlan
from weft_router.reporting.path import StepRecord
from weft_router.reporting.step_counters import StepCounters
from weft_router.runtime import Runtime
from weft_router.steps.base import Action, StepPolicy
from weft_router.steps.run import Run

#: No pause is longer, however many attempts there were.
MAX_BACKOFF_MS = 60_000
_NS_PER_MS = 1_000_000
_MAX_PAUSE_NS = MAX_BACKOFF_MS * _NS_PER_MS
_NEVER_NS = 2**63


class Retried(StepPolicy):
    """Acts again after a failure that is worth it, as long as the budgets and the deadline allow.

    A further attempt goes to another replica of the target, if there is one, and not before the time that the service
    asked for. Where nobody answered, as when a replica dies, its calls may all go elsewhere at once: then the target's
    throttle alone counts. A request of a sequence is never tried again: it changes what its model remembers.

    Args:
        action: One attempt.
        plan: When and how often.
        runtime: Clock, chance and the retry budget.
        counters: Of the step.
    """

    def __init__(self, action: Action, plan: RetryPlan, runtime: Runtime, counters: StepCounters) -> None:
        super().__init__(action)
        self._plan = plan
        self._runtime = runtime
        self._counters = counters

    async def act(self, run: Run, record: StepRecord) -> None:
        """As ``Action.act``; the message of the last error says how many attempts there were."""
        if run.request.is_in_sequence:
            await self._action.act(run, record)
            return
        plan, budget = self._plan, self._runtime.retry_budget
        throttle = self._runtime.throttles.get(self.target)
        number = 1
        is_counted = False
        try:
            while True:
                try:
                    await self._action.act(run, record)
                    return
                except WeftError as error:
                    if error.code not in plan.codes:
                        if number == 1:
                            raise
                        raise self._numbered(error, number) from error
                    if number == plan.attempts:
                        raise self._numbered(error, number) from error
                    pause_ns = max(self._pause_ns(number), _pushback_ns(error))
                    end_ns = _NEVER_NS if run.deadline_ns is None else run.deadline_ns
                    if pause_ns > _MAX_PAUSE_NS or self._runtime.clock_ns() + pause_ns >= end_ns:
                        raise self._numbered(error, number, ", no time for another") from error
                    is_free = is_counted or (throttle is not None and getattr(error, "is_unanswered", False))
                    if not is_free:
                        is_counted = budget.take(plan.budget_percent)
                    if not (is_free or is_counted) or (throttle is not None and not throttle.take()):
                        self._counters.num_refused += 1
                        raise self._numbered(error, number, ", retry budget exhausted") from error
                number += 1
                self._counters.num_retries += 1
                if pause_ns:
                    await asyncio.sleep(pause_ns / 1e9)
        finally:
            if is_counted:
                budget.give_back()

    def _pause_ns(self, number: int) -> int:
        """How long to wait after attempt ``number``: it doubles each time, and half of it is left to chance."""
        backoff_ms = self._plan.backoff_ms
        if not backoff_ms:
            return 0
        limit_ms = min(backoff_ms * 2 ** min(number - 1, 32), MAX_BACKOFF_MS)
        return int(limit_ms * self._runtime.generator.uniform(0.5, 1.0) * _NS_PER_MS)

    def _numbered(self, error: WeftError, number: int, reason: str = "") -> WeftError:
        return error.with_message(f"{error.message}, attempt {number} of {self._plan.attempts}{reason}")


def _pushback_ns(error: WeftError) -> int:
    """How long the service asked to be left alone."""
    return (getattr(error, "retry_after_ms", None) or 0) * _NS_PER_MS
