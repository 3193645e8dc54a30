"""Open streams of steps and nodes: the latest response is in a frame, the rest is read from the request's stream."""

import asyncio
import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from typing_extensions import override

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import RequestCancelledError, WeftError
from weft.base.observing import telemetry
from weft.router.reporting.counters import StepCounters
from weft.router.reporting.path import StepRecord
from weft.router.steps.run import GraphRequest, OpenStream, ResponsePart, Run
from weft.router.tasks import Arrivals

_Key = TypeVar("_Key")


class NodeResponses(OpenStream):
    """The stream of a node whose responses are runs of some of its steps.

    Args:
        runs: Makes the runs; closing it ends running calls.
        slots: The output slots, in the frames of ``runs`` and in those written to.
    """

    def __init__(self, runs: AsyncGenerator[Run, None], slots: Sequence[int]) -> None:
        super().__init__()
        self._runs = runs
        self._slots = slots
        self._latest: GraphRequest | None = None
        self._is_over = False

    async def open(self, run: Run) -> None:
        """Write the first response to the frame of ``run`` and leave the rest in its request. Raises as ``read_on``."""
        try:
            await self.read_on(run)
        except BaseException:
            await self.close()
            raise
        run.request.stream = self

    @property
    @override
    def has_ended(self) -> bool:
        return self._is_over or (self._latest is not None and self._latest.is_known_last)

    @override
    async def settle(self, timeout_s: float) -> None:
        if self._latest is not None and not self._is_over:
            await self._latest.is_last(timeout_s)

    @override
    async def read_on(self, run: Run) -> bool:
        response = await anext(self._runs, None)
        if response is None:
            self._is_over = True
            return False
        for slot in self._slots:
            run.frame[slot] = response.frame[slot]
        self._latest = request = response.request
        self.num_responses += 1
        self.outputs, self.parameters = request.captured, request.response_parameters
        return True

    @override
    async def close(self) -> None:
        await self._runs.aclose()


class StreamParts(NamedTuple):
    """Settings shared by all streams of a step.

    Attributes:
        is_soft: Whether a failure after the first response ends a stream as if it were complete.
    """

    counters: StepCounters
    clock_ns: Callable[[], int]
    is_soft: bool


