"""Whose rewards count, and for which steps.

Each line of a case in scripts.txt is one of

- ``ab A B``, ``inner X``: a bandit over these steps comes, or another version of it;
- ``choose BANDIT[,BANDIT] ID [N] [shadow]``: a request, or N one after the other, comes to these bandits; ``x*300`` is
  an id of 300 characters;
- ``reward ID NUMBER [of GRAPH]``, and ``reward STEP[!] NUMBER by path``, with ! for a step that has not answered;
- ``keep N [bytes]``: of so many requests choices are kept; ``figures``: pulls, rewards and their sum of each step.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.case_files import Case, cases

from weft.base.errors import AlreadyExistsError, NotFoundError, WeftError
from weft.language.bandit_algorithms import ALGORITHMS, Arm, BanditPlan
from weft.language.plan import NodePlan, StepPlan
from weft.router.bandits.store import (
    MAX_PULLS,
    BanditChoice,
    BanditStore,
    Pulls,
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
    pulls: Pulls | None = field(default_factory=Pulls)

    def end(self) -> None:
        """The request has ended, and every step that it passed has answered."""
        self.pulls[:] = [pull._replace(run=None) for pull in self.pulls]


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


def figures(store: BanditStore) -> dict[str, tuple[int, int, float]]:
    return {f"{k.node}[{k.step}]": (k.arm.num_pulls, k.arm.num_rewards, k.arm.reward_sum) for k in store}


class Script:
    """A store, and what comes of lines."""

    def __init__(self) -> None:
        self.recent = RecentPulls()
        self.store = BanditStore(recent=self.recent)
        self.choosers: dict[str, Chooser] = {}

    def told(self, verb: str, *words: str) -> str:
        """What comes of a line."""
        if verb == "keep":
            self.recent = RecentPulls(**{"max_bytes" if words[1:] else "max_requests": int(words[0])})
            self.store = BanditStore(recent=self.recent)
        elif verb in ("ab", "inner"):
            self.choosers[verb] = chooser(self.store, f"root/{verb}", words)
        elif verb == "choose":
            for _ in range(int(words[2]) if words[2:] and words[2].isdigit() else 1):
                asked = Request(self._id(words[1]), None if "shadow" in words else Pulls())
                for one in words[0].split(","):
                    self.choosers[one].choose(asked)
                if asked.pulls is not None:
                    asked.end()
        elif verb == "figures":
            known = [f"{path} {' '.join(f'{one:g}' for one in ones)}" for path, ones in figures(self.store).items()]
            return "\n".join([*known, f"{len(self.recent)} requests are remembered"])
        else:
            try:
                return self._rewarded(words[0], float(words[1]), words[2:])
            except WeftError as error:
                return f"{error.code}: {error.message}"
        return ""

    def _id(self, word: str) -> str:
        return "x" * int(word[2:]) if word.startswith("x*") else word.strip("'")

    def _rewarded(self, subject: str, reward: float, rest: tuple[str, ...]) -> str:
        if rest == ("by", "path"):
            choice = BanditChoice(splitter(), PLAN, subject.strip("!"), not subject.endswith("!"))
            found = self.store.reward_choices("g", [choice], reward)
        else:
            found = self.store.reward_request(rest[1] if rest else "g", self._id(subject), reward)
        return f"rewarded {' '.join(f'{one.node}[{one.step}]' for one in found)}"


@cases(Path(__file__).with_name("scripts.txt"))
def test_a_script(case: Case) -> None:
    """What each line of a script is told is what is written down."""
    script = Script()
    case.check("\n".join(told for line in case.lines if (told := script.told(*line.split()))))


def test_a_step_that_has_not_answered_is_worth_nothing() -> None:
    """However good the answer was that another gave: by the request's id."""
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


def test_feedback_before_the_end_of_a_request_counts_at_its_end() -> None:
    """Once, and for the steps that its path shows; what a lost attempt chose, or has failed, earns nothing."""
    store = BanditStore()
    ab, asked, root = chooser(store), request("r1"), NodeRecord("root", SequencePlan.path_form)
    ab.choose(asked)
    store.reward_request("g", "r1", 1.0)
    ab.choose(asked)
    ab.choose(asked)
    assert {"root/ab[A]": (3, 0, 0.0)} == figures(store)
    for run, status in zip(ab.runs[1:], ("UNAVAILABLE", "OK"), strict=True):
        step, around = StepRecord("A", "root/ab[A]", 0), StepRecord("ab", "root/ab", 0)
        step.status, around.node = status, run
        run.steps.append(step)
        root.steps.append(around)
    settle(asked.pulls, root)
    assert {"root/ab[A]": (3, 2, 1.0)} == figures(store)
    with pytest.raises(AlreadyExistsError):
        store.reward_request("g", "r1", 1.0)


def test_late_feedback_counts_against_the_steps_that_have_come_since() -> None:
    """A reward for a request of an earlier version moves its step's weight beside those of the new version's too."""
    exp3 = BanditPlan(ALGORITHMS["EXP3"], 0.1, 0)
    store, asked = BanditStore(random.Random(1)), request("r1")
    store.chooser("g", splitter(steps=("A", "B")), exp3)("r1", asked.pulls, NodeRecord("ab"))
    asked.end()
    store.chooser("g", splitter(steps=("A", "B", "C")), exp3)
    (rewarded,) = store.reward_request("g", "r1", 1.0)
    assert [0.0 if known.step == rewarded.step else -0.1 for known in store] == pytest.approx(
        [known.arm.log_weight for known in store]
    )


def test_of_several_requests_with_one_id_the_latest_is_meant() -> None:
    """Also where two workers got them: the one that got the earlier one takes no feedback for it."""
    first, second = BanditStore(), BanditStore()
    for store in (first, second):
        asked = request("r1")
        chooser(store).choose(asked)
        asked.end()
    times_ns = [store.recent.time_ns("g", "r1") for store in (first, second)]
    with pytest.raises(NotFoundError):
        first.reward_request("g", "r1", 1.0, after_ns=times_ns[1])
    second.reward_request("g", "r1", 1.0, after_ns=times_ns[0])
    assert [0, 1] == [figures(store)["root/ab[A]"][1] for store in (first, second)]
    assert 0 == first.recent.time_ns("g", "r2")


def test_memory_is_bounded() -> None:
    """That of the requests that are remembered, and the choices of one request."""
    small = RecentPulls(max_bytes=10_000)
    hoard = chooser(BanditStore(recent=small))
    for i in range(100):
        hoard.choose(request(f"{i}" + "x" * 900))
    assert 0 < len(small) < 10
    long = request("long")
    for _ in range(MAX_PULLS + 10):
        hoard.choose(long)
    assert len(long.pulls) == MAX_PULLS


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
    asked = request("r")
    ab.choose(asked)
    asked.end()
    revisions.append(store.revision)
    store.reward_request("g", "r", 0.0)
    revisions.append(store.revision)
    assert [0, 1, 2] == revisions
