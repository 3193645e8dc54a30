"""Runs one shard: rows to requests, requests through the window, answers to columns."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.signature import TensorSpec
from weft.base.tensors import Array, WireTensor
from weft.jobs.dataset import Shard
from weft.jobs.layout import ROW, InputValues, Layout, write_column
from weft.jobs.output import AnsweredRows, FailedRow, Journal
from weft.jobs.target import RowsFailed
from weft.jobs.window import Place, Window

#: Sends one request and returns its outputs; raises RowsFailed, and calls the function if the server is busy.
SendRequest = Callable[[Mapping[str, WireTensor], Callable[[], None]], Awaitable[dict[str, Array]]]

#: A shard keeps what is answered so often, in seconds.
CHECKPOINT_S = 15.0


class ShardResult(NamedTuple):
    """Result of a shard: columns of the answered rows, by name, and the failed rows; in order."""

    columns: dict[str, pa.Array]
    failed: list[FailedRow]


@dataclass
class _ShardRun:
    shard: Shard
    layout: Layout
    send: SendRequest
    window: Window | None
    journal: Journal | None
    inputs: dict[str, InputValues] = field(default_factory=dict)
    answers: list[AnsweredRows] = field(default_factory=list)
    failed: dict[int, FailedRow] = field(default_factory=dict)
    kept_s: float = field(default_factory=time.monotonic)
    num_kept: int = 0
    num_restored: int = 0
    num_rows: int = 0
    is_keeping: bool = False

    async def run(self) -> ShardResult:
        await asyncio.to_thread(self._read)
        requests = self._requests()
        if self.journal is not None:
            requests = self._restore(
                requests, *await asyncio.to_thread(self.journal.checkpoints.read, self.shard.index)
            )
        remaining = iter(requests)
        num_at_once = min(len(requests), self.window.maximum) if self.window is not None else len(requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(self._answer(remaining))
        return await asyncio.to_thread(self._result)

    def _restore(
        self, requests: list[Sequence[int]], kept: Sequence[AnsweredRows], failed: Mapping[int, FailedRow]
    ) -> list[Sequence[int]]:
        """Load the kept answers of completely answered requests; return the other requests."""
        known = {row for answered in kept for row in answered.rows} | failed.keys()
        done = {row for rows in requests if known.issuperset(rows) for row in rows}
        self.answers = [answered for answered in kept if done.issuperset(answered.rows)]
        self.failed = {row: failure for row, failure in failed.items() if row in done} | self.failed
        self.num_kept, self.num_restored, self.num_rows = len(self.answers), len(done), len(done)
        self._tell(0)
        return [rows for rows in requests if not done.issuperset(rows)]

    async def _keep(self) -> None:
        """Save new answers from time to time; one request waits for it, the others go on."""
        now_s = time.monotonic()
        if self.journal is None or self.is_keeping or now_s - self.kept_s < CHECKPOINT_S:
            return
        self.is_keeping, self.kept_s = True, now_s
        answered = self.answers[self.num_kept :]
        if answered or self.failed:
            await self.journal.write(answered, dict(self.failed))
        self.num_kept += len(answered)
        self.is_keeping = False

    def _tell(self, num_rows: int) -> None:
        self.num_rows += num_rows
        if self.journal is not None:
            self.journal.tell(self.num_rows, self.num_restored)

    def _read(self) -> None:
        shard = self.shard
        for row, message in shard.faults.items():
            self._fail(row, InvalidArgumentError(message))
        for spec in self.layout.inputs:
            rows = self.inputs[spec.name] = self.layout.read(spec, shard.columns, is_text=shard.is_text)
            for row, message in rows.faults.items():
                self._fail(row, InvalidArgumentError(message))
        for name, type in self.layout.kept_types.items():
            if isinstance(values := shard.columns[name], list):
                for row, value in enumerate(values):
                    if not _is_of(value, type):
                        self._fail(row, InvalidArgumentError(f"--keep '{name}': {value!r:.80} is no {type}, as before"))

    def _requests(self) -> list[Sequence[int]]:
        """Group adjacent rows of equal shapes into requests, up to the limit of rows."""
        num_rows, most = self.shard.num_rows, self.layout.rows_per_request
        if not self.failed and all(isinstance(rows.values, np.ndarray) for rows in self.inputs.values()):
            return [range(first, min(first + most, num_rows)) for first in range(0, num_rows, most)]
        requests: list[list[int]] = []
        shapes: list[tuple[int, ...]] = []
        for row in range(num_rows):
            if row in self.failed:
                continue
            own = [rows.shape(row) for rows in self.inputs.values()]
            if not requests or own != shapes or len(requests[-1]) >= most:
                requests.append([])
                shapes = own
            requests[-1].append(row)
        return list(requests)

    async def _answer(self, remaining: Iterator[Sequence[int]]) -> None:
        async with contextlib.nullcontext() if self.window is None else self.window.place() as place:
            for rows in remaining:
                await self._request(rows, place)
                self._tell(len(rows))
                await self._keep()

    async def _request(self, rows: Sequence[int], place: Place | None) -> None:
        """Answer the rows; if they fail together, retry each half, down to the rows at fault."""
        try:
            outputs = await self._outputs(rows, place)
        except RowsFailed as failure:
            if len(rows) == 1:
                self._fail(rows[0], failure.error, failure.path)
                return
            middle = len(rows) // 2
            await self._request(rows[:middle], place)
            await self._request(rows[middle:], place)
            return
        for spec in self.layout.outputs:
            value = outputs.get(spec.name)
            if value is None and not spec.is_optional:
                raise InternalError(f"the answer lacks the output '{spec.name}'")
            if value is not None and self.layout.has_batch and (not value.shape or value.shape[0] != len(rows)):
                raise InternalError(f"output '{spec.name}' has shape {list(value.shape)} for {len(rows)} rows")
        self.answers.append(AnsweredRows(rows, outputs))

    async def _outputs(self, rows: Sequence[int], place: Place | None) -> dict[str, Array]:
        if place is None:
            return await self.send(self.layout.tensors(self.inputs, rows), lambda: None)
        await place.begin()
        try:
            return await self.send(self.layout.tensors(self.inputs, rows), place.refused)
        finally:
            place.end()

    def _fail(self, row: int, error: WeftError, path: str = "") -> None:
        number = self.shard.first_row + row
        file = self.shard.files[row] if self.shard.files else self.shard.file
        self.failed.setdefault(row, FailedRow(number, file, error.code, error.message, path))

    def _result(self) -> ShardResult:
        layout, shard = self.layout, self.shard
        # Requests have rows in their order, and none of another's between them.
        self.answers.sort(key=lambda answer: answer[0][0])
        columns: dict[str, pa.Array] = {}
        for spec in layout.outputs:
            is_binary = spec.name in layout.binary
            try:
                columns[spec.name] = write_column(spec, self._values(spec.name), is_binary=is_binary)
            except InvalidArgumentError:
                self._drop_undecodable(spec)
                return self._result()
        rows = np.fromiter((row for own, _ in self.answers for row in own), np.int64)
        columns[ROW] = pa.array(shard.first_row + rows)
        for name in layout.keep:
            columns[name] = _kept(shard.columns[name], rows, layout.kept_types.get(name, pa.string()))
        failed = [self.failed[row] for row in sorted(self.failed)]
        if layout.keep:
            failed = [failure._replace(kept=self._kept_of(failure.row - shard.first_row)) for failure in failed]
        return ShardResult(columns, failed)

    def _kept_of(self, row: int) -> dict[str, Any]:
        columns = ((name, self.shard.columns[name]) for name in self.layout.keep)
        return {name: column[row] if isinstance(column, list) else column[row].as_py() for name, column in columns}

    def _values(self, name: str) -> Array | list[Array | None]:
        """An output of all rows: one array if all have one shape, else an array per row."""
        if not self.layout.has_batch:
            return [outputs.get(name) for _, outputs in self.answers]
        parts = [outputs.get(name) for _, outputs in self.answers]
        whole = [part for part in parts if part is not None]
        if whole and len(whole) == len(parts) and len({part.shape[1:] for part in whole}) == 1:
            return np.concatenate(whole)
        values: list[Array | None] = []
        for (rows, _), part in zip(self.answers, parts, strict=True):
            values += [None] * len(rows) if part is None else [np.asarray(value) for value in part]
        return values

    def _drop_undecodable(self, spec: TensorSpec) -> None:
        """Drop rows whose output is not valid text."""
        left: list[AnsweredRows] = []
        for rows, outputs in self.answers:
            for place, row in enumerate(rows):
                own = outputs
                if self.layout.has_batch:
                    own = {name: value[place : place + 1] for name, value in outputs.items()}
                try:
                    value = own.get(spec.name)
                    is_one = value is None or not self.layout.has_batch
                    write_column(spec, [value] if is_one else value, is_binary=False)  # type: ignore[arg-type]
                except InvalidArgumentError as error:
                    self._fail(row, error)
                else:
                    left.append(AnsweredRows([row], own))
        self.answers = left


def _is_of(value: Any, type: pa.DataType) -> bool:  # Arrow's word
    if pa.types.is_string(type):
        return True
    try:
        pa.scalar(value, type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def _kept(column: Any, rows: Array, type: pa.DataType) -> pa.Array:
    """Some rows of a column with its type; as text where that is none of the values', others than text as JSON."""
    if not isinstance(column, list) and column.type == type:
        taken = column.take(pa.array(rows))
        return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken
    plain = column if isinstance(column, list) else column.to_pylist()
    values = [plain[row] for row in rows]
    if pa.types.is_string(type):
        values = [one if one is None or isinstance(one, str) else json.dumps(one, default=str) for one in values]
    return pa.array(values, type)


async def run_shard(
    shard: Shard, layout: Layout, send: SendRequest, window: Window | None = None, journal: Journal | None = None
) -> ShardResult:
    """Answer every row of a shard, or report why it has no answer.

    Without a window all requests are in flight at once; without a journal no answers are saved before the shard is
    done.

    Raises:
        ExceptionGroup: ``send`` raised an unexpected error.
    """
    return await _ShardRun(shard, layout, send, window, journal).run()


def first_error(group: BaseExceptionGroup[Any]) -> Exception:
    """The first error of nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else InternalError(str(error))
