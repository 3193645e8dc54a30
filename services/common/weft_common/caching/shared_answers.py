"""Answers that are kept, and answers that are on their way."""

from collections.abc import Callable, Coroutine
from typing import Any

from weft_common.caching.answer_cache import Answer, AnswerCache
from weft_common.caching.single_flight import SingleFlight
from weft_common.errors import WeftError


class SharedAnswers:
    """The cache of a step, of a whole graph, or of the models of a service.

    Args:
        max_bytes, ttl_ms, stale_ms: Its limits, as of ``AnswerCache``.
        clock_ns: What time is measured on.
    """

    def __init__(self, max_bytes: int, ttl_ms: int, clock_ns: Callable[[], int], stale_ms: int = 0) -> None:
        self.cache = AnswerCache(max_bytes, ttl_ms, clock_ns, stale_ms)
        self._flights: SingleFlight[Answer] = SingleFlight(clock_ns)

    @property
    def num_flights(self) -> int:
        """Answers that are being made."""
        return self._flights.num_flights

    async def answer(
        self, key: bytes, make: Callable[[], Coroutine[Any, Any, Answer]], deadline_ns: int | None
    ) -> tuple[Answer, bool]:
        """The answer, and whether it took no work of ours: it was kept, or made for an equal request.

        Args:
            key: As ``answer_key`` gives it.
            make: Makes the answer, within our deadline; it is kept if nothing is raised. It may be called on behalf of
                several requests: what it changes must not belong to one of them.
            deadline_ns: Ours.

        Raises:
            Exception: As ``make`` raised it, for us or for an equal request.
            StillInWorkError: Our deadline passed while we waited for an equal request.

        A cancelled request, or one whose deadline passes, costs the others that wait nothing; when all have gone what
        ``make`` began is cancelled.
        """
        kept = self.cache.get(key)
        if kept is not None:
            return kept, True
        answer, is_own = await self._flights.run(key, lambda: self._keep(key, make()), deadline_ns)
        return answer, not is_own

    def instead_of(self, error: WeftError, key: bytes) -> Answer | None:
        """A kept answer, expired or not, to give in place of an error that says that nobody is there to make one."""
        return self.cache.get_stale(key) if error.code == "UNAVAILABLE" else None

    async def _keep(self, key: bytes, work: Coroutine[Any, Any, Answer]) -> Answer:
        answer = await work
        self.cache.put(key, answer)
        return answer
