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
        key: Of this definition, in the shared state.
        news: The verdict of a change that no span has told yet; else "".
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
        self.key = f"{graph}/{node}@{plan.digest}"
        self.news = ""
        self.state = begin(plan, 0)
        self.weights = weights_now(plan, self.state)

    def follow(self, state: RolloutState) -> None:
        """Take over a state, of this definition, unless it is older; the next request is split by it."""
        if state.revision < self.state.revision:
            return
        if (state.phase, state.step) != (self.state.phase, self.state.step):
            self.news = f"{state.phase}: {state.verdict}"
        self.state = state
        if (weights := weights_now(self.plan, state)) != self.weights:
            self.weights = weights

    def arm(self, index: int) -> ArmCounts:
        """The counts of the side that step ``index`` belongs to."""
        return self.candidate if index == self.plan.index else self.baseline


class RolloutStore:
    """Owns the rollouts by graph, path of the splitter and digest; each lives as long as a loaded graph has it.

    Attributes:
        states: As last shared, by ``Rollout.key``: where a rollout goes on that is registered.
    """

    def __init__(self) -> None:
        self.states: dict[str, RolloutState] = {}
        self._rollouts: WeakValueDictionary[tuple[str, str, str], Rollout] = WeakValueDictionary()

    def register(self, graph: str, node: str, plan: RolloutPlan) -> Rollout:
        """The rollout of a splitter; the one that is there if the definition is the same, as after a reload."""
        key = (graph, node, plan.digest)
        found = self._rollouts.get(key)
        if found is None:
            found = self._rollouts[key] = Rollout(graph, node, plan)
        found.plan = plan  # the other steps may have new weights
        found.follow(self.states.get(found.key, found.state))
        return found

    def __iter__(self) -> Iterator[Rollout]:
        """Every rollout in the order of loading."""
        return iter(list(self._rollouts.values()))
