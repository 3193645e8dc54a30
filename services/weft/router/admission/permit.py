"""One request that the admission controller has admitted or queued."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from weft.base.adaptive_limit import Outcome
from weft.base.core import CallContext
from weft.base.errors import WeftError
from weft.router.admission.concurrency_limit import ConcurrencyLimit

if TYPE_CHECKING:
    from weft.router.admission.controller import AdmissionController


class Permit:
    """A request that was not refused; at the end of its ``with`` block its slot is free again.

    Args:
        admission: Of the router.
        limit: Of the graph or model.
        level, client, context: Of the request.
        start_ns: When it was admitted; 0 for one that is to be queued.

    Attributes:
        is_waiting: Whether ``wait`` is due.
    """

    __slots__ = ("_admission", "_decision", "client", "context", "is_waiting", "level", "limit", "start_ns")

    def __init__(
        self,
        admission: "AdmissionController",
        limit: ConcurrencyLimit,
        level: int,
        client: str,
        context: CallContext,
        start_ns: int = 0,
    ) -> None:
        self._admission = admission
        self.limit, self.level, self.client, self.context = limit, level, client, context
        self.start_ns = start_ns
        self.is_waiting = False
        self._decision: asyncio.Future[WeftError | None] | None = None

    def enqueue(self) -> None:
        """The request waits; if the queue is full, the last one of a lower level is refused in its place."""
        queue, level = self.limit.queue, self.level
        if queue.num_waiting >= self.limit.max_waiting:
            last = queue.last_below(level)
            if last is not None:
                other_level, other = last
                queue.remove(other_level, other)
                other.refuse(
                    self._admission.refusals.full(other.limit, other.limit, "priority", other_level, other.context)
                )
        self.is_waiting = True
        self._decision = asyncio.get_running_loop().create_future()
        queue.add(level, self)

    def admit(self, now_ns: int) -> None:
        """A request that waits is admitted."""
        self.start_ns = now_ns
        self.limit.enter(self.client, now_ns)
        self._decide(None)

    def refuse(self, error: WeftError) -> None:
        """A request that waits is refused."""
        self._decide(error)

    async def wait(self) -> None:
        """The request has left the queue and is admitted.

        Raises:
            ResourceExhaustedError: No slot became free in time, or a request of a higher level took it.
            DeadlineExceededError: The rest of the time is not enough any more.
        """
        if self._decision is None:
            return
        try:
            async with asyncio.timeout(self._admission.max_wait_s(self)):
                error = await self._decision
        except TimeoutError:
            error = self._admission.timed_out(self)
        if error is not None:
            raise error

    def __enter__(self) -> "Permit":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_waiting:
            self.limit.queue.remove(self.level, self)
        self._admission.release(self, Outcome.ANSWERED if error is None else outcome_of(error))

    def _decide(self, error: WeftError | None) -> None:
        if self._decision is not None and not self._decision.done():
            self._decision.set_result(error)


def outcome_of(error: BaseException) -> Outcome:
    """What an error that a request ended with says of the load."""
    if isinstance(error, WeftError):
        if error.code == "RESOURCE_EXHAUSTED":
            return Outcome.REFUSED
        return Outcome.WITHDRAWN if error.code in ("DEADLINE_EXCEEDED", "CANCELLED") else Outcome.FAILED
    is_withdrawn = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return Outcome.WITHDRAWN if is_withdrawn else Outcome.FAILED
