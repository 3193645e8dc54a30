"""Which step of a splitter answers: by weight, and for a given key always the same one."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from math import log


class WeightedChoice:
    """Chooses a step with probability weight / sum of weights.

    With a key the choice is weighted rendezvous hashing: each step gets the score ``-weight / ln(h)`` with ``h`` in
    (0, 1) hashed from salt, key and step name; the highest score wins. It depends on nothing else, so every process
    decides alike, and when a weight changes only the keys move that must.

    Args:
        names: Step names.
        weights: At least 0, one of them above 0; dimensionless.
        salt: Splitters with the same salt and step names decide alike.
        generator: Source of the choices without a key.

    Source:
        C. Schindelhauer, G. Schomaker, "Weighted distributed hash tables", SPAA 2005 (logarithmic method).
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], salt: str, generator: random.Random) -> None:
        self._weights = tuple(weights)
        self._names = [_field(name) for name in names]
        self._salt = _field(salt)
        self._bounds = list(accumulate(weights))
        self._generator = generator

    def by_key(self, key: str) -> int:
        """Index of the step for ``key``."""
        prefix = blake2b(self._salt + _field(key), digest_size=8)
        best, best_score = 0, -1.0
        for index, (name, weight) in enumerate(zip(self._names, self._weights, strict=True)):
            if weight <= 0:
                continue
            state = prefix.copy()
            state.update(name)
            h = (int.from_bytes(state.digest(), "big") + 0.5) / 2.0**64
            score = -weight / log(h) if h < 1.0 else float("inf")
            if score > best_score:
                best, best_score = index, score
        return best

    def by_chance(self) -> int:
        """Index of a step drawn at random; a step of weight 0 is never drawn."""
        point = self._generator.random() * self._bounds[-1]
        return bisect_right(self._bounds, point)


def _field(text: str) -> bytes:
    """Text with its length in front, so that no two triples run together to the same bytes."""
    data = text.encode()
    return len(data).to_bytes(4, "big") + data
