"""A node that streams in a step's place: its first response is the step's answer."""

from weft_common.errors import WeftError
from weft_common.tensors import WireTensor
from weft_router.graph.plan import Frame, NodePlan, StepPlan
from weft_router.reporting.path import NodeRecord, StepRecord
from weft_router.steps.base import ErrorContext, Node
from weft_router.steps.node import NodeAction
from weft_router.steps.reshaping import reshape_slots
from weft_router.steps.responses import OpenStream, close_streams
from weft_router.steps.run import Run
from weft_router.steps.step_stream import StepStream, StreamParts


class StreamNodeAction(NodeAction):
    """As ``NodeAction`` for a node that may stream; its limit counts streams as long as they are open.

    Args:
        plan, node, error_context, around: As of ``NodeAction``.
        parts: Of its streams; the limit is the node's.
    """

    def __init__(
        self, plan: StepPlan, node: Node, error_context: ErrorContext, parts: StreamParts, around: NodePlan
    ) -> None:
        super().__init__(plan, node, error_context, parts.clock_ns, around, is_tentative=True)
        self._parts = parts

    async def act(self, run: Run, record: StepRecord) -> None:
        """As ``Action.act``; unless this raises, close the request's stream, if there is one."""
        try:
            self._parts.enter()
        except WeftError as error:
            raise self._error_context.wrap(error, self.where) from error
        inner = self._inner(run, record)
        try:
            await self._node.run(inner)
        except BaseException:
            self._parts.leave(record)
            await close_streams((inner,))
            raise
        stream, inner.request.stream = inner.request.stream, None
        if stream is not None:
            await _NodeStream(self, self._parts, stream, inner, record).open(run)
            return
        self._parts.leave(record)
        run.request.merge(inner.request)
        self.hand_on(inner, run, run.request.captured)

    def hand_on(self, inner: Run, run: Run, captured: dict[str, WireTensor]) -> None:
        """The node's outputs are in the frame around it, those that the client requested in ``captured`` as well."""
        frame, outer, captures = inner.frame, run.frame, run.request.captures
        for slot, outer_slot in self._outputs:
            outer[outer_slot] = frame[slot]
        if self._reshaped_outputs:
            reshape_slots(outer, self._reshaped_outputs)
        if self._defaults is not None:
            self._defaults.complete(outer)
        if captures is not None:
            self._capture(captures.get(self._path, ()), frame, captured)

    def _inner(self, run: Run, record: StepRecord) -> Run:
        """The run of the node, its inputs in a frame and its stream in a request of its own."""
        plan, outer = self._node.plan, run.frame
        record.node = NodeRecord(plan.name, plan.path_form)
        frame: Frame = [None] * plan.num_slots
        for outer_slot, slot in self._inputs:
            frame[slot] = outer[outer_slot]
        if self._reshaped_inputs:
            reshape_slots(frame, self._reshaped_inputs)
        if self._timeout_ns:
            run = run.until(self._clock_ns() + self._timeout_ns)
        return Run(frame, run.request.fork(), run.deadline_ns, run.context, record.node)


class _NodeStream(StepStream):
    """The further responses of a node.

    Args:
        action: The step's.
        parts, record: As of ``StepStream``.
        stream: Of the node.
        inner: The run of the node; its frame has the node's first response, and gets the others.
    """

    def __init__(
        self, action: StreamNodeAction, parts: StreamParts, stream: OpenStream, inner: Run, record: StepRecord
    ) -> None:
        super().__init__(parts, record)
        self._action = action
        self._stream = stream
        self._inner = inner

    async def settle(self, timeout_s: float) -> None:
        """As ``OpenStream.settle``."""
        if not self._is_over:
            await self._stream.settle(timeout_s)

    @property
    def _is_known_last(self) -> bool:
        return self._stream.has_ended

    async def _read(self, run: Run) -> bool:
        stream, inner = self._stream, self._inner
        if self.num_responses:
            if not await stream.read_on(inner):
                return False
        elif not stream.num_responses:
            return False
        request = inner.request
        self.parameters = request.response_parameters | stream.parameters
        self.outputs = request.captured | stream.outputs
        self._action.hand_on(inner, run, self.outputs)
        return True

    async def _close(self) -> None:
        await self._stream.close()
