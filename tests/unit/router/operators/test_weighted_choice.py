"""Splitters: shares by weight, the same step for the same key; see ``cases/others.txt`` too."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.router import make
from tests.unit.router.fake_random import FakeRandom
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.graph_cases import compiled

from weft.base.core import CallContext
from weft.base.errors import InvalidArgumentError
from weft.router.executor import GraphExecutor
from weft.router.operators.splitter import WeightedChoice
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


async def called_by_users(graph: str, *users: str, version: str = "1") -> list[str]:
    """The models that are called for these users, one after another."""
    plan, target = compiled(graph), FakeTarget()
    plan = replace(plan, signature=replace(plan.signature, version=version))
    executor = GraphExecutor(plan, Runtime({"model": target}))
    for user in users:
        await make.run(executor, context=CallContext(headers={"x-user-id": user}))
    return target.called()


def sticky(name: str, *arms: str) -> str:
    """A splitter of an experiment, whose arms are NAME:MODEL:WEIGHT."""
    steps = " ".join('step {{ name: "{}" model_name: "{}" weight: {} }}'.format(*arm.split(":")) for arm in arms)
    return f"""node {{ name: "{name}" splitter {{ sticky_by: 'headers["x-user-id"]' salt: "s" {steps} }} }}"""


async def test_a_splitter_node_draws_by_key_whatever_else_changes() -> None:
    """Salt, key and step names decide; neither the version nor the order of the steps, nor what they call."""
    users = [f"u{user}" for user in range(50)]
    before = await called_by_users(sticky("root", "a:m1:50", "b:n1:50"), *users, *users)
    assert (before[:50], {"m1", "n1"}) == (before[50:], set(before))
    after = await called_by_users(sticky("root", "b:n2:50", "a:m2:50"), *users, version="2")
    assert [model[0] for model in before[:50]] == [model[0] for model in after]


async def test_a_canary_meets_its_canary() -> None:
    """Splitters that share a salt decide alike: a canary's preprocessing feeds the canary."""
    nodes = """node { name: "root" sequence { step { node: "pre" output_map { key: "Y" value: "M" } }
      step { node: "main" input_map { key: "X" value: "M" } } } }"""
    halves = [sticky(name, f"old:{name}-old:80", f"new:{name}-new:20") for name in ("pre", "main")]
    called = await called_by_users("\n".join([nodes, *halves]), *(f"u{user}" for user in range(100)))
    pairs = list(zip(called[::2], called[1::2], strict=True))
    assert {("pre-old", "main-old"), ("pre-new", "main-new")} == set(pairs)
    assert 5 < pairs.count(("pre-new", "main-new")) < 40


PINNED = """node { name: "root" splitter { bandit { algorithm: EPSILON_GREEDY epsilon: 0.0001 }
  step { model_name: "a" } step { model_name: "b" } } }"""


async def test_a_pin_goes_before_a_bandit_and_no_further() -> None:
    """The bandit does not learn of it, and no call carries its header; without a pin the bandit chooses."""
    target = FakeTarget()
    runtime = Runtime({"model": target}, is_pinning_allowed=True, generator=FakeRandom(0.5))
    executor = GraphExecutor(compiled(PINNED), runtime)
    await make.run(executor, context=CallContext(headers={"x-graph-route": " root = b ", "x-user-id": "7"}))
    assert (["b"], {"x-user-id": "7"}) == (target.called(), target.contexts[0].headers)
    assert [("a", 0), ("b", 0)] == [(known.step, known.arm.num_pulls) for known in runtime.bandits]
    await make.run(executor)
    assert 1 == sum(known.arm.num_pulls for known in runtime.bandits)


async def test_a_router_that_allows_no_pins_hands_their_header_on() -> None:
    """The services behind see it, as any other."""
    target = FakeTarget()
    await make.run(compiled(PINNED), target, context=CallContext(headers={"x-graph-route": "nonsense"}))
    assert "x-graph-route" in target.contexts[0].headers


async def test_a_pin_of_any_length_is_refused_with_its_beginning() -> None:
    """A header of kilobytes makes no message of kilobytes."""
    context = CallContext(headers={"x-graph-route": "x" * 9_000 + "=a"})
    with pytest.raises(InvalidArgumentError, match=r"names node 'x{200}'; the splitters"):
        await make.run(compiled(PINNED), FakeTarget(), context=context, is_pinning_allowed=True)
