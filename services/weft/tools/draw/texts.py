"""A diagram as an outline for the terminal, in Graphviz's DOT language, and as a Mermaid flowchart."""

import re
from collections.abc import Iterable, Sequence

from weft.tools.draw.build import Edge, Group, Item, Role, Stroke

_SUFFIXES = {Stroke.SOLID: "", Stroke.DASHED: " (soft)", Stroke.DOTTED: " (copy)"}


def render_text(diagram: Group) -> str:
    """One line for each box, indented as boxes lie in one another; below it what it gets, and from where."""
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
    """Items at which an edge to the box and one from it really end."""
    if isinstance(box, Item):
        return box.id, box.id
    return _ends(box.items[0])[0], _ends(box.items[-1])[1]


def _cluster(group: Group, ends: dict[str, tuple[str, str]], indent: str) -> list[str]:
    inner = indent + "    "
    lines = [f"{indent}subgraph cluster_{group.id} {{"]
    lines.append(f"{inner}{_attributes(label=_dot_text([f'{group.title} [{group.kind}]', *group.lines]))[1:-1]}")
    lines.append(f"{inner}style={_quoted(_style(group, 'rounded'))}")
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
    """As Graphviz reads a label, where a backslash and ``&`` are special."""
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
    """A flowchart that Mermaid 10 and 11 take; boxes are subgraphs.

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
