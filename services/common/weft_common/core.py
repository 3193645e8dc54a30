"""What a V2 server does, without gRPC: the interface between the one servicer and what is behind it.

``weft_common.server.servicer`` turns RPCs into calls of an ``InferenceCore``; the serving library and the router each
are one.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weft_common.errors import WeftError
from weft_common.statistics import ModelStatistics
from weft_common.tensors import WireTensor

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from weft_common.signature import ModelSignature
    from weft_protos.model_config_pb2 import ModelConfig

ParameterValue = bool | int | str | float
Parameters = Mapping[str, ParameterValue]


class RequestedOutput(NamedTuple):
    """An output that the client asked for, with its own parameters (``classification``, shared memory)."""

    name: str
    parameters: Parameters


@dataclass(slots=True)
class InferCall:
    """One inference request as the protocol carries it.

    Attributes:
        model_name: Model or graph.
        model_version: As sent; "" means the highest ready version.
        request_id: Client's id, echoed; may be "".
        parameters: Request parameters; ``priority`` and ``timeout`` (microseconds) among them.
        inputs: By name, in the order sent.
        outputs: Requested outputs in order; empty means all.
        num_rows: Batch size as whoever made or checked the call counted it; 1 without batch dimension.
    """

    model_name: str
    model_version: str = ""
    request_id: str = ""
    parameters: Parameters = field(default_factory=dict)
    inputs: dict[str, WireTensor] = field(default_factory=dict)
    outputs: tuple[RequestedOutput, ...] = ()
    num_rows: int = 1


@dataclass(slots=True)
class InferResult:
    """One inference response: outputs by name, in the order answered.

    Attributes:
        is_final: No response to the request follows.
        is_null: A decoupled model has sent all its responses; this is none, it only says so. Clients see it if they
            asked for it with the parameter ``triton_enable_empty_final_response``.
        is_unordered: Of a decoupled model: it does not wait for answers to requests that came before on its stream.
        error: What this response of a decoupled model is in place of outputs; others follow. An error that ends the
            request is raised.
    """

    model_name: str
    model_version: str
    request_id: str = ""
    parameters: Parameters = field(default_factory=dict)
    outputs: dict[str, WireTensor] = field(default_factory=dict)
    is_final: bool = True
    is_null: bool = False
    is_unordered: bool = False
    error: WeftError | None = None


@dataclass(slots=True)
class CallContext:
    """What surrounds one call.

    Attributes:
        deadline_ns: When the answer is no longer wanted, on the clock of ``time.monotonic_ns``; None without deadline.
        headers: The client's ASCII metadata, lower-case keys; binary headers are left out.
        trailing_metadata: Pairs that are sent after the answer, also after an error.
        trace_context: OpenTelemetry context whose span is the parent of everything done for this call.
        arrival_ns: When the request was received, ``time.monotonic_ns``.
        tried: Replicas of the target that were called for this request, the latest last; the target adds the one that
            it chooses, and chooses another while there is one. None: nobody asks for it.
        client_key: Who calls, for limits by client: the authenticated principal; "" without authentication.
    """

    deadline_ns: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    trailing_metadata: list[tuple[str, str]] = field(default_factory=list)
    trace_context: "Context | None" = None
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    client_key: str = ""
    tried: list[str] | None = None


class IndexEntry(NamedTuple):
    """One version of a model in ``RepositoryIndex``; ``state`` is READY, UNAVAILABLE, LOADING, UNLOADING or ""."""

    name: str
    version: str
    state: str
    reason: str


class InferenceCore(Protocol):
    """A V2 server without its transport. Every method may raise a ``WeftError``."""

    def is_ready(self) -> bool:
        """Whether every model that should serve is ready."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether the version ("" = default) is ready. Raises NotFoundError for an unknown model or version."""

    def signature(self, name: str, version: str) -> "ModelSignature":
        """Names, types and shapes of a ready model. Raises NotFoundError or UnavailableError."""

    def config(self, name: str, version: str) -> "ModelConfig":
        """The full configuration, ``name`` filled in. The message is the core's own: do not modify."""

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Every known model version."""

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """Counters of one model (``name`` given) or of all."""

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Answer one request. Cancelling the awaiting task withdraws the request wherever it is."""

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """Answers of one request, the last with ``is_final``. A model that is not decoupled gives exactly one.

        The next answer is made when it is asked for. Closing the iterator withdraws the request.
        """

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load or reload a model, if model control is on; returns when it serves or raises why it cannot."""

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload every version of a model, if model control is on; in-flight requests finish."""
