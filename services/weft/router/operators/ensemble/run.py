"""Runs the steps of an ensemble at once and combines their answers; with streams, for each response."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import override

from weft.base.errors import InvalidArgumentError, RemoteError, WeftError
from weft.language.description import given, offered, shadow_flows, slot_name, target_text, when_notes
from weft.language.path_form import PathForm
from weft.language.plan import Description, End, Flow, Frame, StepPlan, TensorUse
from weft.router.combine import CombineMethod, CombineSettings, stack_with_mask
from weft.router.operators.alternatives import AlternativesNode
from weft.router.reporting.path import SKIPPED, NodeRecord
from weft.router.steps.action import ConditionFailedError
from weft.router.steps.node import Node, NodeParts, OperatorPlan, StreamingNode
from weft.router.steps.responses import by_arrival, close_streams, of_part, responses_of
from weft.router.steps.run import Run
from weft.router.tasks import Fork, Quorum, Race

#: Response parameter: the step whose response it is, of an ensemble that merges.
STEP_PARAMETER = "graph_step"


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """One output of an ensemble.

    Attributes:
        sources: Per step that offers the tensor: (index of the step, slot with its value).
        custom: The model call that combines, for methods with ``calls_model``. The node fills its input slots ``stack``
            and ``mask``; the others are node inputs. Its one output slot is ``output``.
        stack: With ``custom``: slot of all sources stacked along a new axis behind the batch dimension (or in front,
            without one), absent ones as zeros or empty strings; else -1.
        mask: With ``custom``: slot of a BOOL tensor, shape [rows, sources] (or [sources]), false where a source is
            absent.
    """

    output: int
    method: CombineMethod
    sources: tuple[tuple[int, int], ...]
    is_weighted: bool = False
    axis: int = 0
    custom: StepPlan | None = None
    stack: int = -1
    mask: int = -1


@dataclass(frozen=True, slots=True)
class EnsemblePlan(OperatorPlan):
    """An ensemble.

    Attributes:
        quorum: Number of answers needed. 0 means every HARD step, and at least one step.
        straggler_ms: How long to wait for SOFT steps after the quorum-th answer; 0: until they end.
    """

    kind: ClassVar[str] = "ensemble"
    path_form: ClassVar[PathForm] = PathForm.of("{", "}")

    combines: tuple[CombinePlan, ...] = ()
    quorum: int = 0
    straggler_ms: int = 0

    @property
    def is_race(self) -> bool:
        """Whether the first answer counts and the other steps are cancelled."""
        return bool(self.combines) and self.quorum <= 1 and all(one.method.is_first for one in self.combines)

    @property
    def is_merge(self) -> bool:
        """Whether each response of each step is a response of the ensemble."""
        return any(one.method.is_merged for one in self.combines)

    @property
    @override
    def streams(self) -> bool:
        return self.is_merge or any(step.streams for step in self.steps)

    @property
    @override
    def customs(self) -> tuple[StepPlan, ...]:
        return tuple(combine.custom for combine in self.combines if combine.custom is not None)

    @override
    def first_lost(self, lost: Sequence[int]) -> int | None:
        hard = next((index for index in lost if not self.steps[index].is_soft), None)
        if hard is not None and not self.is_race:
            return hard
        return lost[0] if lost and len(self.steps) - len(lost) < max(self.quorum, 1) else None

    @override
    def node(self, parts: NodeParts) -> Node:
        return (MergedEnsemble if self.is_merge else StreamedEnsemble if self.streams else EnsembleNode)(self, parts)

    @override
    def describe(self) -> Description:
        notes = [f"{slot_name(self, combine.output)}: {_combine_text(combine)}" for combine in self.combines]
        if self.quorum:
            notes.append(f"quorum {self.quorum} of {len(self.steps)}")
        if self.straggler_ms:
            notes.append(f"stragglers {self.straggler_ms} ms")
        own_names = {
            binding.slot: spec.name.removeprefix(f"{step.name}.")  # in the frame it is gnn.SCORE
            for step in self.steps
            for binding in step.outputs
            if (spec := self.specs.get(binding.slot))
        }
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows, *self.customs),
            entry=End("all at once"),
            exit=End("first answer" if self.is_race else "combine", tuple(notes)),
            flows=(*_flows(self), *shadow_flows(self)),
            names=own_names,
        )


def _flows(plan: EnsemblePlan) -> Iterator[Flow]:
    first_custom = len(plan.steps) + len(plan.shadows)
    customs = [combine for combine in plan.combines if combine.custom is not None]
    places = {combine.output: first_custom + number for number, combine in enumerate(customs)}
    is_weighted = any(combine.is_weighted for combine in plan.combines)
    for index, step in enumerate(plan.steps):
        weight = [f"weight {step.weight:g}"] if is_weighted else []
        yield Flow(None, index, (*when_notes(step), *weight), given(step))
        outputs = {binding.slot: binding.name for binding in step.outputs}
        for combine in plan.combines:
            for slot in (slot for source, slot in combine.sources if source == index):
                use = TensorUse(slot, given_as=outputs.get(slot, ""))
                yield Flow(index, places.get(combine.output), tensors=(use,), gives=True)
    for combine in customs:
        if combine.custom is not None:
            own = tuple(use for use in given(combine.custom) if use.slot not in (combine.stack, combine.mask))
            if own:
                yield Flow(None, places[combine.output], tensors=own)
            yield Flow(places[combine.output], None, tensors=offered(combine.custom), gives=True)


def _combine_text(combine: CombinePlan) -> str:
    axis = f" on axis {combine.axis}" if combine.method.takes_axis else ""
    by = f" by {target_text(combine.custom.action)}" if combine.custom is not None else ""
    return f"{combine.method.name}{by}{axis}{', weighted' * combine.is_weighted}"


class _Combine:
    """One output of an ensemble, combined from its steps' tensors; prepared before requests."""

    def __init__(self, plan: CombinePlan, step_weights: Sequence[float], *, is_batching: bool) -> None:
        method = plan.method
        self.name = method.name
        self._combine = method.combine
        self._settings = CombineSettings(plan.axis, plan.is_weighted, is_batching)
        weights = method.weights(step_weights, self._settings)
        self._output = plan.output
        self._sources = {index: (slot, weights[index]) for index, slot in plan.sources}
        self._is_first = method.is_first

    def run(self, frame: Frame, order: Sequence[int]) -> None:
        """Write the combined tensor into ``frame``; None if no step gave one."""
        sources = self._sources
        chosen = [sources[index] for index in order if index in sources] if self._is_first else sources.values()
        present = [(tensor, weight) for slot, weight in chosen if (tensor := frame[slot]) is not None]
        tensors, weights = [tensor for tensor, _ in present], [weight for _, weight in present]
        frame[self._output] = self._combine(tensors, weights, self._settings) if present else None


