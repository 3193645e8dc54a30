"""A diagram as an SVG file that stands alone: no program made it, no font or script is loaded."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from weft.tools.draw.build import Group, Item, Role
from weft.tools.draw.layout import (
    LABEL_SIZE,
    LINE_HEIGHT,
    PADDING,
    TEXT_SIZE,
    TITLE_SIZE,
    PlacedBox,
    Point,
    Route,
    lay_out,
)
from weft.tools.draw.texts import render_text

_MARGIN = 12.0
_STYLE = f"""
text {{ font-family: "DejaVu Sans", Verdana, Arial, sans-serif; font-size: {TEXT_SIZE:g}px; fill: #24292f; }}
.title {{ font-size: {TITLE_SIZE:g}px; font-weight: bold; }}
.kind {{ font-weight: normal; fill: #57606a; }}
.label {{ font-size: {LABEL_SIZE:g}px; }}
rect, polygon {{ fill: #ffffff; stroke: #24292f; stroke-width: 1.2; }}
path {{ fill: none; stroke: #24292f; stroke-width: 1.2; }}
.page {{ fill: #ffffff; stroke: none; }} .arrow {{ fill: #24292f; stroke: none; }}
.tensors {{ fill: #f0f0f0; }} .choice {{ fill: #fff4ce; }} .merge {{ fill: #e6f4ea; }}
.sequence {{ fill: #f6f8fa; }} .switch {{ fill: #fffaf0; }} .splitter {{ fill: #fdf4fb; }}
.ensemble {{ fill: #f3f9ff; }} .cascade {{ fill: #f5fbf5; }} .fallback {{ fill: #fbf7f4; }}
.dashed {{ stroke-dasharray: 6 4; }} .dotted {{ stroke-dasharray: 2 3; }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3; }} .kind {{ fill: #9198a1; }}
rect, polygon {{ fill: #1c2128; stroke: #9198a1; }} path {{ stroke: #9198a1; }}
.page {{ fill: #0d1117; stroke: none; }} .arrow {{ fill: #9198a1; stroke: none; }}
.tensors {{ fill: #2d333b; }} .choice {{ fill: #423410; }} .merge {{ fill: #163a25; }}
.sequence {{ fill: #131920; }} .switch {{ fill: #1f1a10; }} .splitter {{ fill: #211825; }}
.ensemble {{ fill: #101c2b; }} .cascade {{ fill: #111f18; }} .fallback {{ fill: #221b17; }}
}}
"""
_ARROW = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="arrow" d="M0 0 8 4 0 8z"/></marker>'
)
#: Characters that XML 1.0 cannot hold.
_NOT_XML = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF), "\ufffd")


def render_svg(diagram: Group) -> str:
    """The drawing, in light or dark as the reader has it; texts that are cut are in full where the pointer rests.

    Who cannot see it is read the outline.
    """
    place = lay_out(diagram)
    place.moved(_MARGIN, _MARGIN)
    width, height = place.width + 2 * _MARGIN, place.height + 2 * _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-labelledby="title outline">',
        f'<title id="title">{_text(diagram.title)}</title>',
        f'<desc id="outline">{_text(render_text(diagram))}</desc>',
        f"<style>{_STYLE}</style>",
        f"<defs>{_ARROW}</defs>",
        '<rect class="page" width="100%" height="100%"/>',
        *_box(place),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _box(place: PlacedBox) -> Iterator[str]:
    box = place.box
    kind = box.kind if isinstance(box, Group) else box.role.value
    tooltip = f"<title>{_text(box.tooltip)}</title>" if box.tooltip else ""
    yield f'<g id="{box.id}">{tooltip}'
    yield _outline(place, f"{kind} {box.stroke.value}")
    suffix = f'<tspan class="kind" dx="8">{box.kind}</tspan>' if isinstance(box, Group) else ""
    x = place.x + (PADDING if isinstance(box, Group) else place.width / 2)
    anchor = "start" if isinstance(box, Group) else "middle"
    y = place.y + PADDING / 2 + TITLE_SIZE
    yield f'<text class="title" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{_text(box.title)}{suffix}</text>'
    top = place.y + PADDING / 2 + TITLE_SIZE * LINE_HEIGHT
    yield from _lines(place.lines, x, top, TEXT_SIZE, f'text-anchor="{anchor}"')
    yield "</g>"
    for child in place.children:
        yield from _box(child)
    for route in place.routes:
        yield from _route(route)


def _outline(place: PlacedBox, classes: str) -> str:
    x, y, width, height = place.x, place.y, place.width, place.height
    role = place.box.role if isinstance(place.box, Item) else None
    if role is Role.CHOICE:
        right, middle, bottom, cut = x + width, y + height / 2, y + height, PADDING
        corners = [
            (x, middle),
            (x + cut, y),
            (right - cut, y),
            (right, middle),
            (right - cut, bottom),
            (x + cut, bottom),
        ]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in corners)
        return f'<polygon class="{classes}" points="{points}"/>'
    radius = min(height / 2, 18.0) if role is Role.TENSORS else 5.0
    return (
        f'<rect class="{classes}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}"/>'
    )


def _route(route: Route) -> Iterator[str]:
    edge = route.edge
    tooltip = f"<title>{_text(edge.tooltip)}</title>" if edge.tooltip else ""
    way = _straight(route.points) if edge.is_back else _curved(route.points)
    yield f"<g data-from={quoteattr(edge.source)} data-to={quoteattr(edge.target)}>{tooltip}"
    yield f'<path class="{edge.stroke.value}" d="{way}" marker-end="url(#arrow)"/>'
    yield from _lines(route.lines, *route.label, LABEL_SIZE, 'class="label"')
    yield "</g>"


def _straight(points: Sequence[Point]) -> str:
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _curved(points: Sequence[Point]) -> str:
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for i, ((x, y), (to_x, to_y)) in enumerate(pairwise(points)):
        middle = (y + to_y) / 2
        curve = f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
        parts.append(f"L{to_x:.1f} {to_y:.1f}" if i % 2 == 0 else curve)
    return " ".join(parts)


def _lines(lines: Sequence[str], x: float, top: float, size: float, attributes: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        y = top + number * size * LINE_HEIGHT + size
        yield f'<text {attributes} x="{x:.1f}" y="{y:.1f}">{_text(line)}</text>'


def _text(text: str) -> str:
    return escape(text.translate(_NOT_XML))
