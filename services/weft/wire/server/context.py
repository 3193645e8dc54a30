"""The context of a handler: the methods of ``grpc.aio.ServicerContext``."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from weft.wire.errors import ErrorCode
from weft.wire.interface import StatusCode, grpc
from weft.wire.rpc.compression import compress
from weft.wire.rpc.messages import pack_prefix
from weft.wire.rpc.metadata import Metadata, encode_metadata
from weft.wire.rpc.status import STATUS_BY_NUMBER
from weft.wire.server.request import RequestHalf

if TYPE_CHECKING:
    pass

_ENCODINGS = {grpc.Compression.Gzip: "gzip", grpc.Compression.Deflate: "deflate"}


class CallContextMethods(RequestHalf):
    """What a handler asks and tells of its call."""

    def invocation_metadata(self) -> Metadata:
        """Metadata of the request."""
        return self.head.metadata if self.head is not None else ()

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline.when_s - self._protocol.loop.time())

    def peer(self) -> str:
        """Address of the client, as gRPC writes it."""
        return self._protocol.peer

    def auth_context(self) -> dict[str, list[bytes]]:
        """What TLS has verified of the client; empty without TLS."""
        return self._protocol.auth_context

    def peer_identity_key(self) -> str | None:
        """Key of ``auth_context`` that identifies the client; None without a certificate."""
        names = ("x509_subject_alternative_name", "x509_common_name")
        return next((name for name in names if name in self.auth_context()), None)

    def peer_identities(self) -> list[bytes] | None:
        """What is under that key."""
        key = self.peer_identity_key()
        return None if key is None else self.auth_context()[key]

    def set_code(self, code: StatusCode | int) -> None:
        """Set the status that the call ends with."""
        self._code = STATUS_BY_NUMBER.get(code, StatusCode.UNKNOWN) if isinstance(code, int) else code

    def code(self) -> StatusCode | None:
        """The status set so far."""
        return self._code

    def set_details(self, details: str) -> None:
        """Set the message of the status."""
        self._details = details

    def details(self) -> str:
        """The message set so far."""
        return self._details

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Set the metadata that follow the response."""
        self._trailing = tuple(metadata)

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata set so far."""
        return self._trailing

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Send metadata before the response.

        Raises:
            RuntimeError: They were sent.
            ValueError: They cannot be sent; the message says why.
        """
        if self._has_sent_headers:
            raise RuntimeError("the initial metadata were sent")
        initial = tuple(metadata)
        encode_metadata(initial)  # raises before anything is kept
        self._initial = initial
        self._send_headers()

    def set_compression(self, compression: grpc.Compression) -> None:
        """Compress responses, if the client reads that encoding.

        Raises:
            RuntimeError: The initial metadata, which name the encoding, were sent.
        """
        if self._has_sent_headers:
            raise RuntimeError("Compression setting must be specified before sending initial metadata")
        encoding = _ENCODINGS.get(compression, "")
        accepted = self.head.accepted if self.head is not None else ""
        self._encoding = encoding if encoding in accepted.replace(" ", "").split(",") else ""

    def disable_next_message_compression(self) -> None:
        """Ignored: each message says itself whether it is compressed, and one is compressed as all are."""

    async def read(self) -> Any:
        """The next request of a stream; ``grpc.aio.EOF`` at its end."""
        assert self._method is not None  # noqa: S101  # its handler runs
        return await self._next_request(self._method)

    async def write(self, response: Any) -> None:
        """Send one response of a stream; waits while the client reads slower than this.

        Raises:
            UsageError: The call is over.
        """
        method = self._method
        if self.is_finished or method is None:
            raise grpc.aio.UsageError("the call is over")
        body = self._serialized(method, response)
        prefix = b"\0" + len(body).to_bytes(4, "big")
        headers = None
        if not self._has_sent_headers:
            headers = self._header_block()
            self._has_sent_headers = True
        if self._encoding:
            body = compress(self._encoding, body)
            prefix = pack_prefix(1, len(body))
        self.connection.send_message(self, headers, prefix, body)
        if self.pending is not None:
            self._hold_response(len(body))
            await self._drain()

    async def _drain(self) -> None:
        while self.pending is not None and not self.is_finished:
            drained = self._drained
            if drained is None or drained.done():
                drained = self._drained = self._protocol.loop.create_future()
            await asyncio.wait((drained,))  # several tasks may write; one that is cancelled leaves the others waiting

    async def abort(
        self, code: StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        """End the call with a status other than OK, by raising AbortError."""
        if code is StatusCode.OK:
            raise ValueError("a call cannot be aborted with OK")
        self._code, self._details = code, details
        if trailing_metadata:
            self._trailing = tuple(trailing_metadata)
        raise grpc.aio.AbortError("the handler aborted the call")

    async def abort_with_status(self, status: "grpc.Status") -> NoReturn:
        """``abort`` with what ``status`` has."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def add_done_callback(self, callback: Callable[["CallContextMethods"], None]) -> None:
        """Call ``callback`` with this context when the call is over."""
        if self.is_finished:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Whether the client has broken the call off."""
        return self.is_broken_off

    def done(self) -> bool:
        """Whether the call is over."""
        return self.is_finished

    def cancel(self) -> bool:
        """End the call with CANCELLED; False if it is over."""
        if self.is_finished:
            return False
        self.connection.reset(self, ErrorCode.CANCEL)
        self._end()
        if self._task is not None:
            self._task.cancel()
        return True
