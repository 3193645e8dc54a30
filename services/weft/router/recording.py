"""Recordings of graphs in this process: a task hands what was kept to a thread, which writes; requests never wait."""

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
#: Of requests that wait for their answer, or for the disk; what does not fit is dropped.
MAX_HELD_BYTES = 32 << 20
#: What one takes beside its tensors, about.
_REQUEST_BYTES = 2048
#: Pause between frames, each of which costs half a millisecond, and while each has many bytes.
_FRAME_S, _BUSY_FRAME_S, _MANY_BYTES = 2.0, 0.5, 1 << 20
#: Of a request and its answer, whose record is made at once: from the caches of the CPU that takes a third of the time.
_SMALL_BYTES = 64 << 10
_MIN_BYTES = 64 << 10
_MAX_STOP_S = 10.0

_log = get_logger("weft.router.recording")


class RecordingLimits(NamedTuple):
    """Where recordings go, and how large each may be; without a folder they are refused."""

    folder: Path | None = None
    max_bytes: int = 1 << 30
    max_s: float = 3600.0


class _Redaction:
    """Leaves out or hashes tensors, headers and parameters by name; without the key digests cannot be looked up."""

    def __init__(self, request: pb.RecordingRequest, key: bytes) -> None:
        omit, hashed = ({*names, *map(str.lower, names)} for names in (request.omit, request.hash))
        self._omit, self.hashed, self._key = omit | {TRACE_PARAMETER}, hashed, key
        self.names = omit | hashed

    def __call__(self, values: Any) -> Any:
        if values.keys().isdisjoint(self._omit) and values.keys().isdisjoint(self.hashed):
            return values
        kept = {name: value for name, value in values.items() if name not in self._omit}
        return kept | {name: self._digest(kept[name]) for name in kept.keys() & self.hashed}

    def _digest(self, value: Any) -> Any:
        if not isinstance(value, WireTensor):
            data = value if isinstance(value, bytes) else str(value).encode()
            return blake2b(data, key=self._key, digest_size=16).hexdigest()
        if value.datatype == "BYTES":
            return bytes_tensor([self._digest(one) for one in split_bytes(value.data)], value.shape)
        return bytes_tensor([self._digest(repr(value[:2]).encode() + value.data)], (1,))


class Kept:
    """A request that is kept, until its answer ends."""

    def __init__(self, recorder: "Recorder", call: InferCall, context: CallContext, *, is_stream: bool) -> None:
        self._recorder, self._call, self._context, self._is_stream = recorder, call, context, is_stream
        self._results: list[tuple[int, InferResult]] = []
        self.num_bytes, self._is_dropped = 0, False
        self._hold(call.inputs)

    def add(self, result: InferResult) -> None:
        """Keep a response."""
        if not (result.is_null or self._is_dropped):
            self._results.append((time.monotonic_ns() - self._context.arrival_ns, result))
            self._hold(result.outputs)

    def _hold(self, tensors: Mapping[str, WireTensor]) -> None:
        num_bytes = _REQUEST_BYTES + sum([len(one.data) for one in tensors.values()])
        if self._recorder.num_held_bytes + num_bytes > MAX_HELD_BYTES:
            self._is_dropped, num_bytes = True, -self.num_bytes
            self._results.clear()
        self._recorder.num_held_bytes += num_bytes
        self.num_bytes += num_bytes

    def end(self, version: str, error: BaseException | None = None) -> None:
        """Hand the request over."""
        self._version, self._end_unix_ns = version, time.time_ns()
        self._duration_ns = time.monotonic_ns() - self._context.arrival_ns
        self._error = error if isinstance(error, Exception | None) else withdrawal(self._context)
        if self._is_dropped or not self._recorder.status.is_running:
            self._recorder.status.num_dropped += 1
        else:
            made: Kept | file_pb.Entry = self
            with contextlib.suppress(Exception):  # the thread meets it again, and ends the recording
                made = self.entry() if self.num_bytes < _SMALL_BYTES and not self._recorder.redaction.hashed else self
            self._recorder.waiting.append((self.num_bytes, made))

    def entry(self) -> file_pb.Entry:
        """The record, without what it may not have."""
        call, context, entry = self._call, self._context, file_pb.Entry()
        record, redaction = entry.record, self._recorder.redaction
        record.arrival_unix_ns, record.duration_ns = self._end_unix_ns - self._duration_ns, self._duration_ns
        record.timeout_ns = 0 if context.deadline_ns is None else max(context.deadline_ns - context.arrival_ns, 1)
        record.version, record.is_stream = self._version, self._is_stream
        record.path = dict(context.trailing_metadata).get(PATH_HEADER, "")
        headers = forwarded_headers(context.headers, is_traced=True)
        record.header.update(redaction({name: value for name, value in headers.items() if name != "cookie"}))
        record.withheld.extend(name for name in (*call.inputs, *call.parameters) if name in redaction.names)
        names = call.model_name, call.model_version, call.request_id
        kept = InferCall(*names, redaction(call.parameters), redaction(call.inputs), call.outputs)
        record.request.MergeFromString(serialize_call(kept))
        for offset_ns, result in self._results:
            response = record.response.add(offset_ns=offset_ns)
            names = result.model_name, result.model_version, result.request_id
            answer = InferResult(*names, redaction(result.parameters), redaction(result.outputs))
            response.response.MergeFromString(serialize_result(answer))
            if result.error is not None:
                response.status, response.message = _told(result.error, redaction)
        if self._error is not None:
            record.status, record.message = _told(self._error, redaction)
        return entry


