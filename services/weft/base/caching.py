"""Caches with a time to live: of responses, bounded by size, and of any values, bounded by number."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

from weft.base.cancellation import cancel_and_wait
from weft.base.core import ParameterValue
from weft.base.errors import DeadlineExceededError, RequestCancelledError, WeftError
from weft.base.tensors import WireTensor

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

#: Estimated overhead of an entry beyond its tensor data: the key, tuples and strings.
_ENTRY_BYTES = 512


class CachedResponse(NamedTuple):
    """The response of a step, a graph or a model.

    Attributes:
        outputs: Tensors in an order that the key implies; None is absent.
        version: Version of the model; "" if there is more than one.
    """

    outputs: tuple[WireTensor | None, ...]
    parameters: Mapping[str, ParameterValue]
    version: str = ""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes in a cache, key included; an upper estimate."""
        size = _ENTRY_BYTES + sum(len(tensor.data) + 64 for tensor in self.outputs if tensor is not None)
        return size + sum(len(name) + len(str(value)) + 128 for name, value in self.parameters.items())


class _Entry(NamedTuple):
    response: CachedResponse
    num_bytes: int
    expiry_ns: int


class ResponseCache:
    """Responses by key; evicts the least recently used.

    Args:
        max_bytes: Limit of all entries together; a larger response is not cached.
        ttl_ms: Time to live, in milliseconds; 0: until evicted.
        stale_ms: Time after expiry in which ``get_stale`` still returns a response, in milliseconds.
    """

    def __init__(self, max_bytes: int, ttl_ms: int, clock_ns: Callable[[], int], stale_ms: int = 0) -> None:
        self._max_bytes = max_bytes
        self._ttl_ns = ttl_ms * 1_000_000
        self._stale_ns = stale_ms * 1_000_000
        self._clock_ns = clock_ns
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Entries, including expired ones that are not removed yet."""
        return len(self._entries)

    def get(self, key: bytes) -> CachedResponse | None:
        """The response, which becomes the most recently used; None if missing or expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._ttl_ns and (past_ns := self._clock_ns() - entry.expiry_ns) >= 0:
            if past_ns >= self._stale_ns:
                self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry.response

    def get_stale(self, key: bytes) -> CachedResponse | None:
        """The response, even if expired by less than ``stale_ms``; None if there is none."""
        entry = self._entries.get(key)
        if entry is None or (self._ttl_ns and self._clock_ns() - entry.expiry_ns >= self._stale_ns):
            return None
        self._entries.move_to_end(key)
        return entry.response

    def put(self, key: bytes, response: CachedResponse) -> None:
        """Store a response, replacing that of the same key and evicting others to make room."""
        self._remove(key)
        num_bytes = response.num_bytes
        if num_bytes > self._max_bytes:
            return
        while self.num_bytes + num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))
        self._entries[key] = _Entry(response, num_bytes, self._clock_ns() + self._ttl_ns)
        self.num_bytes += num_bytes

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes


def cache_key_base(subject: Iterable[str], outputs: Iterable[str]) -> blake2b:
    """Hash of the key parts that many requests share.

    Args:
        subject: Callee: target, model, version.
        outputs: Names of the requested outputs, in order.
    """
    return blake2b(repr((tuple(subject), tuple(outputs))).encode(), digest_size=32)


def cache_key(base: blake2b, inputs: Iterable[tuple[str, WireTensor | None]], extra: str) -> bytes:
    """Cache key of a request; 32 bytes, about 1 ms per MB of input.

    Args:
        base: Result of ``cache_key_base``. Not modified.
        inputs: By name, in a fixed order; an absent one (None) differs from an empty one.
        extra: Anything else that the response depends on; "" for nothing.
    """
    digest = base.copy()
    for name, tensor in inputs:
        if tensor is not None:
            datatype, shape, data = tensor
            digest.update(repr((name, datatype, shape, len(data))).encode())
            digest.update(data)
    digest.update(repr(extra).encode())
    return digest.digest()


