"""A diagram as a Mermaid flowchart.

Source:
    https://mermaid.js.org/syntax/flowchart.html
"""

import re
from collections.abc import Sequence

from weft.tools.draw.diagram import Edge, Group, Item, Role, Stroke

#: What Mermaid reads as syntax even between quotes: entities, Markdown, directives, formulas and styles.
_SPECIAL = re.compile(r"[\"#&<>`\\$]|%(?=[%{])|:(?! )|[\x00-\x1f\x7f]")
#: What it takes for a formula, a line break or an icon even where it is written as entities; a word joiner parts them.
_PAIRS = re.compile(r"(?<=\$)(?=\$)|(?<=\\)(?=n)|(?<=:)(?=fa-)")
_JOINER = "\u2060"
_SHAPES = {Role.STEP: ('["', '"]'), Role.TENSORS: ('(["', '"])'), Role.CHOICE: ('{{"', '"}}'), Role.MERGE: ('("', '")')}
_ARROWS = {Stroke.SOLID: "-->", Stroke.DASHED: "-.->", Stroke.DOTTED: "-.->"}
_CLASSES = {
    Stroke.DASHED: ("soft", "stroke-dasharray: 6 4"),
    Stroke.DOTTED: ("shadow", "stroke-dasharray: 2 3"),
}


def render_mermaid(diagram: Group) -> str:
    """A flowchart that Mermaid 10 and 11 take; boxes are subgraphs."""
    edges: list[Edge] = []
    lines = ["flowchart TB", *_group(diagram, edges, "    ")]
    dotted = [str(number) for number, edge in enumerate(edges) if edge.stroke is Stroke.DOTTED]
    if dotted:
        lines.append(f"    linkStyle {','.join(dotted)} {_CLASSES[Stroke.DOTTED][1]}")
    for stroke, (name, style) in _CLASSES.items():
        boxes = [box.id for box in diagram.boxes() if box.stroke is stroke]
        if boxes:
            lines += [f"    classDef {name} {style}", f"    class {','.join(boxes)} {name}"]
    return "\n".join(lines) + "\n"


def _group(group: Group, edges: list[Edge], indent: str) -> list[str]:
    """Lines of a subgraph; its edges are added to ``edges`` in the order in which they appear."""
    title = "; ".join([f"{group.title} [{group.kind}]", *group.lines])  # of several lines boxes would cover the others
    lines = [f'{indent}subgraph {group.id}["{_text([title])}"]', f"{indent}    direction TB"]
    for item in group.items:
        lines += _group(item, edges, indent + "    ") if isinstance(item, Group) else [f"{indent}    {_item(item)}"]
    lines += [f"{indent}    {_edge(edge)}" for edge in group.edges]
    edges += group.edges
    return [*lines, f"{indent}end"]


def _item(item: Item) -> str:
    start, end = _SHAPES[item.role]
    return f"{item.id}{start}{_text([item.title, *item.lines])}{end}"


def _edge(edge: Edge) -> str:
    label = f'|"{_text(edge.lines)}"|' if edge.lines else ""
    return f"{edge.source} {_ARROWS[edge.stroke]}{label} {edge.target}"


def _text(lines: Sequence[str]) -> str:
    """Lines of a label; a line has no quote, and nothing that Mermaid would take for more than text."""
    return "<br/>".join(_SPECIAL.sub(lambda found: f"#{ord(found[0])};", _PAIRS.sub(_JOINER, line)) for line in lines)
