"""What nodes and steps run with: the request, one run of a node for it, and the stream that a run may leave."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.base.core import CallContext, ParameterValue
from weft.base.tensors import WireTensor
from weft.language.plan import Frame
from weft.language.request_scope import RequestScope
from weft.router.bandits.store import Pull
from weft.router.reporting.path import NodeRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context


class ResponsePart(ABC):
    """A stream whose response is part of another."""

    num_responses: int

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether it is known that no response follows the latest."""

    @abstractmethod
    async def settle(self, timeout_s: float) -> None:
        """Find out whether a response follows the latest, for at most so many seconds; none is lost by it."""


class OpenStream(ResponsePart):
    """What a node or a step has left in ``GraphRequest.stream``: its first response, if there is one, was written.

    Whoever made the request closes it.

    Attributes:
        outputs: Outputs that the client requested by a step's path, of the latest response, by path and name.
    """

    def __init__(self) -> None:
        self.num_responses = 0
        self.outputs: dict[str, WireTensor] = {}
        self.parameters: dict[str, ParameterValue] = {}

    @abstractmethod
    async def read_on(self, run: "Run") -> bool:
        """Write the next response into the frame of ``run``, in place of the one before; False: there are no more.

        Raises WeftError if what streams has failed. Cancelling the awaiting task cancels every call in work.
        """

    @abstractmethod
    async def close(self) -> None:
        """End what still runs; no task is left. Closed before its end, the stream counts as cancelled."""


@dataclass(slots=True)
class GraphRequest:
    """One request of a graph.

    Attributes:
        root: Context of the client's request.
        response_parameters: Of all steps so far; the later step wins.
        pins: Node that chooses -> the step that it must take; None: the node decides.
        captures: Path of a step -> outputs of its target that the client requested; None where it requested none.
        captured: These outputs, by ``<path>/<output>``.
        is_collected: Decoupled models are called for one response with everything.
        pulls: What bandits chose for it so far; None for a copy that gets no feedback.
        stream: Of the step or the node that streams and has run: more responses may come.
        parts: Responses of streams that it goes on with: the streams, and the number of each in its stream.
        broken: Streams of soft steps that failed after their first response, as ``path: code``; shared by all forks.
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
    pulls: list[Pull] | None = field(default_factory=list)
    stream: OpenStream | None = None
    parts: tuple[tuple[ResponsePart, int], ...] = ()
    broken: list[str] = field(default_factory=list)

    async def is_last(self, timeout_s: float) -> bool:
        """Whether no further response of its streams follows, as far as is known in so many seconds."""
        for stream, number in self.parts:
            if stream.num_responses == number and not stream.has_ended:
                await stream.settle(timeout_s)
            if stream.num_responses != number or not stream.has_ended:
                return False
        return True

    @property
    def is_known_last(self) -> bool:
        """Whether it is known that no further response of its streams follows."""
        return all(stream.num_responses == number and stream.has_ended for stream, number in self.parts)

    @property
    def is_in_sequence(self) -> bool:
        """Whether it is one of a stateful sequence, whose model remembers the requests before it."""
        return bool(self.scope.parameters.get("sequence_id"))

    def fork(self) -> "GraphRequest":
        """The same request for an attempt that may be discarded: what it collects is its own until ``merge``."""
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
        )

    def merge(self, attempt: "GraphRequest") -> None:
        """Take over what a fork has collected."""
        self.response_parameters.update(attempt.response_parameters)
        self.captured.update(attempt.captured)


@dataclass(slots=True)
class Run:
    """One run of a node.

    Steps that run at the same time share it: derive another one where something differs, assign no attribute.

    Attributes:
        frame: The node's tensors by slot, its inputs filled in.
        deadline_ns: On the runtime's clock; None without deadline. The node's own is worked in.
    """

    frame: Frame
    request: GraphRequest
    deadline_ns: int | None
    context: "Context | None"
    record: NodeRecord

    def until(self, limit_ns: int) -> "Run":
        """The same with the earlier of its deadline and ``limit_ns``."""
        if self.deadline_ns is not None and self.deadline_ns <= limit_ns:
            return self
        return Run(self.frame, self.request, limit_ns, self.context, self.record)

    def under(self, context: "Context") -> "Run":
        """The same with another trace context."""
        return Run(self.frame, self.request, self.deadline_ns, context, self.record)

    def with_frame(self, frame: Frame) -> "Run":
        """The same with another frame."""
        return Run(frame, self.request, self.deadline_ns, self.context, self.record)

    def with_record(self, record: NodeRecord) -> "Run":
        """The same with another record."""
        return Run(self.frame, self.request, self.deadline_ns, self.context, record)

    def fork(self) -> "Run":
        """The same for an attempt that may be discarded: with a frame and a request of its own."""
        return Run(self.frame.copy(), self.request.fork(), self.deadline_ns, self.context, self.record)


def earlier(deadline_ns: int | None, limit_ns: int) -> int:
    """The earlier of a deadline, which may be absent, and a limit."""
    return limit_ns if deadline_ns is None or limit_ns < deadline_ns else deadline_ns
