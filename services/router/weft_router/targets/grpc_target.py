"""A target behind gRPC: any V2 server; one unary call a step, or one stream for a decoupled model."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import grpc

from weft_common.client.channels import MAX_TIMEOUT_S, open_channel
from weft_common.client.exchange_client import ExchangeClient
from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import DeadlineExceededError, RemoteError, UnavailableError
from weft_common.observing import telemetry
from weft_common.observing.logs import get_logger
from weft_common.protocol.rpc import ASKS_FOR_STATUS, EOF, begun, cancel, ended, response_of, streamed
from weft_common.protocol.status import from_rpc_error
from weft_common.protocol.wire import request_from_call, result_from_response
from weft_common.security.channel import ChannelSecurity
from weft_common.signature import ModelSignature, TensorSpec
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from weft_router.target import TargetModel

#: Configurations are asked for when a model's state changes. Because a reloaded model may differ while the index looks
#: the same, so many others are asked for at each discovery, in turn: 64 take about 10 ms.
CONFIGS_PER_DISCOVERY = 64

_log = get_logger("weft.router.targets")


class _Known(NamedTuple):
    state: str
    model: TargetModel | None


class GrpcTarget:
    """A V2 server reached over one channel; make it on the event loop that uses it.

    Args:
        name: As given to the router.
        address: ``host:port`` or any name that gRPC resolves.
        options: Of the channel, beside those that all have.
        use_exchange: Calls travel together in one stream where the server offers it. False for a channel that balances
            each call over several servers: a stream has one of them.
        security: TLS and key; None: plaintext without a key.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        options: Sequence[tuple[str, Any]] = (),
        use_exchange: bool = True,
        security: ChannelSecurity | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self._channel = open_channel(address, options=options, security=security)
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._exchange = ExchangeClient(self._channel) if use_exchange else None
        #: The one whose configuration was asked for longest ago comes first.
        self._known: dict[tuple[str, str], _Known] = {}

    @property
    def channel(self) -> grpc.aio.Channel:
        """What it is reached over."""
        return self._channel

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As ``Target.infer``; the time that is left becomes the gRPC deadline."""
        timeout_s = None if context.deadline_ns is None else self._timeout_s(call, context.deadline_ns)
        metadata = tuple(context.headers.items())
        if context.trace_context is not None:
            metadata += tuple(telemetry.inject(context.trace_context).items())
        try:
            begun_call = None if self._exchange is None else self._exchange.begin(call, metadata, timeout_s)
            if begun_call is not None:
                response = await begun_call.response()
            else:
                response = await response_of(
                    self._stub.ModelInfer(request_from_call(call), timeout=timeout_s, metadata=metadata or None)
                )
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, call, timeout_s, "{} did not answer") from error
        except grpc.aio.UsageError as error:
            raise self._closed(call) from error
        return result_from_response(response)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``Target.stream_infer``; each call has a stream of its own.

        Where no response is marked as the last, the end of the stream says it. A server that sends the text of an error
        without its status has failed with UNKNOWN.
        """
        timeout_s = None if context.deadline_ns is None else self._timeout_s(call, context.deadline_ns)
        metadata = (*context.headers.items(), *telemetry.inject(context.trace_context).items(), ASKS_FOR_STATUS)
        request = request_from_call(call)
        rpc: Any = None
        is_final = False
        version = call.model_version
        try:
            rpc = self._stub.ModelStreamInfer(iter((request,)), timeout=timeout_s, metadata=metadata)
            await begun(rpc)
            while not is_final and (message := await rpc.read()) is not EOF:
                if message.error_message:
                    raise RemoteError("UNKNOWN", message.error_message)
                result = streamed(message.infer_response)
                is_final, version = result.is_final, result.model_version
                yield result
            if is_final:
                await ended(rpc)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, call, timeout_s, "the stream of {} did not end") from error
        except grpc.aio.UsageError as error:
            raise self._closed(call) from error
        finally:
            if rpc is not None:
                cancel(rpc)
        if not is_final:
            yield InferResult(call.model_name, version, call.request_id, is_null=True)

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """As ``Target.discover``."""
        try:
            return await self._discover(timeout_s)
        except grpc.aio.AioRpcError as error:
            self._known = {}
            raise from_rpc_error(error, f"target '{self.name}' ({self.address})") from error

    async def close(self) -> None:
        """As ``Target.close``."""
        if self._exchange is not None:
            await self._exchange.close()
        await self._channel.close(None)

    async def _discover(self, timeout_s: float) -> list[TargetModel]:
        index: pb.RepositoryIndexResponse = await self._stub.RepositoryIndex(
            pb.RepositoryIndexRequest(), timeout=timeout_s
        )
        # A model without a version is one that failed to load, or is on a server that has no versions.
        states = {(m.name, m.version): m.state for m in index.models if m.version or m.state == "READY"}
        reasons = {(m.name, m.version): m.reason for m in index.models if m.state != "READY"}
        due = set(islice(self._known, CONFIGS_PER_DISCOVERY))
        asked = [key for key, state in states.items() if key in due or self._is_news(key, state)]
        models = await asyncio.gather(*(self._model(*key, timeout_s=timeout_s) for key in asked))
        known = {key: entry for key, entry in self._known.items() if key in states and key not in asked}
        for key, model in zip(asked, models, strict=True):
            earlier = self._known.get(key)
            known[key] = _Known(states[key], model or (earlier.model if earlier else None))
        self._known = known
        return [
            model._replace(is_ready=state == "READY", reason=reasons.get(key, ""))
            for key, state in states.items()
            if (model := known[key].model) is not None
        ]

    def _is_news(self, key: tuple[str, str], state: str) -> bool:
        known = self._known.get(key)
        return known is None or known.state != state or (known.model is None and state == "READY")

    async def _model(self, name: str, version: str, *, timeout_s: float) -> TargetModel | None:
        """The model by its configuration, or by its metadata where the server has no configurations.

        None where it has neither, as for a model that failed to load.
        """
        try:
            response: pb.ModelConfigResponse = await self._stub.ModelConfig(
                pb.ModelConfigRequest(name=name, version=version), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return await self._model_by_metadata(name, version, timeout_s=timeout_s)
            _log.debug("no configuration of %s/%s at %s: %s", name, version, self.address, error.details())
            return None
        return TargetModel(ModelSignature.from_config(response.config, version), False, response.config)

    async def _model_by_metadata(self, name: str, version: str, *, timeout_s: float) -> TargetModel | None:
        """A model whose batch dimension, if it has one, is one of its own: metadata do not tell them apart."""
        try:
            response: pb.ModelMetadataResponse = await self._stub.ModelMetadata(
                pb.ModelMetadataRequest(name=name, version=version), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            _log.debug("no metadata of %s/%s at %s: %s", name, version, self.address, error.details())
            return None
        inputs, outputs = (
            tuple(TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors)
            for tensors in (response.inputs, response.outputs)
        )
        return TargetModel(ModelSignature(name, version, response.platform, 0, inputs, outputs), False)

    def _timeout_s(self, call: InferCall, deadline_ns: int) -> float:
        """The time that is left, in seconds. Raises DeadlineExceededError when none is."""
        timeout_s = min((deadline_ns - time.monotonic_ns()) / 1e9, MAX_TIMEOUT_S)
        if timeout_s <= 0:
            raise DeadlineExceededError(
                f"the deadline passed {-timeout_s * 1e3:.1f} ms before {self._where(call)} was called"
            )
        return timeout_s

    def _where(self, call: InferCall) -> str:
        version = f" version {call.model_version}" if call.model_version else ""
        return f"model '{call.model_name}'{version} on target '{self.name}' ({self.address})"

    def _failure(self, error: grpc.aio.AioRpcError, call: InferCall, timeout_s: float | None, late: str) -> RemoteError:
        """The error that a call ended with; ``late`` says of the model, its ``{}``, what did not happen in time."""
        failure = from_rpc_error(error, self._where(call))
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
            what = late.format(self._where(call))
            return RemoteError(failure.code, f"{what} within the {timeout_s * 1e3:.0f} ms that were left")
        return failure

    def _closed(self, call: InferCall) -> UnavailableError:
        return UnavailableError(f"{self._where(call)} is no longer used: its channel is closed")
