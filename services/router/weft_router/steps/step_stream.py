"""The stream of a step: its record and its spans last as long as it does, and a soft one may fail late."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft_common.core import ParameterValue
from weft_common.errors import RequestCancelledError, WeftError
from weft_common.tensors import WireTensor
from weft_router.admission import InflightLimit
from weft_router.reporting.path import StepRecord
from weft_router.reporting.step_counters import StepCounters
from weft_router.steps.responses import OpenStream
from weft_router.steps.run import Run


class StreamParts(NamedTuple):
    """What the streams of a step have in common.

    Attributes:
        counters: Of the step.
        clock_ns: What deadlines are measured on.
        is_soft: Whether a failure after the first response ends a stream as if it were complete.
        limits: Each counts the streams that are open.
    """

    counters: StepCounters
    clock_ns: Callable[[], int]
    is_soft: bool
    limits: Sequence[InflightLimit]

    def enter(self) -> None:
        """One more is open. Raises ResourceExhaustedError where a limit is reached."""
        for index, limit in enumerate(self.limits):
            try:
                limit.enter()
            except WeftError:
                for entered in self.limits[:index]:
                    entered.leave(0)
                raise

    def leave(self, record: StepRecord) -> None:
        """One of them is over."""
        record.end_ns = self.clock_ns()
        for limit in self.limits:
            limit.leave(record.end_ns - record.start_ns)


class StepStream(OpenStream):
    """The stream of a step, from its first response.

    Args:
        parts: What it has in common with others of the step; its limits are entered.
        record: Of the step.

    Attributes:
        record: As given; a step that takes over the stream of another puts its own there.
        is_soft: As of ``StreamParts``.
        on_end: Called once, the latest first, when the stream has ended, with the error that ended it, if one did: the
            spans around the step end then.
    """

    def __init__(self, parts: StreamParts, record: StepRecord) -> None:
        self.num_responses = 0
        self.outputs: dict[str, WireTensor] = {}
        self.parameters: dict[str, ParameterValue] = {}
        self.record = record
        self.is_soft = parts.is_soft
        self.on_end: list[Callable[[BaseException | None], None]] = []
        self._parts = parts
        self._failure: WeftError | None = None
        self._is_over = False

    async def open(self, run: Run) -> None:
        """Write the first response into the frame of ``run``, whose request gets the rest.

        Raises:
            WeftError: It failed; nothing of it is left, and its record tells nothing of it.
        """
        try:
            if not await self._read(run):
                self._end(None)
            else:
                self._count()
        except BaseException:
            await self.close()
            raise
        run.request.stream = self

    @property
    def has_ended(self) -> bool:
        """As ``OpenStream.has_ended``."""
        return self._is_over or self._is_known_last

    async def read_on(self, run: Run) -> bool:
        """As ``OpenStream.read_on``; a failure of a soft step only ends the stream."""
        if self._is_over:
            return False
        record = self.record
        try:
            if await self._read(run):
                self._count()
                return True
        except WeftError as error:
            self._failure = error
            record.status = error.code
            self._parts.counters.count_failure(error.code)
            if not self._may_end_early(error, run):
                raise
            record.error = error.message
            await self.close()
            return False
        self._end(None)
        return False

    async def close(self) -> None:
        """As ``OpenStream.close``."""
        if self._is_over:
            return
        is_complete = self._is_known_last
        if self.record.status == "OK" and not is_complete:
            self.record.status = "CANCELLED"
        cancelled = None if is_complete else RequestCancelledError("the stream was closed before its end")
        self._is_over = True
        self._parts.leave(self.record)
        try:
            await self._close()
        finally:
            self._tell_end(self._failure or cancelled)

    @property
    @abstractmethod
    def _is_known_last(self) -> bool:
        """Whether it is known that no response follows the latest."""

    @abstractmethod
    async def _read(self, run: Run) -> bool:
        """As ``read_on``, whatever the step is; the attributes of the response are written too."""

    @abstractmethod
    async def _close(self) -> None:
        """End what still runs."""

    def _count(self) -> None:
        self.num_responses += 1
        self.record.responses = self.num_responses

    def _may_end_early(self, error: WeftError, run: Run) -> bool:
        """Whether a failure after the first response ends the stream as if it were complete."""
        deadline_ns = run.request.scope.deadline_ns
        is_out_of_time = deadline_ns is not None and self._parts.clock_ns() >= deadline_ns
        return self.is_soft and not (error.code == "DEADLINE_EXCEEDED" and is_out_of_time)

    def _end(self, failure: WeftError | None) -> None:
        self._is_over = True
        self._parts.leave(self.record)
        self._tell_end(failure)

    def _tell_end(self, failure: WeftError | None) -> None:
        self._failure = None
        while self.on_end:
            self.on_end.pop()(failure)
