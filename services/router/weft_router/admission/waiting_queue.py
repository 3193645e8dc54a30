"""The short line of requests that wait at a admission for a place."""

from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """Higher levels are served first, and within a level the newest first.

    The newest have the most time left; those that have waited long are given up, instead of being all served late.

    Args:
        num_levels: Levels are 1, the highest, to this.
    """

    __slots__ = ("_levels", "_num")

    def __init__(self, num_levels: int) -> None:
        self._levels: list[dict[T, None]] = [{} for _ in range(num_levels + 1)]
        self._num = 0

    def __len__(self) -> int:
        """Who waits."""
        return self._num

    def add(self, level: int, waiter: T) -> None:
        """It waits."""
        self._levels[level][waiter] = None
        self._num += 1

    def remove(self, level: int, waiter: T) -> bool:
        """It does not wait any more; whether it did."""
        if waiter not in self._levels[level]:
            return False
        del self._levels[level][waiter]
        self._num -= 1
        return True

    def next(self) -> tuple[int, T] | None:
        """Who is served next, with its level."""
        return next(((i, next(reversed(level))) for i, level in enumerate(self._levels) if level), None)

    def last_below(self, level: int) -> tuple[int, T] | None:
        """Who gives way to one of this level: of the lowest level below it, who has waited longest."""
        for i in range(len(self._levels) - 1, level, -1):
            if self._levels[i]:
                return i, next(iter(self._levels[i]))
        return None
