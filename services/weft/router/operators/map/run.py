"""One step for every row of lists."""

from typing import TypeVar

from typing_extensions import override

from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.observing import telemetry
from weft.language.plan import Frame, NodePlan
from weft.router.operators.map.chunks import Chunks
from weft.router.operators.map.lists import Lists, as_lists, lengths_of
from weft.router.operators.map.settings import MapSettings
from weft.router.reporting.path import SKIPPED, StepRecord
from weft.router.reporting.spans import end_step_span, start_step_span, step_attributes
from weft.router.steps import Node, NodeParts, Run

#: Rows of all lists of a request, unless `max_rows` allows more; one that is a call of its own takes about 1.2 kB.
DEFAULT_TOTAL_ROWS = 65_536

_AnyChunks = TypeVar("_AnyChunks", bound=Chunks)


class MapNode(Node):
    """Runs its step for every row of its lists, in chunks, several at once; their answers come back in order.

    The step is one in the path and has one span, with the counts of rows, chunks and failures.
    """

    def __init__(self, plan: NodePlan, parts: NodeParts, settings: MapSettings) -> None:
        super().__init__(plan)
        self._settings = settings
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
        elif run.request.is_traced:
            await self._run_traced(chunks, run, record)
        else:
            await chunks.run(run)
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

    async def _run_traced(self, chunks: Chunks, run: Run, record: StepRecord) -> None:
        span = start_step_span(record.path, telemetry.INTERNAL, self._span_attributes, run.context)
        failure: BaseException | None = None
        try:
            await chunks.run(run.under(telemetry.context_of(span, run.context)))
        except BaseException as error:
            failure = error
            raise
        finally:
            end_step_span(span, record, failure)
            del failure  # it holds this frame

    def _lists(self, frame: Frame, *, is_due: bool) -> Lists:
        """Number and lengths of the lists; their tensors in ``frame`` get the batch dimension that the graph has."""
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
        if is_due or any(one.default is not None for one in settings.collects):
            self._check_total(size * len(lengths), len(lengths))
        longest = max(lengths, default=0)
        if is_due and 0 < settings.max_rows < longest:
            raise InvalidArgumentError(
                f"a list of {longest} rows came to map '{self.plan.name}', which takes up to {settings.max_rows}; send "
                "fewer, or raise its 'max_rows'"
            )
        return Lists(size, lengths, is_batched)

    def _check_total(self, num_rows: int, num_lists: int) -> None:
        """Refuse more rows than the router has memory for. Raises InvalidArgumentError.

        Padding counts, because an output has it too, and its rows may be larger than those of the lists.
        """
        limit = max(self._settings.max_rows * num_lists, DEFAULT_TOTAL_ROWS)
        if num_rows > limit:
            raise InvalidArgumentError(
                f"{num_rows} rows, padding included, came to map '{self.plan.name}', which takes up to {limit} in one "
                "request; send fewer, or give it a higher 'max_rows'"
            )

    def _batch_size(self, frame: Frame) -> int:
        tensors = ((frame[slot], len(self.plan.specs[slot].dims)) for _, slot in self.plan.inputs)
        sizes = [tensor.shape[0] for tensor, rank in tensors if tensor is not None and len(tensor.shape) > rank]
        return max(sizes, default=1)
