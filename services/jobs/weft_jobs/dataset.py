"""A data set of Parquet, JSON Lines or CSV files, local or in an object store, as shards of rows in a fixed order."""

import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from weft_common.errors import InvalidArgumentError, NotFoundError
from weft_common.text.suggestion import suggestion

#: Format by suffix; a suffix of compression may follow that of JSON Lines and CSV.
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
#: What the readers of compressed files raise for one that is damaged or ends too early.
_DAMAGES = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
#: Characters of a cell of CSV, at most; the module's own limit is 128 KiB.
_MAX_CELL = 2**31 - 1
_HASHED_AT_ONCE_BYTES = 1 << 20
_MAX_SHOWN = 80


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


@dataclass(frozen=True)
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
    """

    index: int
    first_row: int
    num_rows: int
    file: str
    columns: dict[str, Any]
    is_text: bool = False
    faults: dict[int, str] = field(default_factory=dict)


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

    def shards(self, num_rows: int, columns: Sequence[str]) -> Iterator[Shard]:
        """Shards of ``num_rows`` rows; the last one of each file may have fewer.

        Args:
            num_rows: Rows of a shard.
            columns: Those to read.

        Raises:
            InvalidArgumentError: A file lacks a column, is not what its suffix says, or has changed meanwhile.
            OSError: A file cannot be read.
        """
        index = first_row = 0
        for file in self.files:
            for part in self._parts(file, num_rows, columns):
                self._check_unchanged(file)
                yield Shard(index, first_row, *part)
                index += 1
                first_row += part[0]

    def _parts(self, file: DataFile, num_rows: int, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        if file.format == "parquet":
            yield from self._parquet(file, num_rows, columns)
            return
        try:
            with self._system.open(file.path, "rb", compression="infer") as stream:
                text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
                yield from (_json_lines if file.format == "jsonl" else _csv)(file, text, num_rows, columns)
        except _DAMAGES as error:
            raise InvalidArgumentError(f"'{file.path}' cannot be unpacked: {error}") from None

    def _parquet(self, file: DataFile, num_rows: int, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        with self._system.open(file.path, "rb") as stream:
            try:
                parquet = pq.ParquetFile(stream)
                _check_columns(file, parquet.schema_arrow.names, columns)
                rest = None
                for batch in parquet.iter_batches(num_rows, columns=list(columns)):
                    table = pa.Table.from_batches([batch])
                    rest = table if rest is None else pa.concat_tables([rest, table])
                    while rest.num_rows >= num_rows:
                        yield num_rows, file.path, _columns(rest.slice(0, num_rows))
                        rest = rest.slice(num_rows)
                if rest is not None and rest.num_rows:
                    yield rest.num_rows, file.path, _columns(rest)
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # else Arrow's word for damage
                    raise
                raise InvalidArgumentError(f"'{file.path}' is no Parquet file that can be read: {error}") from None

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


def _columns(table: pa.Table) -> dict[str, Any]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _json_lines(
    file: DataFile, text: io.TextIOWrapper, num_rows: int, columns: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    lines = (line for line in text if line.strip())
    while some := list(islice(lines, num_rows)):
        values: dict[str, list[Any]] = {name: [] for name in columns}
        faults: dict[int, str] = {}
        for row, line in enumerate(some):
            record: Any = None
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                faults[row] = f"no JSON: {error}: {_shown(line)}"
            if record is not None and not isinstance(record, dict):
                faults[row] = f"a line must be an object of columns, got {_shown(line)}"
            known = record if isinstance(record, dict) else {}
            for name, column in values.items():
                column.append(known.get(name))
        yield len(some), file.path, values, False, faults


def _csv(file: DataFile, text: io.TextIOWrapper, num_rows: int, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    csv.field_size_limit(_MAX_CELL)
    reader = csv.reader(text)
    try:
        header = next(reader, [])
        _check_columns(file, header, columns)
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
            yield len(some), file.path, values, True, faults
    except csv.Error as error:
        raise InvalidArgumentError(f"'{file.path}', line {reader.line_num}: {error}") from None


def _check_columns(file: DataFile, got: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in got:
            raise InvalidArgumentError(
                f"'{file.path}' has no column '{name}'{suggestion(name, got)}; it has {', '.join(got) or 'none'}; "
                "--column INPUT=COLUMN names another"
            )


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


def _shown(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
