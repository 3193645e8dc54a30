"""A data set of files, local or in an object store, read as shards of rows in a fixed order.

Files are Parquet, JSON Lines or CSV; or images and the like, each of which is a row.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.observing.logs import get_logger
from weft.jobs.readers import PATH_COLUMN, READERS, ROW_FILE, FileLook, FilePart, FileReader, is_compressed

_log = get_logger("weft.jobs")

#: Format by suffix; a suffix of compression may follow that of JSON Lines and CSV.
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
#: Suffixes of files that are a row each.
_ROW_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".wav", ".flac", ".mp3", ".pdf")
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
#: Files that cannot be read whose reasons a message has.
_MAX_TOLD = 10


@dataclass(frozen=True)
class DataFile:
    """A file of a data set, in a format of ``READERS``.

    The digest is the sha256 of a local file; in an object store, the store's identifier of its content.
    """

    path: str
    format: str
    digest: str


@dataclass(frozen=True, eq=False)
class Shard:
    """A run of adjacent rows of one file.

    Attributes:
        index: Of the shard in the data set.
        first_row: Number of its first row in the data set.
        num_rows: At least 1.
        columns: A list of values, or an Arrow column, by name.
        is_text: Every value is text.
        faults: Unreadable rows, counted from 0, and why. Their columns hold None.
        share: Its share of the data set, from 0 to 1, by the bytes of the files; estimated for rows.
        files: Path of each row, for files that are a row each.
    """

    index: int
    first_row: int
    num_rows: int
    file: str
    columns: dict[str, Any]
    is_text: bool = False
    faults: dict[int, str] = field(default_factory=dict)
    share: float = 0.0
    files: tuple[str, ...] = ()


class ShardSpan(NamedTuple):
    """Adjacent shards of one file that can be read without the earlier ones.

    Attributes:
        file: Index of the file, or of the first of adjacent ones that are a row each.
        start: Position in the file, in its reader's terms, or among these files.
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


class _Unit(NamedTuple):
    """A file; or adjacent ones that are a row each, which are read as one. Its share is of the whole data set."""

    number: int
    file: DataFile
    reader: FileReader
    share: float


