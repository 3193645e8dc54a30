"""Readers of file formats, from the beginning or from a recorded position: ``READERS``.

``pyarrow.dataset`` would reject a whole JSON file for one bad line, and turn large integers into floats.
"""

import csv
import gzip
import io
import json
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.core import compr, get_compression
from typing_extensions import override

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError
from weft.base.text.suggestion import suggestion

#: Format of files that are a row each, and the columns of such a row.
ROW_FILE = "file"
PATH_COLUMN, CONTENT_COLUMN = "path", "content"
_BOM = b"\xef\xbb\xbf"
#: What the readers of compressed files raise for one that is damaged or ends too early.
_DAMAGES = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
#: Characters of a cell of CSV, at most; the module's own limit is 128 KiB.
_MAX_CELL = 2**31 - 1
_MAX_SHOWN = 80
#: Bytes of a value in memory; in the file equal ones may share theirs.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}
_PAGE_BUFFER_BYTES = 1 << 20
#: Rows of a file of text that say what its columns are, and how much memory of Python a byte of text takes.
_NUM_LOOKED_AT = 1000
_MEMORY_OF_TEXT = 4.0


class FilePart(NamedTuple):
    """A run of adjacent rows of a file.

    Attributes:
        num_rows: At least 1.
        fraction: Share of the file up to their end, from 0 to 1; estimated for text.
        columns: A list of values, or an Arrow column, by name.
        is_text: Every value is text.
        faults: Unreadable rows, counted from 0, and why. Their columns hold None.
    """

    num_rows: int
    fraction: float
    columns: dict[str, Any]
    is_text: bool
    faults: dict[int, str]


class FileLook(NamedTuple):
    """Facts about a file from its beginning.

    Attributes:
        types: Of the columns, by name; None: no inspected row has a value.
        row_bytes: Approximate memory of one row.
    """

    types: dict[str, pa.DataType | None]
    row_bytes: float


