"""The stream of a step: its record and its spans last as long as it does, and a soft one may fail late."""

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from typing_extensions import override

from weft.base.core import ParameterValue
from weft.base.errors import RequestCancelledError, WeftError
from weft.base.tensors import WireTensor
from weft.router.admission import InflightLimit
from weft.router.reporting.path import StepRecord
from weft.router.reporting.step_counters import StepCounters
from weft.router.steps.responses import OpenStream
from weft.router.steps.run import Run


class StreamParts(NamedTuple):
    """What the streams of a step have in common.

    Attributes:
        counters: Of the step.
        clock_ns: What deadlines are measured on.
        is_soft: Whether a failure after the first response ends a stream as if it were complete.
        admission: Counts the streams that are open; None: there is no limit.
    """

    counters: StepCounters
    clock_ns: Callable[[], int]
    is_soft: bool
    admission: InflightLimit | None = None

    def enter(self) -> None:
        """One more is open; ``leave`` must follow. Raises ResourceExhaustedError where the limit is reached."""
        if self.admission is not None:
            self.admission.enter()

    def leave(self, record: StepRecord) -> None:
        """One of them is over."""
        record.end_ns = self.clock_ns()
        if self.admission is not None:
            self.admission.leave(record.end_ns - record.start_ns)


class StepStream(OpenStream):
    """The stream of a step, from its first response.

    Args:
        parts: What it has in common with others of the step; its limit is entered.
        record: Of the step.

    Attributes:
        record: As given; a step that takes over the stream of another puts its own there.
        is_soft: As of ``StreamParts``.
    """

    def __init__(self, parts: StreamParts, record: StepRecord) -> None:
        self.num_responses = 0
        self.outputs: dict[str, WireTensor] = {}
        self.parameters: dict[str, ParameterValue] = {}
        self.record = record
        self.is_soft = parts.is_soft
        self._on_end: list[Callable[[BaseException | None], None]] = []
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

    def when_over(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call back once when the stream has ended, at once if it has; the latest of several callbacks is the first.

        Args:
            callback: Receives the error that ended the stream, if one did.
        """
        if self._is_over:
            callback(None)  # without a response: what fails before the first is the step's error
        else:
            self._on_end.append(callback)

    @property
    @override
    def has_ended(self) -> bool:
        return self._is_over or self._is_known_last

    async def read_on(self, run: Run) -> bool:
        """As ``OpenStream.read_on``; a failure of a soft step ends the stream, which the last response tells."""
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
            run.request.broken.append(f"{record.path}: {error.code}")
            await self.close()
            return False
        self._end(None)
        return False

    @override
    async def close(self) -> None:
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
        while self._on_end:
            self._on_end.pop()(failure)