class EnsembleNode(AlternativesNode):
    """Runs all steps at once and combines the answers.

    In a race the first step that answers wins, and the others are cancelled. Otherwise a failing HARD step cancels the
    others and fails the node; SOFT steps may be missing as long as there is a quorum, and late ones are cancelled and
    awaited.
    """

    def __init__(self, plan: EnsemblePlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        combines, is_batching = plan.combines, parts.error_context.is_batching
        self._customs = list(zip([one for one in combines if one.custom], parts.customs, strict=True))
        weights = [step.weight for step in plan.steps]
        self._combines = [_Combine(one, weights, is_batching=is_batching) for one in combines if not one.custom]
        self._is_race = plan.is_race
        self._is_hard = [not step.is_soft for step in plan.steps]
        self._has_quorum = plan.quorum > 0
        self._needed = max(plan.quorum, 1)
        self._straggler_s = plan.straggler_ms / 1e3 if plan.straggler_ms else None

    @override
    async def run(self, run: Run) -> None:
        frame, members = run.frame, [run] * len(self._steps)
        answered = await self._race(members, self._answers) if self._is_race else await self._quorum(members)
        if len(answered) < self._needed:
            raise self._out_of_reach(run.record)
        if len(answered) < len(self._steps) and not self._is_race:
            for index, step in enumerate(self._steps):
                if index not in answered:
                    step.defaults.fill(frame)  # of a late step nobody has done it yet
        await self._finish(run, answered)

    async def _race(self, runs: Sequence[Run], answers: Callable[[int, Run], Coroutine[Any, Any, bool]]) -> list[int]:
        """Run the steps at once, each with its run; index of the first that answers, empty if none does."""
        if len(runs) == 1:
            return [0] if await answers(0, runs[0]) else []
        race = Race(ConditionFailedError)
        for index, run in enumerate(runs):
            race.start(answers(index, run))
        await race.join()
        return [race.winner] if race.winner >= 0 else []

    async def _quorum(self, runs: Sequence[Run]) -> list[int]:
        """Run the steps at once, each with its run; indexes of those that answered, in order of completion."""
        if len(self._steps) == 1:
            return [0] if await self._steps[0].run(runs[0]) else []
        quorum = Quorum(self._needed, self._is_hard, self._straggler_s, waits_for_hard=not self._has_quorum)
        for step, run in zip(self._steps, runs, strict=True):
            quorum.start(step.run(run))
        await quorum.join()
        return quorum.answered

    def _answers(self, index: int, run: Run) -> Coroutine[Any, Any, bool]:
        return self._steps[index].run(run)

    async def _finish(self, run: Run, answered: Sequence[int]) -> None:
        """Combine the answers, in order of completion."""
        rest = () if self._is_race else (i for i in range(len(self._steps)) if i not in answered)
        order = [*answered, *rest]
        for combine in self._combines:
            try:
                combine.run(run.frame, order)
            except WeftError as error:
                raise self._placed(error, combine.name) from error
        if self._customs:
            await self._run_customs(run)

    async def _run_customs(self, run: Run) -> None:
        frame, ready = run.frame, []
        for combine, step in self._customs:
            sources = [frame[slot] for _, slot in combine.sources]
            if any(tensor is not None for tensor in sources):
                try:
                    stacked, mask = stack_with_mask(sources, is_batching=self._error_context.is_batching)
                except WeftError as error:
                    raise self._placed(error, combine.method.name) from error
                frame[combine.stack] = stacked
                if combine.mask >= 0:
                    frame[combine.mask] = mask
                ready.append(step)
        if len(ready) == 1:
            await ready[0].run(run)
        elif ready:
            fork = Fork()
            for step in ready:
                fork.start(step.run(run))
            await fork.join()

    def _out_of_reach(self, own: NodeRecord) -> WeftError:
        """The error if too few steps answered: of a race the first failure, else the outcome of each step."""
        records = {record.name: record for record in reversed(own.steps)}
        failures: list[WeftError] = []
        outcomes = []
        for step in self._steps:
            name = step.plan.name
            record = records.get(name)
            failure = None if record is None else self._failure(record)
            if failure is not None:
                failures.append(failure)
                message = failure.message.removeprefix(self._error_context.prefix)
                outcomes.append(f"{name} failed: {failure.code}: {message}")
            elif record is None or record.status == SKIPPED:
                outcomes.append(f"{name} did not run, its 'when' is false")
            else:
                outcomes.append(f"{name} {'answered' if record.has_answered else 'was still running'}")
        if self._is_race and failures:
            return failures[0]
        message = f"{self._needed} of {len(self._steps)} steps must answer, and cannot any more: {'; '.join(outcomes)}"
        codes = {failure.code for failure in failures}
        if not codes:
            return self._placed(InvalidArgumentError(message))
        return self._placed(RemoteError(codes.pop() if len(codes) == 1 else "UNAVAILABLE", message))


class StreamedEnsemble(StreamingNode, EnsembleNode):
    """In a race, the step that responds first wins; else combines all answers for each streamed response.

    Each step has a frame and a request of its own.
    """

    @override
    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        forks = [run.fork() for _ in self._steps]
        try:
            order = await self._answered(run, forks)
            await close_streams(fork for index, fork in enumerate(forks) if index not in order)
            members = forks.copy()
            leading = next((index for index in order if forks[index].request.stream is not None), None)
            if leading is None:
                await self._combine(run, members, order)
                yield run
                return
            num_steps, position = len(run.record.steps), 0
            async with contextlib.aclosing(responses_of(forks[leading])) as responses:
                async for response in responses:
                    members[leading] = response
                    own = replace(run.request, parts=response.request.parts)
                    record = NodeRecord("") if position else run.record
                    combined = Run(run.frame.copy(), own, run.deadline_ns, response.context, record)
                    try:
                        await self._combine(combined, members, order)
                    except WeftError:
                        if position:
                            run.record.steps[num_steps:] = record.steps
                        raise
                    yield combined
                    position += 1
        finally:
            await close_streams(forks)

    async def _answered(self, run: Run, members: Sequence[Run]) -> list[int]:
        """Indexes of the steps that answered, in order of completion; of a race only one."""
        answered = await self._race(members, self._responds) if self._is_race else await self._quorum(members)
        if self._is_race and not answered:  # a stream that ends without a response is an answer if there is no other
            answered = [i for i, member in enumerate(members) if member.request.stream is not None][:1]
        if len(answered) < self._needed:
            raise self._out_of_reach(run.record)
        return answered

    async def _responds(self, index: int, run: Run) -> bool:
        """Whether a step succeeds with a response."""
        has_answered = await self._steps[index].run(run)
        stream = run.request.stream
        return has_answered and (stream is None or stream.num_responses > 0)

    async def _combine(self, run: Run, members: Sequence[Run], order: Sequence[int]) -> None:
        """Write the outputs into the frame of ``run``, and what the steps collected into its request."""
        request = run.request
        request.response_parameters, request.captured = {**request.response_parameters}, {**request.captured}
        for index, (step, member) in enumerate(zip(self._steps, members, strict=True)):
            if index in order:
                request.merge(member.request)
                for binding in step.plan.outputs:
                    run.frame[binding.slot] = member.frame[binding.slot]
            elif not self._is_race:
                step.defaults.fill(run.frame)
        await self._finish(run, order)


class MergedEnsemble(StreamingNode, EnsembleNode):
    """Passes on each response of each step as it arrives; a step that does not stream gives one.

    A failing HARD step ends it, after the responses that came before. A SOFT step that fails has no more responses; if
    none answers, the ensemble fails.
    """

    @override
    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        answered: set[int] = set()
        sources = (self._responses_of(index, run.fork(), answered) for index in range(len(self._steps)))
        async with contextlib.aclosing(by_arrival(sources)) as arrivals:
            async for index, response in arrivals:
                step = self._steps[index].plan
                merged = of_part(run, response, STEP_PARAMETER, step.name)
                for binding in step.outputs:
                    merged.frame[binding.slot] = response.frame[binding.slot]
                await self._finish(merged, [index])
                yield merged
        if not answered:
            raise self._out_of_reach(run.record)

    async def _responses_of(self, index: int, run: Run, answered: set[int]) -> AsyncGenerator[tuple[int, Run], None]:
        try:
            if not await self._steps[index].run(run):
                return
            answered.add(index)
            async with contextlib.aclosing(responses_of(run)) as responses:
                async for response in responses:
                    yield index, response
        finally:
            await close_streams((run,))
