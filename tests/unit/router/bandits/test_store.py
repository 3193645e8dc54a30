"""Whose rewards count, and for which steps."""

import math
import random
from dataclasses import dataclass, field

import pytest

from weft.base.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from weft.language.bandit_algorithms import ALGORITHMS, Arm, BanditPlan
from weft.language.plan import NodePlan, StepPlan
from weft.router.bandits.store import (
    MAX_ID_CHARS,
    MAX_PULLS,
    BanditChoice,
    BanditStore,
    Pull,
    RecentPulls,
    settle,
)
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.splitter import SplitterPlan
from weft.router.reporting.path import SKIPPED, NodeRecord, StepRecord

PLAN = BanditPlan(ALGORITHMS["EPSILON_GREEDY"], 0.1, 0)


@dataclass
class Request:
    request_id: str = ""
    pulls: list[Pull] | None = field(default_factory=list)


def request(request_id: str = "") -> Request:
    return Request(request_id)


def splitter(path: str = "root/ab", steps: tuple[str, ...] = ("A",)) -> NodePlan:
    plans = tuple(StepPlan(name, f"{path}[{name}]", None, (), ()) for name in steps)
    return SplitterPlan(path, path, 0, (), (), plans, bandit=PLAN)


class Chooser:
    """Chooses with a run of its own for each request, the step of which is in ``runs``."""

    def __init__(self, store: BanditStore, node: NodePlan) -> None:
        self._chooser = store.chooser("g", node, PLAN)
        self.runs: list[NodeRecord] = []

    def choose(self, asking: Request) -> int:
        self.runs.append(NodeRecord("ab", SplitterPlan.path_form))
        return self._chooser(asking.request_id, asking.pulls, self.runs[-1])


def chooser(store: BanditStore, node: str = "root/ab", steps: tuple[str, ...] = ("A",)) -> Chooser:
    return Chooser(store, splitter(node, steps))


def chosen(step: str = "A", *, has_answered: bool = True) -> BanditChoice:
    return BanditChoice(splitter(), PLAN, step, has_answered)


def figures(store: BanditStore) -> dict[str, tuple[int, int, float]]:
    return {f"{k.node}[{k.step}]": (k.arm.num_pulls, k.arm.num_rewards, k.arm.reward_sum) for k in store}


def test_a_request_rewards_what_was_chosen_for_it() -> None:
    """Every bandit on its way, each as often as it was passed; other requests are not touched."""
    store = BanditStore()
    ab, inner = chooser(store), chooser(store, node="root/inner", steps=("X",))
    first, other = request("r1"), request("r2")
    for bandit, asked in ((ab, first), (inner, first), (ab, other), (ab, first)):
        assert 0 == bandit.choose(asked)
    rewarded = store.reward_request("g", "r1", 0.5)
    assert ["root/ab", "root/inner"] == [known.node for known in rewarded]
    assert {"root/ab[A]": (3, 2, 1.0), "root/inner[X]": (1, 1, 0.5)} == figures(store)


def test_a_second_reward_for_a_request_is_refused() -> None:
    """It counts nothing, so that feedback may be sent again; the id is free for a later request."""
    store = BanditStore()
    ab = chooser(store)
    ab.choose(request("r1"))
    store.reward_request("g", "r1", 1.0)
    with pytest.raises(AlreadyExistsError, match="feedback for request 'r1' of graph 'g' was already given"):
        store.reward_request("g", "r1", 0.0)
    ab.choose(request("r1"))
    store.reward_request("g", "r1", 0.0)
    assert {"root/ab[A]": (2, 2, 1.0)} == figures(store)


@pytest.mark.parametrize("reward", [-0.1, 1.1, math.nan, math.inf, -math.inf, 1e300])
def test_a_reward_outside_0_to_1_is_refused(reward: float) -> None:
    """The request can still be rewarded."""
    store = BanditStore()
    chooser(store).choose(request("r1"))
    with pytest.raises(InvalidArgumentError, match="a reward is a number from 0"):
        store.reward_request("g", "r1", reward)
    with pytest.raises(InvalidArgumentError, match="a reward is a number from 0"):
        store.reward_choices("g", [chosen()], reward)
    store.reward_request("g", "r1", 1.0)
    assert {"root/ab[A]": (1, 1, 1.0)} == figures(store)


def test_what_is_not_known_is_told() -> None:
    """A request that never was, one of another graph, an id too short or too long."""
    store = BanditStore()
    chooser(store).choose(request("r1"))
    for graph, request_id in (("g", "r2"), ("h", "r1")):
        with pytest.raises(NotFoundError, match=f"no request '{request_id}' of graph '{graph}'"):
            store.reward_request(graph, request_id, 1.0)
    for request_id in ("", "x" * (MAX_ID_CHARS + 1)):
        with pytest.raises(InvalidArgumentError, match=f"1 to {MAX_ID_CHARS} characters, got {len(request_id)}"):
            store.reward_request("g", request_id, 1.0)
    assert {"root/ab[A]": (1, 0, 0.0)} == figures(store)


