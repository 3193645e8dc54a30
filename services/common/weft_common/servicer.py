"""The V2 service: every RPC of ``inference.GRPCInferenceService`` over an ``InferenceCore``.

Protobuf comes in and goes out here; ``weft_common.edge`` has the spans and turns errors into statuses.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib import metadata
from typing import TypeVar, cast

import grpc

from weft_common import telemetry
from weft_common.core import InferenceCore, InferResult
from weft_common.edge import Context, Edge, deadline_ns_of, headers_of, sendable, trailing_of, withdrawal
from weft_common.errors import UnavailableError, UnsupportedError, WeftError
from weft_common.logs import get_logger
from weft_common.shared_memory import DISABLED, Place, SharedMemory
from weft_common.status import cut_message
from weft_common.stream_answers import Outgoing, StreamCall
from weft_common.wire import (
    call_from_request,
    metadata_from_signature,
    output_places,
    parameters_from,
    response_from_result,
    statistics_message,
)
from weft_protos import grpc_service_pb2 as pb
from weft_protos import grpc_service_pb2_grpc as pb_grpc

EXTENSIONS = (
    "classification",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "statistics",
)

#: Requests of one stream that may be in work at once; beyond it the stream is not read, which gRPC turns into
#: back-pressure at the client.
MAX_STREAM_INFLIGHT = 256

_SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests"
_EMPTY_FINAL = "triton_enable_empty_final_response"
#: Parameter of the response that comes with an error's text in a stream: the name of its gRPC status.
_STATUS = "grpc_status"

Request = TypeVar("Request")
Response = TypeVar("Response")

_log = get_logger("weft.servicer")


def _answering(
    rpc: Callable[["V2Servicer", Request, Context], Awaitable[Response]],
) -> Callable[["V2Servicer", Request, Context], Awaitable[Response]]:
    """The RPC, ended with the status of whatever it raises."""

    @functools.wraps(rpc)
    async def answer(self: "V2Servicer", request: Request, context: Context) -> Response:
        try:
            return await rpc(self, request, context)
        except Exception as error:
            model_name = getattr(request, "model_name", "") or getattr(request, "name", "")
            self._edge.fail(context, error, model_name=model_name)
            return cast(Response, None)  # not sent

    return answer


class V2Servicer(pb_grpc.GRPCInferenceServiceServicer):
    """Answers V2 RPCs from a core.

    Args:
        core: What answers.
        service: Name for spans and ``ServerMetadata``, for example ``weft.router``.
        memory: Shared memory that clients may use; None: it is disabled.
    """

    def __init__(self, core: InferenceCore, service: str, memory: SharedMemory | None = None) -> None:
        self._core = core
        self._memory = memory
        self._edge = Edge(service)
        self._is_draining = False
        self._stream_readers: set[asyncio.Task[None]] = set()

    def drain(self) -> None:
        """Take no more requests: new ones get UNAVAILABLE, and so does a stream when it has answered what it took."""
        self._is_draining = True
        for reader in self._stream_readers:
            reader.cancel()

    # Health and metadata.

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """Live as long as it answers."""
        return pb.ServerLiveResponse(live=True)

    @_answering
    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Ready when every model is."""
        return pb.ServerReadyResponse(ready=self._core.is_ready())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Name, version, extensions."""
        return pb.ServerMetadataResponse(
            name=self._edge.service,
            version=metadata.version("weft"),
            extensions=EXTENSIONS if self._memory is None else (*EXTENSIONS, "system_shared_memory"),
        )

    @_answering
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """NOT_FOUND for an unknown model, as in TIS."""
        return pb.ModelReadyResponse(ready=self._core.is_model_ready(request.name, request.version))

    @_answering
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Wire datatypes; shapes show the batch dimension as a leading -1."""
        signature = self._core.signature(request.name, request.version)
        versions = [
            entry.version
            for entry in self._core.index(ready_only=True)
            if entry.name == request.name and (not request.version or entry.version == request.version)
        ]
        return metadata_from_signature(signature, versions or [signature.version])

    @_answering
    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """The whole configuration."""
        return pb.ModelConfigResponse(config=self._core.config(request.name, request.version))

    @_answering
    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Counters of one model, or of all when no name is given."""
        statistics = self._core.statistics(request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=map(statistics_message, statistics))

    # Inference.

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """One request, one response."""
        call_context, span = self._edge.begin(request.model_name, headers_of(context), deadline_ns_of(context))
        try:
            if self._is_draining:
                raise UnavailableError(_SHUTTING_DOWN)
            memory = self._memory
            call = call_from_request(request, memory)
            places = {} if memory is None else output_places(request, memory)
            response = response_from_result(await self._core.infer(call, call_context), places)
        except asyncio.CancelledError:
            telemetry.end_span(span, withdrawal(call_context))
            raise
        except Exception as error:
            self._edge.fail(context, error, model_name=request.model_name, call_context=call_context, span=span)
            return pb.ModelInferResponse()  # not sent
        if call_context.trailing_metadata:
            context.set_trailing_metadata(sendable(call_context.trailing_metadata))
        telemetry.end_span(span)
        return response

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Many requests at once; answers come in the order of the requests, those of decoupled models as they are made.

        An error is text in ``error_message``, behind the name of its status, and the stream goes on; unless the client
        sent the metadata ``triton_grpc_error: true``: then the first error ends the stream with its status. Cancelling
        the stream cancels what is in work. No more answers are made than the client reads, but for a few that wait.
        """
        if self._is_draining:
            self._edge.fail(context, UnavailableError(_SHUTTING_DOWN))
            return
        headers, deadline_ns = headers_of(context), deadline_ns_of(context)
        ends_on_error = headers.get("triton_grpc_error") == "true"
        outgoing = Outgoing()
        free = asyncio.Semaphore(MAX_STREAM_INFLIGHT)
        running: set[asyncio.Task[None]] = set()

        async def read() -> None:
            turn = asyncio.get_running_loop().create_future()
            turn.set_result(None)
            with contextlib.suppress(grpc.RpcError):  # the client broke the stream off
                async for request in request_iterator:
                    await free.acquire()
                    stream_call = StreamCall(request, *self._edge.begin(request.model_name, headers, deadline_ns), turn)
                    turn = stream_call.is_passed
                    task = asyncio.create_task(self._answer(stream_call, outgoing))
                    running.add(task)
                    task.add_done_callback(end_of_request)

        def end_of_request(task: asyncio.Task[None]) -> None:
            running.discard(task)
            free.release()
            end_when_answered()

        def end_of_requests(reader: asyncio.Task[None]) -> None:
            self._stream_readers.discard(reader)
            end_when_answered()

        def end_when_answered() -> None:
            if running or not reader.done():
                return
            if reader.cancelled():
                outgoing.end(UnavailableError(_SHUTTING_DOWN))
            else:
                error = reader.exception()
                outgoing.end(self._edge.as_weft_error(error) if isinstance(error, Exception) else None)

        reader = asyncio.create_task(read())
        self._stream_readers.add(reader)
        reader.add_done_callback(end_of_requests)
        try:
            while (item := await outgoing.get()) is not None:
                stream_call, answer = item
                if isinstance(answer, WeftError):
                    if ends_on_error:
                        self._edge.fail(context, answer, call_context=stream_call.context)
                        return
                    yield _stream_error(answer, stream_call)
                else:
                    yield answer
            if outgoing.failure is not None:
                self._edge.fail(context, outgoing.failure)
        finally:
            reader.cancel()
            for task in running:
                task.cancel()

    async def _answer(self, stream_call: StreamCall, outgoing: Outgoing) -> None:
        """Send every response of one request of a stream, or its error."""
        request = stream_call.request
        wants_null = request.parameters[_EMPTY_FINAL].bool_param if _EMPTY_FINAL in request.parameters else False
        failure: WeftError | None = None
        try:
            memory = self._memory
            places = {} if memory is None else output_places(request, memory)
            results = self._core.stream_infer(call_from_request(request, memory), stream_call.context)
            async with contextlib.aclosing(results):
                async for result in results:
                    if result.is_null or not result.is_final:
                        stream_call.leave_line()
                    if wants_null or not result.is_null:
                        await outgoing.put(stream_call, _stream_response(result, places))
        except asyncio.CancelledError:
            failure = withdrawal(stream_call.context)
            raise
        except Exception as error:
            failure = self._edge.as_weft_error(error, request.model_name, stream_call.context)
            await outgoing.put(stream_call, failure)
        finally:
            stream_call.leave_line()
            telemetry.end_span(stream_call.span, failure)
            del failure  # it holds this frame, and with it the tensors

    # Repository control.

    @_answering
    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Every model version with its state and, where it does not serve, the reason."""
        entry_message = pb.RepositoryIndexResponse.ModelIndex
        entries = self._core.index(ready_only=request.ready)
        return pb.RepositoryIndexResponse(models=[entry_message(**entry._asdict()) for entry in entries])

    @_answering
    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Returns when the model serves."""
        await self._core.load(request.model_name, parameters_from(request.parameters))
        return pb.RepositoryModelLoadResponse()

    @_answering
    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Returns when the model has stopped."""
        parameters = parameters_from(request.parameters)
        await self._core.unload(request.model_name, unload_dependents=parameters.get("unload_dependents") is True)
        return pb.RepositoryModelUnloadResponse()

    # Shared memory. Status and unregister succeed also where it is disabled, because clients call them unasked.

    @_answering
    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        """One region, or every one."""
        regions = () if self._memory is None else self._memory.regions(request.name)
        status = pb.SystemSharedMemoryStatusResponse.RegionStatus
        return pb.SystemSharedMemoryStatusResponse(
            regions={
                region.name: status(name=region.name, key=region.key, offset=region.offset, byte_size=region.byte_size)
                for region in regions
            }
        )

    @_answering
    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """UNIMPLEMENTED where it is disabled."""
        if self._memory is None:
            raise UnsupportedError(DISABLED)
        self._memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """One region, or every one; requests in flight keep what they use."""
        if self._memory is not None:
            self._memory.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        """No region is registered."""
        return pb.CudaSharedMemoryStatusResponse()

    @_answering
    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, context: Context
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """UNIMPLEMENTED."""
        raise UnsupportedError("CUDA shared memory is not supported by this version; use system shared memory")

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Nothing to do."""
        return pb.CudaSharedMemoryUnregisterResponse()

    @_answering
    async def TraceSetting(self, request: pb.TraceSettingRequest, context: Context) -> pb.TraceSettingResponse:
        """The settings in force; they come from ``OTEL_*`` variables and cannot be changed while the service runs."""
        if request.settings:
            raise UnsupportedError(
                f"trace settings {sorted(request.settings)} cannot be changed while the service runs; set "
                "OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_TRACES_SAMPLER_ARG before it starts"
            )
        value = pb.TraceSettingResponse.SettingValue
        return pb.TraceSettingResponse(
            settings={
                "trace_mode": value(value=["opentelemetry"]),
                "trace_level": value(value=["TIMESTAMPS" if telemetry.is_enabled() else "OFF"]),
                "trace_rate": value(value=["1"]),
                "trace_count": value(value=["-1"]),
                "log_frequency": value(value=["0"]),
            }
        )

    @_answering
    async def LogSettings(self, request: pb.LogSettingsRequest, context: Context) -> pb.LogSettingsResponse:
        """The settings in force; ``--log-level`` sets them when the service starts."""
        if request.settings:
            raise UnsupportedError(
                f"log settings {sorted(request.settings)} cannot be changed while the service runs; start it with "
                "--log-level"
            )
        value = pb.LogSettingsResponse.SettingValue
        return pb.LogSettingsResponse(
            settings={
                "log_file": value(string_param=""),
                "log_info": value(bool_param=_log.isEnabledFor(20)),
                "log_warning": value(bool_param=_log.isEnabledFor(30)),
                "log_error": value(bool_param=True),
                "log_verbose_level": value(uint32_param=int(_log.isEnabledFor(10))),
                "log_format": value(string_param="json"),
            }
        )


def _stream_response(result: InferResult, places: Mapping[str, Place]) -> pb.ModelStreamInferResponse:
    response = response_from_result(result, places)
    response.parameters["triton_final_response"].bool_param = result.is_final
    return pb.ModelStreamInferResponse(infer_response=response)


def _stream_error(error: WeftError, stream_call: StreamCall) -> pb.ModelStreamInferResponse:
    """The error as text, all that some clients show; its status and metadata are parameters of the response too."""
    response = pb.ModelInferResponse(id=stream_call.request.id)
    response.parameters["triton_final_response"].bool_param = True
    response.parameters[_STATUS].string_param = error.code
    for key, value in trailing_of(error, stream_call.context):
        response.parameters[key].string_param = value
    return pb.ModelStreamInferResponse(
        error_message=cut_message(f"{error.code}: {error.message}"), infer_response=response
    )
