"""Interface between the V2 servicer and its implementations, independent of gRPC.

``weft.v2.server.servicer`` converts RPCs to calls of an ``InferenceCore``; the serving library and the router each
implement one.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weft.base.errors import WeftError

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from weft.base.signature import ModelSignature
    from weft.base.statistics import ModelStatistics
    from weft.base.tensors import WireTensor
    from weft_protos.model_config_pb2 import ModelConfig

ParameterValue = bool | int | str | float
Parameters = Mapping[str, ParameterValue]


class RequestedOutput(NamedTuple):
    """An output that the client requested, with its own parameters (``classification``, shared memory)."""

    name: str
    parameters: Parameters


@dataclass(slots=True)
class InferCall:
    """One inference request, independent of the transport.

    Attributes:
        model_version: As sent; "" means the highest ready version.
        request_id: The client's id, echoed; may be "".
        parameters: Request parameters, including ``priority`` and ``timeout`` (microseconds).
        inputs: By name, in the order sent.
        outputs: Requested outputs in order; empty means all.
    """

    model_name: str
    model_version: str = ""
    request_id: str = ""
    parameters: Parameters = field(default_factory=dict)
    inputs: "dict[str, WireTensor]" = field(default_factory=dict)
    outputs: tuple[RequestedOutput, ...] = ()
    num_rows: int = 1


@dataclass(slots=True)
class InferResult:
    """One inference response: outputs by name, in the model's order.

    Attributes:
        is_final: No further response to the request follows.
        is_null: End marker of a decoupled model without outputs. Sent only to clients that request it with the
            parameter ``triton_enable_empty_final_response``.
        is_unordered: Decoupled models: may be sent before responses to earlier requests of its stream.
        is_cached: It was in the response cache of the model.
        error: Decoupled models: error in place of outputs; further responses follow. An error that ends the request is
            raised.
    """

    model_name: str
    model_version: str
    request_id: str = ""
    parameters: Parameters = field(default_factory=dict)
    outputs: "dict[str, WireTensor]" = field(default_factory=dict)
    is_final: bool = True
    is_null: bool = False
    is_unordered: bool = False
    error: WeftError | None = None
    is_cached: bool = False


#: Metadata that asks for the times of a call, and trailing metadata that has them, or a parameter of a stream's first
#: response: these numbers, separated by commas. ``batch`` is the same for calls of one batch at one service.
TIMES_HEADER = "x-weft-times"
TIMES = ("queue_ms", "compute_ms", "batch_rows", "batch_requests", "batch")


@dataclass(slots=True)
class CallContext:
    """Context of one call.

    Attributes:
        deadline_ns: Deadline by ``time.monotonic_ns``; None: no deadline.
        headers: The client's ASCII metadata, lower-case keys; binary headers are omitted.
        trailing_metadata: Pairs to send after the response, also after an error.
        trace_context: OpenTelemetry context with the parent span of all work for this call.
        arrival_ns: Arrival of the request, by ``time.monotonic_ns``.
        tried: Replicas of the target that this request has called, latest last; the target appends the one that it
            chooses, and avoids those in the list. None: not tracked.
        balancing_key: What the target chose a replica by, if it has several.
        client_key: Key for limits per client: the authenticated principal; "" without authentication.
        priority: The request parameter of that name, read at admission; 0: none.
        root: Context of the client's request that this call is part of; None: this is it.
        lost: Of a root: the replicas that were lost while they worked on the request, with the time by
            ``time.monotonic_ns``.
    """

    deadline_ns: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    trailing_metadata: list[tuple[str, str]] = field(default_factory=list)
    trace_context: "Context | None" = None
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    client_key: str = ""
    tried: list[str] | None = None
    priority: int = 0
    root: "CallContext | None" = None
    lost: tuple[tuple[str, int], ...] = ()
    balancing_key: object = None

    @property
    def is_suspect(self) -> bool:
        """Of a root: replicas were lost twice while they worked on the request; it is not sent again."""
        return len(self.lost) > 1


class IndexEntry(NamedTuple):
    """One model version in ``RepositoryIndex``; ``state`` is READY, UNAVAILABLE, LOADING, UNLOADING or ""."""

    name: str
    version: str
    state: str
    reason: str


class InferenceCore(Protocol):
    """A V2 server without its transport. Every method may raise a ``WeftError``."""

    def is_ready(self) -> bool:
        """Whether every configured model is ready."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether the version ("" = default) is ready. Raises NotFoundError for an unknown model or version."""

    def signature(self, name: str, version: str) -> "ModelSignature":
        """Names, types and shapes of a ready model. Raises NotFoundError or UnavailableError."""

    def config(self, name: str, version: str) -> "ModelConfig":
        """The full configuration with ``name`` set. Owned by the core: do not modify."""

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Every known model version."""

    def statistics(self, name: str, version: str) -> "list[ModelStatistics]":
        """Counters of one model (``name`` given) or of all."""

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Process one request. Cancelling the awaiting task cancels the request wherever it is."""

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """Responses to one request, the last with ``is_final``. A model that is not decoupled yields exactly one.

        Responses are produced on demand. Closing the iterator cancels the request.
        """

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load or reload a model, if model control is on; returns when it is ready, or raises why it is not."""

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload every version of a model, if model control is on; in-flight requests finish."""