class StepStream(OpenStream):
    """The stream of a step, from its first response; the step's record and spans last as long.

    Attributes:
        record: As given; a step that takes over another's stream puts its own there.
    """

    def __init__(self, parts: StreamParts, record: StepRecord) -> None:
        super().__init__()
        self.record = record
        self.is_soft = parts.is_soft
        self._on_end: list[Callable[[BaseException | None], None]] = []
        self._parts = parts
        self._failure: WeftError | None = None
        self._has_raised = False
        self._is_over = False

    async def open(self, run: Run) -> None:
        """Write the first response to the frame of ``run`` and leave the rest in its request.

        Raises WeftError if it failed: the stream is closed, and not recorded.
        """
        try:
            if not await self._read(run):
                self._end()
            else:
                self._count()
        except BaseException:
            await self.close()
            raise
        run.request.stream = self

    def when_over(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call ``callback`` once when the stream has ended, or now if it has; callbacks run in reverse order."""
        if self._is_over:
            callback(None)  # without a response: what fails before the first is the step's error
        else:
            self._on_end.append(callback)

    @property
    @override
    def has_ended(self) -> bool:
        """An error that follows the latest response is told after it: that response is not the last."""
        return not self._has_raised and (self._is_over or self._is_known_last)

    @override
    async def read_on(self, run: Run) -> bool:
        """Read the next response; a failure of a soft step ends the stream and is reported in the last response."""
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
            deadline_ns = run.request.scope.deadline_ns
            is_out_of_time = deadline_ns is not None and self._parts.clock_ns() >= deadline_ns
            if not self.is_soft or (error.code == "DEADLINE_EXCEEDED" and is_out_of_time):
                self._has_raised = True
                raise
            record.error = error.message
            run.request.broken.append(f"{record.path}: {error.code}")
            await self.close()
            return False
        self._end()
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
        self.record.end_ns = self._parts.clock_ns()
        try:
            await self._close()
        finally:
            self._notify_end(self._failure or cancelled)

    @property
    @abstractmethod
    def _is_known_last(self) -> bool:
        """Whether it is known that no response follows the latest."""

    @abstractmethod
    async def _read(self, run: Run) -> bool:
        """As ``read_on``, for any step; also sets the response's attributes."""

    @abstractmethod
    async def _close(self) -> None:
        """Stop what still runs."""

    def _count(self) -> None:
        self.num_responses += 1
        self.record.responses = self.num_responses

    def _end(self) -> None:
        self._is_over = True
        self.record.end_ns = self._parts.clock_ns()
        self._notify_end(None)

    def _notify_end(self, failure: WeftError | None) -> None:
        self._failure = None
        while self._on_end:
            self._on_end.pop()(failure)


def stream_of(record: StepRecord, run: Run) -> StepStream | None:
    """The open stream that the step of a record, or its answering fallback, left."""
    stream = run.request.stream
    if not isinstance(stream, StepStream):
        return None
    tried = () if record.fallbacks is None else record.fallbacks.steps[-1:]
    return stream if any(stream.record is one for one in (record, *tried)) else None


async def responses_of(run: Run) -> AsyncGenerator[Run, None]:
    """Yield the results of an ended run: the run itself, or each response of the stream that it left.

    Raises WeftError if the stream failed, after the responses before.
    """
    stream = run.request.stream
    if stream is None:
        yield run
        return
    position, has_response = 0, stream.num_responses > 0
    while has_response:
        yield of_response(run, stream, position)
        position, has_response = position + 1, await stream.read_on(run)


def of_response(run: Run, stream: OpenStream, position: int) -> Run:
    """Make a run for the latest response of a stream, which is in the frame of ``run``.

    The trace shows the first response in full, and of the others, possibly thousands, only failures. The span of the
    decoupled step has an event for each. Of pieces of a collector the spans show all.
    """
    request = dataclasses.replace(
        run.request,
        response_parameters=run.request.response_parameters | stream.parameters,
        captured=run.request.captured | stream.outputs,
        stream=None,
        parts=(*run.request.parts, (stream, stream.num_responses)),
    )
    is_shown = not position or stream.is_sampled or not request.is_traced
    context = run.context if is_shown else telemetry.unsampled(run.context)
    return Run(run.frame.copy(), request, run.deadline_ns, context, run.record)


def of_part(run: Run, response: Run, parameter: str, label: str) -> Run:
    """Turn the response of one part of a node into a response of the node, in a copy of its frame.

    Args:
        parameter: The response parameter that names the part; an inner node has written its own there.
    """
    given, inner = response.request, response.request.response_parameters.get(parameter)
    parameters = {**run.request.response_parameters, **given.response_parameters}
    parameters[parameter] = label if inner is None else f"{label}/{inner}"
    captured = run.request.captured | given.captured
    request = dataclasses.replace(run.request, response_parameters=parameters, captured=captured, parts=given.parts)
    return Run(run.frame.copy(), request, response.deadline_ns, response.context, run.record)


async def close_streams(runs: Iterable[Run]) -> None:
    """Close the streams that some runs left, all of them, even if the awaiting task is cancelled."""
    async with contextlib.AsyncExitStack() as closing:
        for run in runs:
            if run.request.stream is not None:
                closing.push_async_callback(run.request.stream.close)


async def by_arrival(
    sources: Iterable[AsyncGenerator[tuple[_Key, Run], None]], limit: int | None = None
) -> AsyncGenerator[tuple[_Key, Run], None]:
    """Yield the responses of all sources as they arrive, each with its key; each knows whether others may follow.

    Args:
        limit: Sources that are open at once; the next opens when one has ended. None: all.

    Closing the generator, or cancelling the task that awaits it, closes every source; no task is left.
    """
    arrivals = Arrivals(sources, limit)
    merged = _Merged(arrivals)
    try:
        while (arrived := await arrivals.next()) is not None:
            key, response = arrived
            merged.latest = response.request
            merged.num_responses += 1
            parts = ((merged, merged.num_responses), *response.request.parts)
            request = dataclasses.replace(response.request, parts=parts)
            yield key, Run(response.frame, request, response.deadline_ns, response.context, response.record)
    finally:
        await arrivals.close()


class _Merged(ResponsePart):
    """Part of each response of several merged sources: tells when the last of them ends."""

    latest: GraphRequest

    def __init__(self, arrivals: Arrivals[Any]) -> None:
        self.num_responses = 0
        self._arrivals = arrivals

    @property
    @override
    def has_ended(self) -> bool:
        return self._arrivals.has_one_left and self.latest.is_known_last

    @override
    async def settle(self, timeout_s: float) -> None:
        """Settle only if no other source has a response ready."""
        own = asyncio.create_task(self.latest.is_last(timeout_s))
        try:
            await self._arrivals.settle(own, timeout_s)
        finally:
            await cancel_and_wait((own,))