class FileReader(ABC):
    """Reads a file; or several, each of which is a row.

    All methods raise InvalidArgumentError if a file lacks a column or contradicts its suffix, and OSError if it cannot
    be read.
    """

    def __init__(self, system: AbstractFileSystem, paths: Sequence[str]) -> None:
        self._system = system
        self._paths = paths
        self._path = paths[0]

    @abstractmethod
    def parts(self, num_rows: int, columns: Sequence[str], start: int = 0) -> Iterator[FilePart]:
        """Parts of ``num_rows`` rows from a position of ``starts`` on; the last one may have fewer."""

    @abstractmethod
    def starts(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Number of rows of each part, and its position."""

    @abstractmethod
    def look(self, columns: Sequence[str]) -> FileLook:
        """Inspect the beginning of the file."""

    def _check_columns(self, got: Sequence[str], wanted: Sequence[str]) -> None:
        for name in wanted:
            if name not in got:
                raise InvalidArgumentError(
                    f"'{self._path}' has no column '{name}'{suggestion(name, got)}; it has {', '.join(got) or 'none'}; "
                    "--column INPUT=COLUMN names another"
                )


class _RowFiles(FileReader):
    """Reads files that are one row each; positions are files."""

    @override
    def parts(self, num_rows: int, columns: Sequence[str], start: int = 0) -> Iterator[FilePart]:
        for first in range(start, len(self._paths), num_rows):
            some = list(self._paths[first : first + num_rows])
            values: dict[str, Any] = {PATH_COLUMN: some}
            if CONTENT_COLUMN in columns:
                values[CONTENT_COLUMN] = [self._system.cat_file(path) for path in some]
            yield FilePart(len(some), (first + len(some)) / len(self._paths), values, is_text=False, faults={})

    @override
    def starts(self, num_rows: int) -> Iterator[tuple[int, int]]:
        total = len(self._paths)
        return ((min(num_rows, total - start), start) for start in range(0, total, num_rows))

    @override
    def look(self, columns: Sequence[str]) -> FileLook:
        types = {PATH_COLUMN: pa.string(), CONTENT_COLUMN: pa.binary()}
        self._check_columns(tuple(types), columns)
        return FileLook({name: types[name] for name in columns}, float(self._system.size(self._path) or 0))


class _Parquet(FileReader):
    """Reads Parquet; positions are rows."""

    @override
    def parts(self, num_rows: int, columns: Sequence[str], start: int = 0) -> Iterator[FilePart]:
        with self._opened() as parquet:
            self._check_columns(parquet.schema_arrow.names, columns)
            groups = list(range(parquet.num_row_groups))
            end = skip = start
            total = parquet.metadata.num_rows
            while groups and skip >= (in_group := parquet.metadata.row_group(groups[0]).num_rows):
                skip -= in_group
                del groups[0]
            rest = None
            for batch in parquet.iter_batches(num_rows, row_groups=groups, columns=list(columns)):
                table = pa.Table.from_batches([batch])
                rest = table if rest is None else pa.concat_tables([rest, table])
                skipped = min(skip, rest.num_rows)
                rest, skip = rest.slice(skipped), skip - skipped
                while rest.num_rows >= num_rows:
                    end += num_rows
                    yield FilePart(num_rows, end / total, _columns(rest.slice(0, num_rows)), is_text=False, faults={})
                    rest = rest.slice(num_rows)
            if rest is not None and rest.num_rows:
                yield FilePart(rest.num_rows, 1.0, _columns(rest), is_text=False, faults={})

    @override
    def starts(self, num_rows: int) -> Iterator[tuple[int, int]]:
        with self._opened() as parquet:
            total = parquet.metadata.num_rows
        for start in range(0, total, num_rows):
            yield min(num_rows, total - start), start

    @override
    def look(self, columns: Sequence[str]) -> FileLook:
        with self._opened() as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            self._check_columns(schema.names, columns)
            num_bytes = sum(
                max(column.total_uncompressed_size, column.num_values * _WIDTHS.get(column.physical_type, 0))
                for group in range(metadata.num_row_groups)
                for column in map(metadata.row_group(group).column, range(metadata.num_columns))
                if column.path_in_schema.partition(".")[0] in columns
            )
        return FileLook({name: schema.field(name).type for name in columns}, num_bytes / max(metadata.num_rows, 1))

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        with self._system.open(self._path, "rb") as stream:
            try:
                yield pq.ParquetFile(
                    stream, buffer_size=_PAGE_BUFFER_BYTES
                )  # else it reads a column of a group at once
            except MemoryError as error:
                raise ResourceExhaustedError(
                    f"'{self._path}' needs more memory than there is: {error}; give smaller --rows-per-shard, or row "
                    "groups"
                ) from None
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # else Arrow's word for damage
                    raise
                raise InvalidArgumentError(f"'{self._path}' is no Parquet file that can be read: {error}") from None


class _Lines:
    """Lines of a text file, with the bytes read for them and the bytes they hold so far."""

    def __init__(self, lines: io.TextIOWrapper, fraction: Callable[[], float], start: int) -> None:
        self.lines = lines
        self.fraction = fraction
        self.num_bytes = start

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = next(self.lines)
        self.num_bytes += len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))
        return line


class _TextReader(FileReader):
    """Reads lines of text; positions are bytes."""

    @contextmanager
    def _opened(self, start: int = 0) -> Iterator[_Lines]:
        with self._system.open(self._path, "rb") as stored:
            compression = get_compression(self._path, "infer")
            plain = io.BufferedReader(compr[compression](stored, mode="rb") if compression else stored)
            try:
                start = start or len(_BOM) * plain.peek(len(_BOM)).startswith(_BOM)
                if start:
                    plain.seek(start)
                with io.TextIOWrapper(plain, encoding="utf-8", errors="surrogateescape", newline="") as lines:
                    size = self._system.size(self._path) or 1
                    yield _Lines(lines, lambda: stored.tell() / size, start)
            except _DAMAGES as error:
                raise InvalidArgumentError(f"'{self._path}' cannot be unpacked: {error}") from None


class _JsonLines(_TextReader):
    @override
    def parts(self, num_rows: int, columns: Sequence[str], start: int = 0) -> Iterator[FilePart]:
        with self._opened(start) as text:
            lines = (line for line in text.lines if line.strip())
            while some := list(islice(lines, num_rows)):
                values: dict[str, list[Any]] = {name: [] for name in columns}
                faults: dict[int, str] = {}
                for row, line in enumerate(some):
                    record: Any = None
                    try:
                        record = parsed_json(line)
                    except (ValueError, RecursionError) as error:
                        faults[row] = f"no JSON: {error}: {_shown(line)}"
                    if record is not None and not isinstance(record, dict):
                        faults[row] = f"a line must be an object of columns, got {_shown(line)}"
                    known = record if isinstance(record, dict) else {}
                    for name, column in values.items():
                        column.append(known.get(name))
                yield FilePart(len(some), text.fraction(), values, is_text=False, faults=faults)

    @override
    def starts(self, num_rows: int) -> Iterator[tuple[int, int]]:
        with self._opened() as lines:
            yield from _starts(lines, lambda: next(lines).strip(), num_rows)

    @override
    def look(self, columns: Sequence[str]) -> FileLook:
        with self._opened() as lines:
            count = sum(1 for _ in islice(lines, _NUM_LOOKED_AT))
        part = next(self.parts(_NUM_LOOKED_AT, columns), None)
        values = {name: [] for name in columns} if part is None else part.columns
        row_bytes = lines.num_bytes / max(count, 1) * _MEMORY_OF_TEXT
        return FileLook({name: _type_of(column) for name, column in values.items()}, row_bytes)


class _Csv(_TextReader):
    @override
    def parts(self, num_rows: int, columns: Sequence[str], start: int = 0) -> Iterator[FilePart]:
        with self._records() as (reader, text):
            header: list[str] = next(reader, [])
            self._check_columns(header, columns)
            if not start:
                yield from self._parts(text, reader, header, num_rows, columns)
                return
        with self._records(start) as (reader, text):
            yield from self._parts(text, reader, header, num_rows, columns)

    def _parts(
        self, text: _Lines, reader: Iterator[list[str]], header: Sequence[str], num_rows: int, columns: Sequence[str]
    ) -> Iterator[FilePart]:
        places = {name: header.index(name) for name in columns}
        records = (record for record in reader if record)
        while some := list(islice(records, num_rows)):
            faults = {
                row: f"has {len(record)} cells, the header {len(header)}: {_shown(','.join(record))}"
                for row, record in enumerate(some)
                if len(record) != len(header)
            }
            values = {
                name: [None if row in faults else record[place] for row, record in enumerate(some)]
                for name, place in places.items()
            }
            yield FilePart(len(some), text.fraction(), values, is_text=True, faults=faults)

    @override
    def starts(self, num_rows: int) -> Iterator[tuple[int, int]]:
        with self._records(counts=True) as (reader, lines):
            next(reader, [])
            yield from _starts(lines, lambda: next(reader), num_rows)

    @override
    def look(self, columns: Sequence[str]) -> FileLook:
        with self._records(counts=True) as (reader, lines):
            self._check_columns(next(reader, []), columns)
            count = sum(1 for _ in islice(reader, _NUM_LOOKED_AT))
        return FileLook(dict.fromkeys(columns, pa.string()), lines.num_bytes / max(count, 1) * _MEMORY_OF_TEXT)

    @contextmanager
    def _records(self, start: int = 0, *, counts: bool = False) -> Iterator[tuple[Any, _Lines]]:
        """Records and their lines, whose bytes are counted on request."""
        csv.field_size_limit(_MAX_CELL)
        with self._opened(start) as lines:
            reader = csv.reader(lines if counts else lines.lines)
            try:
                yield reader, lines
            except csv.Error as error:
                raise InvalidArgumentError(f"'{self._path}', line {reader.line_num}: {error}") from None


def _starts(lines: _Lines, next_row: Callable[[], Any], num_rows: int) -> Iterator[tuple[int, int]]:
    """Rows and start byte of each span. ``next_row`` reads a row's lines; a falsy result is no row."""
    start = count = 0
    while True:
        before = lines.num_bytes
        try:
            row = next_row()
        except StopIteration:
            break
        if row:
            if count == num_rows:
                yield count, start
                count = 0
            if not count:
                start = before
            count += 1
    if count:
        yield count, start


def _type_of(values: Sequence[Any]) -> pa.DataType | None:
    """Type of a JSON column: that of its values, or text if they differ, or are lists or objects."""
    found = {type(value) for value in values if value is not None}
    if found == {int, float}:
        found = {float}
    types = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    return types.get(found.pop(), pa.string()) if len(found) == 1 else pa.string() if found else None


def parsed_json(text: str) -> Any:
    """Parse JSON strictly: NaN and Infinity, which Python accepts, are errors. Raises ValueError."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def is_compressed(path: str) -> bool:
    """Whether a text file can only be read from its beginning."""
    return get_compression(path, "infer") is not None


def _columns(table: pa.Table) -> dict[str, Any]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _shown(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


#: By format.
READERS: Mapping[str, type[FileReader]] = {
    "parquet": _Parquet,
    "jsonl": _JsonLines,
    "csv": _Csv,
    ROW_FILE: _RowFiles,
}
