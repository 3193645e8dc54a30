"""Answers of shards that are not done: what an interrupted job need not ask again."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from weft.base.tensors import Array, WireTensor, decode, encode
from weft.jobs.atomic_files import remove_unfinished, replace_file
from weft.jobs.output import FailedRow

_FOLDER = ".answers"
#: Name of an output that stands for a row that failed.
_FAILED = ""
_SCHEMA = pa.schema(
    [
        ("rows", pa.list_(pa.int64())),
        ("output", pa.string()),
        ("datatype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("data", pa.large_binary()),
    ]
)


class Answered(NamedTuple):
    """Rows of a shard, counted from 0, that were answered by one request, and its outputs."""

    rows: Sequence[int]
    outputs: Mapping[str, Array]


class Checkpoints:
    """Files of answers in a folder of its own beside the output; each is written once, and whole.

    Args:
        output: Folder of the job.
        writer: Name of this process, where others of the same job write too.
    """

    def __init__(self, output: Path, writer: str = "") -> None:
        self._folder = output / _FOLDER
        self._writer = writer

    def write(self, index: int, answered: Sequence[Answered], failed: Mapping[int, FailedRow]) -> None:
        """Add to what is known of a shard. Raises OSError."""
        self._folder.mkdir(exist_ok=True)
        records = [
            (list(one.rows), name, *encode(value)) for one in answered for name, value in one.outputs.items()
        ] + [([row], _FAILED, "", (), json.dumps(failure.fields()).encode()) for row, failure in failed.items()]
        columns = [
            pa.array(column, field.type) for column, field in zip(zip(*records, strict=True), _SCHEMA, strict=True)
        ]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, _SCHEMA) as stream:
            stream.write_table(pa.table(columns, schema=_SCHEMA))
        path = self._folder / f"{index:06}-{self._writer}{time.time_ns()}.arrow"
        replace_file(path, sink.getvalue().to_pybytes(), self._writer)

    def read(self, index: int) -> tuple[list[Answered], dict[int, FailedRow]]:
        """What is known of a shard. Raises OSError."""
        outputs: dict[tuple[int, ...], dict[str, Array]] = {}
        failed: dict[int, FailedRow] = {}
        for path in self._paths(index):
            with pa.ipc.open_file(pa.BufferReader(path.read_bytes())) as stream:
                for rows, name, datatype, shape, data in zip(
                    *(column.to_pylist() for column in stream.read_all().columns), strict=True
                ):
                    if name == _FAILED:
                        failed[rows[0]] = FailedRow(**json.loads(data))
                    else:
                        value = decode(WireTensor(datatype, tuple(shape), data), name=name)
                        outputs.setdefault(tuple(rows), {})[name] = value
        return [Answered(rows, found) for rows, found in outputs.items()], failed

    def remove(self, index: int) -> None:
        """The shard is done, or is to be done anew."""
        for path in self._paths(index):
            path.unlink(missing_ok=True)

    def clear(self, first: int = 0) -> None:
        """Remove those of all shards from this one on, and what writers that were killed have left."""
        remove_unfinished(self._folder)
        for path in self._folder.glob("*.arrow"):
            if int(path.name.partition("-")[0]) >= first:
                path.unlink(missing_ok=True)

    def _paths(self, index: int) -> list[Path]:
        return sorted(self._folder.glob(f"{index:06}-*.arrow"))


@dataclass(frozen=True)
class Journal:
    """Keeps answers of a shard that is not done, and hears how far it is.

    Attributes:
        checkpoints: Where they are kept.
        index: Of the shard.
        check: Raises if answers are of another graph than those before.
        tell: Called with how many rows are answered or have failed, and how many of them before the job was resumed.
    """

    checkpoints: Checkpoints
    index: int
    check: Callable[[], Awaitable[None]]
    tell: Callable[[int, int], None]

    def read(self) -> tuple[list[Answered], dict[int, FailedRow]]:
        """What was kept, by whoever began the shard. Raises OSError."""
        return self.checkpoints.read(self.index)

    async def write(self, answered: Sequence[Answered], failed: Mapping[int, FailedRow]) -> None:
        """Keep some more. Raises OSError."""
        await self.check()
        await asyncio.to_thread(self.checkpoints.write, self.index, answered, failed)
