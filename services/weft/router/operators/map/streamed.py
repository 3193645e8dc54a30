"""A map whose step streams: each response of each row is one of the map, as it arrives."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import numpy as np
from typing_extensions import override

from weft.base.errors import InternalError, WeftError
from weft.base.observing import telemetry
from weft.base.tensors import WireTensor
from weft.language.plan import Frame
from weft.router.operators.map.chunks import Chunks
from weft.router.operators.map.run import MapNode
from weft.router.operators.map.settings import CollectPlan
from weft.router.reporting.path import SKIPPED
from weft.router.reporting.spans import end_step_span, start_step_span
from weft.router.steps import Run, StreamingNode, by_arrival, close_streams, of_part, responses_of
from weft.router.tensors import with_batch, without_batch

#: Response parameter: the row whose response it is, ``3``; with a batch dimension the list as well, ``0:3``.
ROW_PARAMETER = "graph_row"


class StreamedMapNode(StreamingNode, MapNode):
    """Runs its step for every row of its lists, several at once; responses come as they arrive, a row's in order.

    A failing row ends it after the responses before. A row that fails softly has one response, with the defaults.
    """

    @override
    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        chunks, record = self._begin(run, StreamedRows)
        if not chunks.bounds:
            record.status = SKIPPED
            async with contextlib.aclosing(chunks.defaults(run)) as responses:
                async for response in responses:
                    yield response
            return
        span, own = None, run
        failure: BaseException | None = None
        if run.request.is_traced:
            span = start_step_span(record.path, telemetry.INTERNAL, self._span_attributes, run.context)
            own = run.under(telemetry.context_of(span, run.context))
        try:
            async with contextlib.aclosing(chunks.responses(own)) as responses:
                async for response in responses:
                    try:
                        yield response
                    except GeneratorExit as left:
                        failure = None if response.request.is_known_last else left
                        raise
        except (WeftError, asyncio.CancelledError) as error:
            failure = error
            raise
        finally:
            if span is not None:
                end_step_span(span, record, failure)
            del failure  # it holds this frame


class StreamedRows(Chunks):
    """The work of one request, row by row."""

    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        """The responses of all rows by arrival. Errors as of ``Chunks.run``; what closes it, ends what runs."""
        record = self._record
        self._open()
        rows = (self._responses_of(number, run) for number in range(len(self.bounds)))
        with self._recorded():
            async with contextlib.aclosing(by_arrival(rows, self._settings.max_inflight)) as arrivals:
                async for number, response in arrivals:
                    record.responses += 1
                    yield self._response(run, number, response)

    async def defaults(self, run: Run) -> AsyncGenerator[Run, None]:
        """A response for each row of a step that does not run: its defaults, as far as there are some."""
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
