"""Runs sequences: steps as their inputs become ready, loops, and a run for each response of a stream."""

import contextlib
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from typing_extensions import override

from weft.language.description import condition_text, counted, given, slot_name, when_notes
from weft.language.path_form import PathForm
from weft.language.plan import THEN, Condition, Description, End, Flow, NodePlan, StepPlan, TensorUse
from weft.language.pruning import pruned, steps_before
from weft.router.reporting.path import NodeRecord
from weft.router.steps.node import Node, NodeParts, OperatorPlan, PrunableNode
from weft.router.steps.responses import NodeResponses, close_streams, responses_of
from weft.router.steps.run import Run
from weft.router.steps.step import Step
from weft.router.tasks import Fork, in_order


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """A pipeline that repeats while a condition holds.

    Attributes:
        again: The ``while``: reads inputs and outputs of the last round; true means another round.
        max_iterations: Most rounds; after the last its outputs count.
        carry: (slot of an output, slot of an input): the output replaces the input in the next round.
    """

    again: Condition
    max_iterations: int
    carry: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SequencePlan(OperatorPlan):
    """A sequence.

    Attributes:
        max_inflight_responses: With streams: responses of a streaming step that are being processed, or wait for the
            reader; beyond that the stream is not read further. 0: one.
    """

    kind: ClassVar[str] = "sequence"
    path_form: ClassVar[PathForm] = PathForm(("(", ")"), (".", ""))
    is_pipeline: ClassVar[bool] = True
    runs_shadows: ClassVar[bool] = True

    loop: LoopPlan | None = None
    max_inflight_responses: int = 0

    @property
    @override
    def conditions(self) -> tuple[Condition, ...]:
        return () if self.loop is None else (self.loop.again,)

    @property
    @override
    def slots_read(self) -> tuple[int, ...]:
        if self.loop is None:
            return ()
        return (*(slot for slot, _ in self.loop.carry), *(binding.slot for binding in self.loop.again.tensors))

    @override
    def followers(self) -> Sequence[Sequence[int]]:
        return [step.consumers for step in self.steps]

    @override
    def first_lost(self, lost: Sequence[int]) -> int | None:
        return next((index for index in lost if not self.steps[index].is_soft), None)

    @override
    def node(self, parts: NodeParts) -> Node:
        if self.loop is not None:
            return Loop(self, parts)
        return (StagedPipeline if self.streams else Pipeline)(self, parts)

    @override
    def describe(self) -> Description:
        loop, limit = self.loop, self.max_inflight_responses
        flows = list(_data_flows(self))
        notes = [f"at most {counted(limit, 'response')} of a stream in work"] if limit else []
        if loop is not None:
            carried = [f"{slot_name(self, output)} becomes {slot_name(self, taken)}" for output, taken in loop.carry]
            again = (f"again while {condition_text(loop.again)}", *carried)
            flows.append(Flow(None, None, again, is_back=True))
            notes = [f"at most {counted(loop.max_iterations, 'round')}"]
        optional = [
            {binding.slot for binding in step.outputs} - {default.slot for default in step.defaults}
            for step in self.steps
            if step.is_soft or step.when is not None
        ]
        return Description(
            kind=self.kind,
            steps=self.steps,
            entry=End("inputs", is_plain=True),
            exit=End("outputs", is_plain=True),
            flows=tuple(flows),
            notes=tuple(notes),
            step_notes={index: when_notes(step) for index, step in enumerate(self.steps)},
            maybe_absent=frozenset[int]().union(*optional),
        )


def _data_flows(plan: SequencePlan) -> Iterator[Flow]:
    producers: dict[int, int] = {}
    for index, step in enumerate(plan.steps):
        producers.update((binding.slot, index) for binding in step.outputs)
        if step.ok_slot >= 0:
            producers[step.ok_slot] = index
    joined: set[tuple[int, int]] = set()
    for index, step in enumerate(plan.steps):
        for use in _taken(step):
            source = producers.get(use.slot)
            yield _data_flow(plan, source, index, use)
            if source is not None:
                joined.add((source, index))
    for index, step in enumerate(plan.steps):
        for consumer in step.consumers:
            if (index, consumer) not in joined:
                yield Flow(index, consumer, (THEN,))
    sources = [producers.get(binding.slot) for binding in plan.outputs]
    for source, binding in zip(sources, plan.outputs, strict=True):
        yield _data_flow(plan, source, None, TensorUse(binding.slot, taken_as=binding.name))
    for index, step in enumerate(plan.steps):
        if step.is_awaited and index not in sources:
            yield Flow(index, None, (THEN,))


