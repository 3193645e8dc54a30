"""The stream of the page: one poller for all viewers who show the same key, which ends with the last of them."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection
from typing import Any

from weft import __version__
from weft.base.cancellation import cancel_and_wait
from weft.base.errors import ResourceExhaustedError, WeftError
from weft.gateway.http.resources import Resources
from weft.gateway.ui.machines import MetricPages
from weft.gateway.ui.rates import Sample, tick_of
from weft.gateway.v2.routes import to_json
from weft.v2.client.v2_client import Metadata
from weft_protos import graph_service_pb2 as pb

#: Pause between two questions to the router, the time over which rates are taken, and how often its index is read.
PERIOD_S, WINDOW_S, INDEX_PERIOD_S = 1.0, 5.0, 5.0
TIMEOUT_S = 5.0
#: Viewers at once, and events that one may be behind before it is dropped.
MAX_VIEWERS, MAX_BEHIND = 16, 8
_MAX_REQUESTS = 50
#: Statuses of a key that is not valid, or lacks the right.
DENIED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_ACTIONS = {"explicit": ("load", "unload", "rollback"), "poll": ("rollback",)}

Event = dict[str, Any]


class Feeds:
    """All viewers of a gateway."""

    def __init__(self, resources: Resources, pages: MetricPages) -> None:
        self.resources, self.pages = resources, pages
        self._feeds: dict[Metadata, _Feed] = {}

    async def ask(self, method: str, request: Any, identity: Metadata) -> Any:
        """Call the router's ``GraphService`` as a client. Raises WeftError."""
        router = self.resources.router
        return await router.graph_service(method, request, timeout_s=TIMEOUT_S, metadata=identity)

    async def state(self, identity: Metadata, seen: pb.ObserveResponse) -> Event:
        """What there is, and what the client may do. Raises WeftError."""
        graphs = {one.graph for one in seen.graph if not one.is_model}
        index = await self.resources.router.index(timeout_s=TIMEOUT_S, metadata=identity)
        return {
            "type": "state",
            "version": __version__,
            "control": seen.model_control,
            "actions": [*_ACTIONS.get(seen.model_control, ()), "rollout"],
            "index": [{**to_json(one), "is_graph": one.name in graphs} for one in index],
        }

    async def events(self, identity: Metadata, graphs: Collection[str]) -> AsyncGenerator[Event, None]:
        """Yield events for one viewer until the key is refused or the gateway stops.

        Raises ResourceExhaustedError: there are too many viewers.
        """
        if sum(len(feed.viewers) for feed in self._feeds.values()) >= MAX_VIEWERS:
            raise ResourceExhaustedError(f"{MAX_VIEWERS} viewers look at this page, as many as may; close another one")
        feed = self._feeds.get(identity)
        if feed is None or feed.task.done():
            feed = self._feeds[identity] = _Feed(self, identity)
        events = feed.join(graphs)
        try:
            while (event := await events.get()) is not None:
                if event["type"] == "tick":
                    event = {**event, "looked_at": [one for one in event["looked_at"] if one["name"] in graphs]}
                yield event
        finally:
            feed.viewers.pop(events, None)
            if not feed.viewers:
                await cancel_and_wait([feed.task])
                if self._feeds.get(identity) is feed:
                    del self._feeds[identity]


class _Feed:
    """Asks the router once a second, with the key of its viewers."""

    def __init__(self, feeds: Feeds, identity: Metadata) -> None:
        self.viewers: dict[asyncio.Queue[Event | None], Collection[str]] = {}
        self._feeds, self._identity = feeds, identity
        self._samples: deque[Sample] = deque()
        self._told: Event | None = None  # the last ``state`` or ``down``, for who comes later
        self._names: frozenset[str] = frozenset()
        self._index_at_s = 0.0
        self._requests_after_ms = float("inf")
        self.task = asyncio.create_task(self._run())

    def join(self, graphs: Collection[str]) -> "asyncio.Queue[Event | None]":
        events: asyncio.Queue[Event | None] = asyncio.Queue(MAX_BEHIND)
        self.viewers[events] = graphs
        if self._told is not None:
            events.put_nowait(self._told)
        return events

    async def _run(self) -> None:
        try:
            while not self._feeds.resources.is_draining:
                start_s = time.monotonic()
                try:
                    await self._poll(start_s)
                except WeftError as error:
                    if error.code in DENIED:
                        self._send({"type": "denied", "reason": error.message})
                        return
                    self._samples.clear()
                    if self._told is None or self._told["type"] != "down":
                        self._told = {"type": "down", "reason": error.message}
                        self._send(self._told)
                await asyncio.sleep(max(PERIOD_S - (time.monotonic() - start_s), PERIOD_S / 10))
        finally:
            self._send(None)

    async def _poll(self, now_s: float) -> None:
        feeds, graphs = self._feeds, sorted(set().union(*self.viewers.values()))
        wanted = pb.ObserveRequest(graph=graphs, requests_after_unix_ms=self._requests_after_ms)
        seen = await feeds.ask("Observe", wanted, self._identity)
        self._requests_after_ms = seen.unix_ms
        if self._told is None or self._told["type"] == "down" or now_s - self._index_at_s >= INDEX_PERIOD_S:
            state = await feeds.state(self._identity, seen)
            self._index_at_s, self._names = now_s, frozenset(one["name"] for one in state["index"])
            if state != self._told:
                self._told = state
                self._send(state)
        self._samples.append(Sample(seen, now_s))
        while len(self._samples) > 2 and now_s - self._samples[1].at_s >= WINDOW_S:
            self._samples.popleft()
        tick = tick_of(self._samples[0], self._samples[-1], graphs)
        tick["rollouts"] = await self._rollouts() if graphs else []
        tick["models"] = [
            one
            for one in feeds.pages.machines(self._names)["models"]
            if one["kind"] != "graph" and (one["requests_per_s"] or one["failures_per_s"] or one["queue_size"])
        ]
        tick["requests"] = [to_json(one) for one in seen.request[-_MAX_REQUESTS:]]
        self._send(tick)

    async def _rollouts(self) -> list[Event]:
        try:
            found = await self._feeds.ask("Rollout", pb.RolloutRequest(), self._identity)
        except WeftError:  # there are none; what else is wrong is wrong of the next question too
            return []
        return [to_json(one) for one in found.rollout]

    def _send(self, event: Event | None) -> None:
        for events in list(self.viewers):
            if events.full():  # it reads too slowly, and may come again
                del self.viewers[events]
                while not events.empty():
                    events.get_nowait()
                events.put_nowait(None)
            else:
                events.put_nowait(event)
