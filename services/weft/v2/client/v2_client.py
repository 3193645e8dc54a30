"""Client of any V2 server: inference, streams, health, model control; for a router also feedback and signatures."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from google.protobuf.message import Message

from weft.base.core import CallContext, InferCall, InferResult, ParameterValue
from weft.base.errors import NotFoundError, RemoteError, UnavailableError, UnsupportedError, WeftError
from weft.base.observing import telemetry
from weft.base.signature import ModelSignature
from weft.base.text.suggestion import suggestion
from weft.v2.client.channels import open_channel
from weft.v2.client.wires import WireName
from weft.v2.protocol.codec import InferMessage, deserialize_response, deserialize_result, deserialize_stream_answer
from weft.v2.protocol.encoding import fill_parameters, serialize_call
from weft.v2.protocol.services import HEALTH, HealthCheckRequest, HealthCheckResponse, stub_of
from weft.v2.protocol.status import (
    EOF,
    SEND_EMPTY_FINAL,
    SEND_STATUS,
    cancel,
    drain,
    from_rpc_error,
    response_of,
    stream_result,
    wait_started,
)
from weft.v2.protocol.wire import check_sendable, result_of, signature_from_metadata
from weft.v2.security.channel import ChannelSecurity
from weft.wire.interface import grpc
from weft_protos import graph_service_pb2 as graph_pb
from weft_protos import grpc_service_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceAsyncStub

#: Metadata of a call.
Metadata: TypeAlias = Sequence[tuple[str, str]]
#: Errors of ``grpc.aio``: a failed call, a call on a closed channel.
RpcFailure: TypeAlias = grpc.aio.AioRpcError | grpc.aio.UsageError

_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_GRAPH_SERVICE = graph_pb.DESCRIPTOR.services_by_name["GraphService"]
_INDEX_TIMEOUT_S = 5.0
_MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
_MODEL_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


class V2Client:
    """One channel to a server, which connects at the first call; create it on the event loop that uses it.

    Each method raises RemoteError when the server returns an error or is unreachable (UNAVAILABLE), and
    UnavailableError after ``close``. Cancelling the awaiting task cancels the call at the server.
    """

    def __init__(
        self,
        address: str,
        *,
        where: str = "",
        options: Sequence[tuple[str, Any]] = (),
        security: ChannelSecurity | None = None,
        wire: WireName | None = None,
    ) -> None:
        self.channel = open_channel(address, options=options, security=security, wire=wire)
        self.stub: GRPCInferenceServiceAsyncStub = stub_of(self.channel, _SERVICE)
        self.model_infer: grpc.aio.UnaryUnaryMultiCallable[Any, Any] = self.channel.unary_unary(
            _MODEL_INFER, request_serializer=serialize_call, response_deserializer=deserialize_result
        )
        self._infer_message: grpc.aio.UnaryUnaryMultiCallable[Any, Any] = self.channel.unary_unary(
            _MODEL_INFER, request_serializer=serialize_call, response_deserializer=deserialize_response
        )
        self._stream_infer: grpc.aio.StreamStreamMultiCallable[Any, Any] = self.channel.stream_stream(
            _MODEL_STREAM_INFER, request_serializer=serialize_call, response_deserializer=deserialize_stream_answer
        )
        self._health = stub_of(self.channel, HEALTH)
        self.where = where or f"'{address}'"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel, which cancels calls in flight."""
        await self.channel.close(None)

    async def infer(
        self,
        request: pb.ModelInferRequest | InferCall,
        *,
        timeout_s: float | None,
        metadata: Metadata = (),
        trailer: dict[str, str] | None = None,
    ) -> InferResult:
        """Run inference; ``trailer`` receives the trailing metadata, also of an error."""
        if isinstance(request, InferCall):
            check_sendable(request)
        try:
            rpc: Any = self.model_infer(request, timeout=timeout_s, metadata=tuple(metadata))
            response = await response_of(rpc)
            if trailer is not None:
                trailer.update(_pairs(await rpc.trailing_metadata()))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            if trailer is not None and isinstance(error, grpc.aio.AioRpcError):
                trailer.update(_pairs(error.trailing_metadata()))
            raise self.failure(error) from error
        return result_of(response)

    async def infer_message(
        self, request: InferMessage, *, timeout_s: float | None, metadata: Metadata = ()
    ) -> InferMessage:
        """Like ``infer``, but return the whole message, with the parameters of its outputs."""
        response: InferMessage = await self._response(self._infer_message, request, timeout_s, metadata)
        return response

    async def stream(
        self,
        request: InferCall,
        *,
        timeout_s: float | None,
        metadata: Metadata = (),
        failed: Callable[[RpcFailure], WeftError] | None = None,
    ) -> AsyncGenerator[InferResult, None]:
        """Yield every response to one request; only the last ``is_final``. Closing the generator cancels the call.

        If the server marks no response as final, an empty one follows the end of the stream. A final response without
        outputs is empty if another came before, the request asks for such a one, or it has parameters. Responses are
        read on demand, so a slow caller slows the model down. An error message without a status fails with UNKNOWN.
        """
        check_sendable(request)
        rpc: Any = None
        is_final = False
        version = request.model_version
        may_be_whole = request.parameters.get(SEND_EMPTY_FINAL) is not True
        try:
            rpc = self._stream_infer(iter((request,)), timeout=timeout_s, metadata=(*metadata, SEND_STATUS))
            await wait_started(rpc)
            while not is_final and (answer := await rpc.read()) is not EOF:
                error_message, message = answer
                if error_message:
                    raise RemoteError("UNKNOWN", error_message)
                result = stream_result(message, may_be_whole=may_be_whole)
                is_final, version, may_be_whole = result.is_final, result.model_version, False
                yield result
            if is_final:
                await drain(rpc)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            raise (failed or self.failure)(error) from error
        finally:
            if rpc is not None:
                cancel(rpc)
        if not is_final:
            yield InferResult(request.model_name, version, request.request_id, is_null=True)

    async def is_serving(self, *, timeout_s: float) -> bool:
        """Whether ``grpc.health.v1`` of the server is SERVING."""
        answer = await self._response(self._health.Check, HealthCheckRequest(), timeout_s)
        return bool(answer.status == HealthCheckResponse.SERVING)

    async def is_ready(self, *, timeout_s: float) -> bool:
        """Whether every configured model of the server is ready."""
        return bool((await self.call("ServerReady", pb.ServerReadyRequest(), timeout_s=timeout_s)).ready)

    async def call(self, method: str, request: Message, *, timeout_s: float, metadata: Metadata = ()) -> Any:
        """Call a unary method of the V2 service by name."""
        return await self._response(getattr(self.stub, method), request, timeout_s, metadata)

    async def index(
        self, *, ready_only: bool = False, timeout_s: float, metadata: Metadata = ()
    ) -> Sequence[pb.RepositoryIndexResponse.ModelIndex]:
        """State of each model version."""
        request = pb.RepositoryIndexRequest(ready=ready_only)
        response: pb.RepositoryIndexResponse = await self._response(
            self.stub.RepositoryIndex, request, timeout_s, metadata
        )
        return response.models

    async def config(
        self, name: str, version: str = "", *, timeout_s: float | None, metadata: Metadata = ()
    ) -> ModelConfig:
        """Configuration of a model; version "" is the default version. UNIMPLEMENTED: not offered."""
        request = pb.ModelConfigRequest(name=name, version=version)
        response: pb.ModelConfigResponse = await self._response(self.stub.ModelConfig, request, timeout_s, metadata)
        return response.config

    async def model_metadata(
        self, name: str, version: str = "", *, timeout_s: float | None, metadata: Metadata = ()
    ) -> pb.ModelMetadataResponse:
        """Inputs and outputs of a model, with their full shapes."""
        request = pb.ModelMetadataRequest(name=name, version=version)
        response: pb.ModelMetadataResponse = await self._response(self.stub.ModelMetadata, request, timeout_s, metadata)
        return response

    async def signature(
        self, name: str, version: str = "", *, timeout_s: float | None, metadata: Metadata = ()
    ) -> ModelSignature:
        """Names, datatypes and shapes of a model; an error for an unknown name has the most similar one.

        Where the server has no ``ModelConfig``, an extension of the protocol, it is that of
        ``signature_from_metadata``. ``timeout_s`` is for each of at most two calls.
        """
        async with self.names_similar_models(name):
            try:
                config = await self.config(name, version, timeout_s=timeout_s, metadata=metadata)
                if config.input or config.output:
                    return ModelSignature.from_config(config, version)
            except RemoteError as error:
                if error.code != UnsupportedError.code:
                    raise
            found = await self.model_metadata(name, version, timeout_s=timeout_s, metadata=metadata)
        return signature_from_metadata(name, version, found)

    @contextlib.asynccontextmanager
    async def names_similar_models(self, name: str) -> AsyncGenerator[None, None]:
        """Add to an error about an unknown ``name`` the most similar name that the server lists."""
        try:
            yield
        except RemoteError as error:
            if error.code != NotFoundError.code:
                raise
            try:
                known = [model.name for model in await self.index(timeout_s=_INDEX_TIMEOUT_S)]
            except RemoteError:
                known = []
            if not known or name in known:
                raise
            raise error.with_message(error.message + suggestion(name, known)) from None

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes], *, timeout_s: float) -> None:
        """Load or reload a model."""
        request = pb.RepositoryModelLoadRequest(model_name=name)
        fill_parameters(request.parameters, parameters)
        await self._response(self.stub.RepositoryModelLoad, request, timeout_s)

    async def unload(self, name: str, *, unload_dependents: bool, timeout_s: float) -> None:
        """Unload a model, and with ``unload_dependents`` the models it is composed of."""
        request = pb.RepositoryModelUnloadRequest(model_name=name)
        if unload_dependents:
            request.parameters["unload_dependents"].bool_param = True
        await self._response(self.stub.RepositoryModelUnload, request, timeout_s)

    async def statistics(self, name: str, version: str, *, timeout_s: float) -> Sequence[pb.ModelStatistics]:
        """Counters of a model, or of all with the name ""."""
        request = pb.ModelStatisticsRequest(name=name, version=version)
        response: pb.ModelStatisticsResponse = await self._response(self.stub.ModelStatistics, request, timeout_s)
        return response.model_stats

    async def graph_service(self, method: str, request: Any, *, timeout_s: float, metadata: Metadata = ()) -> Any:
        """Call a method of ``weft.graph.GraphService``; return its response.

        Raises UnsupportedError: the server is no router of Weft; RemoteError: what it answered.
        """
        try:
            rpc = getattr(stub_of(self.channel, _GRAPH_SERVICE), method)
            return await self._response(rpc, request, timeout_s, metadata)
        except RemoteError as error:
            if error.code == UnsupportedError.code:
                raise UnsupportedError(f"{self.where} is no router of Weft, or one without {method}") from error
            raise

    async def graph_feedback(
        self, request: graph_pb.GraphFeedbackRequest, *, timeout_s: float
    ) -> graph_pb.GraphFeedbackResponse:
        """Send rewards for a graph's bandits. Raises as ``graph_service``."""
        response: graph_pb.GraphFeedbackResponse = await self.graph_service(
            "GraphFeedback", request, timeout_s=timeout_s
        )
        return response

    async def _response(self, call: Any, request: object, timeout_s: float | None, metadata: Metadata = ()) -> Any:
        try:
            return await response_of(call(request, timeout=timeout_s, metadata=tuple(metadata)))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            raise self.failure(error) from error

    def failure(self, error: RpcFailure) -> WeftError:
        """Convert the error of a call to a WeftError."""
        if isinstance(error, grpc.aio.AioRpcError):
            return from_rpc_error(error, self.where)
        return UnavailableError(f"{self.where} is no longer called: its channel is closed")


def metadata_of(context: CallContext) -> tuple[tuple[str, str], ...]:
    """The metadata to send with a call: headers and trace context."""
    if context.trace_context is None:
        return tuple(context.headers.items())
    return (*context.headers.items(), *telemetry.inject(context.trace_context).items())


def _pairs(metadata: Any) -> Iterator[tuple[str, str]]:
    return ((str(key), str(value)) for key, value in metadata or ())