def _data_flow(plan: SequencePlan, source: int | None, target: int | None, use: TensorUse) -> Flow:
    if source is None:
        return Flow(None, target, tensors=(use,))
    outputs = {binding.slot: binding.name for binding in plan.steps[source].outputs}
    return Flow(source, target, tensors=(use._replace(given_as=outputs.get(use.slot, "")),), gives=True)


def _taken(step: StepPlan) -> list[TensorUse]:
    """Slots that a step reads for its target and its conditions, each once."""
    found = {use.slot: use for use in given(step)}
    of_policies = ((policy.condition_words, policy.condition) for policy in step.policies)
    for what, condition in (("when", step.when), *of_policies):
        for binding in condition.tensors if condition is not None else ():
            found.setdefault(binding.slot, TensorUse(binding.slot, condition=f"{binding.name} (for {what})"))
    return list(found.values())


class Pipeline(PrunableNode):
    """Starts each step as soon as the steps that it reads from have ended, whether they answered or not.

    A lone ready step is awaited where it is; tasks are made only where several are ready at once. The first failure
    cancels the others. Shadows start like steps and hold up nothing.
    """

    def __init__(self, plan: SequencePlan, parts: NodeParts) -> None:
        super().__init__(plan)
        self._plan = plan
        self._steps = parts.steps
        self._parts = parts
        self._consumers = tuple(step.consumers for step in plan.steps)
        self._num_dependencies = [step.num_dependencies for step in plan.steps]
        self._first = [index for index, count in enumerate(self._num_dependencies) if count == 0]
        self._shadows = frozenset(index for index, step in enumerate(plan.steps) if step.shadow is not None)
        self.chain = None if self._shadows else self._chain()

    @override
    async def run(self, run: Run) -> None:
        if self.chain is not None:
            for step in self.chain:
                await step.run(run)
            return
        steps, shadows = self._steps, self._shadows
        pending = self._num_dependencies.copy()
        ready = self._first
        if shadows:
            ready = await self._without_shadows(ready, pending, run)
        while len(ready) == 1:
            index = ready[0]
            await steps[index].run(run)
            ready = self._released_by(index, pending)
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
        return self if len(live) == len(self._steps) else type(self)(*self._part(live))

    def _part(self, live: Collection[int]) -> tuple[SequencePlan, NodeParts]:
        return pruned(self._plan, live), self._parts._replace(steps=tuple(self._steps[i] for i in live))

    async def _follow(self, index: int, fork: Fork, pending: list[int], run: Run) -> int:
        """Run a step, then the first step that it unblocks, and so on; start tasks for the others."""
        while True:
            await self._steps[index].run(run)
            released = self._released_by(index, pending)
            if self._shadows:
                released = await self._without_shadows(released, pending, run)
            if not released:
                return 0
            for other in released[1:]:
                fork.start(self._follow(other, fork, pending, run))
            index = released[0]

    def _released_by(self, index: int, pending: list[int]) -> list[int]:
        """Steps that waited only for step ``index``, which has ended; decrements ``pending``."""
        released = []
        for consumer in self._consumers[index]:
            pending[consumer] -= 1
            if pending[consumer] == 0:
                released.append(consumer)
        return released

    def _chain(self) -> tuple[Step, ...] | None:
        chain, pending, ready = [], self._num_dependencies.copy(), self._first
        while len(ready) == 1:
            chain += ready
            ready = self._released_by(ready[0], pending)
        return tuple(self._steps[index] for index in chain) if len(chain) == len(self._steps) else None

    async def _without_shadows(self, ready: list[int], pending: list[int], run: Run) -> list[int]:
        """Start the ready shadows; return the other ready steps."""
        if self._shadows.isdisjoint(ready):
            return ready
        waiting, others = ready.copy(), []
        for index in waiting:
            if index in self._shadows:
                await self._steps[index].run(run)
                waiting += self._released_by(index, pending)
            else:
                others.append(index)
        return others


