"""The state of a running request: ``GraphRequest``, ``Run`` (one run of a node) and ``OpenStream``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from weft.base.core import CallContext, ParameterValue
from weft.base.tensors import WireTensor
from weft.language.plan import Frame
from weft.language.request_scope import RequestScope
from weft.router.bandits.store import Pulls
from weft.router.reporting.path import NodeRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context


class ResponsePart(ABC):
    """A stream whose responses are part of another stream's."""

    num_responses: int

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the latest response is known to be the last."""

    @abstractmethod
    async def settle(self, timeout_s: float) -> None:
        """Find out, within ``timeout_s``, whether a response follows the latest; none is lost."""


class OpenStream(ResponsePart):
    """The open stream of a node or step in ``GraphRequest.stream``; its first response, if any, was written.

    The creator of the request closes it.

    Attributes:
        outputs: Outputs that the client requested by a step's path, of the latest response, by path and name.
        is_sampled: What runs for each response has spans, not for the first alone: there are few.
    """

    is_sampled = False

    def __init__(self) -> None:
        self.num_responses = 0
        self.outputs: dict[str, WireTensor] = {}
        self.parameters: dict[str, ParameterValue] = {}

    @abstractmethod
    async def read_on(self, run: "Run") -> bool:
        """Write the next response to the frame of ``run``, replacing the one before; False: there are no more.

        Raises WeftError if the stream has failed. Cancelling the awaiting task cancels every call in flight.
        """

    @abstractmethod
    async def close(self) -> None:
        """End running calls; no task is left. Closed before its end, the stream counts as cancelled."""


@dataclass(slots=True)
class GraphRequest:
    """One request of a graph.

    Attributes:
        root: Context of the client's request.
        response_parameters: Of all steps so far; the later step wins.
        pins: Node that chooses -> the step that it must take; None: the node decides.
        captures: Path of a step -> outputs of its target that the client requested; None if it requested none.
        captured: These outputs, by ``<path>/<output>``.
        is_collected: Decoupled models are asked for one response with everything.
        pulls: Choices of bandits so far; None for a copy that gets no feedback.
        stream: Open stream of the step or node that has run: more responses may come.
        parts: The streams whose responses it processes, with the number of each response.
        broken: Streams of soft steps that failed after their first response, as ``path: code``; shared by all forks.
        on_end: Called when the request is over; shared by all forks.
    """

    scope: RequestScope
    headers: Mapping[str, str]
    root: CallContext
    is_traced: bool = False
    response_parameters: dict[str, ParameterValue] = field(default_factory=dict)
    pins: Mapping[str, str] | None = None
    captures: Mapping[str, tuple[str, ...]] | None = None
    captured: dict[str, WireTensor] = field(default_factory=dict)
    is_collected: bool = False
    pulls: Pulls | None = field(default_factory=Pulls)
    stream: OpenStream | None = None
    parts: tuple[tuple[ResponsePart, int], ...] = ()
    broken: list[str] = field(default_factory=list)
    on_end: list[Callable[[], None]] = field(default_factory=list)

    async def is_last(self, timeout_s: float) -> bool:
        """Whether no further response follows in its streams, as far as known within ``timeout_s``."""
        for stream, number in self.parts:
            if stream.num_responses == number and not stream.has_ended:
                await stream.settle(timeout_s)
            if stream.num_responses != number or not stream.has_ended:
                return False
        return True

    @property
    def is_known_last(self) -> bool:
        """Whether no further response is known to follow in its streams."""
        return all(stream.num_responses == number and stream.has_ended for stream, number in self.parts)

    @property
    def is_in_sequence(self) -> bool:
        """Whether it belongs to a stateful sequence, for which the model keeps state."""
        return bool(self.scope.parameters.get("sequence_id"))

    def fork(self) -> "GraphRequest":
        """A copy for an attempt that may be discarded: what it collects is its own until ``merge``."""
        return GraphRequest(
            self.scope,
            self.headers,
            self.root,
            self.is_traced,
            pins=self.pins,
            captures=self.captures,
            is_collected=self.is_collected,
            pulls=self.pulls,
            broken=self.broken,
            on_end=self.on_end,
        )

    def merge(self, attempt: "GraphRequest") -> None:
        """Take over what a fork collected."""
        self.response_parameters.update(attempt.response_parameters)
        self.captured.update(attempt.captured)


@dataclass(slots=True)
class Run:
    """One run of a node.

    Steps that run at the same time share it: derive another for changes, assign no attribute.

    Attributes:
        frame: The node's tensors by slot, its inputs filled in.
        deadline_ns: On the runtime's clock, the node's own deadline included; None without one.
    """

    frame: Frame
    request: GraphRequest
    deadline_ns: int | None
    context: "Context | None"
    record: NodeRecord

    def until(self, limit_ns: int) -> "Run":
        """A copy with the earlier of its deadline and ``limit_ns``."""
        if self.deadline_ns is not None and self.deadline_ns <= limit_ns:
            return self
        return Run(self.frame, self.request, limit_ns, self.context, self.record)

    def under(self, context: "Context") -> "Run":
        """A copy with another trace context."""
        return Run(self.frame, self.request, self.deadline_ns, context, self.record)

    def with_frame(self, frame: Frame) -> "Run":
        """A copy with another frame."""
        return Run(frame, self.request, self.deadline_ns, self.context, self.record)

    def with_own_stream(self) -> "Run":
        """A copy with a request that has its own stream and shares everything else."""
        return Run(self.frame, replace(self.request, stream=None), self.deadline_ns, self.context, self.record)

    def with_record(self, record: NodeRecord) -> "Run":
        """A copy with another record."""
        return Run(self.frame, self.request, self.deadline_ns, self.context, record)

    def fork(self) -> "Run":
        """A copy for an attempt that may be discarded, with its own frame and request."""
        return Run(self.frame.copy(), self.request.fork(), self.deadline_ns, self.context, self.record)


def earlier(deadline_ns: int | None, limit_ns: int) -> int:
    """The earlier of an optional deadline and a limit."""
    return limit_ns if deadline_ns is None or limit_ns < deadline_ns else deadline_ns
