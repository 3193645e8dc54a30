"""Metrics pages of the services, read on a thread while somebody looks, at most every other second."""

import asyncio
import re
import ssl
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from weft.v2.client.frames import Frame, Page, frame_of, scrape

PERIOD_S = 2.0
#: A page that took a second to read is read again after so many: that of a router with 1,000 graphs has megabytes.
_REST = 50
#: Pages of before a time in which nobody looked are not compared with.
_STALE_S = 60.0
_GAUGES = re.compile(
    r"nv_gpu_|weft_warm_model|weft_instance_restarts_total|weft_endpoint_(state|inflight|picks_total)|vllm:(kv_|num_req)"
)


class MetricPages:
    """What the pages, of URLs by service, said last."""

    def __init__(self, addresses: Mapping[str, str], tls: ssl.SSLContext | None = None) -> None:
        self._addresses, self._tls = addresses, tls
        self._next_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._pages: Mapping[str, Page] = {}
        self._frame = Frame(0.0, (), ())

    def machines(self, names: Collection[str]) -> dict[str, Any]:
        """All services and, of these models, rows and what else the services say of caches, memory and replicas."""
        if self._addresses and time.monotonic() >= self._next_s and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read())
        frame = asdict(self._frame)
        for part in ("models", "ranks", "roles"):
            rows = [one if isinstance(one, dict) else one._asdict() for one in frame[part]]
            frame[part] = [one for one in rows if one["model"] in names]
        gauges = [
            {"service": service, "name": name, "labels": labels, "value": value}
            for service, page in self._pages.items()
            for name, samples in page.samples.items()
            if _GAUGES.match(name)
            for labels, value in samples
            if value and labels.get("model", labels.get("model_name", "")) in ("", *names)
        ]
        return {**frame, "gauges": gauges}

    async def _read(self) -> None:
        start_s = time.monotonic()
        old = self._pages if start_s < self._next_s + _STALE_S else {}
        self._pages = await asyncio.to_thread(scrape, self._addresses, self._tls)
        self._frame = frame_of(self._addresses, old or self._pages, self._pages)
        rest_s = _REST * (time.monotonic() - start_s) if old else 0.0  # rates need a second page
        self._next_s = start_s + max(PERIOD_S, rest_s)
