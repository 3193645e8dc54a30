"""Equal requests that come while one of them is in work wait for its answer."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from weft_common.cancellation import cancel_and_wait
from weft_common.errors import DeadlineExceededError, RequestCancelledError, WeftError

#: A transport may give up so much before the deadline.
_EARLY_NS = 5_000_000

_Value = TypeVar("_Value")


class StillInWorkError(DeadlineExceededError):
    """The time was over before another's work was done."""


@dataclass(slots=True, eq=False)
class _Flight(Generic[_Value]):
    """Work that several wait for.

    Attributes:
        task: Does it.
        deadline_ns: Of the one who began it.
        num_waiting: When the last one goes, the task is cancelled.
    """

    task: "asyncio.Task[_Value]"
    deadline_ns: int | None
    num_waiting: int = 0


class SingleFlight(Generic[_Value]):
    """Does the same work once for all who want it at the same time.

    The work is nobody's own: it goes on when the one who began it is cancelled, as long as another waits, and it is
    cancelled when the last one goes.

    Args:
        clock_ns: What deadlines are measured on.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._flights: dict[bytes, _Flight[_Value]] = {}

    @property
    def num_flights(self) -> int:
        """Kinds of work that are being done."""
        return len(self._flights)

    async def run(
        self, key: bytes, start: Callable[[], Coroutine[Any, Any, _Value]], deadline_ns: int | None
    ) -> tuple[_Value, bool]:
        """The value, and whether it is our own work.

        Args:
            key: Equal for equal work.
            start: Does the work, within our deadline.
            deadline_ns: Ours. If the work of another ends at an earlier deadline than ours, it is done again.

        Raises:
            Exception: As the work raised it; each who waited gets an error of its own.
            StillInWorkError: Our deadline passed while we waited for another's work.
        """
        while True:
            flight = self._flights.get(key)
            is_own = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight(asyncio.create_task(start()), deadline_ns)
                flight.task.add_done_callback(partial(self._ended, key, flight))
            try:
                await self._wait(key, flight, None if is_own else deadline_ns)
                task = flight.task
                if task.cancelled():
                    raise RequestCancelledError("the work was cancelled from outside")
                error = task.exception()
                if error is None:
                    return task.result(), is_own
                if is_own or not isinstance(error, WeftError):
                    raise error
                if error.code != "DEADLINE_EXCEEDED" or not self._ran_out_first(flight, deadline_ns):
                    raise error.with_message(error.message)
            finally:
                # An error holds the frames that it passed; they must not hold the error in turn.
                flight = task = error = None  # type: ignore[assignment]

    async def _wait(self, key: bytes, flight: _Flight[_Value], deadline_ns: int | None) -> None:
        """The work is over; it is cancelled if nobody is left who waits."""
        flight.num_waiting += 1
        timeout_s = None if deadline_ns is None else max(deadline_ns - self._clock_ns(), 0) / 1e9
        try:
            await asyncio.wait((flight.task,), timeout=timeout_s)
            if not flight.task.done():
                raise StillInWorkError("an equal request was still in work when the time was over")
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 and not flight.task.done():
                self._land(key, flight)
                await cancel_and_wait((flight.task,))

    def _ended(self, key: bytes, flight: _Flight[_Value], task: "asyncio.Task[_Value]") -> None:
        self._land(key, flight)
        if not task.cancelled():
            task.exception()  # seen, also where everybody has gone meanwhile

    def _land(self, key: bytes, flight: _Flight[_Value]) -> None:
        """The next one who comes starts anew."""
        if self._flights.get(key) is flight:
            del self._flights[key]

    def _ran_out_first(self, flight: _Flight[_Value], deadline_ns: int | None) -> bool:
        """Whether the deadline of the one who began has passed, and ours has not."""
        now_ns = self._clock_ns()
        if flight.deadline_ns is None or now_ns + _EARLY_NS < flight.deadline_ns:
            return False
        return deadline_ns is None or deadline_ns > max(now_ns, flight.deadline_ns)
