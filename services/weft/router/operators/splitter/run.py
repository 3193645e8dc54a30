"""One step, drawn by weight."""

from typing_extensions import override

from weft.language.plan import Condition, NodePlan
from weft.router.bandits.store import StepChooser
from weft.router.operators.alternatives import AlternativesNode
from weft.router.operators.splitter.weighted_choice import WeightedChoice
from weft.router.steps import NodeParts, Run


class SplitterNode(AlternativesNode):
    """Runs one step: the one that the request is pinned to, else the one drawn.

    The same key always draws the same step; a bandit draws by what it has learned.

    Args:
        plan, parts: As of ``AlternativesNode``.
        sticky_by: The key; None, or an empty one: drawn at random.
        salt: As of ``WeightedChoice``.
    """

    def __init__(self, plan: NodePlan, parts: NodeParts, sticky_by: Condition | None, salt: str) -> None:
        super().__init__(plan, parts)
        self._sticky_by = sticky_by
        names, weights = [step.name for step in plan.steps], [step.weight for step in plan.steps]
        self._choice = WeightedChoice(names, weights, salt, parts.runtime.generator)
        self._index_by_name = {name: index for index, name in enumerate(names)}
        self._bandit: StepChooser | None = None
        if plan.bandit is not None:
            self._bandit = parts.runtime.bandits.chooser(parts.error_context.graph, plan, plan.bandit)

    @override
    async def run(self, run: Run) -> None:
        await self._steps[self._choose(run)].run(run)

    def _choose(self, run: Run) -> int:
        request = run.request
        if request.pins is not None:
            index = self._index_by_name.get(request.pins.get(self.plan.name, ""))
            if index is not None:
                return index
        if self._bandit is not None:
            return self._bandit.choose(request.scope.request_id, request.pulls, run.record)
        if self._sticky_by is not None:
            key = self._error_context.text(self._sticky_by, run, self.plan.path)
            if key:
                return self._choice.by_key(key)
        if request.is_in_sequence:  # its state is where its first request went
            return self._choice.by_key(str(request.scope.parameters["sequence_id"]))
        return self._choice.by_chance()
