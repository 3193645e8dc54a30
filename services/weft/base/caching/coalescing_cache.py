"""Response cache that also coalesces equal concurrent requests."""

from collections.abc import Callable, Coroutine
from typing import Any

from weft.base.caching.response_cache import CachedResponse, ResponseCache
from weft.base.caching.single_flight import SingleFlight
from weft.base.errors import WeftError


class CoalescingCache:
    """Cache of a step, of a whole graph, or of the models of a service.

    Args:
        max_bytes, ttl_ms, stale_ms: Limits, see ``ResponseCache``.
        clock_ns: Clock of time to live and deadlines.
    """

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
            deadline_ns: Deadline of the caller.

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
