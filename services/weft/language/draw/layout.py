"""Layout of drawings: rows from top to bottom, boxes within boxes, edges between the rows.

Every edge reserves space in each row that it passes, as wide as its label if it has one. So neither edges nor texts
overlap boxes or other texts.

Source:
    K. Sugiyama, S. Tagawa, M. Toda, "Methods for visual understanding of hierarchical system structures", 1981.
"""

import textwrap
import unicodedata
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import pairwise

from weft.language.draw.build import Edge, Group, Item

_NUM_SWEEPS = 12

Row = list[int]
#: Vertex -> its neighbours in the row above, or below.
Neighbours = Mapping[int, Sequence[int]]


def longest_path_ranks(edges: Sequence[tuple[int, int]], lowest: Sequence[int]) -> list[int]:
    """Rank of each vertex: at least its lowest allowed one, and beyond it only as the longest path requires.

    Args:
        edges: (from, to), acyclic.
        lowest: For each vertex.
    """
    ranks = list(lowest)
    above: dict[int, list[int]] = {vertex: [] for vertex in range(len(ranks))}
    for source, target in edges:
        above[target].append(source)
    for vertex in TopologicalSorter(above).static_order():
        ranks[vertex] = max([ranks[vertex], *(ranks[source] + 1 for source in above[vertex])])
    return ranks


def ordered(rows: Sequence[Row], above: Neighbours, below: Neighbours) -> list[Row]:
    """Reorder each row to the order found with the fewest crossings; ties keep the given order.

    Uses barycentre sweeps, after each of which neighbours are swapped if that saves a crossing.
    """
    best = [list(row) for row in rows]
    fewest = _num_crossings(best, below)
    for start in (rows, [row[::-1] for row in rows]):
        found, crossings = _swept(start, above, below)
        if crossings < fewest:
            best, fewest = found, crossings
    return best


def _swept(rows: Sequence[Row], above: Neighbours, below: Neighbours) -> tuple[list[Row], int]:
    """Best order found in sweeps down and up, and its number of crossings."""
    current = [list(row) for row in rows]
    best, fewest = [list(row) for row in rows], _num_crossings(rows, below)
    for sweep in range(_NUM_SWEEPS):
        if not fewest:
            break
        is_downward = sweep % 2 == 0
        fixed = above if is_downward else below
        for i in range(1, len(current)) if is_downward else range(len(current) - 2, -1, -1):
            place = {vertex: at for at, vertex in enumerate(current[i - 1 if is_downward else i + 1])}
            current[i] = _by_barycentre(current[i], fixed, place)
        _transpose(current, above, below)
        crossings = _num_crossings(current, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in current], crossings
    return best, fewest


def _by_barycentre(row: Row, neighbours: Neighbours, place: Mapping[int, int]) -> Row:
    keys = {}
    for at, vertex in enumerate(row):
        places = [place[neighbour] for neighbour in neighbours[vertex]]
        keys[vertex] = sum(places) / len(places) if places else float(at)
    return sorted(row, key=lambda vertex: keys[vertex])


def _transpose(rows: Sequence[Row], above: Neighbours, below: Neighbours) -> None:
    """Swap neighbours in a row if that reduces crossings."""
    for i, row in enumerate(rows):
        sides = [
            (neighbours, {vertex: at for at, vertex in enumerate(rows[i + step])})
            for step, neighbours in ((-1, above), (1, below))
            if 0 <= i + step < len(rows)
        ]
        for left in range(len(row) - 1):
            u, v = row[left], row[left + 1]
            saved = 0
            for neighbours, place in sides:
                saved += _num_inverted(neighbours[u], neighbours[v], place)
                saved -= _num_inverted(neighbours[v], neighbours[u], place)
            if saved > 0:
                row[left], row[left + 1] = v, u


def _num_inverted(left: Sequence[int], right: Sequence[int], place: Mapping[int, int]) -> int:
    """Crossings of the edges to ``left`` from one vertex with those to ``right`` from the next."""
    return sum(place[a] > place[b] for a in left for b in right)


def _num_crossings(rows: Sequence[Row], below: Neighbours) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        place = {vertex: at for at, vertex in enumerate(lower)}
        seen: list[int] = []
        for vertex in upper:
            ends = sorted(place[neighbour] for neighbour in below[vertex])
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def spread(wanted: Sequence[float], weights: Sequence[float], distances: Sequence[float]) -> list[float]:
    """Places nearest to ``wanted`` (weighted least squares), with ``distances[i]`` or more from place i to i+1."""
    offsets = [0.0]
    for distance in distances:
        offsets.append(offsets[-1] + distance)
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, how many): pooled where the order would be broken
    for place, weight, offset in zip(wanted, weights, offsets, strict=False):
        mean, total, count = place - offset, weight, 1
        while blocks and blocks[-1][0] >= mean:
            other, mass, size = blocks.pop()
            mean, total, count = (other * mass + mean * total) / (mass + total), mass + total, size + count
        blocks.append((mean, total, count))
    means = [mean for mean, _, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]


