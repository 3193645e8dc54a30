"""Client of the router that forwards each caller's key, deadline and trace context."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft_common.client.channels import open_channel
from weft_common.errors import RemoteError
from weft_common.protocol.rpc import ASKS_FOR_STATUS, EOF, begun, cancel, ended
from weft_common.protocol.status import from_rpc_error
from weft_common.security.channel import ChannelSecurity
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from weft_protos.model_config_pb2 import ModelConfig

#: Metadata of a call.
Metadata = Sequence[tuple[str, str]]

#: Timeout of list and configuration calls, in seconds.
LOOKUP_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 2.0
#: Reconnects quickly to a restarted router; balances round-robin if the name resolves to several.
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
]
_WHERE = "the router"  # hides its address from clients of the gateway
_FINAL = "triton_final_response"


class RouterClient:
    """One channel to a router; make it on the event loop that uses it.

    Args:
        address: ``host:port`` or any name that gRPC resolves.
        security: TLS; None: plaintext. It has no key: each call shows that of the client.

    Raises:
        InvalidArgumentError: A file of ``security`` is missing or wrong.
    """

    def __init__(self, address: str, security: ChannelSecurity | None = None) -> None:
        self._channel = open_channel(address, options=_OPTIONS, security=security)
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def is_serving(self) -> bool:
        """Whether the router answers that it serves."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def ready_models(self, metadata: Metadata) -> list[str]:
        """Names of the graphs and models that are READY and that the key in ``metadata`` may use, each once, in order.

        Raises:
            RemoteError: The router does not answer, or refuses.
        """
        try:
            index = await self._stub.RepositoryIndex(
                pb.RepositoryIndexRequest(ready=True), timeout=LOOKUP_TIMEOUT_S, metadata=tuple(metadata)
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, _WHERE) from error
        return list(dict.fromkeys(entry.name for entry in index.models if entry.state == "READY"))

    async def config(self, model: str, metadata: Metadata) -> ModelConfig:
        """Configuration of a graph or model. Raises RemoteError: also NOT_FOUND, and what a key does not allow."""
        try:
            response = await self._stub.ModelConfig(
                pb.ModelConfigRequest(name=model), timeout=LOOKUP_TIMEOUT_S, metadata=tuple(metadata)
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, _WHERE) from error
        config: ModelConfig = response.config
        return config

    async def stream(
        self, request: pb.ModelInferRequest, metadata: Metadata, timeout_s: float
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """Every response to one request that has outputs. Closing the iterator cancels the request.

        The next response is read when it is asked for, so that a slow reader slows the model down.

        Args:
            request: To a decoupled model or any other.
            metadata: Of the call.
            timeout_s: Its deadline from now, in seconds.

        Raises:
            RemoteError: As the model, the router or the way there failed; also after some responses.
        """
        rpc: Any = self._stub.ModelStreamInfer(
            iter((request,)), timeout=timeout_s, metadata=(*metadata, ASKS_FOR_STATUS)
        )
        is_final = False
        try:
            await begun(rpc)
            while not is_final and (message := await rpc.read()) is not EOF:
                if message.error_message:
                    raise RemoteError("UNKNOWN", message.error_message)
                response = message.infer_response
                is_final = response.parameters[_FINAL].bool_param if _FINAL in response.parameters else False
                if response.outputs:
                    yield response
            if is_final:
                await ended(rpc)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, _WHERE) from error
        finally:
            cancel(rpc)

    async def close(self) -> None:
        """The channel is closed; calls on it are cancelled."""
        await self._channel.close(None)
