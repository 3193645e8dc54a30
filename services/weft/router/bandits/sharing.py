"""What the bandits of sibling routers learn, each from all: the routers behind one port tell one another."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from operator import sub

from weft.language.bandit_algorithms import Arm
from weft.router.bandits.store import BanditStore, add_up

#: How often a router tells what it has learned, in seconds.
PERIOD_S = 0.2

_Name = tuple[str, str, str]


class BanditSharing:
    """Adds up what siblings learn: every router comes to know the pulls and rewards of all of them.

    A router sends what came since it last did, so each pull and reward counts once everywhere, in whatever order.
    Logarithms of weights are added too: what all steps of a node have in common is no difference between them.

    Args:
        period_s: Pause between two looks whether there is something to send, in seconds.
    """

    def __init__(self, store: BanditStore, send: Callable[[bytes], None], *, period_s: float = PERIOD_S) -> None:
        self._store = store
        self._send = send
        self._period_s = period_s
        #: What all routers know, by names of graph, node and step.
        self._common: dict[_Name, Arm] = {}
        self._published_revision = 0
        self._publisher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Send from now on."""
        self._publisher = asyncio.create_task(self._publish_periodically())

    async def close(self) -> None:
        """Send what is left, and no more."""
        if self._publisher is not None:
            self._publisher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._publisher
        self.publish()

    def publish(self) -> None:
        """Send what was learned since the last time."""
        revision = self._store.revision
        if revision == self._published_revision:
            return
        self._published_revision = revision
        changes: list[tuple[_Name, Arm]] = []
        for graph, node, step, arm in self._store:
            name = graph, node, step
            common = self._common.setdefault(name, Arm())
            more = Arm(*map(sub, astuple(arm), astuple(common)))
            if more != Arm():
                changes.append((name, more))
                self._common[name] = replace(arm)
        if changes:
            self._send(_dump(changes))

    def take(self, message: bytes) -> None:
        """A sibling has told this, or knew it when this router came."""
        nodes = set()
        for (graph, node, step), fields in json.loads(message):
            more = Arm(*fields)
            self._store.add(graph, node, step, more)
            common = self._common.setdefault((graph, node, step), Arm())
            add_up(common, more)
            if more.log_weight:
                nodes.add((graph, node))
        for graph, node in nodes:
            best = self._store.level(graph, node)
            for name, common in self._common.items():
                if name[:2] == (graph, node):
                    common.log_weight -= best

    def snapshot(self) -> bytes:
        """What all routers know, for ``take`` of one that comes."""
        return _dump(self._common.items())

    async def _publish_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            self.publish()


def _dump(arms: Iterable[tuple[_Name, Arm]]) -> bytes:
    return json.dumps([(name, astuple(arm)) for name, arm in arms]).encode()
