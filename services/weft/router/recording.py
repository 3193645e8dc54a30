"""Recordings of graphs in this process: a thread writes what the event loop hands over, which never waits."""

import asyncio
import contextlib
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    WeftError,
)
from weft.base.observing.logs import get_logger
from weft.base.security.access import allows
from weft.base.tensors import WireTensor, bytes_tensor, split_bytes
from weft.router.reporting.path import PATH_HEADER
from weft.router.requests import forwarded_headers
from weft.v2.protocol.encoding import serialize_call, serialize_result
from weft.v2.protocol.recording import SUFFIX, VERSION, RecordingWriter
from weft.v2.protocol.status import text_for_client
from weft.v2.server.call_boundary import withdrawal
from weft_protos import graph_service_pb2 as pb
from weft_protos import recording_pb2 as recording_pb

#: Of requests that wait for their answer, or for the thread; what does not fit is dropped.
MAX_HELD_BYTES = 32 << 20
#: What one takes beside its tensors, about.
_REQUEST_BYTES = 2048
#: The thread looks for records so often: waking it for each would cost more than writing it.
_DRAIN_S = 0.05
#: A frame is written once it is so old, or so large.
_FRAME_S, _FRAME_BYTES = 0.5, 256 << 10
#: The disk may hang.
_MAX_STOP_S = 10.0
KEY_BYTES = 32
_DIGEST_BYTES = 16
_MIN_BYTES = 64 << 10
_MAX_NAMES_CHARS = 4096

_log = get_logger("weft.router.recording")


class RecordingLimits(NamedTuple):
    """Where recordings go, and how large each may be; without a folder they are refused."""

    folder: Path | None = None
    max_bytes: int = 1 << 30
    max_s: float = 3600.0


