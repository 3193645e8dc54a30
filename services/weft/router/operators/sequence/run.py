"""Steps that see one another's outputs, and the loop around them."""

from collections.abc import Collection
from dataclasses import dataclass

from typing_extensions import override

from weft.language.plan import Condition, NodePlan
from weft.language.pruning import pruned
from weft.router.fork import Fork
from weft.router.steps import NodeParts, PrunableNode, Run


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """A pipeline that runs again while a condition holds.

    Attributes:
        again: The ``while``: reads inputs and outputs of the round that is over; true means once more.
        max_iterations: Rounds at most; after the last the outputs are what that round gave.
        carry: (slot of an output, slot of an input): what the next round gets in place of its input.
    """

    again: Condition
    max_iterations: int
    carry: tuple[tuple[int, int], ...]


class Pipeline(PrunableNode):
    """Starts each step as soon as the steps that it reads from have ended, whether they answered or not.

    A lone ready step is awaited where it is; tasks are made only where several are ready at once. The first failure
    cancels the others. Shadows start like steps and hold up nothing.
    """

    def __init__(self, plan: NodePlan, parts: NodeParts) -> None:
        super().__init__(plan)
        self._steps = parts.steps
        self._parts = parts
        self._schedule = Schedule(plan)
        self._shadows = frozenset(index for index, step in enumerate(plan.steps) if step.shadow is not None)
        chain = None if self._shadows else self._schedule.chain
        self.chain = None if chain is None else tuple(self._steps[index] for index in chain)

    @override
    async def run(self, run: Run) -> None:
        if self.chain is not None:
            for step in self.chain:
                await step.run(run)
            return
        steps, schedule, shadows = self._steps, self._schedule, self._shadows
        pending = schedule.pending()
        ready = schedule.first
        if shadows:
            ready = await self._without_shadows(ready, pending, run)
        while len(ready) == 1:
            index = ready[0]
            await steps[index].run(run)
            ready = schedule.released_by(index, pending)
            if shadows:
                ready = await self._without_shadows(ready, pending, run)
        if not ready:
            return
        fork = Fork()
        for index in ready:
            fork.start(self._follow(index, fork, pending, run))
        await fork.join()

    @override
    def only(self, live: Collection[int]) -> "Pipeline":
        if len(live) == len(self._steps):
            return self
        return self._with(pruned(self.plan, live), self._parts._replace(steps=tuple(self._steps[i] for i in live)))

    def _with(self, plan: NodePlan, parts: NodeParts) -> "Pipeline":
        return Pipeline(plan, parts)

    async def _follow(self, index: int, fork: Fork, pending: list[int], run: Run) -> int:
        """Run a step, then the first that it releases, and so on; the others that it releases get tasks."""
        while True:
            await self._steps[index].run(run)
            released = self._schedule.released_by(index, pending)
            if self._shadows:
                released = await self._without_shadows(released, pending, run)
            if not released:
                return 0
            for other in released[1:]:
                fork.start(self._follow(other, fork, pending, run))
            index = released[0]

    async def _without_shadows(self, ready: list[int], pending: list[int], run: Run) -> list[int]:
        if self._shadows.isdisjoint(ready):
            return ready
        waiting, others = ready.copy(), []
        for index in waiting:
            if index in self._shadows:
                await self._steps[index].run(run)
                waiting += self._schedule.released_by(index, pending)
            else:
                others.append(index)
        return others


class Loop(Pipeline):
    """A pipeline that runs again while a condition holds; each round starts with an empty frame but for its inputs."""

    def __init__(self, plan: NodePlan, parts: NodeParts, loop: LoopPlan) -> None:
        super().__init__(plan, parts)
        self._loop = loop

    @override
    async def run(self, run: Run) -> None:
        """The outputs are those of the last round."""
        plan, loop, frame = self.plan, self._loop, run.frame
        num_inputs, num_left = len(plan.inputs), loop.max_iterations
        while True:
            await super().run(run)
            num_left -= 1
            if not num_left or not self._parts.error_context.holds(loop.again, run, plan.path):
                return
            carried = [frame[output] for output, _ in loop.carry]
            frame[num_inputs:] = [None] * (plan.num_slots - num_inputs)
            for (_, slot), tensor in zip(loop.carry, carried, strict=True):
                frame[slot] = tensor

    def _with(self, plan: NodePlan, parts: NodeParts) -> Pipeline:
        return Loop(plan, parts, self._loop)


class Schedule:
    """Which steps may start when; made once, shared by all requests.

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
