"""The V2 service: every RPC of ``inference.GRPCInferenceService`` over an ``InferenceCore``.

This is the edge: protobuf comes in and goes out here, errors become statuses here, the SERVER span lives here.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any, NoReturn

import grpc
from opentelemetry.trace import Span

from weft_common import telemetry
from weft_common.core import CallContext, InferenceCore, InferResult
from weft_common.errors import InternalError, RequestCancelledError, UnsupportedError, WeftError
from weft_common.logs import get_logger
from weft_common.statistics import DurationCount, ModelStatistics
from weft_common.status import MAX_MESSAGE_CHARS, to_status, trailing_pairs
from weft_common.wire import call_from_request, parameters_from, response_from_result
from weft_protos import grpc_service_pb2 as pb
from weft_protos import grpc_service_pb2_grpc as pb_grpc

EXTENSIONS = (
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

Context = grpc.aio.ServicerContext[Any, Any]

_log = get_logger("weft.servicer")


class V2Servicer(pb_grpc.GRPCInferenceServiceServicer):
    """Answers V2 RPCs from a core.

    Args:
        core: What answers.
        service: Name for spans and ``ServerMetadata``, for example ``weft.router``.
    """

    def __init__(self, core: InferenceCore, service: str) -> None:
        self._core = core
        self._service = service

    # Health and metadata.

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """Live as long as it answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Ready when every model is."""
        return pb.ServerReadyResponse(ready=self._core.is_ready())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Name, version, extensions."""
        return pb.ServerMetadataResponse(name=self._service, version=metadata.version("weft"), extensions=EXTENSIONS)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """NOT_FOUND for an unknown model, as in TIS."""
        try:
            return pb.ModelReadyResponse(ready=self._core.is_model_ready(request.name, request.version))
        except Exception as error:
            await self._abort(context, error)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Wire datatypes; shapes show the batch dimension as a leading -1."""
        try:
            signature = self._core.signature(request.name, request.version)
            versions = [
                entry.version
                for entry in self._core.index(ready_only=True)
                if entry.name == request.name and (not request.version or entry.version == request.version)
            ]
        except Exception as error:
            await self._abort(context, error)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=signature.name,
            versions=versions or [signature.version],
            platform=signature.platform,
            inputs=[
                tensor(name=spec.name, datatype=spec.datatype, shape=signature.full_shape(spec))
                for spec in signature.inputs
            ],
            outputs=[
                tensor(name=spec.name, datatype=spec.datatype, shape=signature.full_shape(spec))
                for spec in signature.outputs
            ],
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """The whole configuration."""
        try:
            return pb.ModelConfigResponse(config=self._core.config(request.name, request.version))
        except Exception as error:
            await self._abort(context, error)

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Counters of one model, or of all when no name is given."""
        try:
            statistics = self._core.statistics(request.name, request.version)
        except Exception as error:
            await self._abort(context, error)
        return pb.ModelStatisticsResponse(model_stats=[_statistics_message(entry) for entry in statistics])

    # Inference.

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """One request, one response."""
        call_context, span = self._begin(request.model_name, context)
        try:
            result = await self._core.infer(call_from_request(request), call_context)
            response = response_from_result(result)
        except asyncio.CancelledError:
            telemetry.end_span(span, RequestCancelledError("the client cancelled, or its deadline passed"))
            raise
        except Exception as error:
            await self._abort(context, error, call_context, span)
        if call_context.trailing_metadata:
            context.set_trailing_metadata(tuple(call_context.trailing_metadata))
        telemetry.end_span(span)
        return response

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Many requests at once; answers come in the order of the requests.

        An error is text in ``error_message`` and the stream goes on, unless the client sent the metadata
        ``triton_grpc_error: true``: then the first error ends the stream with its status. Cancelling the stream cancels
        what is in work.
        """
        ends_on_error = _headers(context).get("triton_grpc_error") == "true"
        in_order: asyncio.Queue[_StreamCall | None] = asyncio.Queue(MAX_STREAM_INFLIGHT)
        running: set[asyncio.Task[None]] = set()

        async def read() -> None:
            with contextlib.suppress(grpc.RpcError):  # the client broke the stream off
                async for request in request_iterator:
                    stream_call = _StreamCall(request)
                    task = asyncio.create_task(self._answer(stream_call, context))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    await in_order.put(stream_call)
            await in_order.put(None)

        reader = asyncio.create_task(read())
        try:
            while (stream_call := await in_order.get()) is not None:
                while (answer := await stream_call.answers.get()) is not None:
                    if isinstance(answer, WeftError):
                        if ends_on_error:
                            await context.abort(to_status(answer), answer.message[:MAX_MESSAGE_CHARS])
                        answer = pb.ModelStreamInferResponse(
                            error_message=answer.message,
                            infer_response=pb.ModelInferResponse(id=stream_call.request.id),
                        )
                    yield answer
        finally:
            reader.cancel()
            for task in running:
                task.cancel()

    async def _answer(self, stream_call: "_StreamCall", context: Context) -> None:
        """Put every response of one request of a stream, or its error, into its queue; then None."""
        request, answers = stream_call.request, stream_call.answers
        call_context, span = self._begin(request.model_name, context)
        failure: BaseException | None = None
        try:
            async for result in self._core.stream_infer(call_from_request(request), call_context):
                answers.put_nowait(_stream_response(result))
        except asyncio.CancelledError:
            failure = RequestCancelledError("the client cancelled the stream")
            raise
        except Exception as error:
            failure = self._as_weft_error(error, request.model_name)
            answers.put_nowait(failure)
        finally:
            telemetry.end_span(span, failure)
            answers.put_nowait(None)

    # Repository control.

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Every model version with its state and, where it does not serve, the reason."""
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
                )
                for entry in self._core.index(ready_only=request.ready)
            ]
        )

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Returns when the model serves."""
        try:
            await self._core.load(request.model_name, parameters_from(request.parameters))
        except Exception as error:
            await self._abort(context, error)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Returns when the model has stopped."""
        try:
            parameters = parameters_from(request.parameters)
            await self._core.unload(request.model_name, unload_dependents=parameters.get("unload_dependents") is True)
        except Exception as error:
            await self._abort(context, error)
        return pb.RepositoryModelUnloadResponse()

    # What this version does not offer. Status and unregister succeed, because clients call them unasked.

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        """No region is registered."""
        return pb.SystemSharedMemoryStatusResponse()

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """UNIMPLEMENTED."""
        await self._abort(context, UnsupportedError("Client shared memory is disabled"))

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Nothing to do."""
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        """No region is registered."""
        return pb.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, context: Context
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """UNIMPLEMENTED."""
        await self._abort(context, UnsupportedError("Client shared memory is disabled"))

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Nothing to do."""
        return pb.CudaSharedMemoryUnregisterResponse()

    async def TraceSetting(self, request: pb.TraceSettingRequest, context: Context) -> pb.TraceSettingResponse:
        """The settings in force; they come from ``OTEL_*`` variables and cannot be changed while the service runs."""
        if request.settings:
            await self._abort(
                context,
                UnsupportedError(
                    f"trace settings {sorted(request.settings)} cannot be changed while the service runs; set "
                    "OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_TRACES_SAMPLER_ARG before it starts"
                ),
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

    async def LogSettings(self, request: pb.LogSettingsRequest, context: Context) -> pb.LogSettingsResponse:
        """The settings in force; ``--log-level`` sets them when the service starts."""
        if request.settings:
            await self._abort(
                context,
                UnsupportedError(
                    f"log settings {sorted(request.settings)} cannot be changed while the service runs; start it with "
                    "--log-level"
                ),
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

    # The edge.

    def _begin(self, model_name: str, context: Context) -> tuple[CallContext, Span]:
        """Context and SERVER span of a call that has just come in."""
        arrival_ns = time.monotonic_ns()
        headers = _headers(context)
        remaining_s = context.time_remaining()
        parent = telemetry.extract(headers)
        span = telemetry.start_span(
            f"{self._service}/{model_name}",
            parent=parent,
            kind=telemetry.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": "inference.GRPCInferenceService", "weft.model": model_name}
            if telemetry.is_enabled()
            else None,
        )
        call_context = CallContext(
            deadline_ns=None if remaining_s is None else arrival_ns + int(remaining_s * 1e9),
            headers=headers,
            trace_context=telemetry.context_of(span, parent) if telemetry.is_enabled() else None,
            arrival_ns=arrival_ns,
        )
        return call_context, span

    def _as_weft_error(self, error: Exception, model_name: str = "") -> WeftError:
        """The error itself, or INTERNAL with an id for one that is not ours; logged."""
        if isinstance(error, WeftError):
            return error
        internal = InternalError(f"{self._service} failed" + (f" on model '{model_name}'" if model_name else ""))
        _log.error("unexpected error", exc_info=error, extra={"error_id": internal.error_id, "model": model_name})
        return internal

    async def _abort(
        self, context: Context, error: Exception, call_context: CallContext | None = None, span: Span | None = None
    ) -> NoReturn:
        """End the RPC with the status, the text and the trailing metadata of ``error``."""
        failure = self._as_weft_error(error)
        trailing = trailing_pairs(failure)
        if call_context is not None:
            trailing += call_context.trailing_metadata
            trace_id = telemetry.trace_id_of(call_context.trace_context)
            if trace_id:
                trailing.append(("x-trace-id", trace_id))
        if span is not None:
            telemetry.end_span(span, failure)
        await context.abort(to_status(failure), failure.message[:MAX_MESSAGE_CHARS], tuple(trailing))
        raise AssertionError("abort returned")  # it never does; this tells the type checker


class _StreamCall:
    """One request of a stream and its answers; None ends them."""

    __slots__ = ("answers", "request")

    def __init__(self, request: pb.ModelInferRequest) -> None:
        self.request = request
        self.answers: asyncio.Queue[pb.ModelStreamInferResponse | WeftError | None] = asyncio.Queue()


def _headers(context: Context) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _stream_response(result: InferResult) -> pb.ModelStreamInferResponse:
    response = response_from_result(result)
    response.parameters["triton_final_response"].bool_param = result.is_final
    return pb.ModelStreamInferResponse(infer_response=response)


def _statistics_message(entry: ModelStatistics) -> pb.ModelStatistics:
    return pb.ModelStatistics(
        name=entry.name,
        version=entry.version,
        last_inference=entry.last_inference_ms,
        inference_count=entry.inference_count,
        execution_count=entry.execution_count,
        inference_stats=pb.InferStatistics(
            success=_duration(entry.success),
            fail=_duration(entry.fail),
            queue=_duration(entry.queue),
            compute_input=_duration(entry.compute_input),
            compute_infer=_duration(entry.compute_infer),
            compute_output=_duration(entry.compute_output),
            cache_hit=_duration(entry.cache_hit),
            cache_miss=_duration(entry.cache_miss),
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=size,
                compute_input=_duration(batch.compute_input),
                compute_infer=_duration(batch.compute_infer),
                compute_output=_duration(batch.compute_output),
            )
            for size, batch in sorted(entry.batches.items())
        ],
    )


def _duration(count: DurationCount) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count.count, ns=count.total_ns)
