"""The latest requests of graphs, kept while somebody looks at them."""

import asyncio
import heapq
import itertools
import os
import time
from collections import deque
from typing import NamedTuple

from weft.base.core import CallContext
from weft.base.errors import WeftError
from weft.base.observing import telemetry
from weft.router.reporting.path import NodeRecord, trace_text
from weft_protos import graph_service_pb2 as pb

#: Kept of all requests, and besides of the slowest and of those that failed.
MAX_RECENT, MAX_SLOWEST, MAX_FAILED = 200, 50, 50
_MAX_ERROR_CHARS = 2000


class _Kept(NamedTuple):
    """A request; ordered by duration."""

    duration_ns: int
    number: int
    record: NodeRecord
    path: str
    graph: str
    version: str
    request_id: str
    start_ns: int
    end_unix_ns: int
    status: str
    error: str
    trace_id: str


class RecentRequests:
    """A bounded number of requests that have ended, with what their steps did, without their tensors."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._recent: deque[_Kept] = deque(maxlen=MAX_RECENT)
        self._failed: deque[_Kept] = deque(maxlen=MAX_FAILED)
        self._slowest: list[_Kept] = []
        # A number alone would be another request's after a restart, or at another worker.
        self._process = f"{os.getpid():x}{time.time_ns() // 1_000_000 & 0xFFFFFF:x}"

    def add(
        self,
        record: NodeRecord,
        path: str,
        graph: str,
        version: str,
        request_id: str,
        context: CallContext,
        start_ns: int,
        error: BaseException | None,
    ) -> None:
        """Keep a request that has just ended."""
        status = "OK"
        if error is not None:
            is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
            status = error.code if isinstance(error, WeftError) else "CANCELLED" if is_cancelled else "INTERNAL"
        kept = _Kept(
            time.monotonic_ns() - context.arrival_ns,
            next(self._numbers),
            record,
            path,
            graph,
            version,
            request_id,
            start_ns,
            time.time_ns(),
            status,
            str(error)[:_MAX_ERROR_CHARS] if error is not None else "",
            telemetry.trace_id_of(context.trace_context) if context.trace_context is not None else "",
        )
        self._recent.append(kept)
        if error is not None:
            self._failed.append(kept)
        if len(self._slowest) < MAX_SLOWEST:
            heapq.heappush(self._slowest, kept)
        elif kept > self._slowest[0]:
            heapq.heapreplace(self._slowest, kept)

    def after(self, unix_ns: int) -> list[pb.ObservedRequest]:
        """Those that ended later, the earliest first, without their steps."""
        found = {one.number: one for kept in (self._slowest, self._failed, self._recent) for one in kept}
        return [self._message(one) for _, one in sorted(found.items()) if one.end_unix_ns > unix_ns]

    def find(self, key: str) -> pb.ObservedRequest | None:
        """One with its steps."""
        for one in (*self._recent, *self._failed, *self._slowest):
            if self._key(one) == key:
                message = self._message(one)
                message.steps = trace_text(one.record, one.start_ns)
                return message
        return None

    def _key(self, one: _Kept) -> str:
        return f"{self._process}-{one.number}"

    def _message(self, one: _Kept) -> pb.ObservedRequest:
        return pb.ObservedRequest(
            key=self._key(one),
            request_id=one.request_id,
            graph=one.graph,
            version=one.version,
            path=one.path,
            status=one.status,
            error=one.error,
            end_unix_ns=one.end_unix_ns,
            duration_ms=one.duration_ns / 1e6,
            trace_id=one.trace_id,
        )
