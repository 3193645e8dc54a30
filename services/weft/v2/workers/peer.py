"""Calls and notes in both directions over one stream socket."""

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import NamedTuple, TypeAlias

from weft.base.errors import ERROR_BY_CODE, InternalError, RemoteError, UnavailableError, WeftError
from weft.base.observing.logs import get_logger

#: Answers a call. What it does before it first waits happens in the order of the messages.
CallHandler: TypeAlias = Callable[[bytes], Awaitable[bytes] | bytes]
#: Takes a note, at once; what it raises is logged.
NoteHandler: TypeAlias = Callable[[bytes], None]

#: Bytes that follow, id of the call, kind of the message.
_HEAD = struct.Struct("!IQB")
_CALL, _NOTE, _ANSWER, _ERROR = range(4)

_log = get_logger("weft.workers")


class Peer:
    """One end of the socket; messages arrive in the order in which they were sent.

    Args:
        where: The other end, for messages.
        calls: By name; what an answer raises is raised at the other end, as the same WeftError.
        notes: By name.
    """

    def __init__(self, where: str, calls: Mapping[str, CallHandler], notes: Mapping[str, NoteHandler]) -> None:
        self._where = where
        self._calls = calls
        self._notes = notes
        self._ids = count()
        self._waiting: dict[int, tuple[asyncio.Future[bytes], Callable[[], None]]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other end is there, as far as is known."""
        return self._writer is not None

    @property
    def num_unread_bytes(self) -> int:
        """How much was sent that the other end has not taken."""
        return 0 if self._writer is None else self._writer.transport.get_write_buffer_size()

    async def connect(self, connection: socket.socket) -> None:
        """Send over this socket; ``run`` must follow."""
        connection.setblocking(False)  # the socket's own interface
        self._reader, self._writer = await asyncio.open_unix_connection(sock=connection)

    async def run(self) -> None:
        """Take messages until the other end closes; calls that wait then raise UnavailableError. Closes the socket."""
        reader, writer = self._reader, self._writer
        if reader is None or writer is None:
            return
        try:
            while True:
                size_bytes, call_id, kind = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                self._take(call_id, kind, await reader.readexactly(size_bytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other process has ended
        finally:
            writer.close()
            self._writer = None
            for task in list(self._answering):
                task.cancel()
            for answer, on_answer in self._waiting.values():
                on_answer()
                if not answer.done():
                    answer.set_exception(self._gone())
            self._waiting.clear()

    async def call(
        self,
        name: str,
        payload: bytes = b"",
        *,
        timeout_s: float | None = None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> bytes:
        """The answer of the other end.

        Args:
            name: Of what is asked.
            payload: Goes with it.
            timeout_s: Longest wait; None: there is no limit.
            on_answer: Called when the answer comes, before any later message of the other end is taken.

        Raises:
            UnavailableError: The other end is gone, or has not answered in time.
            WeftError: As the other end raised it.
        """
        call_id = next(self._ids)
        self._send(call_id, _CALL, _named(name, payload))
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer, on_answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise UnavailableError(f"{self._where} has not answered '{name}' within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(call_id, None)

    def tell(self, name: str, payload: bytes) -> None:
        """Send a note; one to an end that is gone is lost."""
        if self._writer is not None:
            self._send(0, _NOTE, _named(name, payload))

    def _gone(self) -> UnavailableError:
        return UnavailableError(f"{self._where} is gone")

    def _send(self, call_id: int, kind: int, body: bytes) -> None:
        if self._writer is None:
            raise self._gone()
        self._writer.write(_HEAD.pack(len(body), call_id, kind) + body)

    def _take(self, call_id: int, kind: int, body: bytes) -> None:
        if kind == _NOTE:
            name, _, payload = body.partition(b"\0")
            try:
                self._notes[name.decode()](payload)
            except Exception:
                _log.exception("a note of %s cannot be taken", self._where, extra={"note": name.decode()})
        elif kind == _CALL:
            self._answer(call_id, body)
        elif call_id in self._waiting:
            answer, on_answer = self._waiting.pop(call_id)
            on_answer()
            if answer.done():
                pass  # cancelled
            elif kind == _ANSWER:
                answer.set_result(body)
            else:
                answer.set_exception(error_from(body))

    def _answer(self, call_id: int, body: bytes) -> None:
        name, _, payload = body.partition(b"\0")
        try:
            answer = self._calls[name.decode()](payload)
        except Exception as error:
            self._refuse(call_id, error)
            return
        if isinstance(answer, bytes):
            self._send(call_id, _ANSWER, answer)
            return
        task = asyncio.ensure_future(self._answer_later(call_id, answer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_later(self, call_id: int, answer: Awaitable[bytes]) -> None:
        try:
            body = await answer
        except Exception as error:
            self._refuse(call_id, error)
            return
        if self._writer is not None:
            self._send(call_id, _ANSWER, body)

    def _refuse(self, call_id: int, error: Exception) -> None:
        if not isinstance(error, WeftError):
            failure = InternalError(f"{type(error).__name__} between workers")
            _log.error("%s", failure.message, exc_info=error, extra={"error_id": failure.error_id})
            error = failure
        if self._writer is not None:
            self._send(call_id, _ERROR, error_bytes(error))


def error_bytes(error: WeftError) -> bytes:
    """An error for another process."""
    return json.dumps([error.code, error.message]).encode()


def error_from(body: bytes) -> WeftError:
    """The error of ``error_bytes``."""
    code, message = json.loads(body)
    kind = ERROR_BY_CODE.get(code)
    return RemoteError(code, message) if kind is None else kind(message)


def _named(name: str, payload: bytes) -> bytes:
    return name.encode() + b"\0" + payload


#: Index of the worker, whether it raised, bytes that follow.
_ANSWER_HEAD = struct.Struct("!H?I")


class Answer(NamedTuple):
    """The answer of one worker.

    Attributes:
        worker: Its index, from 1.
        payload: What it answered; b"" where it raised.
        error: What it raised.
    """

    worker: int
    payload: bytes = b""
    error: WeftError | None = None


def pack(answers: Iterable[Answer]) -> bytes:
    """The answers as one message."""
    parts = []
    for worker, payload, error in answers:
        body = payload if error is None else error_bytes(error)
        parts.append(_ANSWER_HEAD.pack(worker, error is not None, len(body)) + body)
    return b"".join(parts)


def unpack(message: bytes) -> Iterator[Answer]:
    """The answers of a message that ``pack`` made."""
    at = 0
    while at < len(message):
        worker, is_error, size_bytes = _ANSWER_HEAD.unpack_from(message, at)
        at += _ANSWER_HEAD.size
        body = message[at : at + size_bytes]
        at += size_bytes
        yield Answer(worker, error=error_from(body)) if is_error else Answer(worker, body)
