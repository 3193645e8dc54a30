"""Random steps with random policies under random delays, failures, deadlines and cancels: nothing is ever left."""

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.router import make
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import InferResult
from weft.base.errors import RemoteError, WeftError
from weft.language.plan import GraphPlan, ShadowPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.policies.cache import CachePlan
from weft.router.policies.hedge import HedgePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime
from weft.router.target import RetryBudget, Target

CODES = ("UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED")
PERCENT = 20.0
MAX_SAVED = 3

few_ms = st.integers(0, 60)
outcomes = st.tuples(few_ms, st.sampled_from(["OK", "OK", *CODES]))
retries = st.builds(
    RetryPlan, st.integers(2, 4), st.sampled_from([0, 10]), st.frozensets(st.sampled_from(CODES[:3])), st.just(PERCENT)
)


def policies(*, has_fallback: bool) -> st.SearchStrategy[dict[str, Any]]:
    options: dict[str, st.SearchStrategy[Any]] = {
        "retry": retries,
        "hedge": st.builds(HedgePlan, st.integers(0, 40), st.integers(1, 3)),
        "cache": st.builds(CachePlan, st.sampled_from([0, 30]), st.sampled_from([100, 1 << 20])),
        "timeout_ms": st.integers(1, 80),
        "max_inflight": st.integers(1, 4),
        "min_remaining_ms": st.integers(1, 40),
        "is_soft": st.booleans(),
    }
    if has_fallback:
        options["fallback"] = policies(has_fallback=False)
    return st.fixed_dictionaries({}, optional=options)


steps = st.tuples(
    st.sampled_from(["call", "node", "shadow"]), policies(has_fallback=True), policies(has_fallback=False)
)
requests = st.tuples(
    few_ms, st.one_of(st.none(), st.integers(1, 150)), st.lists(st.integers(0, 120), max_size=2), st.integers(0, 1)
)


class Models(Target):
    """Answers the calls of all models, each with the next of the outcomes; knows how many are open."""

    name, address = "model", "fake"

    def __init__(self, clock_ns: Any, script: list[tuple[int, str]]) -> None:
        self.clock_ns = clock_ns
        self.script = script
        self.num_calls = 0
        self.num_open = 0
        self.most_open = 0

    async def infer(self, call: Any, context: Any) -> Any:
        after_ms, code = self.script[self.num_calls % len(self.script)]
        self.num_calls += 1
        is_shadow = "x-graph-shadow" in context.headers
        self.num_open += not is_shadow
        self.most_open = max(self.most_open, self.num_open)
        try:
            limit_s = None if context.deadline_ns is None else max(context.deadline_ns - self.clock_ns(), 0) / 1e9
            async with asyncio.timeout(limit_s):
                await asyncio.sleep(after_ms / 1e3)
        except TimeoutError:
            raise RemoteError("DEADLINE_EXCEEDED", "late") from None
        finally:
            self.num_open -= not is_shadow
        if code != "OK":
            raise RemoteError(code, "fails")
        outputs = {output.name: next(iter(call.inputs.values())) for output in call.outputs}
        return InferResult(call.model_name, "1", call.request_id, {call.model_name: 1}, outputs)


class CheckedBudget(RetryBudget):
    """Says when more is repeated than may be."""

    num_earned = num_taken = 0

    def earn(self, percent: float = 0.0) -> None:
        super().earn(percent)
        self.num_earned += 1

    def take(self) -> bool:
        is_taken = super().take()
        self.num_taken += is_taken
        assert self.num_taken <= MAX_SAVED + PERCENT / 100 * self.num_earned + 1e-6
        return is_taken


