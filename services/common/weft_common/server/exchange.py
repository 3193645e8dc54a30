"""Server of ``weft.mesh.v1.Exchange``: many calls in one stream, each handled like ``ModelInfer``.

One message carries all calls that arrived together, which spreads gRPC's cost per message over several calls.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError, EncodeError

from weft_common.client.channels import MAX_MESSAGE_BYTES, MAX_TIMEOUT_S
from weft_common.core import CallContext
from weft_common.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    WeftError,
)
from weft_common.limits import header_fault
from weft_common.protocol.exchange_wire import (
    MAX_BATCH_BYTES,
    MAX_INFLIGHT,
    MAX_WAITING_BYTES,
    METHOD_NAME,
    SERVICE_NAME,
    Outbox,
)
from weft_common.protocol.status import cut_message, to_status
from weft_common.security.access import KEY_HEADERS, is_revoked
from weft_common.server.call_boundary import CallBoundary, Context, headers_of, sendable, trailing_of
from weft_protos import grpc_service_pb2 as pb
from weft_protos import mesh_pb2

#: Fills the response; returns the context of the call, and its error if it failed. Cancelling it cancels the call.
Answer = Callable[
    [pb.ModelInferRequest, pb.ModelInferResponse, Mapping[str, str], int | None],
    Awaitable[tuple[CallContext, WeftError | None]],
]

#: Timers of the event loop may fire early by this much; a deadline not yet passed would be reported as a cancel.
_TIMER_STEP_S = 0.001

_HEADER_KEY = re.compile(r"[0-9a-z_.-]+")


class ExchangeServicer:
    """Serves exchanges.

    Args:
        answer: Handles a call.
        edge: Call boundary of the service.
        shutting_down: Message of UNAVAILABLE while draining.
        max_message_bytes: Largest message in both directions.
    """

    def __init__(
        self, answer: Answer, edge: CallBoundary, shutting_down: str, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._answer = answer
        self._edge = edge
        self._shutting_down = shutting_down
        self._max_message_bytes = max_message_bytes
        self._is_draining = False
        self._exchanges: set[_ServerExchange] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add ``weft.mesh.v1.Exchange`` to a server. Messages are parsed here, so that an error gets a status."""
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {METHOD_NAME: handler}),))

    def drain(self) -> None:
        """Reject new exchanges, and ask callers to close theirs; calls already sent are processed."""
        self._is_draining = True
        for exchange in self._exchanges:
            exchange.say_closing()

    async def _serve(self, requests: AsyncIterator[bytes], context: Context) -> None:
        if self._is_draining:
            self._edge.fail(context, UnavailableError(self._shutting_down).refused())
            return
        exchange = _ServerExchange(self._answer, headers_of(context), self._max_message_bytes)
        self._exchanges.add(exchange)
        try:
            failure = await exchange.run(requests, context.write)
        finally:
            self._exchanges.discard(exchange)
        if failure is not None:
            self._edge.fail(context, failure)


class _Running(NamedTuple):
    task: "asyncio.Task[None]"
    timer: asyncio.TimerHandle | None


