"""A worker's end of its connection to the parent."""

import argparse
import asyncio
import contextlib
import socket
from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from weft.base.limits import share
from weft.base.text.argument_types import add, num_workers
from weft.v2.server.listening import WorkerPlace
from weft.v2.workers.hub import Answer, CallHandler, NoteHandler, Peer, error_of


class WorkerLink:
    """The connection of a worker to its group."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self._registry: CollectorRegistry | None = None
        self._peer = Peer("the parent", {}, {})
        self._running: asyncio.Task[None] | None = None

    def publish(self, registry: CollectorRegistry) -> None:
        """The parent serves these metrics, with those of the other workers."""
        self._registry = registry

    async def open(self, calls: Mapping[str, CallHandler], notes: Mapping[str, NoteHandler]) -> None:
        """Connect to the parent, with handlers for calls (``snapshot`` among them) and notes of siblings, by name."""
        own: dict[str, CallHandler] = {"ping": lambda _: b"", "metrics": self._metrics}
        self._peer = Peer("the parent", {**own, **calls}, notes)
        await self._peer.connect(socket.socket(fileno=self.place.descriptor))
        self._running = asyncio.create_task(self._peer.run())

    async def close(self) -> None:
        """Disconnect."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    async def join(self) -> tuple[bool, bytes]:
        """Receive changes and notes from now on; ``settle`` must follow.

        Returns:
            Whether siblings still have the state of an earlier worker of this index; a sibling's snapshot, b"" without
            one.
        """
        is_known, snapshot = await self._peer.call("join")
        return is_known, snapshot

    async def settle(self) -> None:
        """Start to give snapshots to siblings that join. Raises UnavailableError."""
        await self._peer.call("settle")

    async def ask(self, name: str, payload: bytes) -> list[Answer]:
        """Call all siblings, each within 2 s, and collect their answers. Raises UnavailableError."""
        return await self._answers("ask", name, payload)

    async def change(self, name: str, payload: bytes) -> list[Answer]:
        """Apply a change at every worker, this one included, and collect the answers; changes run one after another."""
        return await self._answers("change", name, payload)

    async def _answers(self, kind: str, name: str, payload: bytes) -> list[Answer]:
        answers = await self._peer.call(kind, (name, payload))
        return [Answer(worker, body, None if error is None else error_of(error)) for worker, body, error in answers]

    def tell(self, name: str, payload: bytes) -> None:
        """Send a note to the siblings."""
        self._peer.tell("note", (name, payload))

    async def _metrics(self, _: bytes) -> list[Metric]:
        registry = self._registry
        return [] if registry is None else await asyncio.to_thread(lambda: list(registry.collect()))


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--workers`` and the internal argument that the parent gives to each worker."""
    text = "processes that serve on the port, each with an event loop of its own (default %(default)s)"
    add(parser, "--workers N", text, num_workers, 1)
    parser.add_argument("--worker", type=WorkerPlace.parse, help=argparse.SUPPRESS)


def settle_worker(options: argparse.Namespace) -> None:
    """Turn the arguments of the group into those of this worker.

    Limits over all connections are divided. A Unix socket that grpcio servers cannot share belongs to the first worker;
    a worker that starts later takes nothing over.
    """
    place: WorkerPlace = options.worker
    options.max_connections = share(options.max_connections, place.num_workers)
    options.max_buffered_bytes = share(options.max_buffered_bytes, place.num_workers)
    if place.index > 1 or place.unix_descriptor >= 0:
        options.unix_socket = None
    options.take_over = options.take_over and not place.listens_late