class ExpiringCache(Generic[Key, Value]):
    """Keeps values for some time; owned by the event loop.

    Args:
        ttl_s: Time to live, in seconds.
        max_entries: Most entries; the oldest is dropped.
    """

    def __init__(self, ttl_s: float, max_entries: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._clock_s = clock_s
        #: When each expires, and what it is; oldest first.
        self._entries: dict[Key, tuple[float, Value]] = {}

    def __len__(self) -> int:
        """Values that are kept, expired or not."""
        return len(self._entries)

    async def get(self, key: Key, ask: Callable[[], Awaitable[Value]]) -> Value:
        """The value of ``key``, from ``ask`` if it is not cached; errors are not cached."""
        known = self._entries.get(key)
        if known is not None and self._clock_s() < known[0]:
            return known[1]
        value = await ask()
        self._entries.pop(key, None)
        while len(self._entries) >= self._max_entries:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = (self._clock_s() + self._ttl_s, value)
        return value


#: A transport may time out this much before the deadline.
_EARLY_NS = 5_000_000

_Value = TypeVar("_Value")


class CoalescedTimeoutError(DeadlineExceededError):
    """The deadline passed while waiting for the work of an equal request."""


@dataclass(slots=True, eq=False)
class _Flight(Generic[_Value]):
    """Work, the deadline of the caller that started it, and the number of those that wait for it."""

    task: "asyncio.Task[_Value]"
    deadline_ns: int | None
    num_waiting: int = 0


class SingleFlight(Generic[_Value]):
    """Runs equal concurrent work once for all callers.

    The work belongs to no single caller: if the one that started it is cancelled, it continues as long as another
    waits, and it is cancelled when the last one leaves.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._flights: dict[bytes, _Flight[_Value]] = {}

    @property
    def num_flights(self) -> int:
        """Distinct pieces of work in progress."""
        return len(self._flights)

    async def run(
        self, key: bytes, start: Callable[[], Coroutine[Any, Any, _Value]], deadline_ns: int | None
    ) -> tuple[_Value, bool]:
        """The value, and whether this call started the work.

        Args:
            key: Equal for equal work.
            start: Does the work, within the caller's deadline.
            deadline_ns: Deadline of the caller. Work of another caller that times out at an earlier deadline is started
                again.

        Raises:
            Exception: Raised by the work; each waiter gets an instance of its own.
            CoalescedTimeoutError: The deadline passed while waiting for another caller's work.
        """
        while True:
            flight = self._flights.get(key)
            is_own = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight(asyncio.create_task(start()), deadline_ns)
                flight.task.add_done_callback(partial(self._on_done, key, flight))
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
                if error.code != "DEADLINE_EXCEEDED" or not self._timed_out_earlier(flight, deadline_ns):
                    raise error.with_message(error.message)
            finally:
                # Breaks the reference cycle between the error and the frames of its traceback.
                flight = task = error = None  # type: ignore[assignment]

    async def _wait(self, key: bytes, flight: _Flight[_Value], deadline_ns: int | None) -> None:
        """Wait for the work; cancel it if no waiter is left."""
        flight.num_waiting += 1
        timeout_s = None if deadline_ns is None else max(deadline_ns - self._clock_ns(), 0) / 1e9
        try:
            await asyncio.wait((flight.task,), timeout=timeout_s)
            if not flight.task.done():
                raise CoalescedTimeoutError("an equal request was still in work when the time was over")
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 and not flight.task.done():
                self._remove(key, flight)
                await cancel_and_wait((flight.task,))

    def _on_done(self, key: bytes, flight: _Flight[_Value], task: "asyncio.Task[_Value]") -> None:
        self._remove(key, flight)
        if not task.cancelled():
            task.exception()  # retrieved, to avoid asyncio's warning if no waiter is left

    def _remove(self, key: bytes, flight: _Flight[_Value]) -> None:
        """Forget the work, so that the next caller starts anew."""
        if self._flights.get(key) is flight:
            del self._flights[key]

    def _timed_out_earlier(self, flight: _Flight[_Value], deadline_ns: int | None) -> bool:
        """Whether the starter's deadline has passed and ``deadline_ns`` has not."""
        now_ns = self._clock_ns()
        if flight.deadline_ns is None or now_ns + _EARLY_NS < flight.deadline_ns:
            return False
        return deadline_ns is None or deadline_ns > max(now_ns, flight.deadline_ns)


class CoalescingCache:
    """Cache of a step, of a whole graph, or of the models of a service."""

    def __init__(self, max_bytes: int, ttl_ms: int, clock_ns: Callable[[], int], stale_ms: int = 0) -> None:
        self.cache = ResponseCache(max_bytes, ttl_ms, clock_ns, stale_ms)
        self._flights: SingleFlight[CachedResponse] = SingleFlight(clock_ns)

    @property
    def num_flights(self) -> int:
        """Computations in progress."""
        return self._flights.num_flights

    async def answer(
        self, key: bytes, make: Callable[[], Coroutine[Any, Any, CachedResponse]], deadline_ns: int | None
    ) -> tuple[CachedResponse, bool]:
        """The response, and whether it came from the cache or from an equal concurrent request.

        Args:
            key: Result of ``cache_key``.
            make: Computes the response, within the caller's deadline; cached unless it raises. It may run on behalf of
                several requests, so it must not modify one of them.

        Raises:
            Exception: Raised by ``make``, for this or for an equal request.
            CoalescedTimeoutError: The deadline passed while waiting for an equal request.

        A cancelled request, or one whose deadline passes, does not affect others that wait; when all are gone, the
        computation is cancelled.
        """
        cached = self.cache.get(key)
        if cached is not None:
            return cached, True
        answer, is_own = await self._flights.run(key, lambda: self._store(key, make()), deadline_ns)
        return answer, not is_own

    def stale_on_unavailable(self, error: WeftError, key: bytes) -> CachedResponse | None:
        """A cached response, possibly stale, to return instead of an UNAVAILABLE error."""
        return self.cache.get_stale(key) if error.code == "UNAVAILABLE" else None

    async def _store(self, key: bytes, work: Coroutine[Any, Any, CachedResponse]) -> CachedResponse:
        answer = await work
        self.cache.put(key, answer)
        return answer
