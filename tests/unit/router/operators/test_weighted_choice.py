"""Splitters: shares by weight, the same step for the same key, few moves when weights change."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_random import FakeRandom
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext
from weft.base.errors import InvalidArgumentError
from weft.language.bandit_algorithms import ALGORITHMS, BanditPlan
from weft.language.plan import GraphPlan, NodePlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.splitter import SplitterPlan, WeightedChoice
from weft.router.runtime import Runtime

NUM_KEYS = 100_000
#: Chi-square above which two degrees of freedom are rejected at one in a million.
CHI_SQUARE_LIMIT = 27.6


def choice(*weights: float, salt: str = "s") -> WeightedChoice:
    return WeightedChoice([f"arm{i}" for i in range(len(weights))], weights, salt, random.Random(7))


def chi_square(counts: Counter[int], weights: tuple[float, ...], total: int) -> float:
    expected = [total * weight / sum(weights) for weight in weights]
    return sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected))


@pytest.mark.parametrize("weights", [(60.0, 30.0, 10.0), (1.0, 1.0, 1.0), (0.5, 0.3, 0.2)])
@pytest.mark.parametrize("draw", [lambda c, i: c.by_key(f"user-{i}"), lambda c, i: c.by_chance()])
def test_shares_follow_the_weights(weights: tuple[float, ...], draw: Callable[[WeightedChoice, int], int]) -> None:
    """With keys and without, the counts pass a chi-square test against the weights."""
    drawn = choice(*weights)
    counts = Counter(draw(drawn, i) for i in range(NUM_KEYS))
    assert chi_square(counts, weights, NUM_KEYS) < CHI_SQUARE_LIMIT


def test_a_key_always_draws_the_same_step() -> None:
    """Another object, as in another process, decides alike."""
    keys = [f"user-{i}" for i in range(500)]
    assert [choice(60, 30, 10).by_key(key) for key in keys] == [choice(60, 30, 10).by_key(key) for key in keys]


def test_the_choice_does_not_depend_on_the_process() -> None:
    """Another interpreter with another hash seed gives the same steps."""
    program = (
        "import random; from weft.router.operators.splitter import WeightedChoice as W;"
        "c = W(['arm0', 'arm1', 'arm2'], [60, 30, 10], 's', random.Random());"
        "print(''.join(str(c.by_key(f'user-{i}')) for i in range(200)))"
    )
    drawn = choice(60, 30, 10)
    expected = "".join(str(drawn.by_key(f"user-{i}")) for i in range(200))
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "12345"}
    )
    assert expected == answer.stdout.strip()


def test_a_changed_weight_moves_close_to_the_fewest_keys() -> None:
    """From 60/30/10 to 60/30/20 the third arm gains 8.2 % of all keys; no other key moves."""
    before, after = choice(60, 30, 10), choice(60, 30, 20)
    moves = Counter((before.by_key(k), after.by_key(k)) for k in (f"user-{i}" for i in range(20_000)))
    moved = {pair: count for pair, count in moves.items() if pair[0] != pair[1]}
    least = 20 / 110 - 10 / 100
    assert {2} == {to for _, to in moved}
    assert least * 0.9 < sum(moved.values()) / 20_000 < least * 1.1


def test_dropping_a_step_moves_only_its_own_keys() -> None:
    """Keys of the steps that stay keep their step."""
    before, after = choice(50, 30, 20), choice(50, 30)
    for key in (f"user-{i}" for i in range(2_000)):
        if before.by_key(key) != 2:
            assert before.by_key(key) == after.by_key(key)


def test_a_salt_makes_splitters_independent_and_sharing_it_makes_them_alike() -> None:
    """Two experiments with different salts do not put the same users together."""
    keys = [f"user-{i}" for i in range(2_000)]
    first, second = choice(50, 50, salt="one"), choice(50, 50, salt="two")
    agreeing = sum(first.by_key(key) == second.by_key(key) for key in keys)
    assert 900 < agreeing < 1_100


def test_a_step_of_weight_zero_is_never_drawn() -> None:
    """Neither by key nor by chance, even at the very end of the range."""

    class Highest(random.Random):
        def random(self) -> float:
            return 1.0 - 2.0**-53

    drawn = WeightedChoice(["a", "b", "c"], [0.0, 0.1, 0.0], "", Highest())
    assert 1 == drawn.by_chance()
    assert {1} == {drawn.by_key(str(i)) for i in range(200)}


async def test_a_splitter_node_draws_by_key() -> None:
    """The same user reaches the same model; different users reach both."""
    steps = [make.step(n, n, {"IN": "X"}, {"OUT": "Y"}, weight=w) for n, w in (("a", 50.0), ("b", 50.0))]
    sticky = FakeCondition(lambda request, frame: request.headers.get("x-user-id", ""))
    root = make.node("root", SplitterPlan, steps, inputs=["X"], outputs=["Y"], sticky_by=sticky, salt="s")
    target = FakeTarget()
    for user in ["u1"] * 20:
        await make.run(make.graph(root), target, context=_context(user))
    assert 1 == len(set(target.called()))
    for user in range(40):  # type: ignore[assignment]
        await make.run(make.graph(root), target, context=_context(f"u{user}"))
    assert {"a", "b"} == set(target.called())


async def test_a_key_keeps_its_step_when_the_graph_gets_a_new_version() -> None:
    """Salt, key and step names decide; neither the version nor the order of the steps, nor what they call."""
    sticky = FakeCondition(lambda request, frame: request.headers.get("x-user-id", ""))

    async def taken(version: str, *arms: tuple[str, str]) -> list[str]:
        steps = [make.step(name, model, {"IN": "X"}, {"OUT": "Y"}, weight=50.0) for name, model in arms]
        root = make.node("root", SplitterPlan, steps, inputs=["X"], outputs=["Y"], sticky_by=sticky, salt="s")
        plan = make.graph(root)
        target = FakeTarget()
        executor = GraphExecutor(
            replace(plan, signature=replace(plan.signature, version=version)), Runtime({"model": target})
        )
        for user in range(50):
            await make.run(executor, context=_context(f"u{user}"))
        name_by_model = {model: name for name, model in arms}
        return [name_by_model[model] for model in target.called()]

    assert await taken("1", ("a", "m1"), ("b", "n1")) == await taken("2", ("b", "n2"), ("a", "m2"))


async def test_a_splitter_without_a_key_draws_at_random() -> None:
    """An empty key counts as none, and the generator given decides."""
    steps = [make.step(n, n, {"IN": "X"}, {"OUT": "Y"}, weight=w) for n, w in (("a", 90.0), ("b", 10.0))]
    sticky = FakeCondition(lambda request, frame: "")
    root = make.node("root", SplitterPlan, steps, inputs=["X"], outputs=["Y"], sticky_by=sticky)
    target = FakeTarget()
    generator = FakeRandom(0.5, 0.95, 0.89, 0.91)
    plan = make.graph(root)
    for _ in range(4):
        await make.run(plan, target, generator=generator)
    assert ["a", "b", "a", "b"] == target.called()


async def test_a_key_that_cannot_be_evaluated_fails_the_request() -> None:
    """It is not replaced by a random draw in silence."""

    def fail(request: Any, frame: Any) -> Any:
        raise InvalidArgumentError("no such header")

    steps = [make.step("a", "a", {"IN": "X"}, {"OUT": "Y"})]
    root = make.node("root", SplitterPlan, steps, inputs=["X"], outputs=["Y"], sticky_by=FakeCondition(fail))
    with pytest.raises(InvalidArgumentError, match=r"^g/1: root: no such header$"):
        await make.run(make.graph(root), FakeTarget())


def nested() -> GraphPlan:
    """A sequence of the splitter `ab` (a, b) and the splitter `rank` (old, new), whose fallback is a splitter too."""

    def splitter(name: str, *steps: str) -> NodePlan:
        made = [make.step(n, n, {"IN": "X"}, {"OUT": "Y"}, weight=float(i == 0)) for i, n in enumerate(steps)]
        return make.node(name, SplitterPlan, made, inputs=["X"], outputs=["Y"])

    spare = make.step("spare", splitter("spare", "s", "t"), {"X": "M"}, {"Y": "Y"})
    steps = [
        make.step("first", splitter("ab", "a", "b"), {"X": "X"}, {"Y": "M"}),
        make.step("second", splitter("rank", "old", "new"), {"X": "M"}, {"Y": "Y"}, fallback=spare),
    ]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))


@pytest.mark.parametrize(
    ("header", "models"),
    [
        ("ab=b", ["b", "old"]),
        ("ab=b,rank=new", ["b", "new"]),
        (" rank = new , ab = a ", ["a", "new"]),
        ("spare=t", ["a", "old"]),
    ],
)
async def test_a_request_can_be_pinned_to_steps(header: str, models: list[str]) -> None:
    """The weights decide where the header says nothing; a step of weight 0 can be tried. The header goes no further."""
    target = FakeTarget()
    context = CallContext(headers={"x-graph-route": header, "x-user-id": "7"})
    await make.run(nested(), target, context=context, is_pinning_allowed=True)
    assert models == target.called()
    assert [{"x-user-id": "7"}] * 2 == [seen.headers for seen in target.contexts]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("ba=b", r"names node 'ba'; the splitters of this graph are: 'ab', 'rank', 'spare'$"),
        ("ab=c", r"names step 'c' of splitter 'ab'; its steps are: 'a', 'b'$"),
        ("ab", r"is 'ab'; write <splitter node>=<step>, several with commas$"),
        ("ab=a,", r"is 'ab=a,'; write"),
        ("", r"is ''; write"),
        ("=a", r"is '=a'; write"),
        ("ab=a,ab=b", r"names splitter 'ab' twice"),
        ("x" * 9_000 + "=a", r"names node 'x{200}'; the splitters"),
    ],
)
async def test_a_pin_to_what_is_not_there_is_refused(header: str, message: str) -> None:
    """The message has what there is; nothing is called."""
    target = FakeTarget()
    context = CallContext(headers={"x-graph-route": header})
    with pytest.raises(InvalidArgumentError, match=f"^header 'x-graph-route' {message}"):
        await make.run(nested(), target, context=context, is_pinning_allowed=True)
    assert [] == target.called()


async def test_a_router_that_allows_no_pins_ignores_them() -> None:
    """Whatever the header says; the services behind see it, as any other."""
    target = FakeTarget()
    await make.run(nested(), target, context=CallContext(headers={"x-graph-route": "ab=b,nonsense"}))
    assert ["a", "old"] == target.called()
    assert "x-graph-route" in target.contexts[0].headers


async def test_a_pin_goes_before_key_and_bandit() -> None:
    """And the bandit does not learn of it; without a pin it chooses, not the key."""
    steps = [make.step(n, n, {"IN": "X"}, {"OUT": "Y"}, weight=w) for n, w in (("a", 1.0), ("b", 0.0))]
    bandit = BanditPlan(ALGORITHMS["EPSILON_GREEDY"], 0.1, 0)
    root = make.node("root", SplitterPlan, steps, inputs=["X"], outputs=["Y"], bandit=bandit)
    target = FakeTarget()
    runtime = Runtime({"model": target}, is_pinning_allowed=True)
    executor = GraphExecutor(make.graph(root), runtime)
    await make.run(executor, context=CallContext(headers={"x-graph-route": "root=b"}))
    assert [("a", 0), ("b", 0)] == [(known.step, known.arm.num_pulls) for known in runtime.bandits]
    await make.run(executor)
    assert [("a", 1), ("b", 0)] == [(known.step, known.arm.num_pulls) for known in runtime.bandits]
    assert ["b", "a"] == target.called()


def _context(user: str) -> CallContext:
    return CallContext(headers={"x-user-id": user})
