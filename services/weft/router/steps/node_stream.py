"""A node that streams in a step's place: its first response is the step's answer."""

from typing_extensions import override

from weft.base.errors import WeftError
from weft.language.plan import NodePlan, StepPlan
from weft.router.reporting.path import StepRecord
from weft.router.steps.base import ErrorContext, Node
from weft.router.steps.node import NodeAction
from weft.router.steps.responses import OpenStream, close_streams
from weft.router.steps.run import Run
from weft.router.steps.step_stream import StepStream, StreamParts


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
        inner = self._inner(run, record, run.request.fork())
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

    @override
    async def settle(self, timeout_s: float) -> None:
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
