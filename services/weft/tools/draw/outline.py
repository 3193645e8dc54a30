"""A diagram as an outline for the terminal."""

from weft.tools.draw.diagram import Edge, Group, Item, Stroke

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
    """Where a tensor comes from."""
    return f"from {title}{_SUFFIXES[edge.stroke]}{': ' * bool(edge.lines)}{'; '.join(edge.lines)}"
