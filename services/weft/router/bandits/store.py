"""What the bandits of all graphs have learned, and which recent requests can still be rewarded."""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from weft.base.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from weft.language.bandit_algorithms import Arm, Arms, BanditPlan
from weft.language.plan import NodePlan, StepPlan
from weft.router.reporting.path import MAX_PATH_CHARS, SKIPPED, NodeRecord

MAX_REQUESTS = 100_000
MAX_BYTES = 64 << 20
#: A request with a longer id is not remembered.
MAX_ID_CHARS = 1024
#: Of one request, which may pass a bandit many times in a loop; more are not remembered.
MAX_PULLS = 64

_ENTRY_BYTES = 600
_PULL_BYTES = 200
#: What may follow the name of a step, beside the bracket that closes its node.
_ENDS = frozenset("#=!~^>;")
_MAX_SHOWN_CHARS = 200


class Bandit:
    """Chooses among the steps of one splitter and learns from rewards.

    Until each step has ``min_pulls``, the weights alone decide; then the algorithm does. A step of weight 0 is never
    chosen.

    Args:
        arms: Statistics of the steps, in the order of ``names``. Other bandits may share and change them.
        weights: At least 0, one of them above 0; dimensionless.
        known: As of ``Arms``.
    """

    def __init__(
        self,
        names: Sequence[str],
        arms: Sequence[Arm],
        weights: Sequence[float],
        plan: BanditPlan,
        generator: random.Random,
        known: Collection[Arm] = (),
    ) -> None:
        self.names = tuple(names)
        self.arms = tuple(arms)
        self._min_pulls = plan.min_pulls
        self._algorithm = plan.algorithm
        self._arms = Arms(arms, weights, plan.epsilon, generator)
        self._arms.known = known or self.arms

    def choose(self) -> tuple[int, float]:
        """Choose a step and count a pull; return its index and the probability with which it was drawn.

        The probability goes back with the reward; an algorithm that does not need it returns 1.
        """
        arms = self._arms
        if any(self.arms[index].num_trials < self._min_pulls for index in arms.live):
            shares = [arms.weights[index] for index in arms.live]
            at = arms.draw(shares)
            index, probability = arms.live[at], shares[at] / sum(shares)
        else:
            index, probability = self._algorithm.choose(arms)
        self.arms[index].num_pulls += 1
        return index, probability

    def reward(self, index: int, reward: float, probability: float | None = None) -> None:
        """Count a reward, in 0..1, for a pull of step ``index``.

        Args:
            probability: As returned by ``choose``; None: unknown, use the current one.
        """
        arm = self.arms[index]
        arm.num_rewards += 1
        arm.reward_sum += reward
        self._algorithm.learn(self._arms, index, reward, probability)


class Scores:
    """Rewards of the steps of a splitter that is no bandit; ``count`` has a function for each step."""

    def __init__(self, names: Sequence[str], count: Sequence[Callable[[float], None]]) -> None:
        self.names = tuple(names)
        self.arms = tuple(Arm() for _ in names)
        self._count = tuple(count)

    def reward(self, index: int, reward: float, probability: float | None = None) -> None:
        """Count a reward, in 0..1, for step ``index``."""
        self.arms[index].num_rewards += 1
        self.arms[index].reward_sum += reward
        self._count[index](reward)


class Pull(NamedTuple):
    """One choice.

    Attributes:
        node: Path of the splitter.
        probability: As ``Bandit.choose`` returned it; None if unknown.
        run: Of the splitter, while the request is in flight.
        has_answered: False: the step itself has failed, or was cancelled; the answer of a fallback is not its own.
    """

    node: str
    bandit: Bandit | Scores
    step_index: int
    probability: float | None = None
    run: NodeRecord | None = None
    has_answered: bool = True


class Pulls(list[Pull]):
    """The choices of one request.

    Attributes:
        reward: Was given before the request ended; counts when it does.
    """

    reward: float | None = None


def settle(pulls: Pulls, root: NodeRecord) -> None:
    """At the end of a request, drop choices of lost attempts: keep those that its path shows."""
    last = {id(run): run.steps[-1] for run in _runs(root) if run.steps}
    found = ((pull, last.get(id(pull.run))) for pull in pulls)
    pulls[:] = [
        pull._replace(run=None, has_answered=step.status == "OK")
        for pull, step in found
        if step is not None and step.status != SKIPPED
    ]
    if pulls.reward is not None:
        _rewarded("", pulls, pulls.reward)


def _runs(run: NodeRecord) -> Iterator[NodeRecord]:
    """All runs within a node's run, itself included."""
    yield run
    for step in run.steps:
        for inner in (step.node, step.fallbacks):
            if inner is not None:
                yield from _runs(inner)