def _told(error: Exception, redaction: _Redaction) -> tuple[str, str]:
    """Status and message; no message that may quote what is left out."""
    code, message = (error.code, text_for_client(error)) if isinstance(error, WeftError) else ("INTERNAL", "")
    return code, "" if redaction.names else message


class Recorder:
    """One recording.

    Args:
        on_end: Called once it has ended.

    Attributes:
        status: As clients see it.
        waiting: Requests to be written, with the bytes that they hold.
    """

    def __init__(
        self, writer: RecordingWriter, request: pb.RecordingRequest, key: bytes, on_end: Callable[[], None]
    ) -> None:
        file = str(writer.path)
        self.status = pb.RecordingStatus(graph=request.graph, is_running=True, percent=request.percent, file=[file])
        self.waiting: list[tuple[int, Kept | file_pb.Entry]] = []
        self.num_held_bytes = 0
        self._writer, self._request, self._on_end = writer, request, on_end
        self.redaction, self._stop = _Redaction(request, key), asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write what has ended, and close the file; a disk that hangs is not waited for."""
        self._stop.set()
        await asyncio.wait([self._task], timeout=_MAX_STOP_S)

    async def _run(self) -> None:
        status, end_s, reason, frame_s = self.status, time.monotonic() + self._request.max_s, "", 0.0
        while not reason:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_BUSY_FRAME_S, end_s - time.monotonic())):
                    await self._stop.wait()
            now_s = time.monotonic()
            reason = "stopped" if self._stop.is_set() else "its time is over" if now_s >= end_s else ""
            if not reason and now_s < frame_s and self.num_held_bytes < _MANY_BYTES:
                continue
            frame_s = now_s + _FRAME_S
            waiting, self.waiting, num_written = self.waiting, [], 0
            try:
                num_written = await asyncio.to_thread(self._write, waiting) if waiting else 0
                reason = reason if num_written == len(waiting) else "its file is as large as it may be"
            except Exception as error:
                reason = f"writing failed: {getattr(error, 'strerror', None) or type(error).__name__}"
                _log.warning("recording %s", status.file[0], exc_info=error)
            self.num_held_bytes -= sum(num_bytes for num_bytes, _ in waiting)
            status.num_bytes = self._writer.num_bytes
            status.num_requests += num_written
            status.num_dropped += len(waiting) - num_written
        status.num_dropped += len(self.waiting)
        self.waiting.clear()
        status.end_reason, status.is_running = reason, False
        end = file_pb.End(reason=reason, num_records=status.num_requests, num_dropped=status.num_dropped)
        await asyncio.to_thread(self._writer.close, end)
        status.num_bytes = self._writer.num_bytes
        _log.info("recorded %d requests to %s: %s", status.num_requests, status.file[0], reason)
        self._on_end()

    def _write(self, waiting: Sequence[tuple[int, Kept | file_pb.Entry]]) -> int:
        """Write as many as there is room for; returns their number."""
        entries = [one.entry() if isinstance(one, Kept) else one for _, one in waiting]
        while entries and not self._writer.write(entries, self._request.max_bytes):
            del entries[len(entries) // 2 :]
        return len(entries)


class Recordings(Collector):
    """The recordings of a router, at most one of each graph at a time.

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
            is_all = request.action == request.STATUS and not request.graph
            found = [self._latest[name] for name in sorted(self._latest) if is_all or name == request.graph]
            if not (found or is_all):
                raise NotFoundError(f"graph '{request.graph}' has not been recorded since the router's start")
            if request.action == request.STOP:
                await found[0].stop()
        return pb.RecordingResponse(recording=[one.status for one in found])

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
        self._latest[name] = Recorder(writer, request, key, self._choose_active)
        self._choose_active()

    def _choose_active(self) -> None:
        self.active = {name: one for name, one in self._latest.items() if one.status.is_running} or None

    @override
    def collect(self) -> Iterator[Metric]:
        for what in ("requests", "dropped", "bytes"):
            text = f"num_{what} of the graph's latest recording, as weft record --status tells it"
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
