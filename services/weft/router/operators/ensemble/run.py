"""All steps at once, and one answer made of theirs."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from weft.base.errors import InvalidArgumentError, RemoteError, WeftError
from weft.language.plan import Frame, NodePlan, StepPlan
from weft.router.combine import CombineMethod, CombineSettings, stack_with_mask
from weft.router.fork import Fork, Quorum, Race
from weft.router.operators.alternatives import AlternativesNode
from weft.router.reporting.path import SKIPPED, NodeRecord
from weft.router.steps import ConditionFailedError, NodeParts, Run


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """One output of an ensemble.

    Attributes:
        output: Slot of the node's frame that receives it.
        sources: Per step that offers the tensor: (index of the step, slot with its value).
        custom: The call that combines, of a method that calls a model. Two of its input slots are ``stack`` and
            ``mask``, which the node fills; the others are node inputs. Its one output slot is ``output``.
        stack: With ``custom``: slot of all sources stacked along a new axis behind the batch dimension (or in front,
            without one), absent ones as zeros or empty strings; -1 elsewhere.
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


class _Combine:
    """One output of an ensemble, made of the tensors of its steps."""

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
        """The combined tensor is in ``frame``; None where no step gave one.

        Args:
            order: Steps whose tensors count, in the order of their answers.
        """
        sources = self._sources
        chosen = [sources[index] for index in order if index in sources] if self._is_first else sources.values()
        present = [(tensor, weight) for slot, weight in chosen if (tensor := frame[slot]) is not None]
        tensors, weights = [tensor for tensor, _ in present], [weight for _, weight in present]
        frame[self._output] = self._combine(tensors, weights, self._settings) if present else None


class EnsembleNode(AlternativesNode):
    """Runs all steps at once and combines the answers of those that gave one.

    Of a race the first step that answers wins, and the others are cancelled. Else a failing HARD step cancels the
    others and fails the node; SOFT steps may be missing as long as there is a quorum, and those that are late are
    cancelled and awaited.
    """

    def __init__(
        self,
        plan: NodePlan,
        parts: NodeParts,
        combines: Sequence[CombinePlan],
        *,
        quorum: int,
        straggler_ms: int,
        is_race: bool,
    ) -> None:
        super().__init__(plan, parts)
        self._customs = list(zip([one for one in combines if one.custom], parts.customs, strict=True))
        weights = [step.weight for step in plan.steps]
        is_batching = parts.error_context.is_batching
        self._combines = [_Combine(one, weights, is_batching=is_batching) for one in combines if not one.custom]
        self._is_race = is_race
        self._is_hard = [not step.is_soft for step in plan.steps]
        self._has_quorum = quorum > 0
        self._needed = max(quorum, 1)
        self._straggler_s = straggler_ms / 1e3 if straggler_ms else None

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
        if len(runs) == 1:
            return [0] if await answers(0, runs[0]) else []
        race = Race(ConditionFailedError)
        for index, run in enumerate(runs):
            race.start(answers(index, run))
        await race.join()
        return [race.winner] if race.winner >= 0 else []

    async def _quorum(self, runs: Sequence[Run]) -> list[int]:
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
        records = {record.name: record for record in reversed(own.steps)}
        failures: list[WeftError] = []
        outcomes = []
        for step in self._steps:
            name = step.plan.name
            record = records.get(name)
            failure = None if record is None else self._failure(record)
            if failure is not None:
                failures.append(failure)
                outcomes.append(
                    f"{name} failed: {failure.code}: {failure.message.removeprefix(self._error_context.prefix)}"
                )
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
