"""The formats of drawings: SVG, Mermaid flowcharts, Graphviz's DOT language, and an outline for the terminal."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from weft.language.draw.build import Edge, Group, Item, Role, Stroke
from weft.language.draw.layout import (
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

#: Colour and dashes of the marks in a picture of two graphs.
_MARKS = {"added": ("#1a7f37", "1 0"), "removed": ("#cf222e", "10 3"), "changed": ("#9a6700", "12 3 2 3")}
_SUFFIXES = {Stroke.SOLID: "", Stroke.DASHED: " (soft)", Stroke.DOTTED: " (copy)"}


def render_text(diagram: Group) -> str:
    """An outline: a line for each box, indented by nesting, and below it its inputs with their sources."""
    return "\n".join(_lines(diagram, "", "", [])) + "\n"


def _lines(box: Item | Group, head: str, indent: str, sources: list[str]) -> list[str]:
    kind = f" [{box.kind}]" if isinstance(box, Group) else ""
    notes = f"  {'; '.join(box.lines)}" if box.lines else ""
    lines = [f"{head}{box.title}{kind}{notes}"]
    items = box.items if isinstance(box, Group) else []
    bar = "│  " if items else "   "
    lines += [f"{indent}{bar}  {source}" for source in sources]
    edges = box.edges if isinstance(box, Group) else []
    titles = {item.id: item.title for item in items}
    for item in items:
        is_last = item is items[-1]
        given = [_source(edge, titles[edge.source]) for edge in edges if edge.target == item.id]
        branch, below = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        lines += _lines(item, indent + branch, indent + below, given)
    return lines


def _source(edge: Edge, title: str) -> str:
    return f"from {title}{_SUFFIXES[edge.stroke]}{': ' * bool(edge.lines)}{'; '.join(edge.lines)}"


_DOT_SHAPES = {Role.STEP: "box", Role.TENSORS: "oval", Role.CHOICE: "hexagon", Role.MERGE: "box"}
_CONTROL = dict.fromkeys((*range(32), 127), "\ufffd")
_FONT = 'fontname="Helvetica,Arial,sans-serif"'


def render_dot(diagram: Group) -> str:
    """A digraph of Graphviz; boxes are clusters. An edge to a box ends at its border (``compound``).

    Source:
        https://graphviz.org/doc/info/lang.html
    """
    ends = {box.id: _ends(box) for box in diagram.boxes()}
    lines = [
        "digraph weft {",
        f"    graph [compound=true, {_FONT}, fontsize=12]",
        f"    node [{_FONT}, fontsize=11]",
        f"    edge [{_FONT}, fontsize=9]",
        *_cluster(diagram, ends, "    "),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _ends(box: Item | Group) -> tuple[str, str]:
    """Items where an edge to the box, and one from it, actually end."""
    if isinstance(box, Item):
        return box.id, box.id
    return _ends(box.items[0])[0], _ends(box.items[-1])[1]


def _cluster(group: Group, ends: dict[str, tuple[str, str]], indent: str) -> list[str]:
    inner = indent + "    "
    lines = [f"{indent}subgraph cluster_{group.id} {{"]
    lines.append(f"{inner}{_attributes(label=_dot_text([f'{group.title} [{group.kind}]', *group.lines]))[1:-1]}")
    lines.append(f"{inner}style={_quoted(_style(group, 'rounded'))}")
    lines += [f'{inner}color="{_MARKS[group.mark][0]}"; penwidth=2'] if group.mark else []
    if group.tooltip:
        lines.append(f"{inner}tooltip={_quoted(_escaped(group.tooltip))}")
    for item in group.items:
        lines += _cluster(item, ends, inner) if isinstance(item, Group) else [f"{inner}{_dot_item(item)}"]
    groups = {item.id for item in group.items if isinstance(item, Group)}
    lines += [f"{inner}{_dot_edge(edge, ends, groups)}" for edge in group.edges]
    return [*lines, f"{indent}}}"]


def _dot_item(item: Item) -> str:
    style = _style(item, "rounded") if item.role in (Role.STEP, Role.MERGE) else _style(item)
    attributes = {"label": _dot_text([item.title, *item.lines]), "shape": _DOT_SHAPES[item.role], "style": style}
    attributes |= {"color": _MARKS[item.mark][0], "penwidth": "2"} if item.mark else {}
    return f"{item.id} {_attributes(**attributes, tooltip=_escaped(item.tooltip))}"


def _dot_edge(edge: Edge, ends: dict[str, tuple[str, str]], groups: Iterable[str]) -> str:
    attributes = {"label": _dot_text(edge.lines), "labeltooltip": _escaped(edge.tooltip), "style": edge.stroke.value}
    if edge.source in groups:
        attributes["ltail"] = f"cluster_{edge.source}"
    if edge.target in groups:
        attributes["lhead"] = f"cluster_{edge.target}"
    if edge.is_back:
        attributes["constraint"] = "false"
    if edge.stroke is Stroke.SOLID:
        del attributes["style"]
    return f"{ends[edge.source][1]} -> {ends[edge.target][0]} {_attributes(**attributes)}"


def _style(box: Item | Group, *others: str) -> str:
    return ",".join([*others, *([] if box.stroke is Stroke.SOLID else [box.stroke.value])])


def _attributes(**attributes: str) -> str:
    return "[" + ", ".join(f"{name}={_quoted(value)}" for name, value in attributes.items() if value) + "]"


def _dot_text(lines: Sequence[str]) -> str:
    return "\\n".join(_escaped(line) for line in lines)


def _escaped(text: str) -> str:
    """Escape a Graphviz label, where a backslash and ``&`` are special."""
    return text.replace("&", "&amp;").replace("\\", "\\\\").replace("\n", "\\n").translate(_CONTROL)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


#: What Mermaid reads as syntax even between quotes: entities, Markdown, directives, formulas and styles.
_SPECIAL = re.compile(r"[\"#&<>`\\$]|%(?=[%{])|:(?! )|[\x00-\x1f\x7f]")
#: What it takes for a formula, a line break or an icon even where it is written as entities; a word joiner parts them.
_PAIRS = re.compile(r"(?<=\$)(?=\$)|(?<=\\)(?=n)|(?<=:)(?=fa-)")
_JOINER = "\u2060"
_MERMAID_SHAPES = {
    Role.STEP: ('["', '"]'),
    Role.TENSORS: ('(["', '"])'),
    Role.CHOICE: ('{{"', '"}}'),
    Role.MERGE: ('("', '")'),
}
_ARROWS = {Stroke.SOLID: "-->", Stroke.DASHED: "-.->", Stroke.DOTTED: "-.->"}
_CLASSES = {
    Stroke.DASHED: ("soft", "stroke-dasharray: 6 4"),
    Stroke.DOTTED: ("shadow", "stroke-dasharray: 2 3"),
}


def render_mermaid(diagram: Group) -> str:
    """A flowchart for Mermaid 10 and 11; boxes are subgraphs.

    Source:
        https://mermaid.js.org/syntax/flowchart.html
    """
    edges: list[Edge] = []
    lines = ["flowchart TB", *_subgraph(diagram, edges, "    ")]
    dotted = [str(number) for number, edge in enumerate(edges) if edge.stroke is Stroke.DOTTED]
    if dotted:
        lines.append(f"    linkStyle {','.join(dotted)} {_CLASSES[Stroke.DOTTED][1]}")
    for stroke, (name, style) in _CLASSES.items():
        boxes = [box.id for box in diagram.boxes() if box.stroke is stroke]
        if boxes:
            lines += [f"    classDef {name} {style}", f"    class {','.join(boxes)} {name}"]
    for mark, (colour, dashes) in _MARKS.items():
        if boxes := [box.id for box in diagram.boxes() if box.mark == mark]:
            lines.append(f"    classDef {mark} stroke:{colour},stroke-width:3px,stroke-dasharray: {dashes}")
            lines.append(f"    class {','.join(boxes)} {mark}")
    return "\n".join(lines) + "\n"


def _subgraph(group: Group, edges: list[Edge], indent: str) -> list[str]:
    """Lines of a subgraph; its edges are added to ``edges`` in the order in which they appear."""
    title = "; ".join([f"{group.title} [{group.kind}]", *group.lines])  # of several lines boxes would cover the others
    lines = [f'{indent}subgraph {group.id}["{_label([title])}"]', f"{indent}    direction TB"]
    for item in group.items:
        lines += _subgraph(item, edges, indent + "    ") if isinstance(item, Group) else [f"{indent}    {_box(item)}"]
    lines += [f"{indent}    {_arrow(edge)}" for edge in group.edges]
    edges += group.edges
    return [*lines, f"{indent}end"]


def _box(item: Item) -> str:
    start, end = _MERMAID_SHAPES[item.role]
    return f"{item.id}{start}{_label([item.title, *item.lines])}{end}"


def _arrow(edge: Edge) -> str:
    label = f'|"{_label(edge.lines)}"|' if edge.lines else ""
    return f"{edge.source} {_ARROWS[edge.stroke]}{label} {edge.target}"


def _label(lines: Sequence[str]) -> str:
    """Lines of a label; a line has no quote, and nothing that Mermaid would take for more than text."""
    return "<br/>".join(_SPECIAL.sub(lambda found: f"#{ord(found[0])};", _PAIRS.sub(_JOINER, line)) for line in lines)


_MARGIN = 12.0
STYLE = f"""
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
.added {{ stroke: #1a7f37; stroke-width: 2.6; }} .removed {{ stroke: #cf222e; stroke-width: 2.6; }}
.changed {{ stroke: #9a6700; stroke-width: 2.6; }}
.removed {{ stroke-dasharray: 10 3; }} .changed {{ stroke-dasharray: 12 3 2 3; }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3; }} .kind {{ fill: #9198a1; }}
rect, polygon {{ fill: #1c2128; stroke: #9198a1; }} path {{ stroke: #9198a1; }}
.page {{ fill: #0d1117; stroke: none; }} .arrow {{ fill: #9198a1; stroke: none; }}
.tensors {{ fill: #2d333b; }} .choice {{ fill: #423410; }} .merge {{ fill: #163a25; }}
.sequence {{ fill: #131920; }} .switch {{ fill: #1f1a10; }} .splitter {{ fill: #211825; }}
.added {{ stroke: #3fb950; }} .removed {{ stroke: #f85149; }} .changed {{ stroke: #d29922; }}
.ensemble {{ fill: #101c2b; }} .cascade {{ fill: #111f18; }} .fallback {{ fill: #221b17; }}
}}
"""
_ARROW_HEAD = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="arrow" d="M0 0 8 4 0 8z"/></marker>'
)
#: Characters that XML 1.0 cannot hold.
_NOT_XML = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF), "\ufffd")


def render_svg(diagram: Group) -> str:
    """The drawing in the reader's light or dark theme; shortened texts are shown in full on hover.

    Screen readers get the outline.
    """
    place = lay_out(diagram)
    place.moved(_MARGIN, _MARGIN)
    width, height = place.width + 2 * _MARGIN, place.height + 2 * _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-labelledby="title outline">',
        f'<title id="title">{_xml(diagram.title)}</title>',
        f'<desc id="outline">{_xml(render_text(diagram))}</desc>',
        f"<style>{STYLE}</style>",
        f"<defs>{_ARROW_HEAD}</defs>",
        '<rect class="page" width="100%" height="100%"/>',
        *_svg_box(place),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _svg_box(place: PlacedBox) -> Iterator[str]:
    box = place.box
    kind = box.kind if isinstance(box, Group) else box.role.value
    tooltip = f"<title>{_xml(box.tooltip)}</title>" if box.tooltip else ""
    step = f" data-step={quoteattr(_valid(box.path))}" if box.path else ""
    yield f'<g id="{box.id}" data-role="{"group" if isinstance(box, Group) else box.role.value}"{step}>{tooltip}'
    yield _svg_outline(place, f"{kind} {box.stroke.value} {box.mark}".rstrip())
    suffix = f'<tspan class="kind" dx="8">{box.kind}</tspan>' if isinstance(box, Group) else ""
    x = place.x + (PADDING if isinstance(box, Group) else place.width / 2)
    anchor = "start" if isinstance(box, Group) else "middle"
    y = place.y + PADDING / 2 + TITLE_SIZE
    yield f'<text class="title" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{_xml(box.title)}{suffix}</text>'
    top = place.y + PADDING / 2 + TITLE_SIZE * LINE_HEIGHT
    yield from _svg_lines(place.lines, x, top, TEXT_SIZE, f'text-anchor="{anchor}"')
    yield "</g>"
    for child in place.children:
        yield from _svg_box(child)
    paths = {child.box.id: child.box.path for child in place.children}
    for route in place.routes:
        yield from _route(route, paths[route.edge.target] or paths[route.edge.source])


def _svg_outline(place: PlacedBox, classes: str) -> str:
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


def _route(route: Route, path: str) -> Iterator[str]:
    edge = route.edge
    tooltip = f"<title>{_xml(edge.tooltip)}</title>" if edge.tooltip else ""
    way = _straight(route.points) if edge.is_back else _curved(route.points)
    ends = f"data-from={quoteattr(edge.source)} data-to={quoteattr(edge.target)}"
    yield f"<g {ends}{f' data-step={quoteattr(_valid(path))}' if path else ''}>{tooltip}"
    yield f'<path class="{edge.stroke.value}" d="{way}" marker-end="url(#arrow)"/>'
    yield from _svg_lines(route.lines, *route.label, LABEL_SIZE, 'class="label"')
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


def _svg_lines(lines: Sequence[str], x: float, top: float, size: float, attributes: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        y = top + number * size * LINE_HEIGHT + size
        live = ' class="live"' if line.isspace() else ""
        yield f'<text {attributes}{live} x="{x:.1f}" y="{y:.1f}">{_xml(line)}</text>'


def _xml(text: str) -> str:
    return escape(_valid(text))


def _valid(text: str) -> str:
    return text.translate(_NOT_XML)


#: By name.
FORMATS: Mapping[str, Callable[[Group], str]] = {
    "mermaid": render_mermaid,
    "dot": render_dot,
    "svg": render_svg,
    "text": render_text,
}
