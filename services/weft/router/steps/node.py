"""``Node``, the base of running nodes, and the action that runs a node in place of a model call."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from typing_extensions import override

from weft.base.errors import InternalError, InvalidArgumentError
from weft.base.tensors import WireTensor, reshaped
from weft.language.plan import Frame, NodePlan, Reshaping, StepPlan
from weft.router.reporting.path import NodeRecord, StepRecord
from weft.router.runtime import Runtime
from weft.router.steps.action import Action, Defaults, ErrorContext, repeated
from weft.router.steps.responses import NodeResponses, StepStream, StreamParts, close_streams, responses_of
from weft.router.steps.run import GraphRequest, OpenStream, Run, earlier
from weft.router.steps.step import Step
from weft.router.tensors import with_batch, without_batch


class Node(ABC):
    """A node that can run.

    Attributes:
        chain: Its steps in order, if each waits only for the one before; else None.
    """

    chain: tuple[Step, ...] | None = None

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.timeout_ns = plan.timeout_ms * 1_000_000

    @abstractmethod
    async def run(self, run: Run) -> None:
        """Write the node's outputs to the frame of ``run``.

        Raises:
            WeftError: A step failed, no branch matches, or answers cannot be combined; the message says where.

        If it streams, the first response is written and the request holds the open stream, which the caller must close
        unless this raises. No task is left when it returns, raises or is cancelled, except those of that stream.
        """

    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        """Yield the node's responses as they are made; one if it does not stream.

        Each is a run: its frame has the outputs, its request what the steps collected. The record of ``run`` shows each
        step once: as it ran for the first response, or for the one that failed. Raises like ``run``, after earlier
        responses.

        Closing the generator, or cancelling the task that awaits it, cancels every call in flight; no task is left.
        """
        try:
            await self.run(run)
            async with contextlib.aclosing(responses_of(run)) as responses:
                async for response in responses:
                    yield response
        finally:
            await close_streams((run,))


class StreamingNode(Node):
    """A node that streams: ``run`` writes the first response and leaves the others in the request.

    Attributes:
        is_sampled: As of its ``OpenStream``.
    """

    is_sampled = False

    @override
    async def run(self, run: Run) -> None:
        stream = NodeResponses(self.responses(run), [binding.slot for binding in self.plan.outputs])
        stream.is_sampled = self.is_sampled
        await stream.open(run)

    @abstractmethod
    @override
    def responses(self, run: Run) -> AsyncGenerator[Run, None]: ...


class PrunableNode(Node):
    """A node that can skip steps whose outputs nothing reads."""

    @abstractmethod
    def only(self, live: Collection[int]) -> "PrunableNode":
        """The same node with only the steps ``live``, ascending indexes; itself if these are all."""


class NodeParts(NamedTuple):
    """Objects that a node is built from, besides its plan."""

    steps: tuple[Step, ...]
    customs: tuple[Step, ...]
    error_context: ErrorContext
    runtime: Runtime


class OperatorPlan(NodePlan):
    """Base of the plans of node kinds in ``weft.router.operators``."""

    __slots__ = ()

    @abstractmethod
    def node(self, parts: NodeParts) -> Node:
        """Build the executable node."""


class ShadowedNode(StreamingNode):
    """A node with shadow steps: they read its inputs, start when it does, and may be compared with its responses."""

    def __init__(self, node: Node, shadows: Sequence[Step]) -> None:
        super().__init__(node.plan)
        self._node = node
        self._shadows = tuple(shadows)
        self._streams = node.plan.streams
        self.is_sampled = isinstance(node, StreamingNode) and node.is_sampled

    @override
    async def run(self, run: Run) -> None:
        if self._streams:
            await super().run(run)
            return
        for shadow in self._shadows:
            await shadow.run(run)
        await self._node.run(run)

    @override
    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        for shadow in self._shadows:
            await shadow.run(run)
        async with contextlib.aclosing(self._node.responses(run.with_own_stream())) as responses:
            async for response in responses:
                for side in run.record.watching:
                    side.add(response.frame.__getitem__)
                yield response
        for side in run.record.watching:
            side.has_ended = True


class NodeAction(Action):
    """Runs a node in a frame of its own and hands on its outputs when it succeeds.

    If the node streams, its first response is the step's answer.

    Args:
        is_tentative: A failure does not end the request, so discard what inner steps collected.
    """

    def __init__(
        self,
        plan: StepPlan,
        node: Node,
        error_context: ErrorContext,
        around: NodePlan,
        parts: StreamParts,
        *,
        is_tentative: bool,
    ) -> None:
        super().__init__(plan.path)
        self._node = node
        self._error_context = error_context
        self._parts = parts
        self._streams = node.plan.streams
        self._is_tentative = is_tentative or self._streams
        self._timeout_ns = node.timeout_ns
        inner_inputs, inner_outputs = dict(node.plan.inputs), dict(node.plan.outputs)
        self._path = plan.path
        self._inner_outputs = inner_outputs
        self._inputs = [(outer, inner_inputs[name]) for name, outer in plan.inputs]
        self._constants = [(inner_inputs[name], tensor, each) for name, tensor, each in plan.constants]
        self._outputs = [(inner_outputs[name], outer) for name, outer in plan.outputs]
        self._defaults = Defaults(plan, around) if plan.defaults else None
        slots = dict(self._outputs)
        self._reshaped_inputs = node.plan.reshaped_inputs
        self._reshaped_outputs = [
            one._replace(slot=slots[one.slot]) for one in node.plan.reshaped_outputs if one.slot in slots
        ]
        is_one_row = bool(node.plan.is_batched) and around.batches_steps is False
        self._row_ranks = list(_row_ranks(plan, node.plan)) if is_one_row else []
        has_same_rows = all(step.keeps_rows for step in node.plan.steps)
        self._checks_rows = plan.keeps_rows and not has_same_rows and not self._streams

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        request = run.request
        inner = self._inner(run, record, request.fork() if self._is_tentative else request)
        if not self._streams:
            await self._node.run(inner)
        elif (stream := await self._opened(inner)) is not None:
            await _NodeStream(self, self._parts, stream, inner, record).open(run)
            return
        if inner.request is not request:
            request.merge(inner.request)
        if self._checks_rows:
            self._check_rows(inner.frame)
        self.hand_on(inner, run, request.captured)

    async def _opened(self, inner: Run) -> OpenStream | None:
        try:
            await self._node.run(inner)
        except BaseException:
            await close_streams((inner,))
            raise
        stream, inner.request.stream = inner.request.stream, None
        return stream

    def hand_on(self, inner: Run, run: Run, captured: dict[str, WireTensor]) -> None:
        """Copy the node's outputs to the frame around it, and those that the client requested to ``captured``."""
        frame, outer, captures = inner.frame, run.frame, run.request.captures
        is_one_row = any((tensor := outer[slot]) and len(tensor.shape) == rank for slot, _, rank in self._row_ranks)
        for slot, outer_slot in self._outputs:
            tensor = frame[slot]
            if is_one_row and tensor is not None and tensor.shape[:1] == (1,):
                tensor = without_batch(tensor)
            outer[outer_slot] = tensor
        if self._reshaped_outputs:
            reshape_slots(outer, self._reshaped_outputs)
        if self._defaults is not None:
            self._defaults.complete(outer)
        if captures is not None:
            for name in captures.get(self._path, ()):
                tensor = frame[self._inner_outputs[name]]
                if tensor is not None:
                    captured[f"{self._path}/{name}"] = tensor

    def _inner(self, run: Run, record: StepRecord, request: GraphRequest) -> Run:
        plan, outer = self._node.plan, run.frame
        record.node = NodeRecord(plan.name, plan.path_form)
        frame: Frame = [None] * plan.num_slots
        for outer_slot, slot in self._inputs:
            frame[slot] = outer[outer_slot]
        if self._row_ranks:
            self._make_rows(frame)
        if self._constants:
            rows = next((one.shape[0] for _, slot in self._inputs if (one := frame[slot]) and one.shape), 1)
            for slot, tensor, is_batched in self._constants:
                frame[slot] = repeated(tensor, rows if is_batched else 1)
        if self._reshaped_inputs:
            reshape_slots(frame, self._reshaped_inputs)
        deadline_ns = run.deadline_ns
        if self._timeout_ns:
            deadline_ns = earlier(deadline_ns, self._parts.clock_ns() + self._timeout_ns)
        return Run(frame, request, deadline_ns, run.context, record.node)

    def _make_rows(self, frame: Frame) -> None:
        sizes: dict[str, int] = {}
        for name, slot, rank in ((self._node.plan.inputs[slot].name, slot, rank) for _, slot, rank in self._row_ranks):
            if (tensor := frame[slot]) is not None:
                frame[slot] = tensor = with_batch(tensor) if len(tensor.shape) == rank else tensor
                sizes[name] = tensor.shape[0]
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            error = InvalidArgumentError(f"inputs of one batch differ in their rows: {shown}; send as many of each")
            raise self._error_context.wrap(error, self.where)

    def _check_rows(self, frame: Frame) -> None:
        if not self._error_context.is_batching:
            return
        plan = self._node.plan
        rows = next((tensor.shape[0] for _, slot in plan.inputs if (tensor := frame[slot]) and tensor.shape), -1)
        for name, slot in plan.outputs:
            tensor = frame[slot]
            if rows >= 0 and tensor is not None and tensor.shape and tensor.shape[0] != rows:
                error = InternalError(
                    f"output '{name}' of ensemble '{plan.graph}' has batch size {tensor.shape[0]}, that of the request "
                    f"is {rows}; a step of a graph gives as many rows as it gets, alone an ensemble may change that"
                )
                raise self._error_context.wrap(error, self.where)


