"""A graph as boxes and edges, before any format: what is drawn is decided once, for all of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum


class Role(Enum):
    """What an item stands for."""

    STEP = "step"
    TENSORS = "tensors"
    CHOICE = "choice"
    MERGE = "merge"


class Stroke(Enum):
    """How an outline or an edge is drawn: SOFT and what follows a failure dashed, shadows dotted."""

    SOLID = "solid"
    DASHED = "dashed"
    DOTTED = "dotted"


@dataclass(slots=True)
class Item:
    """A box without boxes in it.

    Attributes:
        id: Unique in the drawing, letters and digits.
        title: First line.
        lines: Small text below it.
        tooltip: The same in full, lines ended by newlines; "" where nothing is cut.
        role: Decides the shape.
        stroke: Of the outline.
    """

    id: str
    title: str
    lines: list[str] = field(default_factory=list)
    tooltip: str = ""
    role: Role = Role.STEP
    stroke: Stroke = Stroke.SOLID


@dataclass(slots=True)
class Edge:
    """From one item or group to another of the same group.

    Attributes:
        source, target: Ids.
        lines: Condition and tensors.
        tooltip: The same in full.
        stroke: How it is drawn.
        is_back: Closes a loop, against the direction of all others.
    """

    source: str
    target: str
    lines: list[str] = field(default_factory=list)
    tooltip: str = ""
    stroke: Stroke = Stroke.SOLID
    is_back: bool = False


@dataclass(slots=True)
class Group:
    """A box with boxes in it: a node, or a step with its fallback.

    Attributes:
        id, title, lines, tooltip, stroke: As of ``Item``.
        kind: "sequence", "switch", "splitter", "ensemble", "cascade" or "fallback".
        items: In declared order; the first is where the group is entered, the last where it is left.
        edges: Between its items. Without those that are ``is_back`` they form no cycle.
    """

    id: str
    title: str
    kind: str
    lines: list[str] = field(default_factory=list)
    tooltip: str = ""
    stroke: Stroke = Stroke.SOLID
    items: "list[Item | Group]" = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def boxes(self) -> "Iterator[Item | Group]":
        """This group and everything in it, outermost first."""
        yield self
        for item in self.items:
            if isinstance(item, Group):
                yield from item.boxes()
            else:
                yield item
