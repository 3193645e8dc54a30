"""A diagram in the DOT language of Graphviz.

Source:
    https://graphviz.org/doc/info/lang.html
"""

from collections.abc import Iterable, Sequence

from weft.tools.draw.diagram import Edge, Group, Item, Role, Stroke

_SHAPES = {Role.STEP: "box", Role.TENSORS: "oval", Role.CHOICE: "hexagon", Role.MERGE: "box"}
_CONTROL = dict.fromkeys((*range(32), 127), "\ufffd")
_FONT = 'fontname="Helvetica,Arial,sans-serif"'


def render_dot(diagram: Group) -> str:
    """A digraph; boxes are clusters. An edge to a box ends at its border (``compound``)."""
    ends = {box.id: _ends(box) for box in diagram.boxes()}
    lines = [
        "digraph weft {",
        f"    graph [compound=true, {_FONT}, fontsize=12]",
        f"    node [{_FONT}, fontsize=11]",
        f"    edge [{_FONT}, fontsize=9]",
        *_group(diagram, ends, "    "),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _ends(box: Item | Group) -> tuple[str, str]:
    """Items at which an edge to the box and one from it really end."""
    if isinstance(box, Item):
        return box.id, box.id
    return _ends(box.items[0])[0], _ends(box.items[-1])[1]


def _group(group: Group, ends: dict[str, tuple[str, str]], indent: str) -> list[str]:
    inner = indent + "    "
    lines = [f"{indent}subgraph cluster_{group.id} {{"]
    lines.append(f"{inner}{_attributes(label=_text([f'{group.title} [{group.kind}]', *group.lines]))[1:-1]}")
    lines.append(f"{inner}style={_quoted(_style(group, 'rounded'))}")
    if group.tooltip:
        lines.append(f"{inner}tooltip={_quoted(_escaped(group.tooltip))}")
    for item in group.items:
        lines += _group(item, ends, inner) if isinstance(item, Group) else [f"{inner}{_item(item)}"]
    groups = {item.id for item in group.items if isinstance(item, Group)}
    lines += [f"{inner}{_edge(edge, ends, groups)}" for edge in group.edges]
    return [*lines, f"{indent}}}"]


def _item(item: Item) -> str:
    style = _style(item, "rounded") if item.role in (Role.STEP, Role.MERGE) else _style(item)
    attributes = {"label": _text([item.title, *item.lines]), "shape": _SHAPES[item.role], "style": style}
    return f"{item.id} {_attributes(**attributes, tooltip=_escaped(item.tooltip))}"


def _edge(edge: Edge, ends: dict[str, tuple[str, str]], groups: Iterable[str]) -> str:
    attributes = {"label": _text(edge.lines), "labeltooltip": _escaped(edge.tooltip), "style": edge.stroke.value}
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


def _text(lines: Sequence[str]) -> str:
    return "\\n".join(_escaped(line) for line in lines)


def _escaped(text: str) -> str:
    """As Graphviz reads a label, where a backslash and ``&`` are special."""
    return text.replace("&", "&amp;").replace("\\", "\\\\").replace("\n", "\\n").translate(_CONTROL)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'
