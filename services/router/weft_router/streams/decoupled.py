"""A decoupled graph: what follows a decoupled step runs once for each of its responses.

Its root falls into stages. The first has the steps that read from no decoupled one, and the first decoupled
step; the next those that read from that, and the second decoupled step; and so on, down to a stage without one, whose
end is a response of the graph. Each response of a decoupled step opens a run of the next stage in a copy of the frame.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Collection

from weft_common.observing import telemetry
from weft_router.graph.plan import CallPlan, NodePlan
from weft_router.graph.pruning import steps_before
from weft_router.reporting.path import NodeRecord
from weft_router.steps import OpenStream, PrunableNode, Run
from weft_router.streams.in_order import in_order


class DecoupledRoot:
    """The root of a decoupled graph, in stages.

    Args:
        root: The node.
        steps: Indexes of the steps that run.
        max_inflight_responses: Responses of a decoupled step that are processed at once or wait for the client;
            meanwhile its stream is not read further. 0: one.
    """

    def __init__(self, root: PrunableNode, steps: Collection[int], max_inflight_responses: int) -> None:
        self._stages = [root.only(stage) for stage in _stages(root.plan, steps)]
        self._limit = max(max_inflight_responses, 1)

    def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        """The graph's responses as they are made, in the order of those of the decoupled steps.

        Each is the run of the last stage that made it: its frame has the outputs, its request what the steps collected.

        Args:
            run: Of the root. Its record shows each step once: as it ran for the first response, or for the one that
                failed.

        Raises:
            WeftError: As of ``Node.run``, after the responses that were made before.

        Closing the generator, or cancelling the task that awaits it, cancels every call in work; no task is left.
        """
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
            if run.request.stream is not None:
                await run.request.stream.close()

    async def _rests(self, number: int, run: Run) -> AsyncGenerator[AsyncGenerator[Run, None], None]:
        """For each response of the decoupled step before stage ``number``, the responses of that stage and the next."""
        stream = run.request.stream
        shown = _Shown(run.record)
        if stream is None:  # the step was skipped, failed softly or was replaced: what it left counts as one response
            yield self._rest(number, run, shown, 0)
            return
        position, has_response = 0, stream.has_response
        while has_response:
            yield self._rest(number, _of_response(run, stream, position), shown, position)
            position, has_response = position + 1, await stream.read_on(run)

    async def _rest(self, number: int, run: Run, shown: "_Shown", position: int) -> AsyncGenerator[Run, None]:
        """As ``responses``, for the response at ``position`` of the stream before."""
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
    """What a record shows of the steps that run for each response: those of the first, or of the first that failed.

    Args:
        record: Has the steps so far.
    """

    def __init__(self, record: NodeRecord) -> None:
        self._record = record
        self._num_before = len(record.steps)
        self._failed: int | None = None

    def offer(self, position: int, own: NodeRecord, *, has_failed: bool) -> None:
        """The response at ``position`` has ended; later ones may end before earlier ones."""
        if has_failed and (self._failed is None or position < self._failed):
            self._failed = position
        elif position or self._failed is not None:
            return
        self._record.steps[self._num_before :] = own.steps


def _of_response(run: Run, stream: OpenStream, position: int) -> Run:
    """A run for the latest response of a stream, which is in the frame of ``run``.

    The first is in the trace as it runs; of the others, which may be thousands, what fails. The span of the decoupled
    step has an event for each.
    """
    request = dataclasses.replace(
        run.request,
        response_parameters=run.request.response_parameters | stream.parameters,
        captured=run.request.captured | stream.outputs,
        stream=None,
        parts=(*run.request.parts, (stream, stream.num_responses)),
    )
    context = telemetry.unsampled(run.context) if position and request.is_traced else run.context
    return Run(run.frame.copy(), request, run.deadline_ns, context, run.record)


def _stages(plan: NodePlan, steps: Collection[int]) -> list[list[int]]:
    """Indexes of the steps of each stage, ascending; the compiler sees to it that the decoupled steps are a chain."""
    decoupled = _decoupled(plan) & set(steps)
    stages: list[list[int]] = [[] for _ in range(len(decoupled) + 1)]
    for index in sorted(steps):
        stages[len(steps_before(plan, index) & decoupled)].append(index)
    return stages


def _decoupled(plan: NodePlan) -> set[int]:
    """Indexes of the steps that call a decoupled model."""
    return {
        index
        for index, step in enumerate(plan.steps)
        if isinstance(step.action, CallPlan) and step.action.signature.is_decoupled
    }
