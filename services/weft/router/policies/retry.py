"""The policy ``retry``: tries again after failures."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from weft.base.errors import WeftError
from weft.base.text.pbtxt import suggestion
from weft.language.plan import Condition
from weft.language.syntax.file import GivenPolicies, GraphFile, GraphReport, PolicyKind
from weft.router.reporting.path import StepRecord
from weft.router.steps.action import Action, PolicyAction, PolicyParts, StepPolicyPlan
from weft.router.steps.run import Run
from weft_protos import graph_pb2 as pb

#: gRPC status codes that may be worth another attempt. The others say that the same call fails again, or, CANCELLED,
#: that nobody waits any more.
RETRY_CODES = (
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "INTERNAL",
    "UNKNOWN",
    "DATA_LOSS",
)
_DEFAULT_CODES = frozenset({"UNAVAILABLE"})

#: No pause is longer, however many attempts there were.
MAX_BACKOFF_MS = 60_000
_NS_PER_MS = 1_000_000
_MAX_PAUSE_NS = MAX_BACKOFF_MS * _NS_PER_MS
_NEVER_NS = 2**63


@dataclass(frozen=True, slots=True)
class RetryPlan(StepPolicyPlan):
    """Settings of a retry.

    Attributes:
        attempts: The first included; 2 or more.
        backoff_ms: Pause before the second attempt; doubles with each further one. 0: none.
        budget_percent: Share of calls that may be repeated in the long run, in percent; 0: the router's setting.
    """

    field: ClassVar[str] = "retry"
    repeats_failures: ClassVar[bool] = True
    allows_streams: ClassVar[bool] = True

    attempts: int
    backoff_ms: int
    codes: frozenset[str]
    budget_percent: float

    @property
    @override
    def num_calls(self) -> int:
        return self.attempts

    @override
    def calls_text(self, path: str) -> str:
        return f"{self.attempts} attempts of {path}"

    def text(self) -> str:
        """For example ``2 attempts on UNAVAILABLE, backoff 10 ms``."""
        backoff = f", backoff {self.backoff_ms} ms" if self.backoff_ms else ""
        return f"{self.attempts} attempts on {', '.join(sorted(self.codes))}{backoff}"

    @override
    def wrap(self, action: Action, parts: PolicyParts) -> Action:
        return Retried(action, self, parts)


class RetryPolicy(PolicyKind):
    """``retry`` in graph files. With one attempt it disables an outer one."""

    field = RetryPlan.field
    is_inherited = True
    counters = (
        ("retries", "Attempts after the first"),
        ("retries_refused", "Retries and hedges that the budget of the target did not allow"),
    )

    @override
    def plan(self, given: GivenPolicies, condition: Condition | None) -> RetryPlan | None:
        policy = given.inner(self.field)
        if policy is None or policy.retry.attempts < 2:
            return None
        retry = policy.retry
        codes = frozenset(retry.on) or _DEFAULT_CODES
        return RetryPlan(retry.attempts, retry.backoff_ms, codes, retry.budget_percent)

    @override
    def check(
        self, file: GraphFile, policy: pb.Policy, path: str, around: Sequence[pb.Policy], report: GraphReport
    ) -> None:
        retry = policy.retry
        overrides = any(other.HasField("retry") and other.retry.attempts > 1 for other in around)
        if retry.attempts < 2 and not (retry.attempts == 1 and overrides):
            has = f"'attempts: {retry.attempts}'" if f"{path}.attempts" in file.positions else "no 'attempts'"
            text = f"'retry' has {has}; give 2 or more: the first call counts"
            report.error("G025", file, f"{path}.attempts", text)
        elif retry.attempts == 1:
            for name in (field.name for field, _ in retry.ListFields() if field.name != "attempts"):
                text = f"'{name}' has no effect with 'attempts: 1', which switches the outer 'retry' off; leave it out"
                report.error("G018", file, f"{path}.{name}", text, is_name=True)
        for i, code in enumerate(retry.on):
            if code not in RETRY_CODES:
                report.error("G025", file, f"{path}.on[{i}]", _code_fault(code))
            elif code in retry.on[:i]:
                report.error("G025", file, f"{path}.on[{i}]", f"'{code}' is given twice; leave one out")
            elif code == "DEADLINE_EXCEEDED" and policy.timeout_ms:
                text = (
                    "'DEADLINE_EXCEEDED' seldom helps here: all attempts share this 'timeout_ms', so no time is left "
                    "when it has passed; to call again before that, use 'hedge'"
                )
                report.warning("G018", file, f"{path}.on[{i}]", text)
        if not 0 <= retry.budget_percent <= 100:
            text = (
                f"'budget_percent' is {retry.budget_percent:g}; give 0 to 100, where 0 means what the router's "
                "--retry-budget-percent says"
            )
            report.error("G025", file, f"{path}.budget_percent", text)
        if 0 < 2 * policy.timeout_ms <= retry.backoff_ms:
            text = (
                f"'backoff_ms: {retry.backoff_ms}' leaves no time for a second attempt, because all attempts share the "
                f"'timeout_ms: {policy.timeout_ms}'; wait less"
            )
            report.error("G018", file, f"{path}.backoff_ms", text)


def _code_fault(code: str) -> str:
    if code == "CANCELLED":
        return "'CANCELLED' cannot be retried: it says that the client has gone"
    if code in ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "FAILED_PRECONDITION", "PERMISSION_DENIED"):
        return f"'{code}' cannot be retried: the same call fails again; use one of: {', '.join(RETRY_CODES)}"
    return f"unknown status code '{code}'{suggestion(code, RETRY_CODES)}"


class Retried(PolicyAction):
    """Repeats the action after a retriable failure, as long as the target's budget and the deadline allow.

    A further attempt goes to another replica of the target, if there is one, and waits for the service's
    ``retry-after-ms``. A request of a stateful sequence is not repeated, because a call changes the model's state.
    """

    def __init__(self, action: Action, plan: RetryPlan, parts: PolicyParts) -> None:
        super().__init__(action)
        self._plan = plan
        self._runtime = parts.runtime
        self._counters = parts.counters

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        """Run the action; the last error's message gives the number of attempts."""
        if run.request.is_in_sequence:
            await self._action.act(run, record)
            return
        plan, budget = self._plan, self._runtime.retry_budget(self.target)
        if record.tried is None:  # else it is a repeat itself
            budget.earn(plan.budget_percent)
            record.tried = []
        number = 1
        while True:
            try:
                await self._action.act(run, record)
                return
            except WeftError as error:
                if error.code not in plan.codes:
                    if number == 1:
                        raise
                    raise self._numbered(error, number) from error
                if run.request.root.is_suspect:
                    reason = ": two replicas were lost while they worked on it, so it is not sent again"
                    raise self._numbered(error, number, reason) from error
                if number == plan.attempts:
                    raise self._numbered(error, number) from error
                pause_ns = max(self._pause_ns(number), _pushback_ns(error))
                end_ns = _NEVER_NS if run.deadline_ns is None else run.deadline_ns
                if pause_ns > _MAX_PAUSE_NS or self._runtime.clock_ns() + pause_ns >= end_ns:
                    raise self._numbered(error, number, ", no time for another") from error
                if not budget.take():
                    self._counters.events["retries_refused"] += 1
                    raise self._numbered(error, number, ", retry budget exhausted") from error
            number += 1
            self._counters.events["retries"] += 1
            if pause_ns:
                await asyncio.sleep(pause_ns / 1e9)

    def _pause_ns(self, number: int) -> int:
        """Pause after attempt ``number``: doubles each time, half of it random."""
        backoff_ms = self._plan.backoff_ms
        if not backoff_ms:
            return 0
        limit_ms = min(backoff_ms * 2 ** min(number - 1, 32), MAX_BACKOFF_MS)
        return int(limit_ms * self._runtime.generator.uniform(0.5, 1.0) * _NS_PER_MS)

    def _numbered(self, error: WeftError, number: int, reason: str = "") -> WeftError:
        return error.with_message(f"{error.message}, attempt {number} of {self._plan.attempts}{reason}")


def _pushback_ns(error: WeftError) -> int:
    """Pause that the service asked for."""
    return (getattr(error, "retry_after_ms", None) or 0) * _NS_PER_MS
