"""The order of a pipeline's steps: each starts when the steps that it depends on have ended."""

from weft.language.plan import NodePlan


class Schedule:
    """Which steps may start when; made once, shared by all requests.

    Args:
        plan: A pipeline.

    Attributes:
        first: Indexes of the steps that wait for nothing.
        chain: Indexes of all steps in order, where each waits for the one before alone; None elsewhere.
    """

    __slots__ = ("_consumers", "_num_dependencies", "chain", "first")

    def __init__(self, plan: NodePlan) -> None:
        self._consumers = tuple(step.consumers for step in plan.steps)
        self._num_dependencies = [step.num_dependencies for step in plan.steps]
        self.first = [index for index, count in enumerate(self._num_dependencies) if count == 0]
        self.chain = self._chain()

    def pending(self) -> list[int]:
        """For each step, how many others it waits for; ``released_by`` counts them down for one run."""
        return self._num_dependencies.copy()

    def released_by(self, index: int, pending: list[int]) -> list[int]:
        """Steps that waited for nothing but step ``index``, which has ended."""
        released = []
        for consumer in self._consumers[index]:
            pending[consumer] -= 1
            if pending[consumer] == 0:
                released.append(consumer)
        return released

    def _chain(self) -> list[int] | None:
        chain, pending, ready = [], self.pending(), self.first
        while len(ready) == 1:
            chain += ready
            ready = self.released_by(ready[0], pending)
        return chain if len(chain) == len(self._consumers) else None
