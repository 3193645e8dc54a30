"""What a bandit has learned of its steps, and which requests can still be rewarded."""

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.base.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from weft.language.bandit_algorithms import Arm, Arms, BanditPlan
from weft.router.reporting.path import SKIPPED, NodeRecord

MAX_REQUESTS = 100_000
MAX_BYTES = 64 << 20
#: A request with a longer id is not remembered.
MAX_ID_CHARS = 1024
#: Of one request, which may pass a bandit many times in a loop; more are not remembered.
MAX_PULLS = 64

_ENTRY_BYTES = 600
_PULL_BYTES = 200


class Bandit:
    """Chooses among the steps of one splitter and learns from rewards.

    Until each step has ``min_pulls`` the weights alone decide; then the algorithm does. A step of weight 0 is never
    chosen.

    Args:
        arms: What is known of the steps, in the same order. Other bandits may share and change them.
        weights: At least 0, one of them above 0; dimensionless.
    """

    def __init__(
        self,
        names: Sequence[str],
        arms: Sequence[Arm],
        weights: Sequence[float],
        plan: BanditPlan,
        generator: random.Random,
    ) -> None:
        self.names = tuple(names)
        self.arms = tuple(arms)
        self._min_pulls = plan.min_pulls
        self._algorithm = plan.algorithm
        self._arms = Arms(arms, weights, plan.epsilon, generator)

    def choose(self) -> tuple[int, float]:
        """Index of the next step, which counts as pulled, and the probability that it was drawn with.

        The probability goes back with the reward; an algorithm that does not need it gives 1.
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
        """A pull of step ``index`` was worth ``reward``, in 0..1.

        Args:
            probability: What ``choose`` gave with the pull; None where that is not known: the probability now.
        """
        arm = self.arms[index]
        arm.num_rewards += 1
        arm.reward_sum += reward
        self._algorithm.learn(self._arms, index, reward, probability)


class Pull(NamedTuple):
    """One choice.

    Attributes:
        node: Path of the splitter.
        probability: As ``Bandit.choose`` gave it; None where that is not known.
        run: Of the splitter, while the request is in work.
        has_answered: False: the step itself has failed, or was cancelled; the answer of a fallback is not its own.
    """

    node: str
    bandit: Bandit
    step_index: int
    probability: float | None = None
    run: NodeRecord | None = None
    has_answered: bool = True


def settle(pulls: list[Pull], root: NodeRecord) -> None:
    """Of the choices for a request that is over those are left that its path shows: not those of lost attempts."""
    last = {id(run): run.steps[-1] for run in _runs(root) if run.steps}
    found = ((pull, last.get(id(pull.run))) for pull in pulls)
    pulls[:] = [
        pull._replace(run=None, has_answered=step.status == "OK")
        for pull, step in found
        if step is not None and step.status != SKIPPED
    ]


def _runs(run: NodeRecord) -> Iterator[NodeRecord]:
    yield run
    for step in run.steps:
        for inner in (step.node, step.fallbacks):
            if inner is not None:
                yield from _runs(inner)


class _RememberedRequest:
    """A request; ``pulls`` is None when feedback was given."""

    __slots__ = ("num_bytes", "pulls")

    def __init__(self, pulls: list[Pull], num_bytes: int) -> None:
        self.pulls: list[Pull] | None = pulls
        self.num_bytes = num_bytes


class RecentPulls:
    """The choices of the latest requests that passed a bandit; the oldest are forgotten first.

    Args:
        max_bytes: About how much memory they may take.
    """

    def __init__(self, *, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, str], _RememberedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, graph: str, request_id: str, pulls: list[Pull], pull: Pull) -> None:
        """A choice made for a request is remembered; of two requests with one id, that of the later one.

        Args:
            request_id: Of the request; "" for one that cannot be named.
            pulls: What was chosen for the request so far; receives the choice, and is remembered with the first.
        """
        if len(pulls) < MAX_PULLS:
            pulls.append(pull)
        if len(pulls) > 1 or not request_id or len(request_id) > MAX_ID_CHARS:
            return
        self._forget((graph, request_id))
        num_bytes = _ENTRY_BYTES + _PULL_BYTES + 4 * len(request_id)
        self._entries[graph, request_id] = _RememberedRequest(pulls, num_bytes)
        self._num_bytes += num_bytes
        while len(self._entries) > self._max_requests or self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def take(self, graph: str, request_id: str) -> list[Pull]:
        """The choices of a request, once.

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
        entry = self._entries.get((graph, request_id))
        if entry is None:
            raise NotFoundError(
                f"no request {request_id!r} of graph '{graph}' that passed a bandit is known; the latest "
                f"{self._max_requests} since the start of this router are; give the path of an older one instead, the "
                "value of its trailing metadata x-graph-path"
            )
        if entry.pulls is None:
            raise AlreadyExistsError(f"feedback for request {request_id!r} of graph '{graph}' was already given")
        pulls, entry.pulls = entry.pulls, None
        return pulls

    def _forget(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
