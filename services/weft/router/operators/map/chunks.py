"""The chunks of one map request: each runs the step with some rows; their answers make the outputs.

If the step streams, each response of each row is a response of the map, as it arrives.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

import numpy as np

from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.tensors import WireTensor
from weft.language.plan import Frame
from weft.router.operators.map.lists import CollectPlan, Lists, MapSettings, Rows, Whole, concatenated, stacked
from weft.router.reporting.path import NodeRecord, StepRecord
from weft.router.steps.responses import by_arrival, close_streams, of_part, responses_of
from weft.router.steps.run import GraphRequest, Run
from weft.router.steps.step import Step
from weft.router.tasks import Fork
from weft.router.tensors import with_batch, without_batch, without_rows

#: Response parameter: the row whose response it is, ``3``; with a batch dimension the list as well, ``0:3``.
ROW_PARAMETER = "graph_row"
#: Chunks of one request whose steps have spans.
NUM_TRACED_CHUNKS = 4
#: So many chunks may be answered without waiting, from a cache for example, before other requests have their turn.
_CHUNKS_A_TURN = 32


class Chunks:
    """Runs the chunks of one request.

    Attributes:
        bounds: First row, and the one behind the last, of each chunk.
    """

    def __init__(
        self,
        step: Step,
        shadows: Sequence[Step],
        settings: MapSettings,
        clock_ns: Callable[[], int],
        lists: Lists,
        run: Run,
        record: StepRecord,
        *,
        is_due: bool,
    ) -> None:
        self._step = step
        self._shadows = shadows
        self._settings = settings
        self._clock_ns = clock_ns
        self._lists = lists
        self._frame = run.frame
        self._request = run.request
        self._record = record
        self._is_due = is_due
        self._num_rows = num_rows = lists.num_rows
        size = settings.chunk_rows
        self.bounds = [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)] if is_due else []
        self._answers: list[Frame] = [[]] * len(self.bounds)
        self._reporting: dict[int, GraphRequest] = {}
        self._records: list[StepRecord | None] = [None] * len(self.bounds)
        self._next = 0
        self._rows: list[tuple[int, Rows]] = []
        self._whole: list[tuple[int, Whole]] = []

    async def run(self, run: Run) -> None:
        """Run every chunk, several at once; the first failure of a step that is not soft cancels the others."""
        self._open()
        with self._recorded():
            if len(self.bounds) == 1:
                await self._run_chunk(0, run)
            else:
                fork = Fork()
                for _ in range(min(self._settings.max_inflight, len(self.bounds))):
                    fork.start(self._work(run))
                await fork.join()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        record = self._record
        try:
            yield
            self._record_outcome()
        except WeftError as error:
            self._record_outcome()
            record.status = error.code
            raise
        finally:
            record.end_ns = self._clock_ns()
            self._count()

    def _open(self) -> None:
        frame = self._frame
        for one in self._settings.over:
            if (tensor := frame[one.slot]) is not None:
                self._rows.append((one.row_slot, Rows(tensor, self._lists)))
        for other in self._settings.whole:
            if (tensor := frame[other.slot]) is not None:
                self._whole.append((other.row_slot, Whole(tensor, self._lists, other.rank)))

    async def _work(self, run: Run) -> int:
        while self._next < len(self.bounds):
            number = self._next
            self._next += 1
            if not self._next % _CHUNKS_A_TURN:
                await asyncio.sleep(0)
            await self._run_chunk(number, run)
        return 0

    async def _run_chunk(self, number: int, run: Run) -> None:
        start, stop = self.bounds[number]
        own = self._chunk(number, run)
        for shadow in self._shadows:
            await shadow.run(own)
        try:
            await self._step.run(own)
            self._answers[number] = [own.frame[one.row_slot] for one in self._settings.collects]
            if own.request.response_parameters or own.request.captured:
                self._reporting[number] = own.request
        except WeftError as error:
            raise self._of_rows(error, start, stop) from error
        finally:
            self._records[number] = own.record.steps[0] if own.record.steps else None

    def _chunk(self, number: int, run: Run) -> Run:
        is_batched = self._settings.is_batched
        start, stop = self.bounds[number]
        frame: Frame = [None] * len(self._frame)
        for slot, rows in self._rows:
            frame[slot] = rows.part(start, stop, is_batched=is_batched)
        for slot, whole in self._whole:
            frame[slot] = whole.part(self._lists, start, stop, is_batched=is_batched)
        request = run.request.fork()
        request.is_traced = run.request.is_traced and number < NUM_TRACED_CHUNKS
        return Run(frame, request, run.deadline_ns, run.context, NodeRecord(self._record.name))

    def _of_rows(self, error: WeftError, start: int, stop: int) -> WeftError:
        if stop - start == self._num_rows:
            return error
        shown = f"row {start}" if stop == start + 1 else f"rows {start} to {stop - 1}"
        return error.with_message(f"{error.message} ({shown} of {self._num_rows})")

    def _count(self) -> None:
        record, records = self._record, [one for one in self._records if one is not None]
        num_failed = sum(one.status != "OK" for one in records)
        record.rows = self._num_rows
        record.counts = {"chunks": len(records), "failures": num_failed}
        record.attempts = sum(one.attempts for one in records)

    def _record_outcome(self) -> None:
        """Set the step's record to that of one chunk: the first that did not simply succeed, if any."""
        record, records = self._record, [one for one in self._records if one is not None]
        failed = [one for one in records if one.status not in ("OK", "CANCELLED")]
        if not records:
            return
        shown = (failed or records)[0]
        record.status, record.version, record.error = shown.status, shown.version, shown.error
        record.node, record.fallbacks, record.is_missing = shown.node, shown.fallbacks, shown.is_missing
        record.is_stale = any(one.is_stale for one in records)
        record.cached = None if shown.cached is None else all(one.cached for one in records)

    def collect(self) -> None:
        """Write the outputs to the node's frame; one that is absent for some rows is absent.

        Raises:
            InvalidArgumentError: The rows do not fit into one tensor; the message names the output.
            InternalError: A chunk was answered with another number of rows.
        """
        reporting = [self._reporting[number] for number in sorted(self._reporting)]
        for request in reporting:
            self._request.response_parameters.update(request.response_parameters)
        for index, one in enumerate(self._settings.collects):
            answers = self._answers_of(index, one)
            result: WireTensor | None = None
            lengths: WireTensor | None = None
            if answers is not None:
                result, lengths = self._collected(answers, one)
            if one.output >= 0:
                self._frame[one.output] = result
            if one.lengths >= 0:
                self._frame[one.lengths] = lengths
        self._collect_captured([request.captured for request in reporting])

    def _answers_of(self, index: int, one: CollectPlan) -> list[WireTensor] | None:
        if not self._num_rows and (self._is_due or one.default is not None):
            return [without_rows(one.spec.datatype, one.spec.dims)]
        if not self._is_due:
            if (row := one.default) is None:
                return None
            return [WireTensor(row.datatype, (self._num_rows, *row.shape), bytes(row.data) * self._num_rows)]
        found: list[WireTensor] = []
        for (start, stop), answers in zip(self.bounds, self._answers, strict=True):
            tensor = answers[index]
            if tensor is None:
                return None
            tensor = tensor if self._settings.is_batched else with_batch(tensor)
            if tensor.shape[:1] != (stop - start,):
                raise InternalError(
                    f"output '{one.name}': {stop - start} rows went into the step, and its answer has shape "
                    f"{list(tensor.shape)}; the leading dimension must count the same rows"
                )
            found.append(tensor)
        return found

    def _collected(self, answers: list[WireTensor], one: CollectPlan) -> tuple[WireTensor, WireTensor | None]:
        first, num_free = answers[0], 1 + one.is_list
        other = next((each for each in answers if each.shape[num_free:] != first.shape[num_free:]), None)
        if other is not None:
            shapes = f"{list(first.shape[1:])} and {list(other.shape[1:])}"
            cure = "give the step's model one size; only the first dimension may differ"
            if not one.is_list:
                cure = f'let rows follow one another: collect {{ output: "{one.name}" method: LIST }}'
            raise InvalidArgumentError(f"output '{one.name}': rows of shapes {shapes} do not make one tensor; {cure}")
        if one.is_list:
            return concatenated(answers, self._lists)
        return stacked(answers, self._lists), None

    def _collect_captured(self, each: Sequence[Mapping[str, WireTensor]]) -> None:
        """Tensors that the client requested by the path of an inner step, rows of all chunks in order.

        If rows took different branches, or some chunks did not reach the step, only the rows that did.
        """
        for key in dict.fromkeys(key for captured in each for key in captured):
            found = [captured[key] for captured in each if key in captured]
            answers = found if self._settings.is_batched else [with_batch(tensor) for tensor in found]
            first = answers[0]
            if any(one.shape[1:] != first.shape[1:] for one in answers):
                raise InvalidArgumentError(f"'{key}' has rows of different shapes, which do not make one tensor")
            num_rows = sum(one.shape[0] for one in answers)
            lists = self._lists if num_rows == self._num_rows else Lists(num_rows, (num_rows,), is_batched=False)
            self._request.captured[key] = stacked(answers, lists)