class _NodeStream(StepStream):
    """The further responses of a node."""

    def __init__(
        self, action: NodeAction, parts: StreamParts, stream: OpenStream, inner: Run, record: StepRecord
    ) -> None:
        super().__init__(parts, record)
        self.is_sampled = stream.is_sampled
        self._action = action
        self._stream = stream
        self._inner = inner

    @override
    async def settle(self, timeout_s: float) -> None:
        if not self._is_over:
            await self._stream.settle(timeout_s)

    @property
    @override
    def _is_known_last(self) -> bool:
        return self._stream.has_ended

    @override
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

    @override
    async def _close(self) -> None:
        await self._stream.close()


def _row_ranks(step: StepPlan, node: NodePlan) -> Iterator[tuple[int, int, int]]:
    """(slot around the node, slot within, rank of a row) of each input of a graph that batches, in one that does not.

    As for models: a tensor of that rank is a batch of one row, one with a dimension more is a batch as it stands.
    """
    slots, sources = dict(node.inputs), {one.slot: one.source for one in node.reshaped_inputs}
    for name, outer_slot in step.inputs:
        slot = slots[name]
        yield outer_slot, slot, len(sources.get(slot, node.specs[slot].dims))


def reshape_slots(frame: Frame, reshapings: Iterable[Reshaping]) -> None:
    """Apply ``reshape`` to tensors of a frame: other dims, the same bytes."""
    for reshaping in reshapings:
        tensor = frame[reshaping.slot]
        if tensor is not None:
            frame[reshaping.slot] = across(tensor, reshaping)


def across(tensor: WireTensor, reshaping: Reshaping) -> WireTensor:
    """Apply one ``reshape`` to a tensor."""
    if len(tensor.shape) < len(reshaping.source):
        return tensor
    return tensor._replace(shape=reshaped(tensor.shape, reshaping.source, reshaping.target))
