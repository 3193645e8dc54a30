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
from weft.router.reporting.path import PATH_HEADER, TRACE_PARAMETER
from weft.router.requests import forwarded_headers
from weft.v2.protocol.encoding import serialize_call, serialize_result
from weft.v2.protocol.recording import SUFFIX, VERSION, RecordingWriter
from weft.v2.protocol.status import text_for_client
from weft.v2.server.call_boundary import withdrawal
from weft_protos import graph_service_pb2 as pb
from weft_protos import recording_pb2 as file_pb

KEY_BYTES = 32
#: Of requests that wait for their answer, or for the thread; what does not fit is dropped.
MAX_HELD_BYTES = 32 << 20
#: What one takes beside its tensors, about.
_REQUEST_BYTES = 2048
#: How often the thread looks for requests: waking it for each would cost more than writing it.
_DRAIN_S = 0.1
#: Records that it makes before the event loop has its turn; each change of turns costs as much as one.
_TURN = 16
#: A frame is written when it is as old, or as large.
_FRAME_S, _FRAME_BYTES = 0.5, 256 << 10
_MIN_BYTES = 64 << 10

_log = get_logger("weft.router.recording")


class RecordingLimits(NamedTuple):
    """Where recordings go, and how large each may be; without a folder they are refused."""

    folder: Path | None = None
    max_bytes: int = 1 << 30
    max_s: float = 3600.0


class _Redaction:
    """Leaves out or hashes tensors, headers and parameters by name; without the key digests cannot be looked up."""

    def __init__(self, omit: Iterable[str], hashed: Iterable[str], key: bytes) -> None:
        self._omit, self._hashed = ({name for one in names for name in (one, one.lower())} for names in (omit, hashed))
        self._key = key
        self.names = self._omit | self._hashed

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in values.items() if name not in self._omit and name != TRACE_PARAMETER}
        return {name: self._digest(value) if name in self._hashed else value for name, value in kept.items()}

    def _digest(self, value: Any) -> Any:
        if not isinstance(value, WireTensor):
            data = value if isinstance(value, bytes) else str(value).encode()
            return blake2b(data, key=self._key, digest_size=16).hexdigest()
        if value.datatype == "BYTES":
            return bytes_tensor([self._digest(one) for one in split_bytes(value.data)], value.shape)
        return bytes_tensor([self._digest(repr(value[:2]).encode() + value.data)], (1,))


class Recorder:
    """One recording.

    Args:
        on_end: Called on the event loop once it has ended.

    Attributes:
        status: As clients see it.
        num_taken_bytes, num_done_bytes: Counted on the event loop, and on the thread: neither needs a lock.
    """

    def __init__(
        self, writer: RecordingWriter, request: pb.RecordingRequest, file: str, key: bytes, on_end: Callable[[], None]
    ) -> None:
        self.status = pb.RecordingStatus(graph=request.graph, is_running=True, percent=request.percent, file=[file])
        self.num_taken_bytes = self.num_done_bytes = 0
        self.waiting: deque[Kept] = deque()
        self._redaction = _Redaction(request.omit, request.hash, key)
        self._writer, self._request, self._on_end = writer, request, on_end
        self._loop, self._stop = asyncio.get_running_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-recording", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Write what has ended, and close the file; waits at most 10 s for the disk."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 10.0)
        self._on_end()

    def _run(self) -> None:
        status = self.status
        try:
            status.end_reason = self._write()
        except OSError as error:
            status.end_reason = f"writing failed: {error.strerror or error}"
        except Exception:
            status.end_reason = "writing failed, the router's log says why"
            _log.exception("recording %s", status.file[0])
        end = file_pb.End(reason=status.end_reason, num_records=status.num_requests, num_dropped=status.num_dropped)
        self._writer.close(end)
        status.num_bytes, status.is_running = self._writer.num_bytes, False
        _log.info("recorded %d requests to %s: %s", status.num_requests, status.file[0], status.end_reason)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._on_end)

    def _write(self) -> str:
        """Returns why it ends. Raises OSError."""
        written_s, num_pending_bytes, entries = time.monotonic(), 0, list[file_pb.Entry]()
        end_s = written_s + self._request.max_s
        while True:
            is_stopped, now_s = self._stop.wait(0 if self.waiting else _DRAIN_S), time.monotonic()
            while self.waiting and num_pending_bytes < _FRAME_BYTES:
                kept = self.waiting.popleft()
                entries.append(kept.entry(self._redaction))
                self.num_done_bytes += kept.num_bytes
                num_pending_bytes += kept.num_bytes
                if len(entries) % _TURN == 0:
                    time.sleep(0)  # the event loop's turn
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
        self._results: list[tuple[int, InferResult]] = []
        self.num_bytes, self._is_dropped = 0, False
        self._hold(call.inputs)

    def add(self, result: InferResult) -> None:
        """Keep a response."""
        if not (result.is_null or self._is_dropped):
            self._results.append((time.monotonic_ns(), result))
            self._hold(result.outputs)

    def end(self, version: str, error: BaseException | None = None) -> None:
        """Hand the request over."""
        self._version, self._error = version, withdrawal(self._context) if _is_cancelled(error) else error
        self._end_unix_ns, self._end_ns = time.time_ns(), time.monotonic_ns()
        if self._is_dropped:
            self._recorder.status.num_dropped += 1
        elif self._recorder.status.is_running:
            self._recorder.waiting.append(self)

    def _hold(self, tensors: Mapping[str, WireTensor]) -> None:
        recorder, num_bytes = self._recorder, _REQUEST_BYTES + sum([len(one.data) for one in tensors.values()])
        if recorder.num_taken_bytes - recorder.num_done_bytes + num_bytes > MAX_HELD_BYTES:
            self._is_dropped, num_bytes = True, -self.num_bytes
            self._results.clear()
        recorder.num_taken_bytes += num_bytes
        self.num_bytes += num_bytes

    def entry(self, redaction: _Redaction) -> file_pb.Entry:
        """The record, without what it may not have."""
        call, context, begin_ns = self._call, self._context, self._context.arrival_ns
        entry = file_pb.Entry()
        record = entry.record
        record.duration_ns = self._end_ns - begin_ns
        record.arrival_unix_ns = self._end_unix_ns - record.duration_ns
        record.timeout_ns = max(context.deadline_ns - begin_ns, 1) if context.deadline_ns is not None else 0
        record.version, record.is_stream = self._version, self._is_stream
        record.path = dict(context.trailing_metadata).get(PATH_HEADER, "")
        record.header.update(redaction(forwarded_headers(context.headers, is_traced=True)))
        record.withheld.extend(name for name in (*call.inputs, *call.parameters) if name in redaction.names)
        call = replace(call, inputs=redaction(call.inputs), parameters=redaction(call.parameters))
        record.request.MergeFromString(serialize_call(call))
        for at_ns, result in self._results:
            response = record.response.add(offset_ns=at_ns - begin_ns)
            kept = replace(result, outputs=redaction(result.outputs), parameters=redaction(result.parameters))
            response.response.MergeFromString(serialize_result(kept))
            if result.error is not None:
                response.status, response.message = _told(result.error, redaction)
        if self._error is not None:
            record.status, record.message = _told(self._error, redaction)
        return entry


