"""The policy ``hedge``: starts further calls while none has answered; the first answer counts."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from weft.language.plan import Condition
from weft.language.syntax.file import GivenPolicies, GraphFile, GraphReport, PolicyKind
from weft.router.reporting.path import StepRecord
from weft.router.steps.action import Action, ConditionFailedError, PolicyAction, PolicyParts, StepPolicyPlan
from weft.router.steps.responses import StepStream, close_streams
from weft.router.steps.run import Run
from weft.router.tasks import Race
from weft_protos import graph_pb2 as pb


@dataclass(frozen=True, slots=True)
class HedgePlan(StepPolicyPlan):
    """Settings of a hedge.

    Attributes:
        after_ms: Delay after the previous call.
        budget_percent: As in ``RetryPlan``, with which it shares the budget.
    """

    field: ClassVar[str] = "hedge"
    allows_streams: ClassVar[bool] = True

    after_ms: int
    max_extra: int
    budget_percent: float = 0.0

    @property
    @override
    def num_calls(self) -> int:
        return 1 + self.max_extra

    @override
    def calls_text(self, path: str) -> str:
        return f"1 + {self.max_extra} hedged {'call' if self.max_extra == 1 else 'calls'}"

    def text(self) -> str:
        """For example ``hedge after 40 ms, 1 extra call``."""
        return f"hedge after {self.after_ms} ms, {self.max_extra} extra {'call' if self.max_extra == 1 else 'calls'}"

    @override
    def wrap(self, action: Action, parts: PolicyParts) -> Action:
        return Hedged(action, self, parts)


class HedgePolicy(PolicyKind):
    """``hedge`` in graph files; its calls count against the budget of the step's ``retry``."""

    field = HedgePlan.field
    is_inherited = True
    counters = (("hedges", "Calls started because the one before took long"),)

    @override
    def plan(self, given: GivenPolicies, condition: Condition | None) -> HedgePlan | None:
        policy = given.inner(self.field)
        if policy is None:
            return None
        outer = given.inner("retry")
        percent = outer.retry.budget_percent if outer is not None and outer.retry.attempts > 1 else 0.0
        return HedgePlan(policy.hedge.after_ms, policy.hedge.max_extra or 1, percent)

    @override
    def check(
        self, file: GraphFile, policy: pb.Policy, path: str, around: Sequence[pb.Policy], report: GraphReport
    ) -> None:
        hedge = policy.hedge
        if not hedge.after_ms:
            text = (
                "'hedge' has no 'after_ms'; give the time after which a call is late, for example its 95th percentile"
            )
            report.error("G025", file, path, text, is_name=True)
        elif 0 < policy.timeout_ms <= hedge.after_ms:
            text = (
                f"'hedge' has no effect: 'after_ms: {hedge.after_ms}' is not before the 'timeout_ms: "
                f"{policy.timeout_ms}' ends; make it less"
            )
            report.error("G018", file, f"{path}.after_ms", text)


class _Trial(NamedTuple):
    """One of the calls; its writes become visible only if it wins."""

    run: Run
    record: StepRecord


class Hedged(PolicyAction):
    """Starts the action again each ``after_ms`` without an answer; the first success wins, the others are cancelled.

    After a failure the running calls are awaited; if all fail, the error of the first is raised. A request of a
    stateful sequence is called once, because a call changes the model's state. Of streams, the first to respond is
    kept.
    """

    def __init__(self, action: Action, plan: HedgePlan, parts: PolicyParts) -> None:
        super().__init__(action)
        self._plan = plan
        self._output_slots = [slot for _, slot in parts.step.outputs]
        self._runtime = parts.runtime
        self._counters = parts.counters

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        if run.request.is_in_sequence:
            await self._action.act(run, record)
            return
        if record.tried is None:
            self._runtime.retry_budget(self.target).earn(self._plan.budget_percent)
            record.tried = []  # all trials share it, so that each goes to another replica
        trials: list[_Trial] = []
        call = partial(self._call, trials, run, record)
        race = _HedgedRace(self._plan, call, self._may_hedge)
        try:
            await race.join()
            self._adopt(trials[race.winner], run, record)
        finally:
            if race.winner < 0:
                record.node = trials[0].record.node
            if any(trial.run.request.stream for trial in trials):  # it spoke in the same moment, or in vain
                await close_streams(trial.run for trial in trials)

    def _call(self, trials: list[_Trial], run: Run, record: StepRecord) -> Coroutine[Any, Any, bool]:
        """Make one more call, the last of ``trials``."""
        own = StepRecord(
            record.name, record.path, self._runtime.clock_ns(), record.target, record.model, record.version
        )
        own.attempts, own.tried = record.attempts, record.tried
        record.attempts += 1
        trial = _Trial(run.fork(), own)
        trials.append(trial)
        return self._answered(trial)

    async def _answered(self, trial: _Trial) -> bool:
        await self._action.act(trial.run, trial.record)
        return True

    def _may_hedge(self) -> bool:
        if self._runtime.retry_budget(self.target).take():
            self._counters.events["hedges"] += 1
            return True
        self._counters.events["retries_refused"] += 1
        return False

    def _adopt(self, trial: _Trial, run: Run, record: StepRecord) -> None:
        for slot in self._output_slots:
            run.frame[slot] = trial.run.frame[slot]
        run.request.merge(trial.run.request)
        record.node, record.version = trial.record.node, trial.record.version
        stream, trial.run.request.stream = trial.run.request.stream, None
        if stream is not None:
            record.responses = trial.record.responses
            run.request.stream = stream
            if isinstance(stream, StepStream):
                stream.record = record


class _HedgedRace(Race):
    """A race that another call joins every ``after_ms``, up to the limit."""

    def __init__(
        self, plan: HedgePlan, call: Callable[[], Coroutine[Any, Any, bool]], may_hedge: Callable[[], bool]
    ) -> None:
        super().__init__(ConditionFailedError)
        self._after_s = plan.after_ms / 1e3
        self._num_left = plan.max_extra
        self._call = call
        self._may_hedge = may_hedge
        self.start(call())
        self._timer = self._loop.call_later(self._after_s, self._hedge)

    def _hedge(self) -> None:
        self._timer = None
        if self._over is None or self._over.done() or not self._may_hedge():
            return
        self.start(self._call())
        self._num_left -= 1
        if self._num_left:
            self._timer = self._loop.call_later(self._after_s, self._hedge)
