"""A worker's end: its place in the group, what it asks of its siblings and answers them."""

import argparse
import asyncio
import contextlib
import socket
from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from weft.base.limits import share
from weft.base.text.argument_types import num_workers
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
        """Connect to the parent.

        Args:
            calls: What siblings may ask, by name; ``snapshot`` among them, for a worker that joins.
            notes: What siblings may tell, by name.
        """
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
        """Take part in changes and notes from now on; ``settle`` must follow.

        Returns:
            Whether siblings know what an earlier worker of this index knew; what a sibling knows, b"" without one.

        Raises:
            UnavailableError: The sibling that was asked for its state does not give it.
        """
        is_known, snapshot = await self._peer.call("join")
        return is_known, snapshot

    async def settle(self) -> None:
        """Be ready to give siblings that join a snapshot. Raises UnavailableError."""
        await self._peer.call("settle")

    async def ask(self, name: str, payload: bytes) -> list[Answer]:
        """What the siblings answer, each within 2 s. Raises UnavailableError."""
        return await self._answers("ask", name, payload)

    async def change(self, name: str, payload: bytes) -> list[Answer]:
        """What every worker, this one too, answers to a change; changes are made one after another."""
        return await self._answers("change", name, payload)

    async def _answers(self, kind: str, name: str, payload: bytes) -> list[Answer]:
        answers = await self._peer.call(kind, (name, payload))
        return [Answer(worker, body, None if error is None else error_of(error)) for worker, body, error in answers]

    def tell(self, name: str, payload: bytes) -> None:
        """Tell the siblings."""
        self._peer.tell("note", (name, payload))

    async def _metrics(self, _: bytes) -> list[Metric]:
        registry = self._registry
        return [] if registry is None else await asyncio.to_thread(lambda: list(registry.collect()))


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many processes serve on the port, and what the parent tells each of them."""
    parser.add_argument(
        "--workers",
        type=num_workers,
        default=1,
        metavar="N",
        help="processes that serve on the port, each with an event loop of its own (default %(default)s)",
    )
    parser.add_argument("--worker", type=WorkerPlace.parse, help=argparse.SUPPRESS)


def settle_worker(options: argparse.Namespace) -> None:
    """Change the arguments of the whole group to those of the worker that this process is.

    Each has its part of what is limited over all connections. A Unix socket that the parent has not opened for all of
    them, as servers of grpcio cannot share one, is the first worker's; one that comes later takes nothing over.
    """
    place: WorkerPlace = options.worker
    options.max_connections = share(options.max_connections, place.num_workers)
    options.max_buffered_bytes = share(options.max_buffered_bytes, place.num_workers)
    if place.index > 1 or place.unix_descriptor is not None:
        options.unix_socket = None
    options.take_over = options.take_over and not place.listens_late
