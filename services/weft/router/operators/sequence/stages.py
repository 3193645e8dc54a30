"""A sequence that streams: what follows a step that streams runs once for each of its responses.

It falls into stages. The first has the steps that read from no step that streams, and the first one that does; the next
those that read from that, and the second step that streams; and so on, down to a stage without one, whose end is a
response of the node. Each response of a step opens a run of the next stage in a copy of the frame.
"""

import contextlib
from collections.abc import AsyncGenerator, Collection

from typing_extensions import override

from weft.language.plan import NodePlan
from weft.language.pruning import steps_before
from weft.router.merging import in_order
from weft.router.operators.sequence.run import Pipeline
from weft.router.reporting.path import NodeRecord
from weft.router.steps import NodeResponses, PrunableNode, Run, close_streams, responses_of, with_own_request


class StagedPipeline(PrunableNode):
    """A sequence in stages.

    Args:
        max_inflight_responses: Responses of a step that are processed at once or wait for who reads the node;
            meanwhile the step's stream is not read further. 0: one.
    """

    def __init__(self, pipeline: Pipeline, max_inflight_responses: int) -> None:
        super().__init__(pipeline.plan)
        self._pipeline = pipeline
        self._stages = [pipeline.only(stage) for stage in _stages(pipeline.plan)]
        self._limit = max(max_inflight_responses, 1)
        self._output_slots = [binding.slot for binding in pipeline.plan.outputs]

    @override
    def only(self, live: Collection[int]) -> "StagedPipeline":
        return StagedPipeline(self._pipeline.only(live), self._limit)

    @override
    async def run(self, run: Run) -> None:
        await NodeResponses(self.responses(with_own_request(run)), self._output_slots).open(run)

    @override
    def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        """In the order of the responses of the steps that stream."""
        return self._responses(0, run)

    async def _responses(self, number: int, run: Run) -> AsyncGenerator[Run, None]:
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
        """For each response of the step that streams before stage ``number``, those of that stage and the next.

        Where that step was skipped, failed softly or was replaced, what it left counts as one response.
        """
        shown, position = _Shown(run.record), 0
        async with contextlib.aclosing(responses_of(run)) as responses:
            async for response in responses:
                yield self._rest(number, response, shown, position)
                position += 1

    async def _rest(self, number: int, run: Run, shown: "_Shown", position: int) -> AsyncGenerator[Run, None]:
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


class _Shown:
    """What a record shows of the steps that run for each response: those of the first, or of the first that failed."""

    def __init__(self, record: NodeRecord) -> None:
        self._record = record
        self._num_before = len(record.steps)
        self._failed: int | None = None

    def offer(self, position: int, own: NodeRecord, *, has_failed: bool) -> None:
        if has_failed and (self._failed is None or position < self._failed):
            self._failed = position
        elif position or self._failed is not None:
            return
        self._record.steps[self._num_before :] = own.steps


def _stages(plan: NodePlan) -> list[list[int]]:
    """Indexes of the steps of each stage, ascending; the compiler sees to it that those that stream are a chain."""
    streaming = {index for index, step in enumerate(plan.steps) if step.streams}
    stages: list[list[int]] = [[] for _ in range(len(streaming) + 1)]
    for index in range(len(plan.steps)):
        stages[len(steps_before(plan, index) & streaming)].append(index)
    return stages