TITLE_SIZE, TEXT_SIZE, LABEL_SIZE = 13.0, 11.0, 10.0
PADDING = 10.0
#: From an edge to its label.
LABEL_INDENT = 6.0
_COLUMN_GAP, _THREAD = 18.0, 5.0
#: Between rows: at least, and how much more for each unit that an edge goes sideways there, at most.
_ROW_GAP, _SLOPE, _MAX_ROW_GAP = 18.0, 0.12, 64.0
#: Between two edges that meet the same border: at least, and where there is room; and from them to its corners.
_PORT_GAP, _WIDE_PORT_GAP, _CORNER = 14.0, 54.0, 18.0
#: An edge is drawn straight where it passes rows, rather than boxes in the middle of their neighbours; once the boxes
#: have their places they keep them.
_BEND_WEIGHT, _KEEP_WEIGHT = 6.0, 100.0
#: How far an arrow goes straight down before it ends.
_LANDING = 9.0
_NUM_PASSES = 12

#: How wide characters are at most, in parts of the font size: as in a wide font (DejaVu Sans, Verdana), and more.
_WIDTHS = {
    **dict.fromkeys(" .,:;'!|ijlI/\\", 0.42),
    **dict.fromkeys('()[]`-frt"*', 0.52),
    **dict.fromkeys("mwMW@%+<>=~#^&OQGDHNU", 1.0),
}
_NARROW, _CAPITAL, _WIDE = 0.68, 0.84, 1.05
_BOLD = 1.13
_MAX_LINE_CHARS = 46

LINE_HEIGHT = 1.35


def text_width(text: str, font_size: float, *, is_bold: bool = False) -> float:
    """Width in the units of ``font_size``; an upper bound for browsers' sans-serif fonts."""
    width = sum(map(_character_width, text))
    return width * font_size * (_BOLD if is_bold else 1.0)


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, long ones broken."""
    return [part for line in lines for part in textwrap.wrap(line, _MAX_LINE_CHARS) or [line]]


def _character_width(character: str) -> float:
    known = _WIDTHS.get(character)
    if known is not None:
        return known
    if character > "\x7f":
        is_wide = unicodedata.east_asian_width(character) in "WF" or character > "\uffff"
        return _WIDE if is_wide else 1.0
    return _CAPITAL if character.isupper() else _NARROW


Point = tuple[float, float]


@dataclass(slots=True)
class PlacedBox:
    """A box with its position.

    Attributes:
        x, y: Upper left corner, relative to the box around it until ``moved`` makes it absolute.
        lines: Small text below the title, wrapped.
        header_height: Of title and text.
        children, routes: Of a group.
    """

    box: Item | Group
    lines: list[str]
    header_height: float
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    children: "list[PlacedBox]" = field(default_factory=list)
    routes: "list[Route]" = field(default_factory=list)

    def moved(self, x: float, y: float) -> None:
        """Shift everything in the box."""
        self.x, self.y = self.x + x, self.y + y
        for child in self.children:
            child.moved(x, y)
        for route in self.routes:
            route.points = [(px + x, py + y) for px, py in route.points]
            route.label = (route.label[0] + x, route.label[1] + y)


@dataclass(slots=True)
class Route:
    """The line of an edge.

    Attributes:
        points: First and last lie on the borders of its ends. Between points 2k and 2k+1 the line is straight, between
            2k+1 and 2k+2 it curves from downwards to downwards; a back edge is straight everywhere.
        lines: The label, wrapped.
        label: Upper left corner of the label.
    """

    edge: Edge
    points: list[Point]
    lines: list[str]
    label: Point = (0.0, 0.0)


def label_size(lines: Sequence[str]) -> tuple[float, float]:
    """Width and height of an edge's label."""
    width = max((text_width(line, LABEL_SIZE) for line in lines), default=0.0)
    return width, len(lines) * LABEL_SIZE * LINE_HEIGHT


def lay_out(box: Item | Group) -> PlacedBox:
    """Lay out the whole drawing, its upper left corner at (0, 0)."""
    lines = wrapped(box.lines)
    title = f"{box.title}  {box.kind}" if isinstance(box, Group) else box.title
    widths = [text_width(title, TITLE_SIZE, is_bold=True), *(text_width(line, TEXT_SIZE) for line in lines)]
    header = (TITLE_SIZE + len(lines) * TEXT_SIZE) * LINE_HEIGHT + PADDING
    place = PlacedBox(box, lines, header, max(widths) + 4 * PADDING, header + PADDING / 2)
    if isinstance(box, Group):
        _Layers(box, place).fill()
    return place


