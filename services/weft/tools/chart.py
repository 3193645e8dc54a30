"""Line and point charts as self-contained SVG, in the reader's light or dark theme."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

#: Of the plot, in pixels; titles and legend are around it.
_WIDTH, _HEIGHT = 380.0, 240.0
_LEFT, _TOP, _GAP, _BOTTOM, _LINE_HEIGHT = 60.0, 56.0, 70.0, 50.0, 18.0
_NUM_TICKS = 5
#: Of names of marks, in pixels.
_CHARACTER_WIDTH, _NAME_HEIGHT = 7.2, 14.0
#: Distinguishable also without colour vision (Okabe and Ito).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#999999")
_STYLE = """
text { font-family: "DejaVu Sans", Verdana, Arial, sans-serif; font-size: 12px; fill: #24292f; }
.title { font-size: 14px; font-weight: bold; } .page { fill: #ffffff; }
.axis { stroke: #8c959f; fill: none; } .grid { stroke: #d8dee4; fill: none; } .line { fill: none; stroke-width: 2; }
.mark { stroke: #0072b2; stroke-width: 2; fill: #ffffff; } .disc { fill: #0072b2; } .interval { stroke: #0072b2; }
.name { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .page { fill: #0d1117; } .grid { stroke: #2d333b; } .name { stroke: #0d1117; }
}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Points in order of x; ``is_dashed`` distinguishes groups of lines."""

    label: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled point.

    Attributes:
        label: The name.
        x, y: Position; a ``y`` beyond ``Plot.y_limit`` is drawn at the limit, as a triangle.
        low, high: Interval of y.
        is_filled: A disc, else a ring.
    """

    label: str
    x: float
    y: float
    low: float
    high: float
    is_filled: bool = True


@dataclass(frozen=True, slots=True)
class Plot:
    """Axes with lines and marks, from 0 or the least interval of a mark to the largest value.

    Attributes:
        y_limit: Ends the y axis before the largest value, and the same below 0; 0: none.
    """

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = field(default=())
    y_limit: float = 0.0


def render_svg(title: str, plots: Sequence[Plot]) -> str:
    """Draw the plots side by side, a legend below each."""
    num_lines = max(len(plot.lines) for plot in plots)
    width = len(plots) * (_LEFT + _WIDTH) + (len(plots) - 1) * (_GAP - _LEFT) + 30
    height = _TOP + _HEIGHT + _BOTTOM + num_lines * _LINE_HEIGHT
    body = [part for i, plot in enumerate(plots) for part in _plot(plot, _LEFT + i * (_WIDTH + _GAP))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label={quoteattr(title)}>',
            f"<style>{_STYLE}</style>",
            '<rect class="page" width="100%" height="100%"/>',
            _text(width / 2, 20, title, "middle", "title"),
            *body,
            "</svg>\n",
        ]
    )


def _plot(plot: Plot, left: float) -> Iterator[str]:
    xs = [x for line in plot.lines for x, _ in line.points] + [mark.x for mark in plot.marks]
    ys = [y for line in plot.lines for _, y in line.points] + [mark.high for mark in plot.marks]
    limit = plot.y_limit or math.inf
    y_most, y_least = min(max(ys, default=0), limit), max(min((mark.low for mark in plot.marks), default=0), -limit)
    axes = _Axes(left, _ticks(0.0, max(xs, default=0)), _ticks(y_least, y_most))
    bottom = _TOP + _HEIGHT
    yield _text(left + _WIDTH / 2, _TOP - 12, plot.title, "middle", "")
    for tick in axes.y_ticks:
        y = axes.y(tick)
        yield f'<path class="{"grid" if tick else "axis"}" d="M{left:.1f} {y:.1f}h{_WIDTH:g}"/>'
        yield _text(left - 6, y + 4, f"{tick:g}", "end", "")
    for tick in axes.x_ticks:
        yield _text(axes.x(tick), bottom + 16, f"{tick:g}", "middle", "")
    yield f'<path class="axis" d="M{left:.1f} {_TOP:g}v{_HEIGHT:g}h{_WIDTH:g}"/>'
    yield _text(left + _WIDTH / 2, bottom + 34, plot.x_title, "middle", "")
    turned = f'transform="rotate(-90 {left - 44:.1f} {_TOP + _HEIGHT / 2:.1f})"'
    yield _text(left - 44, _TOP + _HEIGHT / 2, plot.y_title, "middle", "", turned)
    for i, line in enumerate(plot.lines):
        dashes = ' stroke-dasharray="6 4"' if line.is_dashed else ""
        stroke = f'class="line" stroke="{_COLORS[i % len(_COLORS)]}"{dashes}'
        way = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in line.points)
        yield f'<polyline {stroke} points="{way}"/>'
        y = bottom + _BOTTOM + i * _LINE_HEIGHT
        yield f'<path {stroke} d="M{left:.1f} {y - 4:.1f}h26"/>'
        yield _text(left + 34, y, line.label, "start", "")
    yield from _marks(plot.marks, axes)


@dataclass(frozen=True, slots=True)
class _Axes:
    left: float
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]

    def x(self, value: float) -> float:
        return self.left + _WIDTH * _share(value, self.x_ticks)

    def y(self, value: float) -> float:
        return _TOP + _HEIGHT * (1 - _share(value, self.y_ticks))


def _share(value: float, ticks: Sequence[float]) -> float:
    return (min(max(value, ticks[0]), ticks[-1]) - ticks[0]) / (ticks[-1] - ticks[0])


def _marks(marks: Sequence[Mark], axes: _Axes) -> Iterator[str]:
    """The marks, the lowest first; a name that would lie on another is moved up, with a line to its mark."""
    names: list[tuple[float, float, float]] = []  # left, right and y
    for mark in sorted(marks, key=lambda one: one.y):
        x, y = axes.x(mark.x), axes.y(mark.y)
        name = "mark disc" if mark.is_filled else "mark"
        yield f'<path class="interval" d="M{x:.1f} {axes.y(mark.low):.1f}V{axes.y(mark.high):.1f}"/>'
        if mark.y > axes.y_ticks[-1]:
            yield f'<path class="{name}" d="M{x:.1f} {y - 6:.1f}l6 10h-12z"/>'
        else:
            yield f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        is_right = x > axes.left + _WIDTH * 0.7  # its name would leave the plot
        width = len(mark.label) * _CHARACTER_WIDTH
        start = x - 9 - width if is_right else x + 9
        near = [other for left, right, other in names if start < right and left < start + width]
        place = y
        while any(abs(place - other) < _NAME_HEIGHT for other in near):
            place -= 1.0
        names.append((start, start + width, place))
        if place < y - 4:
            yield f'<path class="grid" d="M{x:.1f} {y:.1f}L{x - 8 if is_right else x + 8:.1f} {place:.1f}"/>'
        yield _text(x - 9 if is_right else x + 9, place + 4, mark.label, "end" if is_right else "start", "name")


def _text(x: float, y: float, text: str, anchor: str, name: str, more: str = "") -> str:
    return f'<text class="{name}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _ticks(least: float, most: float) -> list[float]:
    """Even values from ``least``, or 0, to ``most`` or just beyond."""
    least, most = min(least, 0.0), max(most, 0.0)
    wanted = (most - least or 1.0) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= wanted * (1 - 1e-9))
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]