def _is_cancelled(error: BaseException | None) -> bool:
    return error is not None and not isinstance(error, Exception)


def _told(error: BaseException, redaction: _Redaction) -> tuple[str, str]:
    """Status and message; no message that may quote what is left out."""
    code, message = (error.code, text_for_client(error)) if isinstance(error, WeftError) else ("INTERNAL", "")
    return code, "" if redaction.names else message


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
        recorder = (self.active or {}).get(call.model_name)
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
            found = [
                self._latest[name] for name in sorted(self._latest) if request.graph in ("", name) and allows(name)
            ]
            if request.action == request.STOP:
                await asyncio.gather(*(recorder.stop() for recorder in found))
        return pb.RecordingResponse(recording=[recorder.status for recorder in found])

    async def close(self) -> None:
        """End all recordings."""
        await asyncio.gather(*(recorder.stop() for recorder in self._latest.values()))

    async def _start(self, request: pb.RecordingRequest, key: bytes) -> None:
        name, limits = request.graph, self._limits
        if limits.folder is None:
            raise FailedPreconditionError("this router was started without --record-dir, the folder for recordings")
        request.max_bytes, request.max_s = request.max_bytes or limits.max_bytes, request.max_s or limits.max_s
        bounds = {"percent": (0.001, 100), "max_bytes": (_MIN_BYTES, limits.max_bytes), "max_s": (0.001, limits.max_s)}
        for field, (low, high) in bounds.items():
            if not low <= (value := getattr(request, field)) <= high:
                raise InvalidArgumentError(f"a recording's {field} must be {low:g} to {high:g}, got {value:g}")
        if name in self._latest and self._latest[name].status.is_running:
            raise AlreadyExistsError(f"graph '{name}' is recorded already; `weft record {name} --stop` ends that")
        request.max_bytes //= self._num_workers
        file = f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}{SUFFIX}"
        header = file_pb.Header(version=VERSION, graph=name, percent=request.percent)
        header.omitted.extend(request.omit)
        header.hashed.extend(request.hash)
        try:
            await asyncio.to_thread(limits.folder.mkdir, 0o700, parents=True, exist_ok=True)
            writer = await asyncio.to_thread(RecordingWriter, limits.folder / file, header)
        except OSError as error:
            raise UnavailableError(f"no recording can be written to '{limits.folder}': {error.strerror}") from error
        self._latest[name] = Recorder(writer, request, str(limits.folder / file), key, self._choose_active)
        self._choose_active()

    def _choose_active(self) -> None:
        self.active = {name: one for name, one in self._latest.items() if one.status.is_running} or None

    @override
    def collect(self) -> Iterator[Metric]:
        texts = {
            "requests": "Requests in the graph's latest recording",
            "dropped": "Requests that it lacks because the disk was too slow",
            "bytes": "Its size",
        }
        for what, text in texts.items():
            family = CounterMetricFamily(f"weft_recording_{what}", text, labels=("graph",))
            for name, recorder in list(self._latest.items()):
                family.add_metric((name,), getattr(recorder.status, f"num_{what}"))
            yield family


def summed(responses: Iterable[pb.RecordingResponse]) -> pb.RecordingResponse:
    """One answer of those of all workers."""
    total: dict[str, pb.RecordingStatus] = {}
    for one in (status for response in responses for status in response.recording):
        known = total.setdefault(one.graph, pb.RecordingStatus())
        one.is_running |= known.is_running
        for count in ("num_requests", "num_dropped", "num_bytes"):
            setattr(one, count, getattr(one, count) + getattr(known, count))
        known.MergeFrom(one)  # which appends the files
    return pb.RecordingResponse(recording=[total[name] for name in sorted(total)])
