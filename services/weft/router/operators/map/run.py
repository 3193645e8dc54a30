"""Runs the step of a map for every row of its lists."""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from typing_extensions import override

from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.observing import telemetry
from weft.language.description import counted, given, offered, slot_name, when_notes
from weft.language.path_form import PathForm
from weft.language.plan import Description, End, Flow, Frame
from weft.router.operators.map.chunks import Chunks, StreamedRows
from weft.router.operators.map.lists import NO_ROWS, Lists, MapSettings, as_lists, lengths_of
from weft.router.reporting.path import SKIPPED, StepRecord
from weft.router.reporting.spans import end_step_span, start_step_span, step_attributes
from weft.router.steps.node import Node, NodeParts, OperatorPlan, StreamingNode
from weft.router.steps.run import Run

#: Rows of all lists of a request, unless `max_rows` allows more; one that is a call of its own takes about 1.2 kB.
DEFAULT_TOTAL_ROWS = 65_536

_AnyChunks = TypeVar("_AnyChunks", bound=Chunks)


@dataclass(frozen=True, slots=True)
class MapPlan(OperatorPlan):
    """A map; its frame holds lists, the frame of a chunk holds rows, in slots of their own."""

    kind: ClassVar[str] = "map"
    path_form: ClassVar[PathForm] = PathForm.of("*(", ")")._replace(shows_nothing=True)
    runs_shadows: ClassVar[bool] = True
    watches: ClassVar[frozenset[str]] = frozenset({"when"})

    settings: MapSettings = NO_ROWS

    @property
    @override
    def batches_steps(self) -> bool | None:
        return self.settings.is_batched

    @property
    @override
    def counting_slots(self) -> tuple[int, ...]:
        return tuple(one.row_slot for one in self.settings.over)

    @property
    @override
    def counts_read(self) -> tuple[int, ...]:
        return () if self.settings.lengths is None else self.settings.lengths[1:]

    @override
    def first_lost(self, lost: Sequence[int]) -> int | None:
        return next((index for index in lost if not self.steps[index].is_soft), None)

    @override
    def node(self, parts: NodeParts) -> Node:
        return (StreamedMapNode if self.streams else MapNode)(self, parts)

    @override
    def describe(self) -> Description:
        settings = self.settings
        notes = [f"{counted(settings.chunk_rows, 'row')} at once" if settings.chunk_rows > 1 else "one by one"]
        notes.append(f"{counted(settings.max_inflight, 'chunk')} in work")
        if settings.max_rows:
            notes.append(f"at most {counted(settings.max_rows, 'row')}")
        if settings.lengths is not None:
            notes.append(f"as many as {settings.lengths[0]} says")
        flows: list[Flow] = []
        for index, step in enumerate(self.steps):
            flows.append(Flow(None, index, when_notes(step), given(step)))
            if step.shadow is None:
                flows.append(Flow(index, None, tensors=offered(step), gives=True))
        if self.streams:
            title = "each response of each row, as it comes"
            collected = [f"{slot_name(self, settings.index_slot)}: the row"] if settings.index_slot >= 0 else []
        else:
            title = "rows in order again"
            collected = [
                f"{one.name}: {'LIST' if one.is_list else 'STACK'}"
                + (f", lengths {slot_name(self, one.lengths)}" if one.lengths >= 0 else "")
                for one in settings.collects
            ]
        lists = " and ".join(one.name for one in settings.over)
        return Description(
            kind=self.kind,
            steps=self.steps,
            entry=End(f"each row of {lists}", tuple(notes)),
            exit=End(title, tuple(collected)),
            flows=tuple(flows),
            each=f"{'chunk' if settings.chunk_rows > 1 else 'row'} of {lists}",
        )