class Dataset:
    """Files that match a path, sorted by name.

    The path is a file, a folder, or a pattern; also with a protocol of fsspec such as ``s3://``. All files have the
    given format, or, if that is "", the one of their suffixes.

    Attributes:
        files: The files, at least one.
        bad_files: Why files, or the rest of them, are skipped, by path.

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
        protocol = self._system.protocol
        self._is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)
        paths = self._paths(plain)
        if not paths:
            raise NotFoundError(f"--input '{path}' matches no file")
        self._states = {each: self._state(each) for each in paths}
        self.files = [DataFile(each, format or _format_of(each), self._digest(each)) for each in paths]
        self._sizes = [int(self._system.size(each) or 0) for each in paths]
        self.bad_files: dict[str, str] = {}
        self._skips_bad = False

    @property
    def is_of_row_files(self) -> bool:
        """Whether each file is a row."""
        return all(file.format == ROW_FILE for file in self.files)

    def look(self, columns: Sequence[str], *, skips_bad: bool = False) -> FileLook:
        """Inspect the beginning of every file for the columns that will be read, before any row is processed.

        With ``skips_bad`` unreadable files are skipped, and so is the rest of those that turn out to be damaged.

        Returns:
            Types of the columns over all files, text if these differ, and the memory of a row of the largest file.

        Raises:
            InvalidArgumentError: Files lack a column, or contradict their suffix; all of them are named.
            OSError: A file cannot be read.
        """
        self._skips_bad = skips_bad
        looks: dict[str, FileLook] = {}
        for file in self.files:
            try:
                looks[file.path] = READERS[file.format](self._system, [file.path]).look(columns)
            except InvalidArgumentError as error:
                self.bad_files[file.path] = error.message
        if not looks:
            raise InvalidArgumentError(next(iter(self.bad_files.values())))
        if self.bad_files and not skips_bad:
            reasons = "; ".join([*self.bad_files.values()][:_MAX_TOLD])
            raise InvalidArgumentError(
                f"{len(self.bad_files)} of {len(self.files)} files cannot be read: {reasons}; mend or remove them, or "
                "pass over them with --skip-bad-files"
            )
        kept = [place for place, file in enumerate(self.files) if file.path not in self.bad_files]
        self.files, self._sizes = [self.files[place] for place in kept], [self._sizes[place] for place in kept]
        types = {name: _common_type([look.types[name] for look in looks.values()]) for name in columns}
        return FileLook(types, max(look.row_bytes for look in looks.values()))

    def num_shards(self, num_files: int, num_rows: int) -> int:
        """Number of shards in the first ``num_files`` files."""
        count = 0
        for unit in self._units():
            rest = num_files - unit.number
            if rest <= 0:
                break
            spans = [*self._spans_of(unit, num_rows, 0, 0)]
            if unit.file.format == ROW_FILE:  # whole shards of those that are the same
                spans = [span for span in spans if span.start + sum(span.num_rows) <= rest]
            count += sum(len(span.num_rows) for span in spans)
        return count

    def shards(
        self, num_rows: int, columns: Sequence[str], is_done: Callable[[int], bool] = lambda _: False
    ) -> Iterator[Shard]:
        """Yield shards of ``num_rows`` rows; the last one of each file may have fewer.

        Finished shards at the beginning of a file are only counted and have no columns, except in a compressed file
        that is not finished as a whole.

        Raises:
            InvalidArgumentError: A file lacks a column, or contradicts its suffix.
            OSError: A file cannot be read.
        """
        index = first_row = 0
        for unit in self._units():
            file, first_index, first_row_of_file = unit.file, index, first_row
            before, start = 0.0, 0
            for span in self._spans_of(unit, num_rows, index, first_row) if is_done(index) else ():
                start = span.start
                if not all(is_done(span.first_index + place) for place in range(len(span.num_rows))):
                    break
                for rows in span.num_rows:
                    part = FilePart(rows, 0.0, {}, is_text=False, faults={})
                    yield _shard(index, first_row, file, part, span.share * rows / sum(span.num_rows))
                    index += 1
                    first_row += rows
                before += span.share / (unit.share or 1.0)
                start = -1
            if start < 0:
                continue
            for part in self._parts(unit, num_rows, columns, start):
                for path in _row_files(file, part) or (file.path,):
                    if self._state(path) != self._states[path]:
                        raise InvalidArgumentError(
                            f"'{path}' has changed while the job ran; put it back and --resume, or begin again in "
                            "another folder"
                        )
                yield _shard(index, first_row, file, part, max(part.fraction - before, 0.0) * unit.share)
                before = part.fraction
                index += 1
                first_row += part.num_rows
            if file.path in self.bad_files:  # shards of the next file have the numbers that they have without damage
                spans = [*self._spans_of(unit, num_rows, 0, 0)]
                index = first_index + sum(len(span.num_rows) for span in spans)
                first_row = first_row_of_file + sum(sum(span.num_rows) for span in spans)

    def spans(self, num_rows: int) -> Iterator[ShardSpan]:
        """Yield the positions of ``shards``, one by one; those of a compressed file together.

        Reads text files completely, of Parquet files the metadata. Raises as ``shards``.
        """
        index = first_row = 0
        for unit in self._units():
            for span in self._spans_of(unit, num_rows, index, first_row):
                yield span
                index += len(span.num_rows)
                first_row += sum(span.num_rows)

    def read(self, span: ShardSpan, columns: Sequence[str]) -> Iterator[Shard]:
        """Yield the shards of a span, fewer if a damaged file is skipped; raises as ``shards``.

        Raises:
            InvalidArgumentError: The file is not the one that the span is of.
        """
        unit = next(unit for unit in self._units() if unit.number == span.file)
        file, first_row = unit.file, span.first_row
        size = None if file.format == ROW_FILE else self._system.size(file.path)
        if size is not None and size != self._sizes[span.file]:
            raise InvalidArgumentError(
                f"'{file.path}' has {size} bytes, and had {self._sizes[span.file]} when the job began; every machine "
                "must see the same files"
            )
        parts = self._parts(unit, max(span.num_rows), columns, span.start)
        for place, rows in enumerate(span.num_rows):
            part = next(parts, None)
            if part is None and file.path in self.bad_files:
                return
            if part is None or part.num_rows != rows:
                raise InvalidArgumentError(f"'{file.path}' has other rows than when the job began")
            yield _shard(span.first_index + place, first_row, file, part, span.share * rows / sum(span.num_rows))
            first_row += rows

    def _units(self) -> Iterator[_Unit]:
        number, size = 0, max(sum(self._sizes), 1)
        for _, group in itertools.groupby(self.files, lambda file: "" if file.format == ROW_FILE else file.path):
            files = list(group)
            reader = READERS[files[0].format](self._system, [file.path for file in files])
            yield _Unit(number, files[0], reader, sum(self._sizes[number : number + len(files)]) / size)
            number += len(files)

    def _parts(self, unit: _Unit, num_rows: int, columns: Sequence[str], start: int) -> Iterator[FilePart]:
        try:
            yield from unit.reader.parts(num_rows, columns, start)
        except InvalidArgumentError as error:
            self._pass_over(unit.file, error)

    def _spans_of(self, unit: _Unit, num_rows: int, index: int, first_row: int) -> Iterator[ShardSpan]:
        """Spans of one unit; the first has this index and first row number."""
        starts: list[tuple[int, int]] = []
        try:
            starts.extend(unit.reader.starts(num_rows))  # where the file is damaged, those before that
        except InvalidArgumentError as error:
            self._pass_over(unit.file, error)
        rows_of_file = sum(rows for rows, _ in starts) or 1
        is_whole = unit.file.format in ("jsonl", "csv") and is_compressed(unit.file.path)
        together = len(starts) if is_whole else 1
        for first in range(0, len(starts), together or 1):
            rows = tuple(count for count, _ in starts[first : first + together])
            start = 0 if is_whole else starts[first][1]
            yield ShardSpan(unit.number, start, index, first_row, rows, sum(rows) / rows_of_file * unit.share)
            index += len(rows)
            first_row += sum(rows)

    def _pass_over(self, file: DataFile, error: InvalidArgumentError) -> None:
        if not self._skips_bad:
            raise error
        self.bad_files[file.path] = error.message
        _log.warning("the rest of '%s' is passed over: %s", file.path, error.message)

    def _state(self, path: str) -> tuple[int, ...]:
        """State that changes when a local file is written or replaced; remote files are not queried."""
        if not self._is_local:
            return ()
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _paths(self, plain: str) -> list[str]:
        if self._system.isdir(plain):
            found = self._system.find(plain)
            return sorted(
                each
                for each in found
                if _suffix(each) in (*FORMATS, *_ROW_FILES)
                and not any(part.startswith((".", "_")) for part in each[len(plain) :].split("/"))
            )
        if self._system.exists(plain):
            return [plain]
        return sorted(each for each in self._system.glob(plain) if self._system.isfile(each))

    def _digest(self, path: str) -> str:
        if not self._is_local:
            return str(self._system.ukey(path))
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


def _shard(index: int, first_row: int, file: DataFile, part: FilePart, share: float) -> Shard:
    files = _row_files(file, part)
    return Shard(index, first_row, part.num_rows, file.path, part.columns, part.is_text, part.faults, share, files)


def _row_files(file: DataFile, part: FilePart) -> tuple[str, ...]:
    """File of each row, for data sets of one file per row."""
    return tuple(part.columns.get(PATH_COLUMN, ())) if file.format == ROW_FILE else ()


def _common_type(types: Sequence[pa.DataType | None]) -> pa.DataType:
    plain = [type.value_type if pa.types.is_dictionary(type) else type for type in types if type is not None]
    try:
        fields = [pa.schema([("", type)]) for type in plain]
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type if fields else pa.string()
    except pa.ArrowException:
        return pa.string()


def _format_of(path: str) -> str:
    suffix = _suffix(path)
    if suffix not in FORMATS and suffix not in _ROW_FILES:
        raise InvalidArgumentError(
            f"'{path}' has none of the suffixes {', '.join((*FORMATS, *_ROW_FILES))}; --format says what it is"
        )
    return FORMATS.get(suffix, ROW_FILE)


def _suffix(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    for compression in _COMPRESSIONS:
        name = name.removesuffix(compression)
    return f".{name.rsplit('.', 1)[-1]}" if "." in name else ""
