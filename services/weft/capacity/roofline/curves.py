"""Interpolation between measured points, on logarithmic scales."""

import bisect
import math
from collections.abc import Sequence


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x`` of a curve through points, sorted by x and above 0; constant below, proportional beyond.

    A time cannot fall below that of the smallest size measured, and beyond the largest grows with the size.
    """
    first, last = points[0], points[-1]
    if x <= first[0]:
        return first[1]
    if x >= last[0]:
        return last[1] * x / last[0]
    index = bisect.bisect_right([px for px, _ in points], x)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))


def level(points: Sequence[tuple[float, float]], x: float) -> float:
    """As ``interpolated``, for a rate: constant beyond both ends."""
    return interpolated(points, min(max(x, points[0][0]), points[-1][0]))


def on_grid(points: Sequence[tuple[float, float, float]], x: float, y: float) -> float:
    """The value at ``(x, y)`` of a surface through points ``(x, y, value)`` that form a grid, constant beyond it."""
    rows: dict[float, list[tuple[float, float]]] = {}
    for px, py, value in points:
        rows.setdefault(py, []).append((px, value))
    return level([(py, level(sorted(row), x)) for py, row in sorted(rows.items())], y)