class MapNode(Node):
    """Runs its step for every row of its lists, in chunks, several at once; answers are joined in order.

    The step is one entry in the path and one span, with the counts of rows, chunks and failures.
    """

    def __init__(self, plan: MapPlan, parts: NodeParts) -> None:
        super().__init__(plan)
        self._settings = plan.settings
        self._error_context = parts.error_context
        self._clock_ns = parts.runtime.clock_ns
        self._step = next(step for step in parts.steps if step.plan.shadow is None)
        self._shadows = tuple(step for step in parts.steps if step.plan.shadow is not None)
        self._span_attributes = step_attributes(self._step.plan.name, self._step.plan.path)

    @override
    async def run(self, run: Run) -> None:
        chunks, record = self._begin(run, Chunks)
        if not chunks.bounds:
            record.status = SKIPPED
        else:
            with self._traced(run, record) as own:
                await chunks.run(own)
        try:
            chunks.collect()
        except WeftError as error:
            raise self._error_context.wrap(error, self.plan.path) from error

    def _begin(self, run: Run, kind: type[_AnyChunks]) -> tuple[_AnyChunks, StepRecord]:
        step, action, context = self._step.plan, self._step.action, self._error_context
        is_due = step.when is None or context.holds(step.when, run, step.path)
        record = StepRecord(step.name, step.path, self._clock_ns(), action.target, action.model, action.version)
        run.record.steps.append(record)
        shadows = [
            one for one in self._shadows if one.plan.when is None or context.holds(one.plan.when, run, one.plan.path)
        ]
        try:
            lists = self._lists(run.frame, is_due=is_due)
        except WeftError as error:
            record.status = error.code
            raise context.wrap(error, self.plan.path) from error
        return kind(self._step, shadows, self._settings, self._clock_ns, lists, run, record, is_due=is_due), record

    @contextlib.contextmanager
    def _traced(self, run: Run, record: StepRecord) -> Iterator[Run]:
        """Run within the step's span."""
        if not run.request.is_traced:
            yield run
            return
        span = start_step_span(record.path, telemetry.INTERNAL, self._span_attributes, run.context)
        failure: BaseException | None = None
        try:
            yield run.under(telemetry.context_of(span, run.context))
        except BaseException as error:
            failure = error
            raise
        finally:
            end_step_span(span, record, failure)
            del failure  # it holds this frame

    def _lists(self, frame: Frame, *, is_due: bool) -> Lists:
        """Number and lengths of the lists; adds the graph's batch dimension to their tensors in ``frame``."""
        settings, is_batched = self._settings, self._error_context.is_batching
        shapes: dict[str, tuple[int, ...]] = {}
        for one in settings.over:
            if (tensor := frame[one.slot]) is not None:
                frame[one.slot] = tensor = as_lists(tensor, one.rank, one.name, is_batched=is_batched)
                shapes[one.name] = tensor.shape[: 1 + is_batched]
            elif is_due:
                raise InvalidArgumentError(f"the list '{one.name}' is absent; send it, or guard the step with 'when'")
        counts = set(shapes.values()) or {(self._batch_size(frame), 0) if is_batched else (0,)}
        if len(counts) > 1:
            shown = ", ".join(f"{name} has {shape[-1]}" for name, shape in shapes.items())
            raise InvalidArgumentError(f"the lists of map '{self.plan.name}' differ in their number of rows: {shown}")
        *batch, size = counts.pop()
        lengths = [size] * (batch[0] if batch else 1)
        if shapes and settings.lengths is not None and (tensor := frame[settings.lengths[1]]) is not None:
            lengths = lengths_of(tensor, settings.lengths[0], len(lengths), size)
        # Padding counts, because an output has it too, and its rows may be larger than those of the lists.
        num_rows, limit = size * len(lengths), max(settings.max_rows * len(lengths), DEFAULT_TOTAL_ROWS)
        if num_rows > limit and (is_due or any(one.default is not None for one in settings.collects)):
            raise InvalidArgumentError(
                f"{num_rows} rows, padding included, came to map '{self.plan.name}', which takes up to {limit} in one "
                "request; send fewer, or give it a higher 'max_rows'"
            )
        longest = max(lengths, default=0)
        if is_due and 0 < settings.max_rows < longest:
            raise InvalidArgumentError(
                f"a list of {longest} rows came to map '{self.plan.name}', which takes up to {settings.max_rows}; send "
                "fewer, or raise its 'max_rows'"
            )
        return Lists(size, lengths, is_batched)

    def _batch_size(self, frame: Frame) -> int:
        tensors = ((frame[slot], len(self.plan.specs[slot].dims)) for _, slot in self.plan.inputs)
        sizes = [tensor.shape[0] for tensor, rank in tensors if tensor is not None and len(tensor.shape) > rank]
        return max(sizes, default=1)


class StreamedMapNode(StreamingNode, MapNode):
    """Runs its step for every row of its lists, several at once; responses leave by arrival, a row's in order.

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
        with self._traced(run, record) as own:
            async with contextlib.aclosing(chunks.responses(own)) as responses:
                async for response in responses:
                    try:
                        yield response
                    except GeneratorExit:
                        if response.request.is_known_last:
                            return  # so the span ends without an error
                        raise