def plan_of(drawn: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> GraphPlan:
    """A chain from X to Y; a step that may be missing passes on a default."""
    chain = []
    tensor = "X"
    for index, (kind, given_options, inner_options) in enumerate(drawn):
        name = f"s{index}"
        output = f"t{index}"
        options = dict(given_options)
        if "fallback" in options:
            options["fallback"] = make.step(
                f"f{index}", f"f{index}", {"I": tensor}, {"O": output}, **options["fallback"]
            )
        if options.get("is_soft"):
            options["defaults"] = {output: make.tensor(0.0)}
        action: Any = f"m{index}"
        if kind == "node":
            action = make.node(
                f"n{index}",
                SequencePlan,
                [
                    make.step("i", f"i{index}", {"I": "I"}, {"O": "T"}, **{**inner_options, "is_soft": False}),
                    make.step("j", f"j{index}", {"I": "T"}, {"O": "O"}),
                ],
                inputs=["I"],
                outputs=["O"],
            )
        if kind == "shadow":
            chain.append(make.step(f"z{index}", action, {"I": tensor}, {}, shadow=ShadowPlan(50.0, 2), **inner_options))
        chain.append(make.step(name, action, {"I": tensor}, {"O": output}, **options))
        tensor = output
    root = make.node("root", SequencePlan, chain, inputs=["X"], outputs={"Y": tensor})
    return make.graph(root)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    drawn=st.lists(steps, min_size=1, max_size=3),
    script=st.lists(outcomes, min_size=1, max_size=12),
    asked=st.lists(requests, min_size=1, max_size=6),
)
def test_nothing_is_left_and_nothing_is_late(drawn: list[Any], script: list[Any], asked: list[Any]) -> None:
    """Each request ends by its deadline in an answer or an error of ours, unless it was cancelled.

    No call is open then, no task runs, no place and no part of the budget is taken; and at no time were more calls
    open than requests and budget allow.
    """

    async def check() -> None:
        clock_ns = VirtualClock()
        models = Models(clock_ns, script)
        budget = CheckedBudget(PERCENT, max_tokens=MAX_SAVED)
        runtime = Runtime({"model": models}, clock_ns=clock_ns, node_budget=budget)
        executor = GraphExecutor(plan_of(drawn), runtime)

        async def ask(start_ms: int, timeout_ms: int | None, value: int) -> float:
            await asyncio.sleep(start_ms / 1e3)
            deadline_ns = None if timeout_ms is None else clock_ns() + timeout_ms * 1_000_000
            try:
                await make.run(
                    executor, inputs={"X": make.tensor(value)}, context=make.context(deadline_ns=deadline_ns)
                )
            finally:
                assert deadline_ns is None or clock_ns() <= deadline_ns + 1_000
            return clock_ns()

        tasks = [asyncio.create_task(ask(start, timeout, value)) for start, timeout, _, value in asked]
        cancelled = set()
        moments = sorted((at_ms, index) for index, (_, _, cancels, _) in enumerate(asked) for at_ms in cancels)
        for at_ms, index in moments:
            await asyncio.sleep(max(clock_ns.at_ms(at_ms) - clock_ns(), 0) / 1e9)
            if tasks[index].cancel():
                cancelled.add(index)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for index, outcome in enumerate(ended):
            if isinstance(outcome, asyncio.CancelledError):
                assert index in cancelled
            else:
                assert isinstance(outcome, (int, WeftError)), repr(outcome)
        await runtime.close()
        assert (0, 0) == (models.num_open, make.num_other_tasks())
        assert models.most_open <= len(asked) + budget.num_taken
        for admission in admissions_of(executor):
            assert 0 == admission.num_inflight

    asyncio.run(check())


def admissions_of(executor: GraphExecutor) -> list[Any]:
    found = []
    waiting = list(executor._selections._root._steps)  # type: ignore[attr-defined]
    while waiting:
        step = waiting.pop()
        waiting += getattr(step, "_fallbacks", ())
        if getattr(step, "_step", None) is not None:
            waiting.append(step._step)
        if getattr(step, "_admission", None) is not None:
            found.append(step._admission)
        action = step.action
        while hasattr(action, "_action"):
            action = action._action
        if hasattr(action, "_node"):
            waiting += action._node._steps
    return found
