"""What workers ask of one another, in the parent, which passes it on in one order."""

import asyncio
from collections.abc import Callable, Iterable

from weft.base.errors import UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.v2.workers.peer import Answer, CallHandler, Peer, pack

#: How long a sibling may take to answer a question, and to make a change, in seconds.
ASK_TIMEOUT_S = 2.0
CHANGE_TIMEOUT_S = 60.0
#: A worker that leaves so many bytes of notes unread has lost touch with its siblings, and is ended.
MAX_UNREAD_BYTES = 16 << 20

_log = get_logger("weft.workers")


class Hub:
    """Connects the workers of a group, each by a ``Peer``.

    A worker joins when it starts: it receives a snapshot of what a sibling knows, and from then on every change and
    note, none of them twice. Changes are made by one worker after another's, so that all end in the same state.

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
        """A new worker's end in this process; in place of that of an earlier one of its index."""
        calls: dict[str, CallHandler] = {
            "join": lambda _: self._join(worker),
            "settle": lambda _: self._settle(worker),
            "ask": lambda body: self._ask(worker, body),
            "change": self._change,
        }
        peer = self._peers[worker] = Peer(f"worker {worker}", calls, {"note": lambda body: self._pass_on(worker, body)})
        return peer

    def leave(self, worker: int) -> None:
        """A worker has ended."""
        self._peers.pop(worker, None)
        self._joined.discard(worker)
        self._settled.discard(worker)
        self._sources.pop(worker, None)
        if not self._settled:
            self._known.clear()

    async def answers(
        self, name: str, payload: bytes = b"", *, of: Iterable[int] | None = None, timeout_s: float = ASK_TIMEOUT_S
    ) -> list[Answer]:
        """What workers answer to a call.

        Args:
            name: Of the call.
            payload: Of the call.
            of: Indices; None: of every worker that is connected.
            timeout_s: Longest wait for each.
        """

        async def answer(worker: int) -> Answer:
            try:
                peer = self._peers.get(worker)
                if peer is None:
                    raise UnavailableError(f"worker {worker} is gone")
                return Answer(worker, await peer.call(name, payload, timeout_s=timeout_s))
            except WeftError as error:
                return Answer(worker, error=error)

        return list(await asyncio.gather(*map(answer, sorted(self._peers if of is None else of))))

    async def _join(self, worker: int) -> bytes:
        """Whether the group knows what an earlier worker of the index knew (one byte), and a sibling's snapshot."""
        async with self._changing:
            siblings = [
                answer.worker for answer in await self.answers("ping", of=self._settled) if answer.error is None
            ]
            was_known = bytes([worker in self._known])
            self._joined.add(worker)
            if not siblings:
                return was_known
            # What the source tells until it answers is in its snapshot; what others tell reaches it after the call.
            source = self._sources[worker] = siblings[0]
            try:
                return was_known + await self._peers[source].call(
                    "snapshot", timeout_s=CHANGE_TIMEOUT_S, on_answer=lambda: self._forget_source(worker)
                )
            except WeftError:
                self._joined.discard(worker)
                raise
            finally:
                self._forget_source(worker)

    def _forget_source(self, worker: int) -> None:
        self._sources.pop(worker, None)

    def _settle(self, worker: int) -> bytes:
        self._settled.add(worker)
        self._known.add(worker)
        return b""

    async def _ask(self, worker: int, body: bytes) -> bytes:
        """What the siblings of a worker answer."""
        name, _, payload = body.partition(b"\0")
        return pack(await self.answers(name.decode(), payload, of=self._joined - {worker}))

    async def _change(self, body: bytes) -> bytes:
        """What all workers answer to a change, but those that end meanwhile: their successors take it over."""
        name, _, payload = body.partition(b"\0")
        async with self._changing:
            answers = await self.answers(name.decode(), payload, of=self._joined, timeout_s=CHANGE_TIMEOUT_S)
            return pack(answer for answer in answers if self._is_there(answer.worker))

    def _is_there(self, worker: int) -> bool:
        return worker in self._joined and self._peers[worker].is_open

    def _pass_on(self, worker: int, body: bytes) -> None:
        name, _, payload = body.partition(b"\0")
        for sibling in self._joined - {worker}:
            if self._sources.get(sibling) == worker:
                continue
            peer = self._peers[sibling]
            peer.tell(name.decode(), payload)
            if peer.num_unread_bytes > MAX_UNREAD_BYTES:
                _log.error("worker %d does not read what its siblings tell it, and is ended", sibling)
                self._joined.discard(sibling)
                self._on_lost_touch(sibling)