def test_a_step_that_has_not_answered_is_worth_nothing() -> None:
    """However good the answer was that another gave: by the request's id, and by its path."""
    store = BanditStore()
    ab, asked, root = chooser(store, steps=("A", "B")), request("r1"), NodeRecord("root", SequencePlan.path_form)
    indices = [ab.choose(asked) for _ in range(3)]
    for run, status in zip(ab.runs, ("UNAVAILABLE", "OK", SKIPPED), strict=True):
        step, around = StepRecord("A", "root/ab[A]", 0), StepRecord("ab", "root/ab", 0)
        step.status, around.node = status, run
        run.steps.append(step)
        root.steps.append(around)
    lost = ab.choose(asked)  # in an attempt that another has replaced
    settle(asked.pulls, root)
    assert [(indices[0], False), (indices[1], True)] == [(p.step_index, p.has_answered) for p in asked.pulls]
    store.reward_request("g", "r1", 0.7)
    assert (4, 2, 0.7) == tuple(sum(column) for column in zip(*figures(store).values(), strict=True))
    assert lost in (0, 1)
    store = BanditStore()
    store.reward_choices("g", [chosen(has_answered=False), chosen(), chosen()], 0.7)
    assert {"root/ab[A]": (0, 3, 1.4)} == figures(store)


def test_a_fallback_earns_nothing_for_the_step_that_failed() -> None:
    """The client's reward of 1 counts as 0 for the step, so that a step that always fails is drawn less and less."""
    store = BanditStore()
    ab, asked = chooser(store), request("r1")
    ab.choose(asked)
    failed, fallback = StepRecord("A", "root/ab[A]", 0), StepRecord("spare", "root/ab[A]", 0)
    failed.status, fallback.status = "UNAVAILABLE", "OK"
    failed.fallbacks = NodeRecord("", CascadePlan.path_form)
    failed.fallbacks.steps.append(fallback)
    ab.runs[0].steps.append(failed)
    settle(asked.pulls, ab.runs[0])
    store.reward_request("g", "r1", 1.0)
    assert {"root/ab[A]": (1, 1, 0.0)} == figures(store)


def test_a_request_without_an_id_is_counted_and_not_remembered() -> None:
    """Nor is one with an id of megabytes, nor a shadow's."""
    recent = RecentPulls()
    store = BanditStore(recent=recent)
    ab = chooser(store)
    for asked in (request(), request("x" * (MAX_ID_CHARS + 1)), Request("r1", pulls=None)):
        ab.choose(asked)
    assert 0 == len(recent)
    assert {"root/ab[A]": (3, 0, 0.0)} == figures(store)


def test_the_oldest_requests_are_forgotten_first() -> None:
    """Their number is bounded, and the memory that they take; so are the choices of one request."""
    recent = RecentPulls(max_requests=3)
    store = BanditStore(recent=recent)
    ab = chooser(store)
    for i in range(5):
        ab.choose(request(f"r{i}"))
    assert 3 == len(recent)
    with pytest.raises(NotFoundError):
        store.reward_request("g", "r1", 1.0)
    store.reward_request("g", "r2", 1.0)
    small = RecentPulls(max_bytes=10_000)
    hoard = chooser(BanditStore(recent=small))
    for i in range(100):
        hoard.choose(request(f"{i}" + "x" * 900))
    assert 0 < len(small) < 10
    long = request("long")
    for _ in range(MAX_PULLS + 10):
        ab.choose(long)
    assert len(long.pulls) == MAX_PULLS


def test_memory_does_not_grow_with_requests_of_one_id() -> None:
    """A client that sends every request with the same id fills nothing."""
    recent = RecentPulls(max_bytes=2_000)
    ab = chooser(BanditStore(recent=recent))
    for _ in range(100):
        ab.choose(request("same"))
        ab.choose(request("other"))
    assert 2 == len(recent)


def test_versions_share_what_was_learned_by_the_names_of_the_steps() -> None:
    """A new version goes on from there; a new step begins anew, one that is gone is kept for its return."""
    store = BanditStore()
    old = chooser(store, steps=("A", "B"))
    late = request("late")
    old.choose(late)
    chosen_step = late.pulls[0].bandit.names[late.pulls[0].step_index]
    chooser(store, steps=("B", "C"))
    store.reward_request("g", "late", 1.0)
    assert (1, 1, 1.0) == figures(store)[f"root/ab[{chosen_step}]"]
    assert {"root/ab[A]", "root/ab[B]", "root/ab[C]"} == set(figures(store))
    num_rewards = figures(store)["root/ab[A]"][1]
    store.reward_choices(
        "g", [BanditChoice(splitter(steps=("A", "B")), PLAN, "A", True)], 0.0
    )  # the old one serves too
    assert num_rewards + 1 == figures(store)["root/ab[A]"][1]


def test_what_was_restored_is_known_to_the_bandit() -> None:
    """The step with the better record is chosen from the first request on."""
    store = BanditStore(random.Random(3))
    store.add("g", "root/ab", "B", Arm(100, 100, 90.0))
    store.add("g", "root/ab", "A", Arm(100, 100, 10.0))
    ab = chooser(store, steps=("A", "B"))
    assert [ab.choose(request()) for _ in range(100)].count(1) > 80


def test_the_revision_grows_with_pulls_and_rewards() -> None:
    """So that only what has changed is saved."""
    store = BanditStore()
    ab = chooser(store)
    revisions = [store.revision]
    ab.choose(request("r"))
    revisions.append(store.revision)
    store.reward_request("g", "r", 0.0)
    revisions.append(store.revision)
    assert [0, 1, 2] == revisions
