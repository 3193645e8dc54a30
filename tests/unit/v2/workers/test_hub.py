"""What workers ask of one another and tell one another, over real socket pairs in one process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from weft.base.errors import NotFoundError, UnavailableError
from weft.v2.server.listening import WorkerPlace
from weft.v2.workers import hub as hub_module
from weft.v2.workers.hub import Hub
from weft.v2.workers.link import WorkerLink

NUM_WORKERS = 3


class FakeWorker:
    """A worker that keeps a number, to which notes add and which a snapshot gives.

    Attributes:
        total: The number.
        changes: What was changed, in order.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.total = 0
        self.changes: list[str] = []
        self.is_holding = asyncio.Event()
        self.released = asyncio.Event()
        self.released.set()
        self._parent: asyncio.Task[None] | None = None

    async def start(self, hub: Hub) -> None:
        ours, its = socket.socketpair()
        peer = hub.peer(self.index)
        await peer.connect(ours)
        self._parent = asyncio.create_task(peer.run())
        self.link = WorkerLink(WorkerPlace(self.index, NUM_WORKERS, its.detach()))
        await self.link.open(
            {"snapshot": self._snapshot, "double": self._double, "fail": self._fail, "set": self._set},
            {"add": self._add},
        )

    async def join(self) -> bool:
        """Whether the group knew an earlier worker of this index."""
        is_known, snapshot = await self.link.join()
        self.total += int(snapshot or b"0")
        await self.link.settle()
        return is_known

    async def end(self, hub: Hub) -> None:
        await self.link.close()
        if self._parent is not None:
            await self._parent
        hub.leave(self.index)

    def tell(self, number: int) -> None:
        self.total += number
        self.link.tell("add", str(number).encode())

    def _add(self, body: bytes) -> None:
        self.total += int(body)

    def _snapshot(self, _: bytes) -> bytes:
        return str(self.total).encode()

    def _double(self, body: bytes) -> bytes:
        return str(2 * int(body)).encode()

    def _fail(self, _: bytes) -> bytes:
        raise NotFoundError(f"not at {self.index}")

    async def _set(self, body: bytes) -> bytes:
        self.is_holding.set()
        await self.released.wait()
        self.changes.append(body.decode())
        return b""


Start = Callable[[int], Awaitable[FakeWorker]]


@asynccontextmanager
async def group() -> AsyncIterator[tuple[Hub, Start]]:
    """A hub, and what starts a worker."""
    lost: list[int] = []
    hub = Hub(lost.append)
    started: list[FakeWorker] = []

    async def start(index: int) -> FakeWorker:
        worker = FakeWorker(index)
        await worker.start(hub)
        started.append(worker)
        return worker

    try:
        yield hub, start
    finally:
        for worker in started:
            with contextlib.suppress(UnavailableError):
                await worker.end(hub)


async def joined(start: Start, *indices: int) -> list[FakeWorker]:
    """Workers that have joined."""
    workers = [await start(index) for index in indices]
    for worker in workers:
        await worker.join()
    return workers


async def test_siblings_answer_and_their_errors_come_back() -> None:
    """A question goes to all but the one who asks; an error keeps its class and its text."""
    async with group() as (_, start), asyncio.timeout(10):
        one, _, _ = await joined(start, 1, 2, 3)
        assert [(2, b"8"), (3, b"8")] == [answer[:2] for answer in await one.link.ask("double", b"4")]
        failures = [answer.error for answer in await one.link.ask("fail", b"")]
        assert ["not at 2", "not at 3"] == [str(error) for error in failures]
        assert all(isinstance(error, NotFoundError) for error in failures)


async def test_changes_are_made_by_all_in_one_order() -> None:
    """Two changes that two workers ask for at once come one after the other, at each worker in the same order."""
    async with group() as (_, start), asyncio.timeout(10):
        workers = await joined(start, 1, 2, 3)
        results = await asyncio.gather(workers[0].link.change("set", b"a"), workers[2].link.change("set", b"b"))
        assert [[1, 2, 3]] * 2 == [[answer.worker for answer in answers] for answers in results]
        assert workers[0].changes == workers[1].changes == workers[2].changes
        assert {"a", "b"} == set(workers[0].changes)


async def test_a_worker_that_ends_does_not_fail_a_change() -> None:
    """The others have made it, and its successor takes over what they have."""
    async with group() as (_, start), asyncio.timeout(10):
        one, two = await joined(start, 1, 2)
        two.released.clear()
        change = asyncio.create_task(one.link.change("set", b"a"))
        await two.is_holding.wait()
        await two.link.close()  # its process may be noticed later
        assert [(1, None)] == [(answer.worker, answer.error) for answer in await change]


async def test_one_that_joins_knows_everything_once() -> None:
    """A snapshot and the notes around it add up to the same number everywhere, however they fall."""
    async with group() as (_, start), asyncio.timeout(10):
        workers = await joined(start, 1, 2)
        late = await start(3)
        joining = asyncio.create_task(late.join())
        for turn in range(60):
            workers[turn % 2].tell(1)
            await asyncio.sleep(0)
        await joining
        workers[0].tell(1)
        workers[1].tell(1)
        for worker in (*workers, late):  # what it has told comes to the others before what it asks
            await worker.link.ask("double", b"1")
        assert [62, 62, 62] == [worker.total for worker in (*workers, late)]


async def test_the_group_knows_whom_it_knew() -> None:
    """A successor is told that its predecessor's knowledge is there, until nobody is left that has it."""
    async with group() as (hub, start), asyncio.timeout(10):
        one, two = await start(1), await start(2)
        assert (False, False) == (await one.join(), await two.join())
        one.tell(5)
        await one.end(hub)
        one = await start(1)
        assert await one.join()
        assert 5 == one.total
        await one.end(hub)
        await two.end(hub)
        one = await start(1)
        assert not await one.join()


async def test_a_hub_gives_up_on_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not answer is told of as such, and the answers of the others are there."""
    monkeypatch.setattr(hub_module, "ASK_TIMEOUT_S", 0.05)
    async with group() as (hub, start), asyncio.timeout(10):
        _, two = await joined(start, 1, 2)
        two.released.clear()
        one_answer, two_answer = await hub.answers("set", b"a", timeout_s=0.05)
        assert one_answer.error is None
        assert "worker 2 has not answered 'set' within 0.05 s" == str(two_answer.error)


async def test_a_note_that_cannot_be_taken_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It harms nothing else: what comes after it is taken."""
    async with group() as (_, start), asyncio.timeout(10):
        one, two = await joined(start, 1, 2)
        one.link.tell("add", b"no number")
        one.tell(3)
        await one.link.ask("double", b"1")
        assert 3 == two.total
    assert "a note of the parent cannot be taken" in caplog.text


async def test_one_that_does_not_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes that pile up are not kept for ever: the one who would have to read them is to be ended."""
    monkeypatch.setattr(hub_module, "MAX_UNREAD_BYTES", 1 << 20)
    lost: list[int] = []
    hub = Hub(lost.append)
    one, two = FakeWorker(1), FakeWorker(2)
    for worker in (one, two):
        await worker.start(hub)
        await worker.join()
    reading = two.link._running
    assert reading is not None
    transport = two.link._peer._writer.transport  # type: ignore[union-attr]
    transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(40):
        one.link.tell("add", b"0".rjust(1 << 16))
        await asyncio.sleep(0.001)
    assert [2] == lost
    transport.resume_reading()  # type: ignore[attr-defined]
    for worker in (one, two):
        await worker.end(hub)