class Redaction:
    """Leaves out or hashes tensors, headers and parameters by name.

    Args:
        key: Of the hash, and of no other recording: without it digests cannot be looked up.
    """

    def __init__(self, omit: Iterable[str], hashed: Iterable[str], key: bytes) -> None:
        self._omit, self._hashed = ({name for one in names for name in (one, one.lower())} for names in (omit, hashed))
        self._key = key
        self.is_needed = bool(self._omit or self._hashed)

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that may be kept."""
        kept = {name: value for name, value in values.items() if name not in self._omit}
        return {name: self._digest(value) if name in self._hashed else value for name, value in kept.items()}

    def withheld(self, call: InferCall) -> list[str]:
        """What a request lacks. A text that is hashed is another text, and does as well."""
        lost = [name for name in call.inputs if name in self._omit | self._hashed]
        hashed = (name for name in call.parameters.keys() & self._hashed if not isinstance(call.parameters[name], str))
        return [*lost, *(call.parameters.keys() & self._omit), *hashed]

    def _digest(self, value: Any) -> Any:
        if not isinstance(value, WireTensor):
            data = value if isinstance(value, bytes) else str(value).encode()
            return blake2b(data, key=self._key, digest_size=_DIGEST_BYTES).hexdigest()
        if value.datatype == "BYTES":
            return bytes_tensor([self._digest(one) for one in split_bytes(value.data)], value.shape)
        return bytes_tensor([self._digest(repr(value[:2]).encode() + value.data)], (1,))


class Recorder:
    """One recording.

    Args:
        on_end: Called on the event loop once it has ended.

    Attributes:
        status: As clients see it.
    """

    def __init__(
        self, writer: RecordingWriter, request: pb.RecordingRequest, path: Path, key: bytes, on_end: Callable[[], None]
    ) -> None:
        self.status = pb.RecordingStatus(
            graph=request.graph, is_running=True, percent=request.percent, file=[str(path)], num_bytes=writer.num_bytes
        )
        self.redaction = Redaction(request.omit, request.hash, key)
        # Bytes that were taken are counted on the event loop, those that were written on the thread: without a lock.
        self.num_taken_bytes = self.num_done_bytes = 0
        self.waiting: deque[Kept] = deque()
        self._writer, self._request, self._on_end = writer, request, on_end
        self._loop, self._stop = asyncio.get_running_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-recording", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Write what has ended, and close the file."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, _MAX_STOP_S)
        self._on_end()

    def _run(self) -> None:
        try:
            reason = self._write()
        except OSError as error:
            reason = f"writing failed: {error.strerror or error}"
        except Exception:
            reason = "writing failed, the router's log says why"
            _log.exception("recording %s", self.status.file[0])
        status = self.status
        self._writer.close(
            recording_pb.End(reason=reason, num_records=status.num_requests, num_dropped=status.num_dropped)
        )
        status.end_reason, status.num_bytes, status.is_running = reason, self._writer.num_bytes, False
        _log.info("recorded %d requests to %s: %s", status.num_requests, status.file[0], reason)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._on_end)

    def _write(self) -> str:
        """Returns why it ends. Raises OSError."""
        written_s = time.monotonic()
        end_s, num_pending_bytes = written_s + self._request.max_s, 0
        entries: list[recording_pb.Entry] = []
        while True:
            is_stopped = self._stop.wait(0 if self.waiting else _DRAIN_S)
            now_s = time.monotonic()
            while self.waiting and num_pending_bytes < _FRAME_BYTES:
                kept = self.waiting.popleft()
                entries.append(kept.entry(self.redaction))
                self.num_done_bytes += kept.num_bytes
                num_pending_bytes += kept.num_bytes
                time.sleep(0)  # requests go first
            is_over = (is_stopped or now_s >= end_s) and not self.waiting
            if entries and (is_over or num_pending_bytes >= _FRAME_BYTES or now_s - written_s >= _FRAME_S):
                if not self._writer.write(entries, self._request.max_bytes):
                    return "its file is as large as it may be"
                self.status.num_requests += len(entries)
                self.status.num_bytes = self._writer.num_bytes
                entries, num_pending_bytes, written_s = [], 0, now_s
            if is_over:
                return "stopped" if is_stopped else "its time is over"


class Kept:
    """A request that is kept, until its answer ends; on the event loop, but for ``entry``."""

    def __init__(self, recorder: Recorder, call: InferCall, context: CallContext, *, is_stream: bool) -> None:
        self._recorder, self._call, self._context, self._is_stream = recorder, call, context, is_stream
        self._arrival_unix_ns = time.time_ns() - time.monotonic_ns() + context.arrival_ns
        self._results: list[tuple[int, InferResult]] = []
        self.num_bytes, self._is_dropped = 0, False
        self._hold(call.inputs)

    def add(self, result: InferResult) -> None:
        """Keep a response."""
        if not (result.is_null or self._is_dropped):
            self._results.append((time.monotonic_ns() - self._context.arrival_ns, result))
            self._hold(result.outputs)

    def end(self, version: str, error: BaseException | None = None) -> None:
        """Hand the request over."""
        recorder, self._version, self._error = self._recorder, version, error
        self._duration_ns = time.monotonic_ns() - self._context.arrival_ns
        if self._is_dropped:
            recorder.status.num_dropped += 1
        elif recorder.status.is_running:
            recorder.waiting.append(self)

    def _hold(self, tensors: Mapping[str, WireTensor]) -> None:
        recorder, num_bytes = self._recorder, _REQUEST_BYTES + sum([len(one.data) for one in tensors.values()])
        if recorder.num_taken_bytes - recorder.num_done_bytes + num_bytes > MAX_HELD_BYTES:
            recorder.num_taken_bytes -= self.num_bytes
            self._is_dropped = True
            self._results.clear()
        else:
            recorder.num_taken_bytes += num_bytes
            self.num_bytes += num_bytes

    def entry(self, redaction: Redaction) -> recording_pb.Entry:
        """The record, without what it may not have."""
        call, context, of = self._call, self._context, redaction.of
        path = dict(context.trailing_metadata).get(PATH_HEADER, "")
        entry = recording_pb.Entry()
        record = entry.record
        record.arrival_unix_ns, record.duration_ns, record.path = self._arrival_unix_ns, self._duration_ns, path
        record.version, record.is_stream = self._version, self._is_stream
        record.header.update(of(forwarded_headers(context.headers, is_traced=True)))
        if context.deadline_ns is not None:
            record.timeout_ns = max(context.deadline_ns - context.arrival_ns, 1)
        record.withheld.extend(redaction.withheld(call))
        call = replace(call, inputs=of(call.inputs), parameters=of(call.parameters))
        record.request.MergeFromString(serialize_call(call))
        for offset_ns, result in self._results:
            response = record.response.add(offset_ns=offset_ns)
            kept = replace(result, outputs=of(result.outputs), parameters=of(result.parameters))
            response.response.MergeFromString(serialize_result(kept))
            if result.error is not None:
                response.status, response.message = _told(result.error, redaction)
        if self._error is not None:
            failure = self._error if isinstance(self._error, Exception) else withdrawal(context)
            record.status, record.message = _told(failure, redaction)
        return entry


def _told(error: Exception, redaction: Redaction) -> tuple[str, str]:
    """Status and message; no message that may quote what is left out."""
    if not isinstance(error, WeftError):
        return "INTERNAL", ""
    return error.code, "" if redaction.is_needed else text_for_client(error)


class Recordings(Collector):
    """The recordings of a router, at most one of each graph at a time; on the event loop, but for the metrics.

    Args:
        num_workers: Processes that record, each an equal part.

    Attributes:
        active: Those that run, by graph; None without any, so that requests pay for one look.
    """

    def __init__(self, limits: RecordingLimits, num_workers: int = 1) -> None:
        self.active: dict[str, Recorder] | None = None
        self._limits, self._num_workers = limits, num_workers
        self._latest: dict[str, Recorder] = {}
        self._changing = asyncio.Lock()

    def begin(self, call: InferCall, context: CallContext, *, is_stream: bool = False) -> Kept | None:
        """Keep a request if its graph is recorded and a draw says so."""
        recorder = self.active.get(call.model_name) if self.active else None
        if recorder is None or random.random() * 100 >= recorder.status.percent:  # noqa: S311  # no secret
            return None
        return Kept(recorder, call, context, is_stream=is_stream)

    async def answer(self, request: pb.RecordingRequest, key: bytes) -> pb.RecordingResponse:
        """Start, end or describe; ``graph_service.proto`` lists the errors, but for graphs that are not known."""
        async with self._changing:
            if request.action == request.START:
                await self._start(request, key)
            elif request.graph and request.graph not in self._latest:
                raise NotFoundError(f"graph '{request.graph}' has not been recorded since the router's start")
            names = [request.graph] if request.graph else [name for name in sorted(self._latest) if allows(name)]
            if request.action == request.STOP:
                await asyncio.gather(*(self._latest[name].stop() for name in names))
        return pb.RecordingResponse(recording=[self._latest[name].status for name in names])

    async def close(self) -> None:
        """End all recordings."""
        await asyncio.gather(*(recorder.stop() for recorder in self._latest.values()))

    async def _start(self, request: pb.RecordingRequest, key: bytes) -> None:
        name, limits = request.graph, self._limits
        if limits.folder is None:
            raise FailedPreconditionError("this router was started without --record-dir, the folder for recordings")
        request.max_bytes, request.max_s = request.max_bytes or limits.max_bytes, request.max_s or limits.max_s
        _check("percent", request.percent, 0.001, 100)
        _check("max_bytes", request.max_bytes, _MIN_BYTES, limits.max_bytes)
        _check("max_s", request.max_s, 0.001, limits.max_s)
        _check("omit and hash, in characters", sum(map(len, (*request.omit, *request.hash))), 0, _MAX_NAMES_CHARS)
        if name in self._latest and self._latest[name].status.is_running:
            raise AlreadyExistsError(f"graph '{name}' is recorded already; `weft record {name} --stop` ends that")
        now_s = time.time()
        date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
        path = limits.folder / f"{name}-{date}-{secrets.token_hex(3)}{SUFFIX}"
        header = recording_pb.Header(version=VERSION, graph=name, percent=request.percent)
        header.omitted.extend(request.omit)
        header.hashed.extend(request.hash)
        request.max_bytes //= self._num_workers

        def opened() -> RecordingWriter:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return RecordingWriter(path, header)

        try:
            writer = await asyncio.to_thread(opened)
        except OSError as error:
            raise UnavailableError(f"a recording cannot be written to '{path.parent}': {error.strerror}") from error
        self._latest[name] = Recorder(writer, request, path, key, self._choose_active)
        self._choose_active()

    def _choose_active(self) -> None:
        self.active = {name: one for name, one in self._latest.items() if one.status.is_running} or None

    @override
    def collect(self) -> Iterator[Metric]:
        latest = [recorder.status for recorder in list(self._latest.values())]
        for what, text in (
            ("requests", "Requests in the graph's latest recording"),
            ("dropped", "Requests that it lacks because the disk was too slow for them"),
            ("bytes", "Its size"),
        ):
            family = CounterMetricFamily(f"weft_recording_{what}", text, labels=("graph",))
            for status in latest:
                family.add_metric((status.graph,), getattr(status, f"num_{what}"))
            yield family


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidArgumentError(f"a recording's {name} must be {low:g} to {high:g}, got {value:g}")


def summed(responses: Iterable[pb.RecordingResponse]) -> pb.RecordingResponse:
    """One answer of those of all workers."""
    total: dict[str, pb.RecordingStatus] = {}
    for one in (status for response in responses for status in response.recording):
        known = total.setdefault(one.graph, pb.RecordingStatus(num_requests=0))
        sums = known.num_requests, known.num_dropped, known.num_bytes
        is_running = known.is_running or one.is_running
        known.MergeFrom(one)  # files are appended
        known.is_running, known.num_requests = is_running, sums[0] + one.num_requests
        known.num_dropped, known.num_bytes = sums[1] + one.num_dropped, sums[2] + one.num_bytes
    return pb.RecordingResponse(recording=[total[name] for name in sorted(total)])
