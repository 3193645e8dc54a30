"""The two kinds of requests of a call: one message, or a stream of them."""

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Final

from weft.wire.client.call import CALL_ENDED, ClientCall
from weft.wire.client.outcome import CallOwner
from weft.wire.connection.streams import StreamStates
from weft.wire.interface import StatusCode, grpc
from weft.wire.rpc.compression import compress
from weft.wire.rpc.messages import Body, is_body, pack_prefix

_HALF_CLOSED: Final = 'RPC is half closed after calling "done_writing".'
_MIXED: Final = "The iterator and read/write APIs may not be mixed on a single RPC."
#: Requests kept for a call that the server may refuse; one that has sent more is not sent again.
_MAX_KEPT_BYTES: Final = 256 << 10

_log = logging.getLogger("weft.wire.client")


def check_body(body: object) -> None:
    """Raise TypeError unless ``body`` can be sent: nothing may fail once it is in the output of a connection."""
    if not is_body(body):
        raise TypeError(f"a serialized request is bytes, not {type(body)}")


class OneRequest(ClientCall):
    """A call with one request, which is sent in one piece with the fields."""

    needs_whole_request = True
    _body: Body = b""
    _encoding: str = "identity"

    def set_request(self, body: Body, encoding: str) -> None:
        """What is to be sent; to be called before ``CallOwner.begin``."""
        self._body = body
        if encoding != "identity":
            self._encoding = encoding

    def start(self, connection: StreamStates) -> None:
        """Send the request."""
        connection.open_stream(self)
        body = self._body
        if self._encoding == "identity":
            prefix = pack_prefix(0, len(body))
        else:
            body = compress(self._encoding, body)
            prefix = pack_prefix(1, len(body))
        connection.send_message(self, self._request_block(), prefix, body, is_end=True)
        if self._watchers is not None:
            self._wake_watchers()

    def _wake(self) -> None:
        self._body = b""
        super()._wake()


class StreamedRequests(ClientCall):
    """A call whose requests come from an iterator, or from ``write``."""

    _is_done_writing: bool = False
    _feeder: asyncio.Task[None] | None = None
    _num_kept_bytes: int = 0

    def __init__(
        self,
        owner: CallOwner,
        block: bytes,
        deserialize: Callable[[bytes], Any] | None,
        serialize: Callable[[Any], Body] | None,
        encoding: str,
    ) -> None:
        super().__init__(owner, block, deserialize)
        self._serialize = serialize
        self._encoding = encoding
        self._kept: list[tuple[bytes, Body]] | None = []

    def feed_from(self, requests: AsyncIterable[Any] | Iterable[Any]) -> None:
        """Send what an iterator gives; to be called before ``CallOwner.begin``."""
        self._feeder = self._owner.loop.create_task(self._feed(requests))

    async def _feed(self, requests: AsyncIterable[Any] | Iterable[Any]) -> None:
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    await self._send(request)
            else:
                for request in requests:
                    await self._send(request)
            self._half_close()
        except (asyncio.InvalidStateError, grpc.RpcError):
            pass  # the call has ended
        except BaseException as error:
            if self._status is None:
                _log.debug("the iterator of requests has failed", exc_info=error)
                self.cancel()
            if not isinstance(error, Exception):
                raise

    def start(self, connection: StreamStates) -> None:
        """Send the fields, and the requests that were given before."""
        connection.open_stream(self)
        kept = self._kept or ()
        connection.send_headers(self, self._request_block(), is_end=self._is_done_writing and not kept)
        for prefix, body in kept:
            connection.send_message(self, None, prefix, body)
        if self._is_done_writing:
            connection.end_data(self)
        if self._watchers is not None:
            self._wake_watchers()

    def _can_be_sent_again(self) -> bool:
        return self._kept is not None

    def _wake(self) -> None:
        self._kept = None
        if self._feeder is not None and not self._feeder.done():
            self._owner.loop.call_soon(self._feeder.cancel)
        super()._wake()

    async def write(self, request: Any) -> None:
        """Send a request; waits while the server takes no more. Cancelling the caller cancels the call.

        Raises:
            AioRpcError: The call ends while this waits.
            InvalidStateError: The call has ended, or ``done_writing`` was called.
            UsageError: The call has an iterator of requests.
        """
        if self._feeder is not None:
            raise grpc.aio.UsageError(_MIXED)
        await self._send(request)

    async def done_writing(self) -> None:
        """No more requests follow.

        Raises:
            UsageError: The call has an iterator of requests.
        """
        if self._feeder is not None:
            raise grpc.aio.UsageError(_MIXED)
        self._half_close()

    async def _send(self, request: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError(CALL_ENDED)
        if self._is_done_writing:
            raise asyncio.InvalidStateError(_HALF_CLOSED)
        try:
            if not self.is_open:
                await self._wait_until(lambda: self.is_open)
                self._raise_if_ended()
            message = self._packed(request)
            if message is None:
                self._raise_if_ended()
                return
            self._keep(message)
            prefix, body = message
            self.connection.send_message(self, None, prefix, body)
            if self.pending is not None:
                await self._wait_until(lambda: self.is_open and self.pending is None)
                self._raise_if_ended()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_if_ended(self) -> None:
        if self._status is not None:
            self._raise_failure()

    def _packed(self, request: Any) -> tuple[bytes, Body] | None:
        """The prefix and the message; None if the call has ended for it."""
        try:
            body = request if self._serialize is None else self._serialize(request)
            check_body(body)
        except Exception:
            _log.exception("a request cannot be serialized")
            self.fail(StatusCode.INTERNAL, "Exception serializing request!")
            return None
        if self._encoding != "identity":
            body = compress(self._encoding, body)
        limit = self._owner.options.max_message_bytes
        if len(body) > limit:
            text = f"Sent message larger than max ({len(body)} vs. {limit})"
            self.fail(StatusCode.RESOURCE_EXHAUSTED, text)
            return None
        return pack_prefix(int(self._encoding != "identity"), len(body)), body

    def _keep(self, message: tuple[bytes, Body]) -> None:
        """Keep a request for the case that the server refuses the call."""
        if self._kept is None:
            return
        self._num_kept_bytes += len(message[1]) + len(message[0])
        if self._is_committed or self._is_retried or self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._kept = None
        else:
            self._kept.append(message)

    def _half_close(self) -> None:
        if not self._is_done_writing:
            self._is_done_writing = True
            if self.is_open:
                self.connection.end_data(self)
