"""The stream of the page; what several viewers with one key look at is asked for once."""

import asyncio
import json
import math
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from weft import __version__
from weft.base.caching import ExpiringCache
from weft.base.errors import ResourceExhaustedError, WeftError
from weft.gateway.http.resources import Resources
from weft.gateway.ui.rates import Sample, tick_of
from weft.gateway.v2.routes import to_json
from weft.v2.client.frames import Frame, Page, frame_of, scrape
from weft.v2.client.v2_client import Metadata
from weft_protos import graph_service_pb2 as pb

#: Pause between two ticks, the time over which rates are taken, and how often the router's index is read.
PERIOD_S, WINDOW_S, INDEX_PERIOD_S = 1.0, 5.0, 30.0
TIMEOUT_S = 5.0
MAX_VIEWERS = 16
_MAX_REQUESTS = 50
#: Statuses of a key that is not valid, or lacks the right.
_DENIED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
#: Metrics pages that took a second are read again after so many, and a router whose answer took one is asked again.
_PAGES_PERIOD_S, _REST, _TICK_REST = 2.0, 100, 300
_GAUGES = re.compile(r"nv_gpu_|weft_warm_model|weft_instance_restarts_total|vllm:(kv_|num_req)")
_ACTIONS = {"explicit": ("load", "unload", "rollback"), "poll": ("rollback",)}

Event = dict[str, Any]
#: A client's key, and the graphs that it looks at.
_View = tuple[Metadata, tuple[str, ...]]


class Live:
    """Streams of events to viewers.

    Attributes:
        num_changes: So often may what there is have changed at once.
    """

    def __init__(self, resources: Resources, pages: "MetricPages") -> None:
        self.pages, self.num_changes = pages, 0
        self._resources = resources
        self._num_viewers = 0
        self._samples = ExpiringCache[_View, Sample](PERIOD_S * 0.9, MAX_VIEWERS)
        self._states = ExpiringCache[tuple[Metadata, int], Event](INDEX_PERIOD_S * 0.9, MAX_VIEWERS)

    async def ask(self, method: str, request: Any, identity: Metadata) -> Any:
        """Call the router's ``GraphService`` as a client. Raises WeftError."""
        router = self._resources.router
        return await router.graph_service(method, request, timeout_s=TIMEOUT_S, metadata=identity)

    async def events(self, identity: Metadata, graphs: tuple[str, ...]) -> AsyncGenerator[Event, None]:
        """Yield events for one viewer until its key is refused or the gateway stops.

        A viewer that reads slowly gets fewer. Raises ResourceExhaustedError: there are too many viewers; RemoteError:
        the key is refused from the start.
        """
        if self._num_viewers >= MAX_VIEWERS:
            raise ResourceExhaustedError(f"{MAX_VIEWERS} viewers look at this page, as many as may; close another one")
        self._num_viewers += 1
        samples, told, after_ms = deque[Sample](), Event(), math.inf
        try:
            while not self._resources.is_draining:
                start_s = time.monotonic()
                try:
                    # Another viewer, who has rested since, may take the answer.
                    ask = partial(self._sample, identity, graphs, after_ms - 1e3 * (WINDOW_S + PERIOD_S))
                    sample = await self._samples.get((identity, graphs), ask)
                    state = await self._states.get((identity, self.num_changes), partial(self._state, identity, sample))
                    if state != told:
                        yield (told := state)
                    samples.append(sample)
                    while len(samples) > 2 and sample.at_s - samples[1].at_s >= WINDOW_S:
                        samples.popleft()
                    yield await self._tick(identity, graphs, samples, after_ms)
                    after_ms = sample.seen.unix_ms
                except WeftError as error:
                    is_denied = error.code in _DENIED
                    if is_denied and not told:
                        raise
                    if is_denied or told.get("type") != "down":
                        yield (told := {"type": "denied" if is_denied else "down", "reason": error.message})
                    if is_denied:
                        return
                    samples.clear()
                    self.num_changes += 1
                rest_s = min(_TICK_REST * (samples[-1].at_s - start_s), WINDOW_S) if samples else PERIOD_S / 10
                await asyncio.sleep(max(PERIOD_S - (time.monotonic() - start_s), PERIOD_S / 10, rest_s))
        finally:
            self._num_viewers -= 1

    async def _sample(self, identity: Metadata, graphs: tuple[str, ...], after_ms: float) -> Sample:
        wanted = pb.ObserveRequest(graph=graphs, requests_after_unix_ms=after_ms)
        return Sample(await self.ask("Observe", wanted, identity), time.monotonic())

    async def _state(self, identity: Metadata, sample: Sample) -> Event:
        """What there is, and what the client may do."""
        known = {one.graph for one in sample.seen.count if not one.is_model}
        control = sample.seen.model_control
        index = await self._resources.router.index(timeout_s=TIMEOUT_S, metadata=identity)
        return {
            "type": "state",
            "version": __version__,
            "control": control,
            "actions": [*_ACTIONS.get(control, ()), "rollout"],
            "index": [{**to_json(one), "is_graph": one.name in known} for one in index],
        }

    async def _tick(
        self, identity: Metadata, graphs: tuple[str, ...], samples: "deque[Sample]", after_ms: float
    ) -> Event:
        seen = samples[-1].seen
        names = {one.graph for one in seen.count}
        tick = tick_of(samples[0], samples[-1], graphs)
        tick["rollouts"] = await self._rollouts(identity) if graphs else []
        tick["models"] = [
            asdict(one)
            for one in (await self.pages.frame()).models
            if one.model in names
            and one.kind != "graph"
            and (one.requests_per_s or one.failures_per_s or one.queue_size)
        ]
        tick["requests"] = [to_json(one) for one in seen.request if one.unix_ms > after_ms][-_MAX_REQUESTS:]
        return tick

    async def _rollouts(self, identity: Metadata) -> list[Event]:
        try:
            found = await self.ask("Rollout", pb.RolloutRequest(), identity)
        except WeftError:  # there are none; what else is wrong is wrong of the next question too
            return []
        told = json.dumps([to_json(one) for one in found.rollout])
        known: list[Event] = json.loads(told, parse_constant=lambda _: None)  # JSON has no NaN
        return known


