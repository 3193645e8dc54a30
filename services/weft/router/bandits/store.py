"""What the bandits of all graphs have learned, and which requests can still be rewarded."""

import random
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from weft.base.errors import InvalidArgumentError
from weft.language.bandit_algorithms import Arm, BanditPlan
from weft.language.plan import NodePlan, StepPlan
from weft.router.bandits.memory import Bandit, Pull, RecentPulls
from weft.router.reporting.path import MAX_PATH_CHARS, NodeRecord

#: Graph and path of the splitter.
Key = tuple[str, str]
#: What may follow the name of a step, beside the bracket that closes its node.
_ENDS = frozenset("#=!~^>;")
_MAX_SHOWN_CHARS = 200


class KnownArm(NamedTuple):
    """A step of a bandit and what is known of it."""

    graph: str
    node: str
    step: str
    arm: Arm


class BanditChoice(NamedTuple):
    """What a bandit chose.

    Attributes:
        plan: Its bandit.
        has_answered: As of ``Pull``.
    """

    node: NodePlan
    plan: BanditPlan
    step: str
    has_answered: bool


class StepChooser:
    """Chooses the step of a splitter for each request."""

    def __init__(self, graph: str, node: str, bandit: Bandit, recent: RecentPulls) -> None:
        self._graph = graph
        self._node = node
        self._bandit = bandit
        self._recent = recent

    def choose(self, request_id: str, pulls: list[Pull] | None, run: NodeRecord) -> int:
        """Index of the step; the choice counts as a pull and is remembered with the request's id.

        Args:
            pulls: Receives the choice; None for a request that gets no feedback, of which nothing is remembered.
        """
        index, probability = self._bandit.choose()
        if pulls is not None:
            pull = Pull(self._node, self._bandit, index, probability, run)
            self._recent.add(self._graph, request_id, pulls, pull)
        return index


class BanditStore:
    """Owns every arm, by names of graph and step and the splitter's path, so that versions share what was learned."""

    def __init__(self, generator: random.Random | None = None, recent: RecentPulls | None = None) -> None:
        self._generator = generator if generator is not None else random.Random()  # noqa: S311  # no secret
        self._recent = recent if recent is not None else RecentPulls()
        self._arms: dict[Key, dict[str, Arm]] = {}

    @property
    def revision(self) -> int:
        """Grows with every pull and every reward."""
        return sum(known.arm.num_pulls + known.arm.num_rewards for known in self)

    def __iter__(self) -> Iterator[KnownArm]:
        """Every arm, those of graphs that are not loaded too; copied first, because the metrics thread reads too."""
        for (graph, node), arms in list(self._arms.items()):
            for step, arm in list(arms.items()):
                yield KnownArm(graph, node, step, arm)

    def chooser(self, graph: str, node: NodePlan, plan: BanditPlan) -> StepChooser:
        """What chooses for one splitter; it goes on from what is known of steps of these names."""
        return StepChooser(graph, node.path, self._bandit(graph, node, plan), self._recent)

    def arms(self, graph: str, node: NodePlan) -> list[KnownArm]:
        """Every step of a splitter with what is known of it."""
        known = self._arms.setdefault((graph, node.path), {})
        return [KnownArm(graph, node.path, step.name, known.setdefault(step.name, Arm())) for step in node.steps]

    def restore(self, found: KnownArm) -> None:
        """An arm that was saved is known again."""
        self.add(found.graph, found.node, found.step, found.arm)

    def add(self, graph: str, node: str, step: str, more: Arm) -> None:
        """What was learned elsewhere of a step is known here too."""
        arm = self._arms.setdefault((graph, node), {}).setdefault(step, Arm())
        arm.num_pulls += more.num_pulls
        arm.num_rewards += more.num_rewards
        arm.reward_sum += more.reward_sum
        arm.log_weight += more.log_weight

    def level(self, graph: str, node: str) -> float:
        """Weights of a splitter's steps are relative to the best one's again; gives its logarithm until then."""
        arms = self._arms[graph, node].values()
        best = max(arm.log_weight for arm in arms)
        for arm in arms:
            arm.log_weight -= best
        return best

    def reward_request(self, graph: str, request_id: str, reward: float) -> list[KnownArm]:
        """Every step that a bandit chose for the request was worth ``reward``; gives those steps.

        Raises:
            InvalidArgumentError: The reward is outside 0..1, or the id is no id that is remembered.
            NotFoundError: No such request passed a bandit, or it was too long ago.
            AlreadyExistsError: The request was rewarded before; nothing was counted now.
        """
        _check(reward)
        return _rewarded(graph, self._recent.take(graph, request_id), reward)

    def reward_choices(self, graph: str, choices: Sequence[BanditChoice], reward: float) -> list[KnownArm]:
        """The given steps were worth ``reward``, each as often as it is given; gives those steps."""
        _check(reward)
        pulls = []
        for node, plan, step, has_answered in choices:
            bandit = self._bandit(graph, node, plan)
            pulls.append(Pull(node.path, bandit, bandit.names.index(step), has_answered=has_answered))
        return _rewarded(graph, pulls, reward)

    def _bandit(self, graph: str, node: NodePlan, plan: BanditPlan) -> Bandit:
        names, arms = zip(*((known.step, known.arm) for known in self.arms(graph, node)), strict=True)
        return Bandit(names, arms, [step.weight for step in node.steps], plan, self._generator)


