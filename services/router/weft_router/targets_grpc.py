"""A target behind gRPC: any V2 server, one unary call a step."""

import asyncio
import time
from itertools import islice
from typing import Any, NamedTuple

import grpc

from weft_common import telemetry
from weft_common.channels import MAX_TIMEOUT_S, open_channel
from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import DeadlineExceededError, RemoteError, UnavailableError
from weft_common.logs import get_logger
from weft_common.signature import ModelSignature
from weft_common.status import from_rpc_error
from weft_common.wire import request_from_call, result_from_response
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from weft_protos.model_config_pb2 import ModelConfig
from weft_router.targets import TargetModel

#: Configurations are asked for when a model's state changes. Because a reloaded model may differ while the index looks
#: the same, so many others are asked for at each discovery, in turn.
CONFIGS_PER_DISCOVERY = 16

_log = get_logger("weft.router.targets")


class _Known(NamedTuple):
    state: str
    config: ModelConfig | None


class GrpcTarget:
    """A V2 server reached over one channel; make it on the event loop that uses it.

    Args:
        name: As given to the router.
        address: ``host:port`` or any name that gRPC resolves.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._channel = open_channel(address)
        self._stub = GRPCInferenceServiceStub(self._channel)
        #: The one whose configuration was asked for longest ago comes first.
        self._known: dict[tuple[str, str], _Known] = {}

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As ``Target.infer``; the time that is left becomes the gRPC deadline."""
        timeout_s: float | None = None
        if context.deadline_ns is not None:
            timeout_s = min((context.deadline_ns - time.monotonic_ns()) / 1e9, MAX_TIMEOUT_S)
            if timeout_s <= 0:
                raise DeadlineExceededError(
                    f"the deadline passed {-timeout_s * 1e3:.1f} ms before {self._where(call)} was called"
                )
        metadata = (*context.headers.items(), *telemetry.inject(context.trace_context).items())
        try:
            response = await _response_of(
                self._stub.ModelInfer(request_from_call(call), timeout=timeout_s, metadata=metadata or None)
            )
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, call, timeout_s) from error
        except grpc.aio.UsageError as error:
            raise UnavailableError(f"{self._where(call)} is no longer used: its channel is closed") from error
        return result_from_response(response)

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """As ``Target.discover``."""
        try:
            return await self._discover(timeout_s)
        except grpc.aio.AioRpcError as error:
            self._known = {}
            raise from_rpc_error(error, f"target '{self.name}' ({self.address})") from error

    async def close(self) -> None:
        """As ``Target.close``."""
        await self._channel.close(None)

    async def _discover(self, timeout_s: float) -> list[TargetModel]:
        index: pb.RepositoryIndexResponse = await self._stub.RepositoryIndex(
            pb.RepositoryIndexRequest(), timeout=timeout_s
        )
        states = {(model.name, model.version): model.state for model in index.models if model.version}
        due = set(islice(self._known, CONFIGS_PER_DISCOVERY))
        asked = [key for key, state in states.items() if key in due or self._is_news(key, state)]
        configs = await asyncio.gather(*(self._config(*key, timeout_s=timeout_s) for key in asked))
        known = {key: entry for key, entry in self._known.items() if key in states and key not in asked}
        for key, config in zip(asked, configs, strict=True):
            earlier = self._known.get(key)
            known[key] = _Known(states[key], config or (earlier.config if earlier else None))
        self._known = known
        return [
            TargetModel(ModelSignature.from_config(config, key[1]), state == "READY", config)
            for key, state in states.items()
            if (config := known[key].config) is not None
        ]

    def _is_news(self, key: tuple[str, str], state: str) -> bool:
        known = self._known.get(key)
        return known is None or known.state != state or (known.config is None and state == "READY")

    async def _config(self, name: str, version: str, *, timeout_s: float) -> ModelConfig | None:
        """The model's configuration; None where the server has none, as for a model that failed to load."""
        try:
            response: pb.ModelConfigResponse = await self._stub.ModelConfig(
                pb.ModelConfigRequest(name=name, version=version), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            _log.debug("no configuration of %s/%s at %s: %s", name, version, self.address, error.details())
            return None
        return response.config

    def _where(self, call: InferCall) -> str:
        version = f" version {call.model_version}" if call.model_version else ""
        return f"model '{call.model_name}'{version} on target '{self.name}' ({self.address})"

    def _failure(self, error: grpc.aio.AioRpcError, call: InferCall, timeout_s: float | None) -> RemoteError:
        failure = from_rpc_error(error, self._where(call))
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
            text = f"{self._where(call)} did not answer within the {timeout_s * 1e3:.0f} ms that were left"
            return RemoteError(failure.code, text)
        return failure


async def _response_of(rpc: Any) -> pb.ModelInferResponse:
    """The response of a call that was started; cancelling the awaiting task cancels the call.

    To await the call itself would do the same, but ``grpc.aio`` loses 1 kB each time that its own task is cancelled
    (grpcio 1.85): a race that cancels 100 losers a second would lose 8 GB a day. So that task is left to end by itself,
    which it does as soon as the call beneath it is cancelled.
    """
    task = getattr(rpc, "_invocation_task", None)
    if task is not None:
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            rpc._cython_call.cancel("the router cancelled")
            raise
    response: pb.ModelInferResponse = await rpc
    return response
