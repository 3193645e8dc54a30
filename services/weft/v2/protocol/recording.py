"""The format of recordings, ``protos/recording.proto``: writes them frame by frame, and reads them again."""

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import zstandard
from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from weft.base.core import InferCall, InferResult
from weft.base.errors import InvalidArgumentError, RemoteError
from weft.v2.protocol.codec import deserialize_request, deserialize_response
from weft.v2.protocol.wire import call_of, result_of
from weft_protos import recording_pb2 as pb

VERSION: Final = 1
SUFFIX: Final = ".weft.zst"
#: Frames that hold more are not read.
MAX_FRAME_BYTES: Final = 256 << 20
#: A frame holds at most 40,000 times what it takes in the file: so memory is bounded before its size is known.
_READ_BYTES: Final = 4096


class RecordingWriter:
    """Writes a recording to a new file, which only its owner may read. Raises OSError.

    Attributes:
        num_bytes: Of the file.
    """

    def __init__(self, path: Path, header: pb.Header) -> None:
        self.path, self.num_bytes = path, 0
        self._compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
        self.write([pb.Entry(header=header)])

    def write(self, entries: Iterable[pb.Entry], max_bytes: float = float("inf")) -> bool:
        """Append a frame; False, and nothing is written, if the file would be longer than ``max_bytes``.

        Raises OSError: The disk does not take it; the file is as before.
        """
        data = io.BytesIO()
        for entry in entries:
            serialize_length_prefixed(entry, data)
        frame = memoryview(self._compressor.compress(data.getbuffer()))
        if self.num_bytes + len(frame) > max_bytes:
            return False
        try:
            while frame:
                frame = frame[self._file.write(frame) :]
        except OSError:
            self._file.truncate(self.num_bytes)
            self._file.seek(self.num_bytes)
            raise
        self.num_bytes = self._file.tell()
        return True

    def close(self, end: pb.End) -> None:
        """Write the end, if the disk takes it."""
        with self._file, contextlib.suppress(OSError):
            self.write([pb.Entry(end=end)])


def read_recording(path: Path) -> Iterator[pb.Entry]:
    """Yield the header, the records and the end, which is missing if the recorder was killed.

    Raises:
        InvalidArgumentError: The file is no recording, one of another version, or corrupt; what is before the fault was
            read.
        OSError: It cannot be read.
    """
    number = 0
    with path.open("rb") as file:
        try:
            for data in map(io.BytesIO, _frames(file)):
                while (entry := parse_length_prefixed(pb.Entry, data)) is not None:
                    if number == 0 and entry.header.version != VERSION:
                        raise ValueError(f"it has version {entry.header.version}; this release reads {VERSION}")
                    yield entry
                    number += 1
        except (zstandard.ZstdError, DecodeError, ValueError) as error:
            fault = f"is corrupt after record {number - 1}" if number else "is no recording of weft record"
            raise InvalidArgumentError(f"'{path}' {fault}: {error}") from error
    if number == 0:
        raise InvalidArgumentError(f"'{path}' is no recording of weft record, or was cut before its first record")


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """What each frame holds, once its checksum was right, but for one that is cut. Raises ZstdError or ValueError."""
    rest = b""
    while True:
        frame, data = zstandard.ZstdDecompressor(max_window_size=2 * MAX_FRAME_BYTES).decompressobj(), bytearray()
        while not frame.eof:
            rest = rest or file.read(_READ_BYTES)
            if not rest:
                return
            data += frame.decompress(rest)
            if len(data) > MAX_FRAME_BYTES:
                raise ValueError(f"a frame has more than {MAX_FRAME_BYTES} bytes")
            rest = frame.unused_data
        yield bytes(data)


def call_of_record(record: pb.Record) -> InferCall:
    """The request. Raises InvalidArgumentError."""
    return call_of(deserialize_request(record.request.SerializeToString()))


def results_of_record(record: pb.Record) -> list[InferResult]:
    """The responses. Raises RemoteError."""
    results = [result_of(deserialize_response(one.response.SerializeToString())) for one in record.response]
    for result, one in zip(results, record.response, strict=True):
        result.error = RemoteError(one.status, one.message) if one.status else None
    return results
