"""Calls and notes between workers, over a socket pair each, ordered by the parent."""

import asyncio
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from weft.base.errors import ERROR_BY_CODE, InternalError, RemoteError, UnavailableError, WeftError
from weft.base.observing.logs import get_logger

#: How long a sibling may take to answer a question, and to make a change, in seconds.
ASK_TIMEOUT_S = 2.0
CHANGE_TIMEOUT_S = 60.0
#: A worker that leaves so many bytes of notes unread has lost touch with its siblings, and is ended.
MAX_UNREAD_BYTES = 16 << 20

#: Answers a call. What it does before it first waits happens in the order of the messages.
CallHandler: TypeAlias = Callable[[Any], Any]
#: Takes a note, at once; what it raises is logged.
NoteHandler: TypeAlias = Callable[[Any], None]

_LENGTH = struct.Struct("!I")

_log = get_logger("weft.workers")


class Answer(NamedTuple):
    """The answer of one worker, by its index from 1; after an error, b"" and the error."""

    worker: int
    payload: Any = b""
    error: WeftError | None = None


class Peer:
    """One end of a private socket to our own code; messages keep their order.

    Args:
        calls: Handlers by name; a WeftError that one raises is raised again at the other end.
    """

    def __init__(self, where: str, calls: Mapping[str, CallHandler], notes: Mapping[str, NoteHandler]) -> None:
        self._where = where
        self._calls = calls
        self._notes = notes
        self._ids = count(1)
        self._waiting: dict[int, tuple[asyncio.Future[Any], Callable[[], None]]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other end is still connected, as far as known."""
        return self._writer is not None

    @property
    def num_unread_bytes(self) -> int:
        """Bytes sent that the other end has not read."""
        return 0 if self._writer is None else self._writer.transport.get_write_buffer_size()

    async def connect(self, connection: socket.socket) -> None:
        """Send over this socket; ``run`` must follow."""
        connection.setblocking(False)  # the socket's own interface
        self._reader, self._writer = await asyncio.open_unix_connection(sock=connection)

    async def run(self) -> None:
        """Receive until the other end closes, then close the socket; pending calls raise UnavailableError."""
        reader, writer = self._reader, self._writer
        if reader is None or writer is None:
            return
        try:
            while True:
                (size_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._take(*pickle.loads(await reader.readexactly(size_bytes)))  # noqa: S301  # of our own process
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
                    answer.set_exception(UnavailableError(f"{self._where} is gone"))
            self._waiting.clear()

    async def call(
        self,
        name: str,
        payload: Any = b"",
        *,
        timeout_s: float | None = None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> Any:
        """Call the other end and return its answer, or raise its error; UnavailableError: it is gone.

        ``on_answer`` runs before the answer is returned.
        """
        call_id = next(self._ids)
        if not self._send(call_id, name, payload):
            raise UnavailableError(f"{self._where} is gone")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer, on_answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise UnavailableError(f"{self._where} has not answered '{name}' within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(call_id, None)

    def tell(self, name: str, payload: Any) -> None:
        """Send a note; it is lost if the other end is gone."""
        self._send(0, name, payload)

    def _send(self, call_id: int, name: str, payload: Any, error: tuple[str, str] | None = None) -> bool:
        """Send a note (id 0), a call, or with the name "" the answer to one; False: the other end is gone."""
        if self._writer is None:
            return False
        body = pickle.dumps((call_id, name, payload, error))
        self._writer.write(_LENGTH.pack(len(body)) + body)
        return True

    def _take(self, call_id: int, name: str, payload: Any, error: tuple[str, str] | None) -> None:
        if not call_id:
            try:
                self._notes[name](payload)
            except Exception:
                _log.exception("a note of %s cannot be taken", self._where, extra={"note": name})
        elif name:
            try:
                answer = self._calls[name](payload)
            except Exception as failure:
                self._send(call_id, "", b"", told(failure))
                return
            if not isinstance(answer, Awaitable):
                self._send(call_id, "", answer)
                return
            task = asyncio.ensure_future(self._answer_later(call_id, answer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif call_id in self._waiting:
            waiting, on_answer = self._waiting.pop(call_id)
            on_answer()
            if waiting.done():
                pass  # cancelled
            elif error is None:
                waiting.set_result(payload)
            else:
                waiting.set_exception(error_of(error))

    async def _answer_later(self, call_id: int, answer: Awaitable[Any]) -> None:
        try:
            payload = await answer
        except Exception as failure:
            self._send(call_id, "", b"", told(failure))
        else:
            self._send(call_id, "", payload)


def told(error: Exception) -> tuple[str, str]:
    """Code and message of an error, to send to another process; an unexpected error is logged here."""
    if not isinstance(error, WeftError):
        failure = InternalError(f"{type(error).__name__} between workers")
        _log.error("%s", failure.message, exc_info=error, extra={"error_id": failure.error_id})
        error = failure
    return error.code, error.message


def error_of(told_error: tuple[str, str]) -> WeftError:
    """Recreate an error that another process sent."""
    code, message = told_error
    kind = ERROR_BY_CODE.get(code)
    return RemoteError(code, message) if kind is None else kind(message)


class Hub:
    """Connects the workers of a group, each by a ``Peer``.

    A worker that starts receives a snapshot from a sibling and then every change and note exactly once. Changes are
    applied to one worker after another, so that all end in the same state.

    Args:
        on_lost_touch: Called with the index of a worker that does not read its notes.
    """

    def __init__(self, on_lost_touch: Callable[[int], None]) -> None:
        self._on_lost_touch = on_lost_touch
        self._peers: dict[int, Peer] = {}
        self._joined: set[int] = set()
        #: By worker that is joining: the sibling whose snapshot has what it tells until then.
        self._sources: dict[int, int] = {}
        #: Workers that have joined and can give a snapshot.
        self._settled: set[int] = set()
        #: Workers, also earlier ones of the same index, of whose knowledge those that have settled were told.
        self._known: set[int] = set()
        self._changing = asyncio.Lock()

    def peer(self, worker: int) -> Peer:
        """Create the parent's end for a new worker; it replaces an earlier one of the same index."""
        calls: dict[str, CallHandler] = {
            "join": lambda _: self._join(worker),
            "settle": lambda _: self._settle(worker),
            "ask": lambda named: self._passed(self.answers(*named, of=self._joined - {worker})),
            "change": self._change,
        }
        notes: dict[str, NoteHandler] = {"note": lambda named: self._pass_on(worker, *named)}
        peer = self._peers[worker] = Peer(f"worker {worker}", calls, notes)
        return peer

    def leave(self, worker: int) -> None:
        """Disconnect a worker that has ended."""
        self._peers.pop(worker, None)
        self._joined.discard(worker)
        self._settled.discard(worker)
        self._sources.pop(worker, None)
        if not self._settled:
            self._known.clear()

    async def answers(
        self, name: str, payload: Any = b"", *, of: Iterable[int] | None = None, timeout_s: float = ASK_TIMEOUT_S
    ) -> list[Answer]:
        """Call workers (all connected ones by default), each within ``timeout_s``, and collect their answers."""

        async def answer(worker: int) -> Answer:
            try:
                peer = self._peers.get(worker)
                if peer is None:
                    raise UnavailableError(f"worker {worker} is gone")
                return Answer(worker, await peer.call(name, payload, timeout_s=timeout_s))
            except WeftError as error:
                return Answer(worker, error=error)

        return list(await asyncio.gather(*map(answer, sorted(self._peers if of is None else of))))

    async def _passed(self, answers: Awaitable[list[Answer]]) -> list[tuple[Any, ...]]:
        return [(worker, payload, error and told(error)) for worker, payload, error in await answers]

    async def _join(self, worker: int) -> tuple[bool, bytes]:
        """Whether the group knows what an earlier worker of the index knew, and a sibling's snapshot."""
        async with self._changing:
            siblings = [
                answer.worker for answer in await self.answers("ping", of=self._settled) if answer.error is None
            ]
            was_known = worker in self._known
            self._joined.add(worker)
            if not siblings:
                return was_known, b""
            # What the source tells until it answers is in its snapshot; what others tell reaches it after the call.
            source = self._sources[worker] = siblings[0]

            def forget_source() -> None:
                self._sources.pop(worker, None)

            try:
                return was_known, await self._peers[source].call(
                    "snapshot", timeout_s=CHANGE_TIMEOUT_S, on_answer=forget_source
                )
            except WeftError:
                self._joined.discard(worker)
                raise
            finally:
                forget_source()

    def _settle(self, worker: int) -> bytes:
        self._settled.add(worker)
        self._known.add(worker)
        return b""

    async def _change(self, named: tuple[str, Any]) -> list[tuple[Any, ...]]:
        """What all workers answer to a change, but those that end meanwhile: their successors take it over."""
        async with self._changing:
            answers = await self._passed(self.answers(*named, of=self._joined, timeout_s=CHANGE_TIMEOUT_S))
            return [one for one in answers if one[0] in self._joined and self._peers[one[0]].is_open]

    def _pass_on(self, worker: int, name: str, payload: Any) -> None:
        for sibling in self._joined - {worker}:
            if self._sources.get(sibling) == worker:
                continue
            peer = self._peers[sibling]
            peer.tell(name, payload)
            if peer.num_unread_bytes > MAX_UNREAD_BYTES:
                _log.error("worker %d does not read what its siblings tell it, and is ended", sibling)
                self._joined.discard(sibling)
                self._on_lost_touch(sibling)
