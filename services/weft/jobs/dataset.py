"""A data set of Parquet, JSON Lines or CSV files, local or in an object store, as shards of rows in a fixed order."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import fsspec

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.jobs.readers import READERS, FilePart, is_compressed

#: Format by suffix; a suffix of compression may follow that of JSON Lines and CSV.
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_HASHED_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True)
class DataFile:
    """A file of a data set.

    Attributes:
        path: As its file system names it.
        format: ``parquet``, ``jsonl`` or ``csv``.
        digest: sha256 of a local file; of one in an object store, what that says of its content.
    """

    path: str
    format: str
    digest: str


@dataclass(frozen=True, eq=False)
class Shard:
    """Some adjacent rows of one file.

    Attributes:
        index: Counts the shards of the data set.
        first_row: Number of its first row in the data set.
        num_rows: At least 1.
        file: Where it is from.
        columns: A list of values, or a column of Arrow, by name.
        is_text: Every value is text.
        faults: Rows that could not be read, counted from 0, and why. Their columns hold None.
        share: How much of the data set it is, from 0 to 1, by the bytes of the files; of rows about.
    """

    index: int
    first_row: int
    num_rows: int
    file: str
    columns: dict[str, Any]
    is_text: bool = False
    faults: dict[int, str] = field(default_factory=dict)
    share: float = 0.0


class ShardSpan(NamedTuple):
    """Adjacent shards of one file that can be read without those before them.

    Attributes:
        file: Index of the file.
        start: Place in the file, as its reader counts.
        first_index: Index of the first shard.
        first_row: Number of the first row.
        num_rows: Of each shard.
        share: As of ``Shard``, of all of them.
    """

    file: int
    start: int
    first_index: int
    first_row: int
    num_rows: tuple[int, ...]
    share: float


class Dataset:
    """Files that match a path, in the order of their names.

    Args:
        path: A file, a folder, or a pattern; with a protocol such as ``s3://`` where fsspec knows it.
        format: Format of all files; "": as their suffixes say.

    Attributes:
        files: The files, at least one.

    Raises:
        NotFoundError: Nothing matches.
        InvalidArgumentError: A file has an unknown suffix, the protocol is unknown, or its package is not installed.
        OSError: A file cannot be read.
    """

    def __init__(self, path: str, format: str = "") -> None:  # as the option is called
        try:
            self._system, plain = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise InvalidArgumentError(f"--input '{path}': {error}") from None
        self._is_local = "file" in self._protocols()
        paths = self._paths(plain)
        if not paths:
            raise NotFoundError(f"--input '{path}' matches no file")
        self._states = {each: self._state(each) for each in paths}
        self.files = [DataFile(each, format or _format_of(each), self._digest(each)) for each in paths]
        self._sizes = [int(self._system.size(each) or 0) for each in paths]

    def shards(
        self, num_rows: int, columns: Sequence[str], is_done: Callable[[int], bool] = lambda _: False
    ) -> Iterator[Shard]:
        """Shards of ``num_rows`` rows; the last one of each file may have fewer.

        Args:
            num_rows: Rows of a shard.
            columns: Those to read.
            is_done: Whether nobody needs the columns of a shard, by its index. Such shards at the begin of a file are
                only counted and have none, except those of a compressed file that is not done as a whole.

        Raises:
            InvalidArgumentError: A file lacks a column, or is not what its suffix says.
            OSError: A file cannot be read.
        """
        index = first_row = 0
        for number, file in enumerate(self.files):
            done, start = self._done_at_begin(number, num_rows, index, first_row, is_done)
            for span in done:
                for rows in span.num_rows:
                    part = FilePart(rows, 0.0, {}, is_text=False, faults={})
                    yield _shard(index, first_row, file.path, part, span.share * rows / sum(span.num_rows))
                    index += 1
                    first_row += rows
            if start is None:
                continue
            before = sum(span.share for span in done) / (self._share(number) or 1.0)
            for part in READERS[file.format].parts(self._system, file.path, num_rows, columns, start):
                self._check_unchanged(file)
                share = max(part.fraction - before, 0.0) * self._share(number)
                yield _shard(index, first_row, file.path, part, share)
                before = part.fraction
                index += 1
                first_row += part.num_rows

    def spans(self, num_rows: int) -> Iterator[ShardSpan]:
        """Where the shards of ``shards`` are, each alone; those of a compressed file together.

        Reads all files of text, and of Parquet what they say of themselves. Raises as ``shards``.
        """
        index = first_row = 0
        for number in range(len(self.files)):
            for span in self._spans_of(number, num_rows, index, first_row):
                yield span
                index += len(span.num_rows)
                first_row += sum(span.num_rows)

    def read(self, span: ShardSpan, columns: Sequence[str]) -> Iterator[Shard]:
        """The shards of a span; raises as ``shards``.

        Raises:
            InvalidArgumentError: The file is not the one that the span is of.
        """
        file = self.files[span.file]
        size = self._system.size(file.path)
        if size is not None and size != self._sizes[span.file]:
            raise InvalidArgumentError(
                f"'{file.path}' has {size} bytes, and had {self._sizes[span.file]} when the job began; every machine "
                "must see the same files"
            )
        first_row = span.first_row
        parts = READERS[file.format].parts(self._system, file.path, max(span.num_rows), columns, span.start)
        for place, rows in enumerate(span.num_rows):
            part = next(parts, None)
            if part is None or part.num_rows != rows:
                raise InvalidArgumentError(f"'{file.path}' has other rows than when the job began")
            share = span.share * rows / sum(span.num_rows)
            yield _shard(span.first_index + place, first_row, file.path, part, share)
            first_row += rows

    def _spans_of(self, number: int, num_rows: int, index: int, first_row: int) -> Iterator[ShardSpan]:
        """Spans of one file, the first with this index and number of its first row."""
        file = self.files[number]
        starts = list(READERS[file.format].starts(self._system, file.path, num_rows))
        rows_of_file = sum(rows for rows, _ in starts) or 1
        is_whole = file.format != "parquet" and is_compressed(file.path)
        together = len(starts) if is_whole else 1
        for first in range(0, len(starts), together or 1):
            rows = tuple(count for count, _ in starts[first : first + together])
            start = 0 if is_whole else starts[first][1]
            yield ShardSpan(number, start, index, first_row, rows, sum(rows) / rows_of_file * self._share(number))
            index += len(rows)
            first_row += sum(rows)

    def _done_at_begin(
        self, number: int, num_rows: int, index: int, first_row: int, is_done: Callable[[int], bool]
    ) -> tuple[list[ShardSpan], int | None]:
        """Spans at the begin of a file that are done, and where the next one starts; None: there is none."""
        done: list[ShardSpan] = []
        if not is_done(index):
            return done, 0
        for span in self._spans_of(number, num_rows, index, first_row):
            if not all(is_done(span.first_index + place) for place in range(len(span.num_rows))):
                return done, span.start
            done.append(span)
        return done, None

    def _share(self, number: int) -> float:
        """How much of the data set a file is."""
        return self._sizes[number] / max(sum(self._sizes), 1)

    def _state(self, path: str) -> tuple[int, ...]:
        """What changes when a local file is written or replaced; of others nothing is asked, for that is a request."""
        if not self._is_local:
            return ()
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _check_unchanged(self, file: DataFile) -> None:
        if self._state(file.path) != self._states[file.path]:
            raise InvalidArgumentError(
                f"'{file.path}' has changed while the job ran; put it back and --resume, or begin again in another "
                "folder"
            )

    def _paths(self, plain: str) -> list[str]:
        if self._system.isdir(plain):
            found = self._system.find(plain)
            return sorted(each for each in found if _suffix(each) in FORMATS and not _is_hidden(each[len(plain) :]))
        if self._system.exists(plain):
            return [plain]
        return sorted(each for each in self._system.glob(plain) if self._system.isfile(each))

    def _digest(self, path: str) -> str:
        if not self._is_local:
            return str(self._system.ukey(path))
        digest = hashlib.sha256()
        with self._system.open(path, "rb") as stream:
            while piece := stream.read(_HASHED_AT_ONCE_BYTES):
                digest.update(piece)
        return digest.hexdigest()

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._system.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _shard(index: int, first_row: int, path: str, part: FilePart, share: float) -> Shard:
    return Shard(index, first_row, part.num_rows, path, part.columns, part.is_text, part.faults, share)


def _format_of(path: str) -> str:
    try:
        return FORMATS[_suffix(path)]
    except KeyError:
        raise InvalidArgumentError(
            f"'{path}' has none of the suffixes {', '.join(FORMATS)}; --format says what it is"
        ) from None


def _suffix(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    for compression in _COMPRESSIONS:
        name = name.removesuffix(compression)
    return f".{name.rsplit('.', 1)[-1]}" if "." in name else ""


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))
