"""Routers that tell one another what their bandits learn."""

import random
from collections.abc import Callable

import pytest
from tests.unit.router import make  # noqa: F401  # registers the kinds

from weft.language.bandit_algorithms import Arm
from weft.router.bandits.exchange import BanditSharing
from weft.router.bandits.store import BanditStore


class Sibling:
    """A router's store, which tells the others through a queue."""

    def __init__(self) -> None:
        self.store = BanditStore(random.Random(1))
        self.told: list[bytes] = []
        self.sharing = BanditSharing(self.store, self.told.append)

    def learn(self, step: str, *, pulls: int = 0, rewards: int = 0, total: float = 0.0, weight: float = 0.0) -> None:
        self.store.add("graph", "root", step, Arm(pulls, rewards, total, weight))

    def known(self) -> dict[str, Arm]:
        return {known.step: known.arm for known in self.store}


def exchange(*siblings: Sibling) -> None:
    """Everybody tells, then everybody takes what the others have told."""
    for sibling in siblings:
        sibling.sharing.publish()
    for sibling in siblings:
        for message in sibling.told:
            for other in siblings:
                if other is not sibling:
                    other.sharing.take(message)
        sibling.told.clear()


def test_pulls_and_rewards_of_all_are_added_up() -> None:
    """Whoever learns it, all know it, once, whether or not both learn of a step at the same time."""
    one, two, three = siblings = Sibling(), Sibling(), Sibling()
    one.learn("a", pulls=3)
    two.learn("a", pulls=4, rewards=2, total=1.5)
    exchange(*siblings)
    three.learn("b", pulls=1)
    one.learn("a", rewards=1, total=0.5)
    exchange(*siblings)
    exchange(*siblings)
    for sibling in siblings:
        assert sibling.known() == {"a": Arm(7, 3, 2.0), "b": Arm(1)}


def test_nothing_new_is_not_told() -> None:
    """What a sibling has told is not told again."""
    one, two = Sibling(), Sibling()
    one.learn("a", pulls=1)
    exchange(one, two)
    two.sharing.publish()
    one.sharing.publish()
    assert one.told == two.told == []


def test_one_that_comes_later_takes_what_all_know() -> None:
    """What its source has learned and not told yet comes with the source's next news, not twice."""
    one, late = Sibling(), Sibling()
    one.learn("a", pulls=2)
    one.sharing.publish()
    one.told.clear()
    one.learn("a", pulls=5)
    late.sharing.take(one.sharing.snapshot())
    assert late.known() == {"a": Arm(2)}
    exchange(one, late)
    assert late.known() == one.known() == {"a": Arm(7)}


@pytest.mark.parametrize("order", [lambda told: told, lambda told: told[::-1]], ids=["forwards", "backwards"])
def test_weights_differ_as_if_one_had_learned_all(order: Callable[[list[bytes]], list[bytes]]) -> None:
    """Differences between logarithms of weights add up, in any order; the best step's is 0."""
    one, two, three = Sibling(), Sibling(), Sibling()
    # Each is relative to the best step, as after learning.
    one.learn("a", rewards=1, total=1.0, weight=0.0)
    one.learn("b", pulls=1, weight=-0.5)
    two.learn("a", pulls=1, weight=-2.0)
    two.learn("b", rewards=1, total=1.0, weight=0.0)
    one.sharing.publish()
    two.sharing.publish()
    messages = [*one.told, *two.told]
    for message in order(messages):
        three.sharing.take(message)
    one.sharing.take(two.told[0])
    two.sharing.take(one.told[0])
    two.told.clear()
    three.sharing.publish()
    two.sharing.publish()
    assert two.told == three.told == []
    for sibling in (one, two, three):
        assert sibling.known()["a"].log_weight == pytest.approx(-1.5)
        assert sibling.known()["b"].log_weight == pytest.approx(0.0)