class MetricPages:
    """Metrics pages of services, by name, read on a thread while somebody looks, at most every other second."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._next_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._pages: Mapping[str, Page] = {}
        self._frame = Frame()

    async def frame(self) -> Frame:
        """What the services told last."""
        if self._addresses and time.monotonic() >= self._next_s and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read())
        if not self._pages and self._reading is not None:
            await asyncio.shield(self._reading)
        return self._frame

    async def tables(self, names: Collection[str]) -> dict[str, list[Event]]:
        """Rows by title: all services, and of these models what the services say of them, their caches and replicas."""
        frame, known = await self.frame(), {"", *names}
        served = {row.model for row in frame.models if row.kind == "model"}
        models = [row for row in frame.models if row.model in known and (row.kind != "call" or row.model not in served)]
        replicas, gauges = list[Event](), list[Event]()
        for service, page in self._pages.items():
            for labels, is_so in page.values("weft_endpoint_state"):
                place = {key: labels[key] for key in ("target", "endpoint")}
                counts = {name: page.value(f"weft_endpoint_{name}", **place) for name in ("inflight", "picks_total")}
                replicas += [{**labels, **counts}] if is_so else []
            for name in filter(_GAUGES.match, page.samples):
                for labels, value in page.samples[name]:
                    if value and math.isfinite(value) and labels.get("model", labels.get("model_name", "")) in known:
                        of = ", ".join(map(" ".join, labels.items()))
                        gauges.append({"service": service, "name": name, "value": value, "of": of})
        return {
            "Services": list(map(asdict, frame.services)),
            "Models, by priority": list(map(asdict, models)),
            "Ranks of language models": [row._asdict() for row in frame.ranks if row.model in known],
            "Instances that compute for others": [row._asdict() for row in frame.roles if row.model in known],
            "Replicas": replicas,
            "Caches, memory, GPU, instances, warm pool": gauges,
        }

    async def _read(self) -> None:
        start_s = time.monotonic()
        # Rates need a second reading soon, and none is over the time in which nobody looked.
        old = self._pages if start_s < self._next_s + 2 * _PAGES_PERIOD_S else {}
        self._pages = await asyncio.to_thread(scrape, self._addresses)
        self._frame = frame_of(self._addresses, old or self._pages, self._pages)
        took_s = time.monotonic() - start_s
        self._next_s = start_s + (max(_PAGES_PERIOD_S, _REST * took_s) if old else _PAGES_PERIOD_S)
