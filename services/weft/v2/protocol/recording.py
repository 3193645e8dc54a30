"""The format of recordings, ``protos/recording.proto``: writes them frame by frame, and reads them again."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zstandard
from google.protobuf.message import DecodeError

from weft.base.core import InferCall, InferResult
from weft.base.errors import InvalidArgumentError, RemoteError, WeftError
from weft.v2.protocol.codec import deserialize_request, deserialize_response
from weft.v2.protocol.encoding import serialize_call, serialize_result
from weft.v2.protocol.status import text_for_client
from weft.v2.protocol.wire import call_of, result_of
from weft_protos import recording_pb2 as pb

SUFFIX: Final = ".weft.zst"
#: Of one entry; the reader refuses longer ones.
MAX_ENTRY_BYTES: Final = 64 << 20
#: A frame is written once it holds as much, before it is compressed.
FRAME_BYTES: Final = 256 << 10

_VERSION: Final = 1
_LEVEL: Final = 3
#: Room for the last frame in a file that has its size.
_END_BYTES: Final = 512
_MAX_LENGTH_BYTES: Final = 5
_LONGEST_REASON: Final = 200


@dataclass(slots=True)
class Record:
    """One request and its answer; fields as in ``recording.proto``.

    Attributes:
        results: Responses in order, without the empty one that ends a stream; ``error`` is that of one response.
        offsets_ns: When each came, after the arrival.
    """

    call: InferCall
    headers: dict[str, str] = field(default_factory=dict)
    arrival_unix_ns: int = 0
    version: str = ""
    is_stream: bool = False
    timeout_ns: int = 0
    results: list[InferResult] = field(default_factory=list)
    offsets_ns: list[int] = field(default_factory=list)
    status: str = "OK"
    message: str = ""
    path: str = ""
    duration_ns: int = 0
    withheld: list[str] = field(default_factory=list)


class RecordingWriter:
    """Writes one recording to a new file that only its owner may read. Not for several threads.

    Args:
        max_bytes: The file is never longer.

    Attributes:
        num_bytes: Of the file.
        num_records: Those in it.
        pending_bytes: What ``flush`` will write, before it is compressed.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, path: Path, header: pb.Header, max_bytes: int) -> None:
        self.path = path
        self.num_bytes = self.num_records = self.pending_bytes = 0
        self._max_bytes = max_bytes
        self._pending: list[bytes] = []
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
        header.version = _VERSION
        self._write(_delimited(pb.Entry(header=header)))

    def add(self, record: Record) -> bool:
        """Append a record, in memory; False if it is larger than a reader takes."""
        entry = _delimited(_entry_of(record))
        if len(entry) > MAX_ENTRY_BYTES:
            return False
        self._pending.append(entry)
        self.pending_bytes += len(entry)
        return True

    def flush(self) -> bool:
        """Write what was added; False if the file would become too long, and ends without it. Raises OSError."""
        frame = b"".join(self._pending)
        num_added = len(self._pending)
        self._pending, self.pending_bytes = [], 0
        if not self._write(frame, spare_bytes=_END_BYTES):
            return False
        self.num_records += num_added
        return True

    def close(self, reason: str, num_dropped: int) -> None:
        """Write the end, if the disk takes it, and close the file."""
        end = pb.End(reason=reason[:_LONGEST_REASON], num_records=self.num_records, num_dropped=num_dropped)
        with self._file, contextlib.suppress(OSError):
            self._write(_delimited(pb.Entry(end=end)))

    def _write(self, data: bytes, spare_bytes: int = 0) -> bool:
        frame = memoryview(self._compressor.compress(data))
        if self.num_bytes + len(frame) + spare_bytes > self._max_bytes:
            return False
        try:
            while frame:
                frame = frame[self._file.write(frame) :]
        except OSError:
            with contextlib.suppress(OSError):  # what is before stays readable
                self._file.truncate(self.num_bytes)
                self._file.seek(self.num_bytes)
            raise
        self.num_bytes = self._file.tell()
        return True


def _delimited(entry: pb.Entry) -> bytes:
    body = entry.SerializeToString()
    size, prefix = len(body), bytearray()
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + body


