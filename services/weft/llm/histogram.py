"""A histogram of durations."""

from bisect import bisect_left

#: Upper bounds of the buckets: four per doubling, from 100 us to 23 minutes.
BOUNDS_S: tuple[float, ...] = tuple(1e-4 * 2 ** (i / 4) for i in range(96))


class Histogram:
    """Counts durations in buckets, with their exact sum.

    Attributes:
        counts: Durations in the bucket up to each of ``BOUNDS_S``, inclusive; the last counts those above all bounds.
        count: Number of durations.
        sum_s: Sum of the durations.
    """

    __slots__ = ("count", "counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.count = 0
        self.sum_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count ``count`` durations of ``seconds`` each."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += count
        self.count += count
        self.sum_s += seconds * count

    def quantile(self, share: float) -> float:
        """The duration that ``share`` of the durations do not exceed, in seconds, to 20 %; 0 if there are none."""
        rank = share * self.count
        for index, count in enumerate(self.counts):
            rank -= count
            if count and rank <= 0:
                return BOUNDS_S[min(index, len(BOUNDS_S) - 1)]
        return 0.0
