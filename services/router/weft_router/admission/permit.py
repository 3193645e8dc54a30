"""One request at the admission controller, inside, or in line."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from weft_common.core import CallContext
from weft_common.errors import WeftError
from weft_router.admission.adaptive import Outcome
from weft_router.admission.concurrency_limit import ConcurrencyLimit

if TYPE_CHECKING:
    from weft_router.admission.controller import AdmissionController


class Permit:
    """A request that was not refused; leaving its ``with`` block tells the admission controller how it ended.

    Args:
        admission: Of the router.
        limit: Of the graph or model.
        level, client, context: Of the request.

    Attributes:
        start_ns: When it was let in; 0 while it was not.
    """

    __slots__ = ("_admission", "_place", "client", "context", "level", "limit", "start_ns")

    def __init__(
        self, admission: "AdmissionController", limit: ConcurrencyLimit, level: int, client: str, context: CallContext
    ) -> None:
        self._admission = admission
        self.limit, self.level, self.client, self.context = limit, level, client, context
        self.start_ns = 0
        self._place: asyncio.Future[WeftError | None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether ``wait`` is due."""
        return self._place is not None

    def let_in(self, now_ns: int) -> None:
        """The request has a place."""
        self.start_ns = now_ns
        self.limit.enter(self.client, now_ns)
        self._tell(None)

    def stand_in_line(self) -> None:
        """The request waits; if the line is full, the last one of a lower level gives way."""
        line, level = self.limit.line, self.level
        if len(line) >= self.limit.max_waiting:
            last = line.last_below(level)
            if last is not None:
                other_level, other = last
                line.remove(other_level, other)
                other.refuse(
                    self._admission.refusals.full(other.limit, other.limit, "priority", other_level, other.context)
                )
        self._place = asyncio.get_running_loop().create_future()
        line.add(level, self)

    def refuse(self, error: WeftError) -> None:
        """The request does not wait any more, and will not be let in."""
        self._tell(error)

    async def wait(self) -> None:
        """The request was let in.

        Raises:
            ResourceExhaustedError: No place became free in time, or a request of a higher level took it.
            DeadlineExceededError: The rest of the time is not enough any more.
        """
        if self._place is None:
            return
        try:
            async with asyncio.timeout(self._admission.max_wait_s(self)):
                error = await self._place
        except TimeoutError:
            error = self._admission.why_not_let_in(self)
        if error is not None:
            raise error

    def __enter__(self) -> "Permit":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._place is not None:
            self.limit.line.remove(self.level, self)
        self._admission.left(self, Outcome.ANSWERED if error is None else outcome_of(error))

    def _tell(self, error: WeftError | None) -> None:
        if self._place is not None and not self._place.done():
            self._place.set_result(error)


def outcome_of(error: BaseException) -> Outcome:
    """What an error that a request ended with says of the load."""
    if isinstance(error, WeftError):
        if error.code == "RESOURCE_EXHAUSTED":
            return Outcome.REFUSED
        return Outcome.WITHDRAWN if error.code in ("DEADLINE_EXCEEDED", "CANCELLED") else Outcome.FAILED
    is_withdrawn = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return Outcome.WITHDRAWN if is_withdrawn else Outcome.FAILED
