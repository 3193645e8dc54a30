"""The rollouts of the loaded graphs, as one router takes part in them."""

from collections.abc import Iterator
from weakref import WeakValueDictionary

from weft.language.rollouts import RolloutPlan
from weft.router.rollouts.counts import ArmCounts
from weft.router.rollouts.machine import RolloutState, begin, weights_now


class Rollout:
    """One rollout at this router.

    Attributes:
        node: Path of the splitter; ``name`` is its name.
        state: As last followed.
        weights: Of the splitter's steps now; another object after each change.
        candidate, baseline: What this router has counted since it registered the rollout.
    """

    def __init__(self, graph: str, node: str, plan: RolloutPlan) -> None:
        self.graph = graph
        self.node = node
        self.name = node.rpartition("/")[2]
        self.plan = plan
        self.candidate = ArmCounts()
        self.baseline = ArmCounts()
        self.follow(begin(plan, 0))

    def follow(self, state: RolloutState) -> None:
        """Take over a state, of this definition; the next request is split by it."""
        self.state = state
        self.weights = weights_now(self.plan, state)

    def arm(self, index: int) -> ArmCounts:
        """The counts of the side that step ``index`` belongs to."""
        return self.candidate if index == self.plan.index else self.baseline


class RolloutStore:
    """Owns the rollouts by graph, path of the splitter and digest; each lives as long as a loaded graph has it."""

    def __init__(self) -> None:
        self._rollouts: WeakValueDictionary[tuple[str, str, str], Rollout] = WeakValueDictionary()

    def register(self, graph: str, node: str, plan: RolloutPlan) -> Rollout:
        """The rollout of a splitter; the one that is there if the definition is the same, as after a reload."""
        key = (graph, node, plan.digest)
        found = self._rollouts.get(key)
        if found is None:
            found = self._rollouts[key] = Rollout(graph, node, plan)
        found.plan = plan  # the other steps may have new weights
        found.follow(found.state)
        return found

    def __iter__(self) -> Iterator[Rollout]:
        """Every rollout in the order of loading."""
        return iter(list(self._rollouts.values()))
