"""The V2 service: every RPC of ``inference.GRPCInferenceService`` over an ``InferenceCore``.

Converts between protobuf and the core; ``weft.v2.server.call_boundary`` handles spans and error statuses.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from opentelemetry.trace import INVALID_SPAN
from prometheus_client.registry import Collector

from weft import __version__
from weft.base.core import CallContext, InferCall, InferenceCore, Parameters
from weft.base.errors import InvalidArgumentError, NotFoundError, UnsupportedError, WeftError
from weft.base.observing import settings, telemetry
from weft.base.security import access
from weft.v2.protocol.codec import InferMessage, given
from weft.v2.protocol.shared_memory import DISABLED, CudaRegion, SharedMemory, SystemRegion, TensorLocation
from weft.v2.protocol.tensor_memory import PARAMETER, UNKNOWN, TensorMemory
from weft.v2.protocol.wire import (
    call_of,
    message_of_result,
    metadata_from_signature,
    output_locations,
    parameters_from,
    statistics_message,
    summed,
)
from weft.v2.server.call_boundary import (
    CallBoundary,
    Context,
    answering,
    deadline_ns_of,
    headers_of,
    name_in_logs,
    sendable,
    withdrawal,
)
from weft.v2.server.stream_servicer import StreamServicer
from weft.v2.server.unix_socket import LocalTensorService
from weft.wire.interface import grpc
from weft_protos import grpc_service_pb2 as pb

EXTENSIONS = (
    "classification",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "statistics",
)

_NO_PLACES: Mapping[str, TensorLocation] = {}
_SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests"

#: Takes model, version, a function that returns the parameters, and the context of the call.
Precheck = Callable[[str, str, Callable[[], Parameters], CallContext], None]
#: Takes model and version, each "" for all.
MoreStatistics = Callable[[str, str], Awaitable[Sequence[pb.ModelStatistics]]]
PassOn = Callable[[pb.TraceSettingRequest | pb.LogSettingsRequest], Awaitable[None]]


class Extension(NamedTuple):
    """Features of a service beyond the V2 protocol.

    Attributes:
        precheck: Checks each request before its tensors are parsed.
        more_statistics: Fetches counters, by model name and version, of other processes on the same port.
        own_statistics: Fetches a model's counters from the services that run it, which replace those counted here.
        is_serving: Whether the health of the server ("") is SERVING; by default, whether it is ready.
        pass_on: Gives changed settings of traces or logs to the processes behind.
    """

    add_servicers: Callable[[grpc.aio.Server], Sequence[str]] = lambda server: ()
    collectors: Sequence[Collector] = ()
    precheck: Precheck | None = None
    more_statistics: MoreStatistics | None = None
    own_statistics: MoreStatistics | None = None
    is_serving: Callable[[], bool] | None = None
    pass_on: PassOn | None = None


NO_EXTENSION = Extension()


def _status_of(kind: type[Any], response_class: type[Any], **fields: str) -> Any:
    """The RPC that tells of one region, or all; it succeeds even if disabled, because clients call it unconditionally.

    Args:
        kind: Of regions.
        response_class: Of the answer.
        fields: What it has of a region beside name and size, and the attribute of the region that this is.
    """

    @answering
    async def status(self: "V2Servicer", request: Any, context: Context) -> Any:
        response = response_class()
        for region in () if self._memory is None else self._memory.regions(request.name, kind):
            entry = response.regions[region.name]
            entry.name, entry.byte_size = region.name, region.byte_size
            for field, attribute in fields.items():
                setattr(entry, field, getattr(region, attribute))
        return response

    return status


def _unregister_of(kind: type[Any], response_class: type[Any]) -> Any:
    """Make the RPC that unregisters all regions, as ``_status_of``, or one; running requests keep their regions."""

    @answering
    async def unregister(self: "V2Servicer", request: Any, context: Context) -> Any:
        if self._memory is not None:
            self._memory.unregister(request.name, kind)
        elif request.name:
            raise UnsupportedError(DISABLED)
        return response_class()

    return unregister


def _register_of(add: Callable[..., None], response_class: type[Any], *fields: str) -> Any:
    """Make the RPC that registers a region with these fields of its request; UNIMPLEMENTED if disabled."""

    @answering
    async def register(self: "V2Servicer", request: Any, context: Context) -> Any:
        if self._memory is None:
            raise UnsupportedError(DISABLED)
        add(self._memory, request.name, *(getattr(request, field) for field in fields))
        return response_class()

    return register


class V2Servicer:
    """Serves V2 RPCs from a core.

    Args:
        is_ready: Result of ``ServerReady``; that of the core by default.
    """

    def __init__(
        self,
        core: InferenceCore,
        service: str,
        memory: SharedMemory | None = None,
        is_ready: Callable[[], bool] | None = None,
        extension: Extension = NO_EXTENSION,
        local_tensors: LocalTensorService | None = None,
    ) -> None:
        self._edge = CallBoundary(service)
        self._memory = memory
        self._core = core
        self._extension = extension
        self._local_tensors = local_tensors
        self.server_id = service
        self._is_ready = is_ready
        self._released: asyncio.Event | None = None  # set while draining
        self.num_held = 0  # held requests since the drain began
        self._streams = StreamServicer(core, self._edge, self._read_call, _SHUTTING_DOWN)

    def drain(self) -> None:
        """Hold new requests until ``release``; streams end with UNAVAILABLE after the requests they have read."""
        self._released = self._released or asyncio.Event()
        self._streams.drain()

    def release(self) -> None:
        """Process the requests held since ``drain``; call it after clients got GOAWAY."""
        if self._released is not None:
            self._released.set()

    async def _wait_for_release(self) -> None:
        self.num_held += 1
        if self._released is not None:
            await self._released.wait()

    # Health and metadata.

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """Always live."""
        return pb.ServerLiveResponse(live=True)

    @answering
    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Ready if every model is, unless the service was started with ``--strict-readiness=false``."""
        return pb.ServerReadyResponse(ready=(self._is_ready or self._core.is_ready)())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Name, version, extensions."""
        return pb.ServerMetadataResponse(
            name=self.server_id,
            version=__version__,
            extensions=(*EXTENSIONS, *(() if self._memory is None else self._memory.extensions)),
        )

    @answering
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """False for an unknown model too, as in Triton Inference Server."""
        access.check_model(request.name)
        is_ready = False
        with contextlib.suppress(NotFoundError):
            is_ready = self._core.is_model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=is_ready)

    @answering
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Wire datatypes; shapes include the batch dimension as a leading -1."""
        access.check_model(request.name)
        signature = self._core.signature(request.name, request.version)
        versions = [
            entry.version
            for entry in self._core.index(ready_only=True)
            if entry.name == request.name and (not request.version or entry.version == request.version)
        ]
        return metadata_from_signature(signature, versions or [signature.version])

    @answering
    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """The complete configuration."""
        access.check_model(request.name)
        return pb.ModelConfigResponse(config=self._core.config(request.name, request.version))

    @answering
    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Counters of one model, or of all without a name."""
        if request.name:
            access.check_model(request.name)
        statistics = self._core.statistics(request.name, request.version)
        messages = list(map(statistics_message, statistics))
        if (elsewhere := self._extension.more_statistics) is not None:
            messages = summed([*messages, *await elsewhere(request.name, request.version)])
        if (behind := self._extension.own_statistics) is not None:
            own = {(one.name, one.version): one for one in await behind(request.name, request.version)}
            messages = [own.get((one.name, one.version), one) for one in messages]
        return pb.ModelStatisticsResponse(model_stats=[entry for entry in messages if access.allows(entry.name)])

    # Inference.

    async def ModelInfer(self, request: InferMessage | InferCall, context: Context) -> Any:
        """One request, one response."""
        if self._released is not None:
            await self._wait_for_release()
        memory = None
        if not isinstance(request, InferCall) and PARAMETER in request.parameters:
            try:
                request, memory = self._received(request)
            except WeftError as error:
                self._edge.fail(context, error)
                return None
        response, call_context = await self._infer(request, headers_of(context), deadline_ns_of(context))
        if isinstance(response, WeftError):
            self._edge.fail(context, response, call_context=call_context)
            return None
        if call_context.trailing_metadata:
            context.set_trailing_metadata(sendable(call_context.trailing_metadata))
        if memory is not None and self._local_tensors is not None:
            return self._local_tensors.answered(response, memory)
        return response

    def _received(self, request: InferMessage) -> tuple[InferMessage, TensorMemory]:
        if self._local_tensors is None:
            raise InvalidArgumentError(UNKNOWN)
        return self._local_tensors.received(request)

    async def _infer(
        self, request: InferMessage | InferCall, headers: Mapping[str, str], deadline_ns: int | None
    ) -> tuple[Any, CallContext]:
        """Answer one request: returns the response or error, and the call's span. Cancelling withdraws the request."""
        call_context, span = self._edge.begin(request.model_name, headers, deadline_ns)
        name_in_logs(request.request_id, call_context)
        failure: WeftError | None = None
        try:
            with access.admission(request.model_name):
                call, places = self._read_call(request, call_context)
                result = await self._core.infer(call, call_context)
                response = message_of_result(result, places) if places or result.parameters else result
        except asyncio.CancelledError:
            failure = withdrawal(call_context)
            raise
        except Exception as error:
            failure = self._edge.as_weft_error(error, request.model_name, call_context)
            return failure, call_context
        else:
            return response, call_context
        finally:
            if span is not INVALID_SPAN:
                telemetry.end_span(span, failure)
            del failure  # it holds this frame, and with it the tensors

    def _read_call(
        self, request: InferMessage | InferCall, call_context: CallContext
    ) -> tuple[InferCall, Mapping[str, TensorLocation]]:
        if isinstance(request, InferCall):  # without parameters, and all of it was parsed
            return request, _NO_PLACES
        if self._extension.precheck is not None:
            self._extension.precheck(
                request.model_name, request.model_version, partial(_parameters_of, request), call_context
            )
        call = call_of(request, self._memory)
        if call.parameters:
            access.clamp_priority(call.parameters)
        return call, _NO_PLACES if self._memory is None else output_locations(request, self._memory)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[InferMessage | InferCall], context: Context
    ) -> AsyncIterator[tuple[str, InferMessage]]:
        """Concurrent requests; responses come in the order of requests, those of decoupled models as they are produced.

        An error is a message in ``error_message``, its status a parameter, and the stream continues; with the metadata
        ``triton_grpc_error: true`` the first error ends the stream with its status. Cancelling the stream
        cancels its requests. Responses are produced no faster than the client reads, apart from a small buffer.
        """
        if self._released is not None:
            await self._wait_for_release()
        async with contextlib.aclosing(self._streams.serve(request_iterator, context)) as answers:
            async for answer in answers:
                yield answer

    # Repository control.

    @answering
    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Every model version with its state and, unless ready, the reason."""
        entry_message = pb.RepositoryIndexResponse.ModelIndex
        entries = (entry for entry in self._core.index(ready_only=request.ready) if access.allows(entry.name))
        return pb.RepositoryIndexResponse(models=[entry_message(**entry._asdict()) for entry in entries])

    @answering
    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Returns when the model is ready."""
        access.check_model(request.model_name)
        await self._core.load(request.model_name, parameters_from(request.parameters))
        return pb.RepositoryModelLoadResponse()

    @answering
    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Returns when the model has stopped."""
        access.check_model(request.model_name)
        parameters = parameters_from(request.parameters)
        await self._core.unload(request.model_name, unload_dependents=parameters.get("unload_dependents") is True)
        return pb.RepositoryModelUnloadResponse()

    @answering
    async def TraceSetting(self, request: pb.TraceSettingRequest, context: Context) -> pb.TraceSettingResponse:
        """Changes settings if the request has any, here and then behind; returns those in force here.

        A setting without a value is cleared: it falls back from a model to all models, from those to the default.
        """
        if request.model_name:
            access.check_model(request.model_name)
            try:
                self._core.is_model_ready(request.model_name, "")
            except NotFoundError as error:  # here Triton Inference Server's words are others
                raise error.with_message(f"Request for unknown model : {request.model_name}") from None
        await self._change_settings(request)
        value = pb.TraceSettingResponse.SettingValue
        found = settings.TRACE.values(request.model_name)
        return pb.TraceSettingResponse(settings={name: value(value=values) for name, values in found.items()})

    @answering
    async def LogSettings(self, request: pb.LogSettingsRequest, context: Context) -> pb.LogSettingsResponse:
        """Changes settings if the request has any, here and then behind; returns those in force here."""
        await self._change_settings(request)
        response = pb.LogSettingsResponse()
        for name, value in settings.LOG.values().items():
            kind = {bool: "bool_param", int: "uint32_param"}.get(type(value), "string_param")
            setattr(response.settings[name], kind, value)
        return response

    async def _change_settings(self, request: pb.TraceSettingRequest | pb.LogSettingsRequest) -> None:
        if request.settings:
            change_settings(request)
            if self._extension.pass_on is not None:
                await self._extension.pass_on(request)

    # Shared memory.

    SystemSharedMemoryStatus = _status_of(SystemRegion, pb.SystemSharedMemoryStatusResponse, key="key", offset="start")
    CudaSharedMemoryStatus = _status_of(CudaRegion, pb.CudaSharedMemoryStatusResponse, device_id="device_id")
    SystemSharedMemoryUnregister = _unregister_of(SystemRegion, pb.SystemSharedMemoryUnregisterResponse)
    CudaSharedMemoryUnregister = _unregister_of(CudaRegion, pb.CudaSharedMemoryUnregisterResponse)
    SystemSharedMemoryRegister = _register_of(
        SharedMemory.register, pb.SystemSharedMemoryRegisterResponse, "key", "offset", "byte_size"
    )
    CudaSharedMemoryRegister = _register_of(
        SharedMemory.register_cuda, pb.CudaSharedMemoryRegisterResponse, "raw_handle", "device_id", "byte_size"
    )


def change_settings(request: pb.TraceSettingRequest | pb.LogSettingsRequest) -> None:
    """Change settings of this process, all or none. Raises InvalidArgumentError or UnsupportedError."""
    if isinstance(request, pb.TraceSettingRequest):
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        settings.TRACE.update(request.model_name, changes)
        return
    given = ((name, value, value.WhichOneof("parameter_choice")) for name, value in request.settings.items())
    settings.LOG.update({name: getattr(value, kind) if kind else None for name, value, kind in given})


def _parameters_of(request: InferMessage) -> Parameters:
    """The parameters of a request; its priority is limited to what its key allows."""
    values = given(request.parameters)
    access.clamp_priority(values)
    return values
