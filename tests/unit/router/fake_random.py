"""Draws that a test knows beforehand."""

import random
from collections.abc import Iterator
from itertools import repeat


class FakeRandom(random.Random):
    """``random`` gives these numbers in turn, one for ever if it is only one; ``uniform`` gives the upper bound."""

    def __init__(self, *draws: float) -> None:
        super().__init__(0)
        self._draws: Iterator[float] = iter(draws) if len(draws) > 1 else repeat(draws[0])

    def random(self) -> float:
        return next(self._draws)

    def uniform(self, a: float, b: float) -> float:
        return b
