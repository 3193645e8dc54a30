"""The short queue of requests that wait for a slot."""

from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """Higher levels are served first, and within a level the newest first.

    The newest have the most time left; those that have waited long are given up, instead of being all served late.

    Args:
        num_levels: Levels are 1, the highest, to this.

    Attributes:
        num_waiting: Requests in the queue.
    """

    __slots__ = ("_levels", "num_waiting")

    def __init__(self, num_levels: int) -> None:
        self._levels: list[dict[T, None]] = [{} for _ in range(num_levels + 1)]
        self.num_waiting = 0

    def __len__(self) -> int:
        return self.num_waiting

    def add(self, level: int, waiter: T) -> None:
        """Add a waiter."""
        self._levels[level][waiter] = None
        self.num_waiting += 1

    def remove(self, level: int, waiter: T) -> bool:
        """Remove a waiter; whether it was there."""
        if waiter not in self._levels[level]:
            return False
        del self._levels[level][waiter]
        self.num_waiting -= 1
        return True

    def next(self) -> tuple[int, T] | None:
        """The next to be admitted, with its level."""
        return next(((i, next(reversed(level))) for i, level in enumerate(self._levels) if level), None)

    def last_below(self, level: int) -> tuple[int, T] | None:
        """The one to refuse for one of this level: of the lowest level below it, the one that has waited longest."""
        for i in range(len(self._levels) - 1, level, -1):
            if self._levels[i]:
                return i, next(iter(self._levels[i]))
        return None