class Loop(Pipeline):
    """A pipeline that repeats while a condition holds; each round starts with only its inputs in the frame."""

    def __init__(self, plan: SequencePlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        self._loop = cast(LoopPlan, plan.loop)

    @override
    async def run(self, run: Run) -> None:
        """Run all rounds; the outputs are those of the last."""
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


class StagedPipeline(Pipeline):
    """A sequence with streams: steps after a streaming step run once for each of its responses.

    It is cut into stages. The first has the steps that read from no streaming step, and the first streaming step; the
    next has the steps that read from that, and the second streaming step; and so on. The end of the last stage, which
    has none, is a response of the node. Each response of a step starts a run of the next stage in a copy of the frame.
    """

    def __init__(self, plan: SequencePlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        self.chain = None
        self._stages = [Pipeline(*self._part(stage)) for stage in _stages(plan)]
        self._limit = max(plan.max_inflight_responses, 1)
        self._output_slots = [binding.slot for binding in plan.outputs]

    @override
    async def run(self, run: Run) -> None:
        await NodeResponses(self.responses(run.with_own_stream()), self._output_slots).open(run)

    @override
    def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        """Yield responses in the order of the responses of the streaming steps."""
        return self._responses(0, run)

    async def _responses(self, number: int, run: Run) -> AsyncGenerator[Run, None]:
        """Responses of stage ``number`` and those after it."""
        try:
            await self._stages[number].run(run)
            if number + 1 == len(self._stages):
                yield run
                return
            rests = self._rests(number + 1, run)
            async with contextlib.aclosing(rests), contextlib.aclosing(in_order(rests, self._limit)) as responses:
                async for response in responses:
                    yield response
        finally:
            await close_streams((run,))

    async def _rests(self, number: int, run: Run) -> AsyncGenerator[AsyncGenerator[Run, None], None]:
        """For each response of the streaming step before stage ``number``, the responses of that stage and the next.

        If that step was skipped, failed softly or was replaced, its result counts as one response.
        """
        shown, position = _StageRecords(run.record), 0
        async with contextlib.aclosing(responses_of(run)) as responses:
            async for response in responses:
                yield self._rest(number, response, shown, position)
                position += 1

    async def _rest(self, number: int, run: Run, shown: "_StageRecords", position: int) -> AsyncGenerator[Run, None]:
        own = run.with_record(NodeRecord(""))
        has_failed = False
        try:
            async with contextlib.aclosing(self._responses(number, own)) as responses:
                async for response in responses:
                    yield response
        except Exception:
            has_failed = True
            raise
        finally:
            shown.offer(position, own.record, has_failed=has_failed)


class _StageRecords:
    """Collects the records of steps that run per response: shows those of the first, or of the first that failed."""

    def __init__(self, record: NodeRecord) -> None:
        self._record = record
        self._num_before = len(record.steps)
        self._failed: int | None = None

    def offer(self, position: int, own: NodeRecord, *, has_failed: bool) -> None:
        """Record the end of the response at ``position``; later responses may end before earlier ones."""
        if has_failed and (self._failed is None or position < self._failed):
            self._failed = position
        elif position or self._failed is not None:
            return
        self._record.steps[self._num_before :] = own.steps


def _stages(plan: NodePlan) -> list[list[int]]:
    """Indexes of the steps of each stage, ascending; the compiler ensures that streaming steps form a chain."""
    streaming = {index for index, step in enumerate(plan.steps) if step.streams}
    stages: list[list[int]] = [[] for _ in range(len(streaming) + 1)]
    for index in range(len(plan.steps)):
        stages[len(steps_before(plan, index) & streaming)].append(index)
    return stages
