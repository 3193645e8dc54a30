"""A distribution of durations, kept as counts."""

from bisect import bisect_left

#: Upper bounds of the buckets: four for each doubling, from 100 us to 23 minutes.
BOUNDS_S: tuple[float, ...] = tuple(1e-4 * 2 ** (i / 4) for i in range(96))


class Distribution:
    """Durations counted in buckets, with their exact sum.

    Attributes:
        counts: How many were in the bucket below each of ``BOUNDS_S``, bound included; the last is above all of them.
        count: How many there were.
        sum_s: Their sum.
    """

    __slots__ = ("count", "counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.count = 0
        self.sum_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """``count`` durations of ``seconds`` are among them."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += count
        self.count += count
        self.sum_s += seconds * count

    def quantile(self, share: float) -> float:
        """What ``share`` of the durations did not exceed, in seconds, to a fifth; 0 where there are none."""
        rank = share * self.count
        for index, count in enumerate(self.counts):
            rank -= count
            if count and rank <= 0:
                return BOUNDS_S[min(index, len(BOUNDS_S) - 1)]
        return 0.0