def _entry_of(record: Record) -> pb.Entry:
    entry = pb.Entry()
    message = entry.record
    message.arrival_unix_ns, message.version, message.path = record.arrival_unix_ns, record.version, record.path
    message.timeout_ns, message.duration_ns = record.timeout_ns, record.duration_ns
    message.header.update(record.headers)
    message.request.MergeFromString(serialize_call(record.call))
    message.is_stream = record.is_stream
    for offset_ns, result in zip(record.offsets_ns, record.results, strict=True):
        response = message.response.add(offset_ns=offset_ns)
        response.response.MergeFromString(serialize_result(result))
        if result.error is not None:
            response.status, response.message = result.error.code, text_for_client(result.error)
    if record.status != "OK":
        message.status, message.message = record.status, record.message
    message.withheld.extend(record.withheld)
    return entry


class RecordingReader:
    """Reads a recording, any number of times.

    Attributes:
        header: Its first entry.
        end: Its last entry, once all records were read; None if the file is cut, as by a recorder that was killed.

    Raises:
        InvalidArgumentError: The file is no recording, one of another version, or corrupt; a record is then told by its
            number. Everything before was read.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: pb.End | None = None
        with contextlib.closing(self._entries()) as entries:
            first = next(entries, pb.Entry())
        if not first.HasField("header"):
            raise InvalidArgumentError(f"'{path}' is no recording of weft record, or is cut before its first record")
        if first.header.version != _VERSION:
            raise InvalidArgumentError(
                f"'{path}' is a recording of version {first.header.version}; this release reads version {_VERSION}"
            )
        self.header: pb.Header = first.header

    def __iter__(self) -> Iterator[Record]:
        self.end = None
        for number, entry in enumerate(self._entries()):
            if entry.HasField("record"):
                try:
                    record = _record_of(entry.record)
                except (WeftError, DecodeError) as error:
                    raise self._corrupt(number, str(error)) from error
                yield record
            elif entry.HasField("end"):
                self.end = entry.end

    def _entries(self) -> Iterator[pb.Entry]:
        decompressor = zstandard.ZstdDecompressor(max_window_size=2 * MAX_ENTRY_BYTES)
        number = 0
        with self.path.open("rb") as file, decompressor.stream_reader(file, read_across_frames=True) as data:
            try:
                while (body := _read_entry(data)) is not None:
                    yield pb.Entry.FromString(body)
                    number += 1
            except (zstandard.ZstdError, DecodeError, ValueError) as error:
                raise self._corrupt(number, str(error)) from error

    def _corrupt(self, number: int, why: str) -> InvalidArgumentError:
        if number == 0:
            return InvalidArgumentError(f"'{self.path}' is no recording of weft record: {why}")
        return InvalidArgumentError(f"'{self.path}' is corrupt at record {number}: {why}")


def _read_entry(data: zstandard.ZstdDecompressionReader) -> bytes | None:
    """The next entry; None at the end, or if the file is cut there. Raises ValueError or ZstdError."""
    size = 0
    for place in range(_MAX_LENGTH_BYTES):
        byte = data.read(1)
        if not byte:
            return None
        size |= (byte[0] & 0x7F) << 7 * place
        if byte[0] <= 0x7F:
            break
    if byte[0] > 0x7F or not 0 < size <= MAX_ENTRY_BYTES:
        raise ValueError(f"an entry has {size} bytes; 1 to {MAX_ENTRY_BYTES} are allowed")
    body = data.read(size)
    while len(body) < size and (more := data.read(size - len(body))):
        body += more
    return body if len(body) == size else None


def _record_of(message: pb.Record) -> Record:
    record = Record(
        call_of(deserialize_request(message.request.SerializeToString())),
        dict(message.header),
        message.arrival_unix_ns,
        message.version,
        message.is_stream,
        message.timeout_ns,
        status=message.status or "OK",
        message=message.message,
        path=message.path,
        duration_ns=message.duration_ns,
        withheld=list(message.withheld),
    )
    for response in message.response:
        result = result_of(deserialize_response(response.response.SerializeToString()))
        if response.status:
            result.error = RemoteError(response.status, response.message)
        record.results.append(result)
        record.offsets_ns.append(response.offset_ns)
    return record


def read_records(paths: Sequence[Path]) -> Iterable[Record]:
    """Every record of some recordings, one file after the other. Raises as ``RecordingReader``."""
    for path in paths:
        yield from RecordingReader(path)