@dataclass(slots=True)
class _Vertex:
    """A box, or an edge where it passes a row: ``left`` and ``right`` of its anchor, the line or the box's middle."""

    left: float
    right: float
    height: float
    x: float = 0.0


class _Layers:
    """Fills the place of a group: rows of vertices, of which the first are its items in their order."""

    def __init__(self, group: Group, place: PlacedBox) -> None:
        self._group = group
        self._place = place
        self._items = [lay_out(item) for item in group.items]
        self._index = {item.id: i for i, item in enumerate(group.items)}
        for ends in ([edge.source for edge in group.edges], [edge.target for edge in group.edges]):
            for item, i in self._index.items():
                self._items[i].width = max(self._items[i].width, (ends.count(item) - 1) * _PORT_GAP + 2 * _CORNER)
        self._vertices = [_Vertex(item.width / 2, item.width / 2, item.height) for item in self._items]
        self._forward = [edge for edge in group.edges if not edge.is_back]
        self._rows: list[Row] = []
        self._row_of: dict[int, int] = {}
        self._chains: list[list[int]] = []
        self._labels: list[tuple[int, list[str]]] = []
        self._leads: dict[int, int] = {}

    def fill(self) -> None:
        place = self._place
        self._make_rows()
        above: dict[int, list[int]] = {v: [] for v in range(len(self._vertices))}
        below: dict[int, list[int]] = {v: [] for v in range(len(self._vertices))}
        for chain in self._chains:
            for upper, lower in pairwise(chain):
                below[upper].append(lower)
                above[lower].append(upper)
        self._rows = ordered(self._rows, above, below)
        self._row_of = {v: i for i, row in enumerate(self._rows) for v in row}
        self._set_columns(above, below)
        left = min(v.x - v.left for v in self._vertices)
        right = max(v.x + v.right for v in self._vertices)
        shift = PADDING - left + max(0.0, (place.width - 2 * PADDING - (right - left)) / 2)
        for vertex in self._vertices:
            vertex.x += shift
        ways = self._ways()
        heights = [max((self._vertices[v].height for v in row), default=0.0) for row in self._rows]
        tops = self._tops(ways, heights)
        for v, item in enumerate(self._items):
            item.moved(self._vertices[v].x - self._vertices[v].left, tops[self._row_of[v]])
        place.children = self._items
        place.routes = self._routes(ways, tops, heights)
        place.width = max(place.width, right - left + 2 * PADDING)
        place.height = tops[-1] + heights[-1] + PADDING
        for edge in self._group.edges:
            if edge.is_back:
                self._add_back_edge(edge)

    def _make_rows(self) -> None:
        """Items in every second row, edges in all that they pass; the label in one of the others."""
        ends = [(self._index[edge.source], self._index[edge.target]) for edge in self._forward]
        count = len(self._items)
        is_node = self._group.kind not in ("fallback", "versions")
        ranks = longest_path_ranks(ends, [int(is_node and i > 0) for i in range(count)])
        if is_node and count > 1:  # nothing stands beside the exit
            ranks[-1] = max(ranks[:-1]) + 1
        self._rows = [[] for _ in range(2 * max(ranks) + 1)]
        for v, rank in enumerate(ranks):
            self._rows[2 * rank].append(v)
        for edge, (source, target) in zip(self._forward, ends, strict=True):
            lines = wrapped(edge.lines)
            is_exit = is_node and target == count - 1
            labelled = 2 * ranks[source] + 1 if is_exit else 2 * ranks[target] - 1
            chain = [source]
            for row in range(2 * ranks[source] + 1, 2 * ranks[target]):
                width, height = label_size(lines) if row == labelled else (0.0, 0.0)
                self._vertices.append(_Vertex(_THREAD, width + LABEL_INDENT if width else _THREAD, height))
                chain.append(len(self._vertices) - 1)
                self._rows[row].append(chain[-1])
            self._chains.append([*chain, target])
            self._labels.append((chain[labelled - 2 * ranks[source]], lines))
            self._leads.update(zip(chain[1:], chain if is_exit else [*chain[2:], target], strict=False))

    def _set_columns(self, above: dict[int, list[int]], below: dict[int, list[int]]) -> None:
        """Place every vertex as near to the middle of its neighbours as its row allows."""
        vertices = self._vertices
        gaps = [[vertices[u].right + vertices[v].left + _COLUMN_GAP for u, v in pairwise(row)] for row in self._rows]
        weights = [[self._weight(v) for v in row] for row in self._rows]
        for row, weight, gap in zip(self._rows, weights, gaps, strict=True):
            for v, x in zip(row, spread([0.0] * len(row), weight, gap), strict=True):
                vertices[v].x = x
        for step in range(_NUM_PASSES):
            rows = list(zip(self._rows, weights, gaps, strict=True))
            for row, weight, gap in rows if step % 2 == 0 else reversed(rows):
                wanted = []
                for v in row:
                    near = (above, below)[step % 2][v] or [*above[v], *below[v]]
                    mass = [self._weight(u) * self._weight(v) for u in near]
                    total = sum(vertices[u].x * m for u, m in zip(near, mass, strict=True))
                    wanted.append(total / sum(mass) if near else vertices[v].x)
                for v, x in zip(row, spread(wanted, weight, gap), strict=True):
                    vertices[v].x = x

        self._straighten(gaps)

    def _straighten(self, gaps: Sequence[Sequence[float]]) -> None:
        """Align edges with the box that they leave, or the one they enter, as far as there is room."""
        for step in (-1, 1):
            for i in range(len(self._rows))[::-step]:
                row = [self._vertices[v] for v in self._rows[i]]
                leads = [self._leads.get(v, -1) for v in self._rows[i]]
                is_led = [lead >= 0 and self._row_of[lead] == i + step for lead in leads]
                wanted = [
                    self._vertices[lead].x if led else vertex.x
                    for vertex, lead, led in zip(row, leads, is_led, strict=True)
                ]
                weights = [1.0 if led else _KEEP_WEIGHT for led in is_led]
                for vertex, x in zip(row, spread(wanted, weights, gaps[i]), strict=True):
                    vertex.x = x

    def _weight(self, vertex: int) -> float:
        return 1.0 if vertex < len(self._items) else _BEND_WEIGHT

    def _ways(self) -> list[list[float]]:
        """Route each edge as straight as possible: points at the borders of its ends and in the rows between."""
        ways = [[self._vertices[v].x for v in chain] for chain in self._chains]
        for end, beside in ((0, 1), (-1, -2)):
            edges_at: dict[int, list[int]] = {}
            for i, chain in enumerate(self._chains):
                edges_at.setdefault(chain[end], []).append(i)
            for v, edges in edges_at.items():
                box, last = self._vertices[v], len(edges) - 1
                room = box.left + box.right - 2 * _CORNER
                gap = min(_WIDE_PORT_GAP, room / max(1, last))
                edges.sort(key=lambda i: ways[i][beside])
                ports = spread([ways[i][beside] for i in edges], [1.0] * len(edges), [gap] * last)
                low = box.x - box.left + _CORNER
                for at, (i, x) in enumerate(zip(edges, ports, strict=True)):
                    ways[i][end] = min(max(x, low + at * gap), low + room - (last - at) * gap)
        return ways

    def _tops(self, ways: Sequence[Sequence[float]], heights: Sequence[float]) -> list[float]:
        """Upper end of each row: the further edges run sideways above it, the more room."""
        sideways = [0.0] * len(self._rows)
        for chain, way in zip(self._chains, ways, strict=True):
            for lower, (x, to_x) in zip(chain[1:], pairwise(way), strict=True):
                sideways[self._row_of[lower]] = max(sideways[self._row_of[lower]], abs(x - to_x))
        tops = [self._place.header_height]
        for height, distance in zip(heights, sideways[1:], strict=False):
            tops.append(tops[-1] + height + min(_ROW_GAP + _SLOPE * distance, _MAX_ROW_GAP))
        return tops

    def _routes(self, ways: Sequence[Sequence[float]], tops: Sequence[float], heights: Sequence[float]) -> list[Route]:
        routes = []
        for edge, chain, way, (at, lines) in zip(self._forward, self._chains, ways, self._labels, strict=True):
            source, rows = self._items[chain[0]], [self._row_of[v] for v in chain]
            points = [(way[0], source.y + source.height), (way[0], tops[rows[0]] + heights[rows[0]])]
            for x, row in zip(way[1:-1], rows[1:-1], strict=True):
                points += [(x, tops[row]), (x, tops[row] + heights[row])]
            points += [(way[-1], tops[rows[-1]] - _LANDING), (way[-1], tops[rows[-1]])]
            routes.append(Route(edge, points, lines, (self._vertices[at].x + LABEL_INDENT, tops[self._row_of[at]])))
        return routes

    def _add_back_edge(self, edge: Edge) -> None:
        """Draw the edge from the exit to the entry, which are alone in their rows, along the right border."""
        place = self._place
        source, target = self._items[self._index[edge.source]], self._items[self._index[edge.target]]
        lines = wrapped(edge.lines)
        width, height = label_size(lines)
        x = place.width + PADDING
        low, high = source.y + source.height / 2, target.y + target.height / 2
        points = [(source.x + source.width, low), (x, low), (x, high), (target.x + target.width, high)]
        label = (x + LABEL_INDENT, (low + high - height) / 2)
        place.routes.append(Route(edge, points, lines, label))
        place.width = x + LABEL_INDENT + width + PADDING