class StreamedRows(Chunks):
    """Runs one request row by row, with streamed responses."""

    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        """Yield the responses of all rows by arrival. Errors as of ``Chunks.run``; closing ends running calls."""
        record = self._record
        self._open()
        rows = (self._responses_of(number, run) for number in range(len(self.bounds)))
        with self._recorded():
            async with contextlib.aclosing(by_arrival(rows, self._settings.max_inflight)) as arrivals:
                async for number, response in arrivals:
                    record.responses += 1
                    yield self._response(run, number, response)

    async def defaults(self, run: Run) -> AsyncGenerator[Run, None]:
        """Yield a response for each row of a skipped step: its defaults, if any."""
        rows = (self._default(number, run) for number in range(self._num_rows))
        async with contextlib.aclosing(by_arrival(rows, 1)) as arrivals:
            async for number, row in arrivals:
                yield self._response(run, number, row)

    async def _default(self, number: int, run: Run) -> AsyncGenerator[tuple[int, Run], None]:
        frame: Frame = [None] * len(run.frame)
        for one in self._settings.collects:
            if one.default is not None:
                frame[one.row_slot] = with_batch(one.default) if self._settings.is_batched else one.default
        yield number, run.fork().with_frame(frame)

    async def _responses_of(self, number: int, run: Run) -> AsyncGenerator[tuple[int, Run], None]:
        own = self._chunk(number, run)
        for shadow in self._shadows:
            await shadow.run(own)
        try:
            await self._step.run(own)
            async with contextlib.aclosing(responses_of(own)) as responses:
                async for response in responses:
                    yield number, response
        except WeftError as error:
            raise self._of_rows(error, number, number + 1) from error
        finally:
            self._records[number] = own.record.steps[0] if own.record.steps else None
            await close_streams((own,))

    def _response(self, run: Run, number: int, response: Run) -> Run:
        index = self._index_of(number)
        merged = of_part(run, response, ROW_PARAMETER, ":".join(map(str, index)))
        frame = merged.frame
        for one in self._settings.collects:
            tensor = response.frame[one.row_slot]
            if one.output >= 0:
                frame[one.output] = None if tensor is None else self._fitted(tensor, one)
        if self._settings.index_slot >= 0:
            shape = (1, len(index)) if self._lists.is_batched else (len(index),)
            frame[self._settings.index_slot] = WireTensor("INT64", shape, np.asarray(index, np.int64).tobytes())
        return merged

    def _index_of(self, number: int) -> tuple[int, ...]:
        if not self._lists.is_batched:
            return (number,)
        ((owner, _),) = self._lists.owners(number, number + 1)
        return owner, number - sum(self._lists.lengths[:owner])

    def _fitted(self, tensor: WireTensor, one: CollectPlan) -> WireTensor:
        if self._settings.is_batched == self._lists.is_batched:
            return tensor
        if self._lists.is_batched:
            return with_batch(tensor)
        if tensor.shape[:1] != (1,):
            raise InternalError(
                f"output '{one.name}': a response to one row has shape {list(tensor.shape)}; its leading dimension "
                "must be 1, because the graph has no batch dimension"
            )
        return without_batch(tensor)
