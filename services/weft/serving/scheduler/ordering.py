"""Keeps answers in the order of arrival where executions finish in another."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ReorderBuffer(Generic[K, V]):
    """Holds each value until every value that was expected before it has left."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, V | None] = OrderedDict()  # None: not ready

    def __len__(self) -> int:
        return len(self._values)

    def expect(self, key: K) -> None:
        """Have ``key`` leave after everything expected so far."""
        self._values[key] = None

    def release(self, key: K, value: V) -> list[tuple[K, V]]:
        """Mark ``key`` as ready, unless it was withdrawn; returns what may leave now, in order."""
        if key in self._values:
            self._values[key] = value
        return self._ready()

    def withdraw(self, key: K) -> list[tuple[K, V]]:
        """Remove ``key``; returns what may leave now, in order."""
        self._values.pop(key, None)
        return self._ready()

    def _ready(self) -> list[tuple[K, V]]:
        ready: list[tuple[K, V]] = []
        while self._values:
            key = next(iter(self._values))
            value = self._values[key]
            if value is None:
                break
            del self._values[key]
            ready.append((key, value))
        return ready