class RecentPulls:
    """The choices of recent requests that passed a bandit; the oldest are forgotten first."""

    def __init__(self, *, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._num_bytes = 0
        #: (choices, bytes, time) by graph and request; the choices are None when feedback was given.
        self._entries: OrderedDict[tuple[str, str], tuple[Pulls | None, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, graph: str, request_id: str, pulls: Pulls, pull: Pull) -> None:
        """Remember a choice for a request; a later request with the same id replaces an earlier one.

        Args:
            pulls: Choices of the request so far; extended here, and remembered with the first one.
        """
        if len(pulls) < MAX_PULLS:
            pulls.append(pull)
        if len(pulls) > 1 or not request_id or len(request_id) > MAX_ID_CHARS:
            return
        self._forget((graph, request_id))
        num_bytes = _ENTRY_BYTES + _PULL_BYTES + 4 * len(request_id)
        self._entries[graph, request_id] = pulls, num_bytes, time.monotonic_ns()
        self._num_bytes += num_bytes
        while len(self._entries) > self._max_requests or self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def time_ns(self, graph: str, request_id: str) -> int:
        """When the latest request with this id came, on the clock of this machine; 0 if none is known."""
        return self._entries.get((graph, request_id), (None, 0, 0))[2]

    def take(self, graph: str, request_id: str, after_ns: int = 0) -> Pulls:
        """Return the choices of a request, once.

        Args:
            after_ns: A request that came before is not meant: the client has used its id again.

        Raises:
            InvalidArgumentError: The id is empty, or longer than those that are remembered.
            NotFoundError: No such request passed a bandit, or it was too long ago.
            AlreadyExistsError: They were taken before.
        """
        if not 0 < len(request_id) <= MAX_ID_CHARS:
            raise InvalidArgumentError(
                f"a request id for feedback has 1 to {MAX_ID_CHARS} characters, got {len(request_id)}; give the path "
                "of the request instead, the value of its trailing metadata x-graph-path"
            )
        key = graph, request_id
        if self.time_ns(*key) <= after_ns:
            raise NotFoundError(
                f"no request {request_id!r} of graph '{graph}' that passed a bandit is known; the latest "
                f"{self._max_requests} since the start of this router are; give the path of an older one instead, the "
                "value of its trailing metadata x-graph-path"
            )
        pulls, num_bytes, time_ns = self._entries[key]
        if pulls is None:
            raise AlreadyExistsError(f"feedback for request {request_id!r} of graph '{graph}' was already given")
        self._entries[key] = None, num_bytes, time_ns
        return pulls

    def _forget(self, key: tuple[str, str]) -> None:
        if key in self._entries:
            self._num_bytes -= self._entries.pop(key)[1]


class KnownArm(NamedTuple):
    """A step of a bandit and its statistics."""

    graph: str
    node: str
    step: str
    arm: Arm


class BanditChoice(NamedTuple):
    """The step that a node with a bandit ``plan``, or a rollout, chose; ``has_answered`` as of ``Pull``."""

    node: NodePlan
    plan: BanditPlan | None
    step: str
    has_answered: bool


class BanditStore:
    """Owns every arm, keyed by graph, splitter path and step name, so that a graph's versions share its knowledge.

    Attributes:
        scores: What else feedback counts for, by graph and splitter path: rollouts.
    """

    def __init__(self, generator: random.Random | None = None, recent: RecentPulls | None = None) -> None:
        self._generator = generator if generator is not None else random.Random()  # noqa: S311  # no secret
        self.recent = recent if recent is not None else RecentPulls()
        self.scores: dict[tuple[str, str], Scores] = {}
        self._arms: dict[tuple[str, str], dict[str, Arm]] = {}

    @property
    def revision(self) -> int:
        """Increases with every pull and reward."""
        return sum(known.arm.num_pulls + known.arm.num_rewards for known in self)

    def __iter__(self) -> Iterator[KnownArm]:
        """Every arm, also of graphs that are not loaded; on a copy, because the metrics thread reads too."""
        for (graph, node), arms in list(self._arms.items()):
            for step, arm in list(arms.items()):
                yield KnownArm(graph, node, step, arm)

    def chooser(
        self, graph: str, node: NodePlan, plan: BanditPlan, weights: Sequence[float] = ()
    ) -> Callable[[str, Pulls | None, NodeRecord], int]:
        """Return a function that chooses steps for one splitter, continuing from earlier statistics of its steps.

        It takes the request's id, which may be "", its choices so far (None for a request that gets no feedback and is
        not remembered) and the run of the splitter; it counts a pull and returns the index of the step. ``weights`` are
        the plan's by default.
        """
        bandit, recent = self._bandit(graph, node, plan, weights), self.recent

        def choose(request_id: str, pulls: Pulls | None, run: NodeRecord) -> int:
            index, probability = bandit.choose()
            if pulls is not None:
                recent.add(graph, request_id, pulls, Pull(node.path, bandit, index, probability, run))
            return index

        return choose

    def arms(self, graph: str, node: NodePlan) -> list[KnownArm]:
        """The steps of a splitter with their statistics."""
        known = self._arms.setdefault((graph, node.path), {})
        return [KnownArm(graph, node.path, step.name, known.setdefault(step.name, Arm())) for step in node.steps]

    def add(self, graph: str, node: str, step: str, more: Arm) -> None:
        """Add statistics of a step that were saved, or learned by another worker."""
        add_up(self._arms.setdefault((graph, node), {}).setdefault(step, Arm()), more)

    def level(self, graph: str, node: str) -> float:
        """Rescale the weights of a splitter's steps relative to the best; return the logarithm of the old best."""
        arms = self._arms[graph, node].values()
        best = max(arm.log_weight for arm in arms)
        for arm in arms:
            arm.log_weight -= best
        return best

    def reward_request(self, graph: str, request_id: str, reward: float, after_ns: int = 0) -> list[KnownArm]:
        """Reward every step that a bandit chose for the request, when that has ended; return those steps.

        Raises:
            InvalidArgumentError: The reward is outside 0..1, or such ids are not remembered.
            NotFoundError: No such request passed a bandit, or it was too long ago.
            AlreadyExistsError: The request was rewarded before; nothing was counted now.
        """
        _check(reward)
        pulls = self.recent.take(graph, request_id, after_ns)
        if all(pull.run is None for pull in pulls):
            return _rewarded(graph, pulls, reward)
        pulls.reward = reward
        return _arms(graph, pulls)

    def reward_choices(self, graph: str, choices: Sequence[BanditChoice], reward: float) -> list[KnownArm]:
        """Reward the given steps, in 0..1, each as often as listed; return them."""
        _check(reward)
        pulls: list[Pull] = []
        for node, plan, step, has_answered in choices:
            rewarded: list[Bandit | Scores] = [] if plan is None else [self._bandit(graph, node, plan)]
            scores = self.scores.get((graph, node.path))  # maybe of another version, with other steps
            rewarded += [scores] if scores is not None and step in scores.names else []
            pulls += [Pull(node.path, one, one.names.index(step), has_answered=has_answered) for one in rewarded]
        return _rewarded(graph, pulls, reward)

    def _bandit(self, graph: str, node: NodePlan, plan: BanditPlan, weights: Sequence[float] = ()) -> Bandit:
        names, arms = zip(*((known.step, known.arm) for known in self.arms(graph, node)), strict=True)
        known = self._arms[graph, node.path].values()
        return Bandit(names, arms, weights or [step.weight for step in node.steps], plan, self._generator, known)


def add_up(arm: Arm, more: Arm) -> None:
    """Add another worker's statistics to an arm."""
    arm.num_pulls += more.num_pulls
    arm.num_rewards += more.num_rewards
    arm.reward_sum += more.reward_sum
    arm.log_weight += more.log_weight


def _rewarded(graph: str, pulls: Sequence[Pull], reward: float) -> list[KnownArm]:
    """Reward the pulls; returns their arms. An arm that has not answered gets 0."""
    for pull in pulls:
        pull.bandit.reward(pull.step_index, reward if pull.has_answered else 0.0, pull.probability)
    return _arms(graph, pulls)


def _arms(graph: str, pulls: Sequence[Pull]) -> list[KnownArm]:
    """The arms of the pulls, each once, those of bandits before others."""
    found: dict[tuple[str, str], KnownArm] = {}
    for node, bandit, index, *_ in pulls:
        step = bandit.names[index]
        found.setdefault((node, step), KnownArm(graph, node, step, bandit.arms[index]))
    return list(found.values())


def _check(reward: float) -> None:
    if not (isfinite(reward) and 0.0 <= reward <= 1.0):
        raise InvalidArgumentError(f"a reward is a number from 0 (worst) to 1 (best), got {reward:g}")


def bandit_choices(path: str, root: NodePlan) -> list[BanditChoice]:
    """Read from a path which step every bandit chose, outer ones first; loops repeat it.

    Args:
        path: Written by ``weft.router.reporting.path.path_text`` for the graph of ``root``.

    Raises:
        InvalidArgumentError: It is not a path of this graph, was truncated, or is too long.
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
        if node.bandit is not None or (node.rollout is not None and "min_score" in node.rollout.limits):
            self._choices.insert(at, BanditChoice(node, node.bandit, chosen.name, has_answered))

    def _run(self, step: StepPlan) -> bool:
        """What follows the name of a step: rows, the node in its place, and how it ended; whether it answered."""
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
