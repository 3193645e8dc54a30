"""A target behind gRPC: any V2 server; one unary call for each step, or one stream for a decoupled model.

Unary calls use the client's stub directly, which saves two Python calls over ``V2Client.infer``.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from typing_extensions import override

from weft.base.core import TIMES_HEADER, CallContext, InferCall, InferResult
from weft.base.errors import RemoteError, UnavailableError, UnsupportedError, WeftError
from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.router.target import Target, TargetModel, is_to_come, named, too_late
from weft.v2.client.channels import MAX_TIMEOUT_S
from weft.v2.client.local_tensors import LocalTensors
from weft.v2.client.v2_client import RpcFailure, V2Client, metadata_of
from weft.v2.client.wires import WireName
from weft.v2.protocol.status import CACHE_HIT, from_rpc_error, response_of
from weft.v2.protocol.wire import result_of, signature_from_metadata
from weft.v2.security.channel import ChannelSecurity
from weft.v2.server.call_boundary import CLIENT_AHEAD_NS
from weft.wire.client import UnaryCall
from weft.wire.interface import grpc

#: A configuration is read when the state of its model changes. A reloaded model may differ while the index looks the
#: same, so each discovery also reads so many others, in turn: 64 take about 10 ms.
CONFIGS_PER_DISCOVERY = 64

_log = get_logger("weft.router.targets")


class _Known(NamedTuple):
    state: str
    model: TargetModel | None


class GrpcTarget(Target):
    """A V2 server reached over one channel; make it on the event loop that uses it.

    Args:
        address: ``host:port`` or any name that gRPC resolves.
        security: TLS and key; None: plaintext without a key.
        wire: Implementation of gRPC; None: ``default_wire``.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        options: Sequence[tuple[str, Any]] = (),
        security: ChannelSecurity | None = None,
        wire: WireName | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.client = V2Client(
            address, where=f"target '{name}' ({address})", options=options, security=security, wire=wire
        )
        self._tensors = LocalTensors(address) if address.startswith("unix:") else None
        #: The model whose configuration was read longest ago comes first.
        self._known: dict[tuple[str, str], _Known] = {}

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Like ``Target.infer``; the remaining time becomes the gRPC deadline."""
        timeout_s = None if context.deadline_ns is None else self._timeout_s(call, context.deadline_ns)
        metadata = metadata_of(context) if context.trace_context is not None else tuple(context.headers.items())
        tensors = self._tensors
        try:
            if tensors is not None and tensors.is_for(call):
                rpc: Any = None

                def invoke(request: Any) -> Any:
                    nonlocal rpc
                    rpc = self.client.model_infer(request, timeout=timeout_s, metadata=metadata or None)
                    return rpc

                response = await tensors.infer(call, invoke)
            else:
                # A small call has no more layers than it needs: of 80 us that a call by name costs the router at 32
                # in flight, those around its RPC were 9 (AMD EPYC).
                rpc = self.client.model_infer(call, timeout=timeout_s, metadata=metadata or None)
                response = await (rpc if type(rpc) is UnaryCall else response_of(rpc))
                if tensors is not None:
                    tensors.note(call.model_name, response)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            raise self._failure(error, call, context, timeout_s, "{} did not answer") from error
        result = result_of(response)
        trailing: Any
        if type(rpc) is UnaryCall:
            trailing = () if rpc.trailers is None else rpc.trailers.metadata
        else:
            trailing = tuple(await rpc.trailing_metadata() or ())
        if trailing:
            result.is_cached = result.is_cached or CACHE_HIT in trailing
            context.trailing_metadata += (pair for pair in trailing if pair[0] == TIMES_HEADER)
        return result

    @override
    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``Target.stream_infer``; each call has a stream of its own."""
        timeout_s = None if context.deadline_ns is None else self._timeout_s(call, context.deadline_ns)
        late = "the stream of {} did not end"
        failed = partial(self._failure, call=call, context=context, timeout_s=timeout_s, late=late)
        return self.client.stream(call, timeout_s=timeout_s, metadata=metadata_of(context), failed=failed)

    @override
    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        try:
            return await self._discover(timeout_s)
        except WeftError:
            self._known = {}
            raise

    @override
    async def close(self) -> None:
        await self.client.close()
        if self._tensors is not None:
            self._tensors.close()

    async def _discover(self, timeout_s: float) -> list[TargetModel]:
        index = await self.client.index(timeout_s=timeout_s)
        if not index and not await self.client.is_ready(timeout_s=timeout_s):
            raise UnavailableError(f"target '{self.name}' ({self.address}) is starting: it lists no model yet")
        listed = {(m.name, m.version): m for m in index if is_to_come(m.state, m.reason)}
        # A model without a version is one that failed to load, or is on a server that has no versions.
        states = {(m.name, m.version): m.state for m in index if m.version or m.state == "READY"}
        reasons = {(m.name, m.version): m.reason for m in index if m.state != "READY"}
        due = set(islice(self._known, CONFIGS_PER_DISCOVERY))
        asked = [key for key, state in states.items() if key in due or self._has_changed(key, state)]
        answers = await asyncio.gather(*(self._model(*key, timeout_s=timeout_s) for key in asked))
        known = {key: entry for key, entry in self._known.items() if key in states and key not in asked}
        for key, model in zip(asked, answers, strict=True):
            earlier = self._known.get(key)
            known[key] = _Known(states[key], model or (earlier.model if earlier else None))
        self._known = known
        models = {
            key: model._replace(is_ready=state == "READY", reason=reasons.get(key, ""))
            for key, state in states.items()
            if (model := known[key].model) is not None
        }
        others = (
            TargetModel.undescribed(*key, listed[key].state, listed[key].reason) for key in listed if key not in models
        )
        return [*models.values(), *others]

    def _has_changed(self, key: tuple[str, str], state: str) -> bool:
        known = self._known.get(key)
        return known is None or known.state != state or (known.model is None and state == "READY")

    async def _model(self, name: str, version: str, *, timeout_s: float) -> TargetModel | None:
        """The model by its configuration, or by its metadata if the server has no configurations.

        None if it has neither, as for a model that failed to load.
        """
        try:
            config = await self.client.config(name, version, timeout_s=timeout_s)
        except WeftError as error:
            if error.code == UnsupportedError.code:
                return await self._model_by_metadata(name, version, timeout_s=timeout_s)
            _log.debug("no configuration of %s/%s at %s: %s", name, version, self.address, error.message)
            return None
        return TargetModel(ModelSignature.from_config(config, version), False, config)

    async def _model_by_metadata(self, name: str, version: str, *, timeout_s: float) -> TargetModel | None:
        """A model whose batch dimension, if any, is an ordinary one: metadata do not distinguish it."""
        try:
            response = await self.client.model_metadata(name, version, timeout_s=timeout_s)
        except WeftError as error:
            _log.debug("no metadata of %s/%s at %s: %s", name, version, self.address, error.message)
            return None
        return TargetModel(signature_from_metadata(name, version, response), False)

    def _timeout_s(self, call: InferCall, deadline_ns: int) -> float:
        timeout_s = min((deadline_ns - time.monotonic_ns()) / 1e9, MAX_TIMEOUT_S)
        if timeout_s <= 0:
            raise too_late(named(self, call), timeout_s)
        return timeout_s

    def _failure(
        self, error: RpcFailure, call: InferCall, context: CallContext, timeout_s: float | None, late: str
    ) -> WeftError:
        """Convert the error of a call; ``late`` is the message for a passed deadline, with ``{}`` for the model.

        DEADLINE_EXCEEDED before the deadline has another cause, such as a queue timeout, which the server has reported.
        """
        where = named(self, call)
        if isinstance(error, grpc.aio.UsageError):
            return UnavailableError(f"{where} is no longer used: its channel is closed")
        failure = from_rpc_error(error, where)
        is_late = context.deadline_ns is not None and time.monotonic_ns() >= context.deadline_ns - CLIENT_AHEAD_NS
        if is_late and timeout_s is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return RemoteError(failure.code, f"{late.format(where)} within the {timeout_s * 1e3:.0f} ms that were left")
        return failure