def _rewarded(graph: str, pulls: Sequence[Pull], reward: float) -> list[KnownArm]:
    """The arms, each once, after the reward; one that has not answered has no part in it, and gets 0."""
    found: dict[tuple[str, str], KnownArm] = {}
    for pull in pulls:
        pull.bandit.reward(pull.step_index, reward if pull.has_answered else 0.0, pull.probability)
        step = pull.bandit.names[pull.step_index]
        found[pull.node, step] = KnownArm(graph, pull.node, step, pull.bandit.arms[pull.step_index])
    return list(found.values())


def _check(reward: float) -> None:
    if not (isfinite(reward) and 0.0 <= reward <= 1.0):
        raise InvalidArgumentError(f"a reward is a number from 0 (worst) to 1 (best), got {reward:g}")


def bandit_choices(path: str, root: NodePlan) -> list[BanditChoice]:
    """What every bandit on the way chose, outer ones first; loops repeat it.

    Args:
        path: As ``weft.router.report.path_text`` wrote it for this graph.

    Raises:
        InvalidArgumentError: It is no path of this graph, it was cut, or it is too long.
    """
    if len(path) > MAX_PATH_CHARS or (len(path) == MAX_PATH_CHARS and path.endswith("...")):
        raise InvalidArgumentError(
            f"a path of {len(path)} characters was cut, or is none: paths have at most {MAX_PATH_CHARS}; give the "
            "request id instead"
        )
    return _PathReader(path).read(root)


class _PathReader:
    """Reads a path along the plan of its graph, so that every name is one of the plan's."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._choices: list[BanditChoice] = []

    def read(self, root: NodePlan) -> list[BanditChoice]:
        self._expect(root.name, f"the name of the root node, '{root.name}'")
        self._body(root, is_root=True)
        if self._at < len(self._text):
            raise self._fault("its end")
        return self._choices

    def _body(self, node: NodePlan, *, is_root: bool = False) -> None:
        before, after = node.path_form.root_brackets if is_root else node.path_form.brackets
        if not self._take(before):
            return  # it ended before its first step
        if node.path_form.shows_nothing and self._take(after):
            return
        self._step(node)
        while self._take(";"):
            self._step(node)
        self._expect(after, f"'{after}' or ';'")

    def _step(self, node: NodePlan) -> None:
        chosen = step = self._one_of(node)
        at = len(self._choices)
        has_answered = self._run(step)
        while step.fallback is not None and self._text.startswith(f">{step.fallback.name}", self._at):
            step = step.fallback
            self._at += 1 + len(step.name)
            self._run(step)
        if node.bandit is not None:
            self._choices.insert(at, BanditChoice(node, node.bandit, chosen.name, has_answered))

    def _run(self, step: StepPlan) -> bool:
        if self._take("#"):
            while self._at < len(self._text) and self._text[self._at] in "0123456789":
                self._at += 1
        if self._take("="):
            if not isinstance(step.action, NodePlan):
                raise self._fault(f"no node, because step '{step.name}' is a call")
            self._expect(step.action.name, f"node '{step.action.name}'")
            self._body(step.action)
        return self._take("^") or not (self._take("!") or self._take("~"))

    def _one_of(self, node: NodePlan) -> StepPlan:
        ends = _ENDS | {node.path_form.brackets[1]}
        for step in (*node.steps, *node.customs):
            end = self._at + len(step.name)
            if self._text.startswith(step.name, self._at) and (end == len(self._text) or self._text[end] in ends):
                self._at = end
                return step
        raise self._fault(f"a step of node '{node.name}': {', '.join(step.name for step in node.steps)}")

    def _take(self, text: str) -> bool:
        if not text or not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _expect(self, text: str, what: str) -> None:
        if text and not self._take(text):
            raise self._fault(what)

    def _fault(self, expected: str) -> InvalidArgumentError:
        shown = self._text[:_MAX_SHOWN_CHARS]
        return InvalidArgumentError(
            f"{shown!r} is no path of this graph: at character {self._at + 1} it has "
            f"{self._text[self._at : self._at + 20]!r} in place of {expected}"
        )
