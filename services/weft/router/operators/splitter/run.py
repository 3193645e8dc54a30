"""One step, drawn by weight; for a given key always the same one."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from math import log

from typing_extensions import override

from weft.language.plan import Condition, NodePlan
from weft.router.bandits.store import StepChooser
from weft.router.operators.alternatives import AlternativesNode
from weft.router.steps import NodeParts, Run


class SplitterNode(AlternativesNode):
    """Runs one step: the one that the request is pinned to, else the one drawn.

    The same key always draws the same step; a bandit draws by what it has learned.

    Args:
        sticky_by: The key; None, or an empty one: drawn at random.
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


class WeightedChoice:
    """Chooses a step with probability weight / sum of weights.

    With a key the choice is weighted rendezvous hashing: each step gets the score ``-weight / ln(h)`` with ``h`` in
    (0, 1) hashed from salt, key and step name; the highest score wins. It depends on nothing else, so every process
    decides alike, and when a weight changes only the keys move that must.

    Args:
        weights: At least 0, one of them above 0; dimensionless.
        salt: Splitters with the same salt and step names decide alike.

    Source:
        C. Schindelhauer, G. Schomaker, "Weighted distributed hash tables", SPAA 2005 (logarithmic method).
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], salt: str, generator: random.Random) -> None:
        self._weights = tuple(weights)
        self._names = [_field(name) for name in names]
        self._salt = _field(salt)
        self._bounds = list(accumulate(weights))
        self._generator = generator

    def by_key(self, key: str) -> int:
        """Index of the step for ``key``."""
        prefix = blake2b(self._salt + _field(key), digest_size=8)
        best, best_score = 0, -1.0
        for index, (name, weight) in enumerate(zip(self._names, self._weights, strict=True)):
            if weight <= 0:
                continue
            state = prefix.copy()
            state.update(name)
            h = (int.from_bytes(state.digest(), "big") + 0.5) / 2.0**64
            score = -weight / log(h) if h < 1.0 else float("inf")
            if score > best_score:
                best, best_score = index, score
        return best

    def by_chance(self) -> int:
        """Index of a step drawn at random; a step of weight 0 is never drawn."""
        point = self._generator.random() * self._bounds[-1]
        return bisect_right(self._bounds, point)


def _field(text: str) -> bytes:
    """Text with its length in front, so that no two triples run together to the same bytes."""
    data = text.encode()
    return len(data).to_bytes(4, "big") + data
