"""The format of recordings: round trip, what is left of a cut file, and whatever else is in one."""

import contextlib
import stat
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.core import InferCall, InferResult
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import bytes_tensor, encode
from weft.v2.protocol.encoding import serialize_call, serialize_result
from weft.v2.protocol.recording import RecordingWriter, call_of_record, read_recording, results_of_record
from weft_protos import recording_pb2 as pb

CALL = InferCall(
    "g",
    "2",
    "r1",
    {"priority": 1, "team": "ü", "x": 0.5, "is": True},
    {"X": encode(np.arange(4, dtype=np.float32).reshape(1, 4)), "T": bytes_tensor([b"\0a", b""], (1, 2))},
)
RESULT = InferResult("g", "2", "r1", {"n": 3}, {"Y": encode(np.ones((1, 4), np.float32))})


def entry(number: int = 0) -> pb.Entry:
    """A record with two responses, the second an error."""
    record = pb.Record(arrival_unix_ns=number, version="2", header={"a": "b"}, is_stream=True, path="root.a")
    record.request.MergeFromString(serialize_call(CALL))
    record.response.add(offset_ns=5).response.MergeFromString(serialize_result(RESULT))
    record.response.add(offset_ns=9, status="INTERNAL", message="no").response.model_name = "g"
    return pb.Entry(record=record)


def written(path: Path, *, num_frames: int = 4, is_ended: bool = True) -> bytes:
    """A recording of ten records a frame."""
    path.unlink(missing_ok=True)
    writer = RecordingWriter(path, pb.Header(version=1, graph="g", percent=5))
    for frame in range(num_frames):
        writer.write([entry(10 * frame + number) for number in range(10)])
    cut = path.read_bytes()
    writer.close(pb.End(reason="stopped", num_records=10 * num_frames))
    return path.read_bytes() if is_ended else cut


def readable(path: Path) -> list[pb.Entry]:
    """What is before a fault."""
    found: list[pb.Entry] = []
    with contextlib.suppress(InvalidArgumentError):
        found.extend(read_recording(path))
    return found


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Requests, responses and errors come back as they were; the file is its owner's alone."""
    written(tmp_path / "a")
    first, *records, last = read_recording(tmp_path / "a")
    assert 0o600 == stat.S_IMODE((tmp_path / "a").stat().st_mode)
    assert (5.0, "stopped", list(range(40))) == (
        first.header.percent,
        last.end.reason,
        [one.record.arrival_unix_ns for one in records],
    )
    assert CALL == call_of_record(records[3].record)
    answer, error = results_of_record(records[3].record)
    assert (RESULT, "no") == (answer, error.error and error.error.message)
    with pytest.raises(FileExistsError):
        RecordingWriter(tmp_path / "a", pb.Header())


def test_a_cut_file_is_read_up_to_the_cut(tmp_path: Path) -> None:
    """At whatever byte it ends, all frames before are there, and no end; cut before the first record it is refused."""
    whole = written(tmp_path / "a")
    numbers = []
    for size in range(0, len(whole) - 1, 7):
        (tmp_path / "cut").write_bytes(whole[:size])
        found = readable(tmp_path / "cut")
        assert found[:1] == readable(tmp_path / "a")[:1] or not (found or numbers)
        numbers += [sum(one.HasField("record") for one in found)] if found else []
    assert sorted(numbers) == numbers
    assert {10, 20, 30, 40} <= set(numbers)


@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, place: float, value: int) -> None:
    """Whichever byte changes: what is read before the error, if there is one, is as it was."""
    path = tmp_path_factory.getbasetemp() / "changed"
    data = bytearray(written(path))
    expected = list(read_recording(path))
    data[int(place * len(data))] ^= value
    path.write_bytes(data)
    found = readable(path)
    assert found == expected[: len(found)]


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, is_compressed: bool) -> None:
    """A file of any other kind is told to be none, compressed or not."""
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(zstandard.compress(data) if is_compressed else data)
    with pytest.raises(InvalidArgumentError, match="is no recording of weft record"):
        list(read_recording(path))


def test_other_versions_and_long_frames_are_refused(tmp_path: Path) -> None:
    """A version that this release does not know; a frame that holds more than it may."""
    RecordingWriter(tmp_path / "new", pb.Header(version=9)).close(pb.End())
    with pytest.raises(InvalidArgumentError, match="it has version 9; this release reads 1"):
        list(read_recording(tmp_path / "new"))
    bomb = zstandard.compress(bytes(300 << 20))
    (tmp_path / "long").write_bytes(written(tmp_path / "a", num_frames=1, is_ended=False) + bomb)
    with pytest.raises(InvalidArgumentError, match="corrupt after record 10: a frame has more than 268435456 bytes"):
        list(read_recording(tmp_path / "long"))


def test_a_full_file_stays_as_it_is(tmp_path: Path) -> None:
    """A frame that does not fit, or that the disk does not take whole, leaves what was there, readable to its end."""
    writer = RecordingWriter(tmp_path / "a", pb.Header(version=1))
    assert writer.write([entry()], 10_000)
    size = writer.num_bytes
    assert not writer.write([entry(number) for number in range(9)], size + 10)
    write, parts = writer._file.write, iter([7])

    class Full:
        def __getattr__(self, name: str) -> object:
            return getattr(file, name)

        def write(self, data: memoryview) -> int:
            if (part := next(parts, None)) is None:
                raise OSError(28, "No space left on device")
            return write(data[:part])

    file, writer._file = writer._file, Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        writer.write([entry(1)])
    writer._file = file
    assert size == writer.num_bytes == (tmp_path / "a").stat().st_size
    writer.close(pb.End(reason="full"))
    assert ["header", "record", "end"] == [one.WhichOneof("entry") for one in read_recording(tmp_path / "a")]