class _ServerExchange:
    """One stream.

    Args:
        answer: Handles a call.
        headers: Metadata of the stream, inherited by each call.
        max_message_bytes: Largest message in both directions.
    """

    def __init__(self, answer: Answer, headers: dict[str, str], max_message_bytes: int) -> None:
        self._answer = answer
        self._headers = headers
        self._max_message_bytes = max_message_bytes
        self._outbox = Outbox(min(MAX_BATCH_BYTES, max_message_bytes))
        self._running: dict[int, _Running] = {}
        #: Cancelled tasks that have not ended yet.
        self._leaving: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._is_ending = False  # no more calls come
        self._failure: Exception | None = None

    async def run(self, requests: AsyncIterator[bytes], write: Callable[[bytes], Awaitable[None]]) -> Exception | None:
        """Serve the stream to its end; returns why it failed, or None if the caller ended it."""
        self._outbox.put(mesh_pb2.ExchangeResponse(max_message_bytes=self._max_message_bytes).SerializeToString())
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(self._no_more_calls)
        try:
            while message := await self._outbox.take():
                await write(message)
                self._room.set()
        except grpc.aio.BaseError:  # the caller has disconnected, or the server has stopped
            raise asyncio.CancelledError from None  # as gRPC itself says it a moment later
        finally:
            reader.cancel()
            self._withdraw_all()
        return self._failure

    def say_closing(self) -> None:
        """Ask the caller to send no more calls, and to half-close the stream."""
        self._outbox.put(mesh_pb2.ExchangeResponse(is_closing=True).SerializeToString())

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        with contextlib.suppress(grpc.RpcError):  # the caller reset the stream
            async for message in requests:
                try:
                    calls = mesh_pb2.ExchangeRequest.FromString(message).calls
                except DecodeError:
                    raise InvalidArgumentError("a message of the exchange is no ExchangeRequest") from None
                for call in calls:
                    if call.is_cancel:
                        self._withdraw(call.id)
                        continue
                    while self._is_full():
                        self._room.clear()
                        await self._room.wait()
                    self._begin(call)

    def _is_full(self) -> bool:
        outbox = self._outbox
        return len(self._running) + len(outbox.envelopes) >= MAX_INFLIGHT or outbox.num_bytes >= MAX_WAITING_BYTES

    def _begin(self, call: mesh_pb2.Call) -> None:
        call_id, timeout_us = call.id, call.timeout_us
        if call_id in self._running:
            raise InvalidArgumentError(f"call id {call_id} is in use; take another until its answer has come")
        headers: dict[str, str] = self._headers
        if call.headers:
            headers = {**headers, **call.headers}
            for key in KEY_HEADERS & headers.keys():  # who opened the stream makes its calls
                del headers[key]
            if fault := _header_fault(call.headers):
                self._send_failure(call_id, InvalidArgumentError(fault))
                return
        deadline_ns, timer = None, None
        if timeout_us:
            deadline_ns = time.monotonic_ns() + timeout_us * 1000
            timeout_s = min(timeout_us / 1e6, MAX_TIMEOUT_S) + _TIMER_STEP_S
            timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, call_id)
        task = asyncio.create_task(self._run(call, headers, deadline_ns))
        self._running[call_id] = _Running(task, timer)

    async def _run(self, call: mesh_pb2.Call, headers: Mapping[str, str], deadline_ns: int | None) -> None:
        message = mesh_pb2.ExchangeResponse()
        answer = message.answers.add(id=call.id)
        context, failure = await self._answer(call.request, answer.response, headers, deadline_ns)
        running = self._running.get(call.id)
        if running is None or running.task is not asyncio.current_task():
            return  # withdrawn, and answered all the same
        del self._running[call.id]
        if running.timer is not None:
            running.timer.cancel()
        if failure is not None:
            self._send_failure(call.id, failure, context)
            if is_revoked():
                self.say_closing()  # the next one begins with the caller's new key
        else:
            if context.trailing_metadata:
                _add_headers(answer, sendable(context.trailing_metadata))
            self._send(message)
        self._room.set()
        if self._is_ending:
            self._end_when_answered()

    def _send(self, message: mesh_pb2.ExchangeResponse) -> None:
        try:
            envelope = message.SerializeToString()
            size = f"{len(envelope)} vs. {self._max_message_bytes}"
        except EncodeError:  # beyond 2 GiB
            envelope, size = None, f"over 2 GiB vs. {self._max_message_bytes}"
        if envelope is None or len(envelope) > self._max_message_bytes:
            text = f"Sent message larger than max ({size})"  # as gRPC says it of a unary call
            self._send_failure(message.answers[0].id, ResourceExhaustedError(text))
        else:
            self._outbox.put(envelope)

    def _send_failure(self, call_id: int, failure: WeftError, context: CallContext | None = None) -> None:
        message = mesh_pb2.ExchangeResponse()
        code: Any = to_status(failure).value[0]
        answer = message.answers.add(id=call_id, status=code, message=cut_message(failure.message))
        _add_headers(answer, trailing_of(failure, context))
        self._outbox.put(message.SerializeToString())

    def _expire(self, call_id: int) -> None:
        self._send_failure(call_id, DeadlineExceededError("the client's deadline passed"))
        self._withdraw(call_id)

    def _withdraw(self, call_id: int) -> None:
        """Cancel a call and free its id; no effect if it has ended."""
        running = self._running.pop(call_id, None)
        if running is None:
            return
        if running.timer is not None:
            running.timer.cancel()
        self._leaving.add(running.task)  # asyncio keeps no task alive
        running.task.add_done_callback(self._leaving.discard)
        running.task.cancel()
        self._room.set()
        if self._is_ending:
            self._end_when_answered()

    def _withdraw_all(self) -> None:
        for call_id in list(self._running):
            self._withdraw(call_id)

    def _no_more_calls(self, reader: "asyncio.Task[None]") -> None:
        self._is_ending = True
        error = None if reader.cancelled() else reader.exception()
        if isinstance(error, Exception):
            self._failure = error
            self._withdraw_all()
        self._end_when_answered()

    def _end_when_answered(self) -> None:
        if not self._running:
            self._outbox.end()


def _add_headers(answer: mesh_pb2.Answer, pairs: tuple[tuple[str, str], ...]) -> None:
    for key, value in pairs:
        answer.trailing_metadata.add(key=key, value=value)


def _header_fault(headers: Mapping[str, str]) -> str:
    """Error message for headers that gRPC would not carry; "" if valid."""
    if fault := header_fault(headers):
        return fault
    for key, value in headers.items():
        if not _HEADER_KEY.fullmatch(key) or key.endswith("-bin"):
            return (
                f"header '{key}' is no ASCII metadata: give a key of 0-9, a-z, _, - and . that does not end with -bin"
            )
        if not (value.isascii() and value.isprintable()):
            return f"the value of header '{key}' is not printable ASCII"
    return ""
