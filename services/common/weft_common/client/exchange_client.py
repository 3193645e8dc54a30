"""Client of ``weft.mesh.v1.Exchange``: multiplexes unary calls over one stream.

If the exchange cannot accept a call, for whatever reason, the caller falls back to ``ModelInfer``.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from weft_common.core import InferCall
from weft_common.protocol.exchange_wire import (
    EXTENSION,
    MAX_BATCH_BYTES,
    MAX_INFLIGHT,
    MAX_WAITING_BYTES,
    METHOD_NAME,
    SERVICE_NAME,
    Outbox,
)
from weft_common.protocol.rpc import EOF, cancel
from weft_common.protocol.wire import fill_request
from weft_protos import grpc_service_pb2 as pb
from weft_protos import mesh_pb2
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

#: Calls with more tensor bytes are unary, so that they do not block others in the stream. An exchange
#: is cheaper at every size (64 B to 8 MB, loopback, 2 cores AMD EPYC).
MAX_CALL_BYTES = 1 << 20
#: How long calls of a model stay unary after a response larger than ``MAX_CALL_BYTES``, in seconds.
LARGE_ANSWER_S = 10.0
#: Timeout of opening an exchange, and retry period after a failure, in seconds.
OPEN_TIMEOUT_S = 2.0
OPEN_PERIOD_S = 2.0

_STATUS_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_OK, _LATE, _UNAUTHENTICATED = 0, grpc.StatusCode.DEADLINE_EXCEEDED.value[0], grpc.StatusCode.UNAUTHENTICATED.value[0]


class ExchangeClient:
    """Calls to one service over an exchange, which is opened on demand if the service supports it.

    Args:
        channel: Channel to one service; owned by the caller.
        clock_s: Monotonic clock in seconds.
    """

    def __init__(self, channel: grpc.aio.Channel, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._metadata = GRPCInferenceServiceStub(channel).ServerMetadata
        path = f"/{SERVICE_NAME}/{METHOD_NAME}"
        self._method: Any = channel.stream_stream(path, None, None)  # bytes in, bytes out
        self._open: _ClientExchange | None = None
        self._next_attempt_s = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        #: Time until which the calls of a model are unary.
        self._large_until_s: dict[str, float] = {}

    @property
    def is_open(self) -> bool:
        """Whether calls are accepted."""
        return self._open is not None

    def begin(
        self, call: InferCall, headers: Iterable[tuple[str, str]], timeout_s: float | None
    ) -> "PendingCall | None":
        """Start a call; None: it was not accepted."""
        exchange = self._open
        if exchange is None:
            self._open_soon()
            return None
        if self._large_until_s and self._clock_s() < self._large_until_s.get(call.model_name, 0.0):
            return None
        num_bytes = 0
        for tensor in call.inputs.values():
            num_bytes += len(tensor.data)
        if num_bytes > MAX_CALL_BYTES:
            return None
        return exchange.begin(call, headers, timeout_s)

    async def close(self) -> None:
        """Fail calls in flight with UNAVAILABLE, and accept no more."""
        self._is_closed, self._open = True, None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _open_soon(self) -> None:
        now_s = self._clock_s()
        if now_s < self._next_attempt_s or self._is_closed:
            return
        self._next_attempt_s = float("inf")
        task = asyncio.get_running_loop().create_task(self._run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        """Open an exchange and serve it to its end; remaining calls fail."""
        rpc: Any = None
        exchange: _ClientExchange | None = None
        writer: asyncio.Task[None] | None = None
        status, details = grpc.StatusCode.UNAVAILABLE, ""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                offer: pb.ServerMetadataResponse = await self._metadata(pb.ServerMetadataRequest())
                if EXTENSION not in offer.extensions:
                    return
                rpc = self._method()
                message = await rpc.read()
            if message is EOF:
                return
            max_message_bytes = mesh_pb2.ExchangeResponse.FromString(message).max_message_bytes
            self._open = exchange = _ClientExchange(max_message_bytes, self._retire)
            writer = asyncio.get_running_loop().create_task(exchange.write_to(rpc))
            while (message := await rpc.read()) is not EOF:
                for model_name in exchange.take(message):
                    self._large_until_s[model_name] = self._clock_s() + LARGE_ANSWER_S
        except grpc.aio.AioRpcError as error:
            status, details = error.code(), error.details() or ""
        except DecodeError:
            status, details = grpc.StatusCode.INTERNAL, "an answer cannot be read"
        except (TimeoutError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass
        finally:
            if exchange is not None:
                self._retire(exchange)
                exchange.lose(status, details)
            else:
                self._next_attempt_s = self._clock_s() + OPEN_PERIOD_S
            if writer is not None:
                writer.cancel()
            if rpc is not None:
                cancel(rpc)

    def _retire(self, exchange: "_ClientExchange") -> None:
        """Accept no more calls on this exchange; the next call opens another."""
        if self._open is exchange:
            self._open = None
            self._next_attempt_s = float("-inf")
        exchange.retire()


class _ClientExchange:
    """One stream.

    Args:
        max_message_bytes: Largest message that the service accepts.
        on_closing: Called when the service stops accepting calls on this stream.
    """

    def __init__(self, max_message_bytes: int, on_closing: Callable[["_ClientExchange"], None]) -> None:
        self._max_message_bytes = max_message_bytes
        self._on_closing = on_closing
        self._outbox = Outbox(min(MAX_BATCH_BYTES, max_message_bytes))
        self._waiting: dict[int, asyncio.Future[mesh_pb2.Answer]] = {}
        self._ids = itertools.count(1)
        self._is_retired = False

    def begin(
        self, call: InferCall, headers: Iterable[tuple[str, str]], timeout_s: float | None
    ) -> "PendingCall | None":
        """As ``ExchangeClient.begin``."""
        outbox = self._outbox
        if max(len(self._waiting), len(outbox.envelopes)) >= MAX_INFLIGHT or outbox.num_bytes >= MAX_WAITING_BYTES:
            return None
        call_id = next(self._ids)
        message = mesh_pb2.ExchangeRequest()
        envelope = message.calls.add(id=call_id)
        if timeout_s is not None:
            envelope.timeout_us = max(1, int(timeout_s * 1e6))
        for key, value in headers:
            envelope.headers[key] = value
        fill_request(envelope.request, call)
        data = message.SerializeToString()
        if len(data) > self._max_message_bytes:
            return None
        future = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        return PendingCall(self, call_id, outbox.put(data), future, timeout_s)

    def withdraw(self, call_id: int, number: int) -> None:
        """Cancel a call; one that is not sent yet is only removed from the outbox."""
        if self._waiting.pop(call_id, None) is None:
            return
        if not self._outbox.drop(number):
            message = mesh_pb2.ExchangeRequest()
            message.calls.add(id=call_id, is_cancel=True)
            self._outbox.put(message.SerializeToString())
        self._end_when_answered()

    def take(self, data: bytes) -> list[str]:
        """Resolve the responses of a message; returns the names of models with large responses.

        Raises:
            DecodeError: It is not an ``ExchangeResponse``.
        """
        message = mesh_pb2.ExchangeResponse.FromString(data)
        for answer in message.answers:
            future = self._waiting.pop(answer.id, None)
            if future is not None and not future.done():
                future.set_result(answer)
            if answer.status == _UNAUTHENTICATED:  # the key of this stream was revoked
                self._on_closing(self)
        if message.is_closing:
            self._on_closing(self)
        if self._is_retired:
            self._end_when_answered()
        if len(data) <= MAX_CALL_BYTES:
            return []
        return [answer.response.model_name for answer in message.answers if answer.status == _OK]

    async def write_to(self, rpc: Any) -> None:
        """Send everything until the outbox ends."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader gets the same error
            while message := await self._outbox.take():
                await rpc.write(message)
            await rpc.done_writing()

    def retire(self) -> None:
        """Start no more calls; half-close the stream when those in flight have ended."""
        self._is_retired = True
        self._end_when_answered()

    def _end_when_answered(self) -> None:
        if self._is_retired and not self._waiting:
            self._outbox.end()

    def lose(self, status: grpc.StatusCode, details: str) -> None:
        """Fail every call in flight with UNAVAILABLE."""
        if status is not grpc.StatusCode.UNAVAILABLE:
            details = f"Stream removed ({status.name}: {details})"
        answer = mesh_pb2.Answer(status=grpc.StatusCode.UNAVAILABLE.value[0], message=details)
        for future in self._waiting.values():
            if not future.done():
                future.set_result(answer)
        self._waiting.clear()


@dataclass(slots=True)
class PendingCall:
    """A call in flight."""

    exchange: _ClientExchange
    call_id: int
    number: int
    future: "asyncio.Future[mesh_pb2.Answer]"
    timeout_s: float | None

    async def response(self) -> pb.ModelInferResponse:
        """Wait for the response. Cancelling the awaiting task cancels the call at the server.

        Raises:
            AioRpcError: Like ``ModelInfer``: the status of the service, DEADLINE_EXCEEDED, or UNAVAILABLE if the
                exchange was lost.
        """
        timer = None
        if self.timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(self.timeout_s, self._expire)
        try:
            answer = await self.future
        except asyncio.CancelledError:
            self.exchange.withdraw(self.call_id, self.number)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if answer.status == _OK:
            return answer.response
        status = _STATUS_BY_NUMBER.get(answer.status, grpc.StatusCode.UNKNOWN)
        trailing = grpc.aio.Metadata(*((pair.key, pair.value) for pair in answer.trailing_metadata))
        raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, answer.message, None)

    def _expire(self) -> None:
        if not self.future.done():
            self.exchange.withdraw(self.call_id, self.number)
            self.future.set_result(mesh_pb2.Answer(status=_LATE))
