"""Values that are asked for again when some time has passed."""

import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ExpiringCache(Generic[Key, Value]):
    """Keeps values for some time; owned by the event loop.

    Args:
        ttl_s: How long, in seconds.
        max_entries: Most that are kept; then the oldest is forgotten.
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
        """The value of ``key``, from ``ask`` where none is known; what that raises is not kept."""
        known = self._entries.get(key)
        if known is not None and self._clock_s() < known[0]:
            return known[1]
        value = await ask()
        self._entries.pop(key, None)
        while len(self._entries) >= self._max_entries:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = (self._clock_s() + self._ttl_s, value)
        return value
