"""All steps at once, and one answer made of theirs."""

from collections.abc import Mapping, Sequence

from weft_common.errors import InvalidArgumentError, RemoteError, WeftError
from weft_common.tensors import WireTensor
from weft_router.combine import (
    average,
    ballot_weights,
    concat,
    maximum,
    median,
    minimum,
    stack,
    stack_with_mask,
    total,
    vote,
)
from weft_router.graph.plan import CombineMethod, CombinePlan, Frame, NodePlan
from weft_router.nodes.alternatives import AlternativesNode
from weft_router.reporting.path import SKIPPED, NodeRecord
from weft_router.runtime import Runtime
from weft_router.steps import ConditionFailedError, ErrorContext, Run, Step
from weft_router.tasks.fork import Fork, Quorum, Race


class EnsembleNode(AlternativesNode):
    """Runs all steps at once and combines the answers of those that gave one.

    If every output is combined by FIRST and no quorum is asked for, the first step that answers wins, and the others
    are cancelled. Else a failing HARD step cancels the others and fails the node; SOFT steps may be missing as long as
    there is a quorum, and those that are late are cancelled and awaited.

    Args:
        plan, steps, error_context, runtime: As of ``AlternativesNode``.
        customs: The steps that combine, by the index of their combine.
    """

    def __init__(
        self,
        plan: NodePlan,
        steps: Sequence[Step],
        error_context: ErrorContext,
        runtime: Runtime,
        customs: Mapping[int, Step],
    ) -> None:
        super().__init__(plan, steps, error_context, runtime)
        self._customs = [(plan.combines[index], step) for index, step in customs.items()]
        self._combines = [(one, dict(one.sources)) for one in plan.combines if one.method is not CombineMethod.CUSTOM]
        is_first = bool(plan.combines) and all(c.method is CombineMethod.FIRST for c in plan.combines)
        self._is_race = is_first and plan.quorum <= 1
        self._is_hard = [not step.is_soft for step in plan.steps]
        self._needed = max(plan.quorum, 1)
        self._straggler_s = plan.straggler_ms / 1e3 if plan.straggler_ms else None
        self._weights = [step.weight for step in plan.steps]
        self._ballots = ballot_weights(self._weights)

    async def run(self, run: Run) -> None:
        """As ``Node.run``."""
        frame = run.frame
        if len(self._steps) == 1:
            answered = [0] if await self._steps[0].run(run) else []
        elif self._is_race:
            race = Race(ConditionFailedError)
            for step in self._steps:
                race.start(step.run(run))
            await race.join()
            answered = [race.winner] if race.winner >= 0 else []
        else:
            quorum = Quorum(self._needed, self._is_hard, self._straggler_s, waits_for_hard=self.plan.quorum == 0)
            for step in self._steps:
                quorum.start(step.run(run))
            await quorum.join()
            answered = quorum.answered
        if len(answered) < self._needed:
            raise self._out_of_reach(run.record)
        if len(answered) < len(self._steps) and not self._is_race:
            for index, step in enumerate(self._steps):
                if index not in answered:
                    step.fill_defaults(frame)  # of a late step nobody has done it yet
        for combine, slots in self._combines:
            try:
                frame[combine.output] = self._combined(combine, slots, frame, answered)
            except WeftError as error:
                raise self._placed(error, combine.method.value) from error
        if self._customs:
            await self._run_customs(run)

    def _combined(
        self, combine: CombinePlan, slots: Mapping[int, int], frame: Frame, answered: Sequence[int]
    ) -> WireTensor | None:
        """The combined tensor; None where no step gave it."""
        method = combine.method
        if method is CombineMethod.FIRST:
            order = answered if self._is_race else [*answered, *slots]
            return next((tensor for i in order if i in slots and (tensor := frame[slots[i]]) is not None), None)
        present = [(tensor, index) for index, slot in combine.sources if (tensor := frame[slot]) is not None]
        if not present:
            return None
        tensors = [tensor for tensor, _ in present]
        match method:
            case CombineMethod.VOTE:
                ballots = [self._ballots[index] for _, index in present]
                return vote(
                    tensors, ballots, is_weighted=combine.is_weighted, is_batching=self._error_context.is_batching
                )
            case CombineMethod.AVERAGE | CombineMethod.SUM:
                weights = [self._weights[index] if combine.is_weighted else 1.0 for _, index in present]
                return average(tensors, weights) if method is CombineMethod.AVERAGE else total(tensors, weights)
            case CombineMethod.MEDIAN:
                return median(tensors)
            case CombineMethod.MIN:
                return minimum(tensors)
            case CombineMethod.MAX:
                return maximum(tensors)
            case CombineMethod.CONCAT:
                return concat(tensors, combine.axis)
            case CombineMethod.STACK:
                return stack(tensors, combine.axis)
            case _:  # KEYED: the tensor is one step's own
                return tensors[0]

    async def _run_customs(self, run: Run) -> None:
        """Every model that combines has answered; several run at once."""
        frame, ready = run.frame, []
        for combine, step in self._customs:
            sources = [frame[slot] for _, slot in combine.sources]
            if any(tensor is not None for tensor in sources):
                try:
                    stacked, mask = stack_with_mask(sources, is_batching=self._error_context.is_batching)
                except WeftError as error:
                    raise self._placed(error, "CUSTOM") from error
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
        """Too few steps answered; of a race the first failure, else what became of each step."""
        records = {record.name: record for record in reversed(own.steps)}
        failures: list[WeftError] = []
        fates = []
        for step in self._steps:
            name = step.plan.name
            record = records.get(name)
            failure = None if record is None else self._failure(record)
            if failure is not None:
                failures.append(failure)
                fates.append(
                    f"{name} failed: {failure.code}: {failure.message.removeprefix(self._error_context.prefix)}"
                )
            elif record is None or record.status == SKIPPED:
                fates.append(f"{name} did not run, its 'when' is false")
            else:
                fates.append(f"{name} {'answered' if record.has_answered else 'was still running'}")
        if self._is_race and failures:
            return failures[0]
        message = f"{self._needed} of {len(self._steps)} steps must answer, and cannot any more: {'; '.join(fates)}"
        codes = {failure.code for failure in failures}
        if not codes:
            return self._placed(InvalidArgumentError(message))
        return self._placed(RemoteError(codes.pop() if len(codes) == 1 else "UNAVAILABLE", message))
