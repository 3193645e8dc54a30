"""The responses of what streams: the latest is in a frame, the rest is the open stream of a request."""

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence

from typing_extensions import override

from weft.base.core import ParameterValue
from weft.base.observing import telemetry
from weft.base.tensors import WireTensor
from weft.language.plan import Frame
from weft.router.steps.run import GraphRequest, Run


class OpenStream(ABC):
    """What a node or a step has left in ``GraphRequest.stream``: its first response, if there is one, was written.

    Whoever made the request closes it.

    Attributes:
        num_responses: Responses so far.
        outputs: Outputs that the client requested by a step's path, of the latest response, by path and name.
        parameters: Of the latest response.
    """

    num_responses: int
    outputs: dict[str, WireTensor]
    parameters: dict[str, ParameterValue]

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether it is known that no response follows the latest."""

    @abstractmethod
    async def settle(self, timeout_s: float) -> None:
        """Find out whether a response follows the latest, for at most so many seconds; none is lost by it."""

    @abstractmethod
    async def read_on(self, run: Run) -> bool:
        """Write the next response into the frame of ``run``, in place of the one before; False: there are no more.

        Args:
            run: Its frame is like the one that the first response was written into.

        Raises:
            WeftError: What streams has failed; the message says where.

        Cancelling the awaiting task cancels every call in work.
        """

    @abstractmethod
    async def close(self) -> None:
        """End what still runs; no task is left. Closed before its end, the stream counts as cancelled."""


class NodeResponses(OpenStream):
    """Responses of a node that are runs of some of its steps.

    Args:
        runs: Makes them; what closes it, ends what runs.
        slots: Where the outputs are, in the frames of ``runs`` as in those that are written.
    """

    def __init__(self, runs: AsyncGenerator[Run, None], slots: Sequence[int]) -> None:
        self.num_responses = 0
        self.outputs = {}
        self.parameters = {}
        self._runs = runs
        self._slots = slots
        self._latest: GraphRequest | None = None
        self._is_over = False

    async def open(self, run: Run) -> None:
        """Write the first response into the frame of ``run``, whose request gets the rest. Errors as of ``read_on``."""
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


class NoResponses(OpenStream):
    """A stream that has ended without a response."""

    has_ended = True

    def __init__(self) -> None:
        self.num_responses = 0
        self.outputs = {}
        self.parameters = {}

    async def settle(self, timeout_s: float) -> None:
        """There is nothing to find out."""

    async def read_on(self, run: Run) -> bool:
        """There is none."""
        return False

    async def close(self) -> None:
        """Nothing runs."""


async def responses_of(run: Run) -> AsyncGenerator[Run, None]:
    """What a run that has ended has given: the run itself, or each response of the stream that it has left.

    Raises:
        WeftError: The stream failed, after the responses before.
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
    """A run for the latest response of a stream, which is in the frame of ``run``.

    The first is in the trace as it runs; of the others, which may be thousands, what fails. The span of the decoupled
    step has an event for each.
    """
    request = dataclasses.replace(
        run.request,
        response_parameters=run.request.response_parameters | stream.parameters,
        captured=run.request.captured | stream.outputs,
        stream=None,
        parts=(*run.request.parts, (stream, stream.num_responses)),
    )
    context = telemetry.unsampled(run.context) if position and request.is_traced else run.context
    return Run(run.frame.copy(), request, run.deadline_ns, context, run.record)


def with_own_request(run: Run, frame: Frame | None = None) -> Run:
    """The same for something that leaves a stream of its own: all else of the request is shared."""
    request = dataclasses.replace(run.request, stream=None)
    return Run(run.frame if frame is None else frame, request, run.deadline_ns, run.context, run.record)


async def close_streams(runs: Iterable[Run]) -> None:
    """Close what the requests of some runs have left, all of it, also where the awaiting task is cancelled."""
    async with contextlib.AsyncExitStack() as closing:
        for run in runs:
            if run.request.stream is not None:
                closing.push_async_callback(run.request.stream.close)
