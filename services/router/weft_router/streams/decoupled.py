"""A decoupled graph: what follows a decoupled step runs once for each of its responses.

The root sequence falls into stages. The first has the steps that read from no decoupled one, and the first decoupled
step; the next those that read from that, and the second decoupled step; and so on, down to a stage without one, whose
end is a response of the graph. Each response of a decoupled step opens a run of the next stage in a copy of the frame.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weft_router.graph.plan import CallPlan, Frame, NodeKind, NodePlan
from weft_router.graph.pruning import slots_read, steps_behind
from weft_router.nodes import SequenceNode
from weft_router.reporting.path import NodeRun
from weft_router.steps import GraphRequest, OpenStream
from weft_router.streams.in_order import in_order

if TYPE_CHECKING:
    from opentelemetry.context import Context


class GraphResponse(NamedTuple):
    """One response on its way.

    Attributes:
        frame: The root's.
        request: With what the steps collected for this response.
    """

    frame: Frame
    request: GraphRequest


class DecoupledRoot:
    """The root sequence of a decoupled graph, in stages.

    Args:
        root: The sequence.
        steps: Indexes of the steps that run.
        max_inflight_responses: Responses of a decoupled step that are in work at once, those included that nobody has
            taken yet; meanwhile its stream is not read further. 0: one.
    """

    def __init__(self, root: SequenceNode, steps: Collection[int], max_inflight_responses: int) -> None:
        self._stages = [root.only(stage) for stage in _stages(root.plan, steps)]
        self._limit = max(max_inflight_responses, 1)

    def responses(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, parent: "Context | None", run: NodeRun
    ) -> AsyncGenerator[GraphResponse, None]:
        """The graph's responses as they are made, in the order of those of the decoupled steps.

        Arguments and errors are those of ``Node.run``; an error comes after the responses before it. ``run`` shows each
        step once: as it ran for the first response, or for the one that failed.

        Closing the generator, or cancelling the task that awaits it, cancels every call in work; no task is left.
        """
        return _StreamRun(self._stages, self._limit, deadline_ns, parent).responses(
            0, GraphResponse(frame, request), run
        )


class _StreamRun:
    """One request on its way through the stages; arguments are those of ``DecoupledRoot``."""

    def __init__(
        self, stages: Sequence[SequenceNode], limit: int, deadline_ns: int | None, parent: "Context | None"
    ) -> None:
        self._stages = stages
        self._limit = limit
        self._deadline_ns = deadline_ns
        self._parent = parent

    async def responses(self, number: int, start: GraphResponse, run: NodeRun) -> AsyncGenerator[GraphResponse, None]:
        """Responses of stage ``number`` and those after it."""
        try:
            await self._stages[number].run(*start, self._deadline_ns, self._parent, run)
            if number + 1 == len(self._stages):
                yield start
                return
            rests = self._rests(number + 1, start, run)
            async with contextlib.aclosing(rests), contextlib.aclosing(in_order(rests, self._limit)) as responses:
                async for response in responses:
                    yield response
        finally:
            for record in run.steps:
                if record.stream is not None:
                    await record.stream.close()

    async def _rests(
        self, number: int, start: GraphResponse, run: NodeRun
    ) -> AsyncGenerator[AsyncGenerator[GraphResponse, None], None]:
        """For each response of the decoupled step before stage ``number``, the responses of that stage and the next."""
        stream = next((record.stream for record in run.steps if record.stream is not None), None)
        shown = _Shown(run)
        if stream is None:  # the step was skipped, failed softly or was replaced: what it left counts as one response
            yield self._rest(number, start, shown, 0)
            return
        position, has_response = 0, stream.has_response
        while has_response:
            yield self._rest(number, _own(start, stream), shown, position)
            position, has_response = position + 1, await stream.read_on(*start)

    async def _rest(
        self, number: int, start: GraphResponse, shown: "_Shown", position: int
    ) -> AsyncGenerator[GraphResponse, None]:
        """As ``responses``, for the response at ``position`` of the stream before."""
        own = NodeRun("", NodeKind.SEQUENCE)
        has_failed = False
        try:
            async with contextlib.aclosing(self.responses(number, start, own)) as responses:
                async for response in responses:
                    yield response
        except Exception:
            has_failed = True
            raise
        finally:
            shown.offer(position, own, has_failed=has_failed)


class _Shown:
    """What a run shows of the steps that run for each response: those of the first, or of the first that failed.

    Args:
        run: Has the steps so far.
    """

    def __init__(self, run: NodeRun) -> None:
        self._run = run
        self._num_before = len(run.steps)
        self._failed: int | None = None

    def offer(self, position: int, own: NodeRun, *, has_failed: bool) -> None:
        """The response at ``position`` is done, or given up; later ones may be done before earlier ones."""
        if has_failed and (self._failed is None or position < self._failed):
            self._failed = position
        elif position or self._failed is not None:
            return
        self._run.steps[self._num_before :] = own.steps


def _own(start: GraphResponse, stream: OpenStream) -> GraphResponse:
    """A frame and a request for the latest response of a stream, which is in the frame of ``start``."""
    frame, request = start
    own = dataclasses.replace(
        request,
        response_parameters=request.response_parameters | stream.parameters,
        captured=request.captured | stream.outputs,
    )
    return GraphResponse(frame.copy(), own)


def _stages(plan: NodePlan, steps: Collection[int]) -> list[list[int]]:
    """Indexes of the steps of each stage, ascending; the compiler sees to it that the decoupled steps are a chain."""
    decoupled = _decoupled(plan) & set(steps)
    stages: list[list[int]] = [[] for _ in range(len(decoupled) + 1)]
    for index in sorted(steps):
        stages[len(steps_behind(plan, slots_read(plan.steps[index])) & decoupled)].append(index)
    return stages


def _decoupled(plan: NodePlan) -> set[int]:
    """Indexes of the steps that call a decoupled model."""
    return {
        index
        for index, step in enumerate(plan.steps)
        if isinstance(step.action, CallPlan) and step.action.signature.is_decoupled
    }
