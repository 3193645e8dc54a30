"""The SVG as a reader of the file sees it: where boxes, texts and edges are."""

import random
import re
from dataclasses import dataclass
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from tests.unit.router.random_drawing import graphs
from tests.unit.router.random_graph_text import plan_of
from tests.unit.router.random_graphs import Node
from tests.unit.tools.graphs import PLANS, compiled, many_steps

from weft.language.draw.build import Caption, Edge, Group, Item, Role, Stroke, build_diagram
from weft.language.draw.formats import render_svg, render_text
from weft.language.draw.layout import text_width

NAMESPACE = "{http://www.w3.org/2000/svg}"
DRAWN = PLANS | {"many": compiled(many_steps(30))}


@dataclass(frozen=True)
class Rectangle:
    """A box on the page."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Rectangle", slack: float = 0.2) -> bool:
        is_beside = self.right <= other.left + slack or other.right <= self.left + slack
        return not is_beside and self.top < other.bottom - slack and other.top < self.bottom - slack

    def contains(self, other: "Rectangle", slack: float = 0.2) -> bool:
        across = self.left - slack <= other.left and other.right <= self.right + slack
        return across and self.top - slack <= other.top and other.bottom <= self.bottom + slack

    def has_point(self, x: float, y: float, slack: float = 0.3) -> bool:
        return self.left + slack < x < self.right - slack and self.top + slack < y < self.bottom - slack


@dataclass
class Drawn:
    """An edge on the page: its ends, points along its way, the rectangle of each line of its label."""

    source: str
    target: str
    start: tuple[float, float]
    end: tuple[float, float]
    way: list[tuple[float, float]]
    labels: list[Rectangle]
    is_straight: bool


class Page:
    """A drawing read back from its file."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        self.boxes: dict[str, Rectangle] = {}
        self.texts: dict[str, list[Rectangle]] = {}
        self.edges: list[Drawn] = []
        for group in self.root.iter(f"{NAMESPACE}g"):
            if "id" in group.attrib:
                self.boxes[group.attrib["id"]] = _outline(group)
                self.texts[group.attrib["id"]] = [_line(text) for text in group.iter(f"{NAMESPACE}text")]
            else:
                self.edges.append(_edge(group))


def _outline(group: ElementTree.Element) -> Rectangle:
    rectangle = group.find(f"{NAMESPACE}rect")
    if rectangle is not None:
        x, y, width, height = (float(rectangle.attrib[name]) for name in ("x", "y", "width", "height"))
        return Rectangle(x, y, x + width, y + height)
    polygon = group.find(f"{NAMESPACE}polygon")
    assert polygon is not None
    points = [tuple(map(float, point.split(","))) for point in polygon.attrib["points"].split()]
    xs, ys = zip(*points, strict=True)
    return Rectangle(min(xs), min(ys), max(xs), max(ys))


def _line(text: ElementTree.Element) -> Rectangle:
    size = {"title": 13.0, "label": 10.0}.get(text.get("class", ""), 11.0)
    width = text_width("".join(text.itertext()), size, is_bold=text.get("class") == "title")
    x, y = float(text.attrib["x"]), float(text.attrib["y"])
    left = x - width / 2 if text.get("text-anchor") == "middle" else x
    return Rectangle(left, y - size, left + width, y + size * 0.25)


def _edge(group: ElementTree.Element) -> Drawn:
    path = group.find(f"{NAMESPACE}path")
    assert path is not None
    way: list[tuple[float, float]] = []
    for command, text in re.findall(r"([MLC])([^MLC]*)", path.attrib["d"]):
        numbers = list(map(float, text.split()))
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        way += points if command == "M" else _sampled(way[-1], points)
    labels = [_line(text) for text in group.iter(f"{NAMESPACE}text")]
    is_straight = "C" not in path.attrib["d"]
    return Drawn(group.attrib["data-from"], group.attrib["data-to"], way[0], way[-1], way, labels, is_straight)


def _sampled(start: tuple[float, float], points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points along a line or a cubic curve."""
    steps = [step / 16 for step in range(1, 17)]
    if len(points) == 1:
        return [tuple(a + (b - a) * t for a, b in zip(start, points[0], strict=True)) for t in steps]  # type: ignore
    a, b, c, d = start, *points
    return [
        tuple(
            (1 - t) ** 3 * a[i] + 3 * (1 - t) ** 2 * t * b[i] + 3 * (1 - t) * t**2 * c[i] + t**3 * d[i] for i in (0, 1)
        )
        for t in steps
    ]  # type: ignore


def check(diagram: Group) -> Page:
    """Everything that makes a drawing readable."""
    page = Page(render_svg(diagram))
    groups = [box for box in diagram.boxes() if isinstance(box, Group)]
    assert set(page.boxes) == {box.id for box in diagram.boxes()}
    for group in groups:
        children = [page.boxes[item.id] for item in group.items]
        assert all(page.boxes[group.id].contains(child) for child in children), group.title
        assert not any(one.overlaps(other) for one, other in combinations(children, 2)), group.title
        assert not any(text.overlaps(child) for text in page.texts[group.id] for child in children), group.title
    for name, texts in page.texts.items():
        assert all(page.boxes[name].contains(text) for text in texts), name
        assert not any(one.overlaps(other) for one, other in pairwise(texts)), name
    owner = {edge_ends: group for group in groups for edge_ends in ((e.source, e.target) for e in group.edges)}
    labels = [(edge, label) for edge in page.edges for label in edge.labels]
    for edge in page.edges:
        inside = owner[edge.source, edge.target]
        source, target = page.boxes[edge.source], page.boxes[edge.target]
        if edge.is_straight and edge.start[1] > edge.end[1]:
            assert (source.right, target.right) == pytest.approx((edge.start[0], edge.end[0]), abs=0.2)
        else:
            assert (source.bottom, target.top) == pytest.approx((edge.start[1], edge.end[1]), abs=0.2)
            assert source.left <= edge.start[0] <= source.right
            assert target.left <= edge.end[0] <= target.right
        items = [page.boxes[item.id] for item in inside.items]
        assert not any(box.has_point(*point) for box in items for point in edge.way), (edge.source, edge.target)
        assert all(page.boxes[inside.id].has_point(*point) for point in edge.way)
        for label in edge.labels:
            assert page.boxes[inside.id].contains(label)
            assert not any(label.overlaps(box) for box in items)
    for (one, first), (other, second) in combinations(labels, 2):
        assert not first.overlaps(second), (one, other)
    for name in page.boxes:
        heads = sorted(edge.end[0] for edge in page.edges if edge.target == name and not edge.is_straight)
        tails = sorted(edge.start[0] for edge in page.edges if edge.source == name and not edge.is_straight)
        assert all(right - left > 13.0 for ends in (heads, tails) for left, right in pairwise(ends)), name
    for edge in page.edges:
        assert not any(label.has_point(*point, slack=1.0) for _, label in labels for point in edge.way)
    return page


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_readable(name):
    """Boxes lie in their parents and beside one another, texts in their boxes; edges touch nothing but their ends."""
    page = check(build_diagram(DRAWN[name]))
    left, top, width, height = map(float, page.root.attrib["viewBox"].split())
    assert all(Rectangle(left, top, width, height).contains(box) for box in page.boxes.values())
    assert [str(int(width)), str(int(height))] == [page.root.attrib["width"], page.root.attrib["height"]]


@settings(max_examples=30, deadline=None)
@given(root=graphs())
def test_a_random_graph_is_readable(root: Node):
    """Whatever nodes and policies are combined, the drawing holds what that of a written graph does."""
    check(build_diagram(plan_of(root)))


@pytest.mark.parametrize("seed", range(12))
def test_a_drawing_of_any_shape_is_readable(seed):
    """Random boxes in boxes, with random edges, titles and labels, are laid out without overlap."""
    generator = random.Random(seed)
    numbers = iter(range(10_000))

    def words() -> str:
        return " ".join("Wi<&>\"'日"[generator.randrange(8)] * generator.randint(1, 30) for _ in range(3))

    def group(depth: int) -> Group:
        made = Group(f"n{next(numbers)}", words(), [words()] * generator.randint(0, 3), kind="switch")
        for _ in range(generator.randint(2, 9)):
            if depth and generator.random() < 0.4:
                made.items.append(group(depth - 1))
            else:
                role = generator.choice(list(Role))
                made.items.append(Item(f"n{next(numbers)}", words(), [words()] * generator.randint(0, 3), role=role))
        for i, j in combinations(range(len(made.items)), 2):
            if generator.random() < 0.35:
                lines = [words()] * generator.randint(0, 3)
                made.edges.append(Edge(made.items[i].id, made.items[j].id, lines, words()))
        if isinstance(made.items[0], Item) and isinstance(made.items[-1], Item) and generator.random() < 0.5:
            made.edges.append(Edge(made.items[-1].id, made.items[0].id, ["again"], is_back=True))
        return made

    check(group(2))


def test_edges_of_soft_steps_are_dashed_and_of_shadows_dotted():
    """Soft outputs, and what follows a failure, are dashed; copies are dotted; the rest is solid."""
    diagram = build_diagram(PLANS["rich"])
    root = ElementTree.fromstring(render_svg(diagram))
    strokes = {
        (group.attrib["data-from"], group.attrib["data-to"]): group.find(f"{NAMESPACE}path").attrib["class"]
        for group in root.iter(f"{NAMESPACE}g")
        if "data-from" in group.attrib
    }
    for group in (box for box in diagram.boxes() if isinstance(box, Group)):
        for edge in group.edges:
            assert edge.stroke.value == strokes[edge.source, edge.target]
    assert {"solid", "dashed", "dotted"} == set(strokes.values())


def test_a_cut_text_is_whole_in_the_tooltip():
    """A condition of hundreds of characters is cut in the drawing; its <title> has all of it."""
    condition = " && ".join(f"max(inputs.HINT) > {number}.0" for number in range(40))
    item = Item("n2", "step")
    caption = Caption(condition)
    item.lines, item.tooltip = caption.lines, caption.tooltip
    root = ElementTree.fromstring(render_svg(Group("n1", "graph", kind="switch", items=[item])))
    titles = [title.text for group in root.iter(f"{NAMESPACE}g") for title in group.findall(f"{NAMESPACE}title")]
    shown = "".join("".join(text.itertext()) for text in root.iter(f"{NAMESPACE}text"))
    assert [condition] == titles
    assert "…" in shown
    assert "> 30.0" not in shown


def test_characters_that_xml_cannot_hold_are_replaced():
    """Control characters in a name do not break the file; markup in it stays text."""
    text = render_svg(Group("n1", 'a\x01b<script>&"', kind="switch", items=[Item("n2", "]]>", stroke=Stroke.DASHED)]))
    shown = ["".join(element.itertext()) for element in ElementTree.fromstring(text).iter(f"{NAMESPACE}text")]
    assert ['a\ufffdb<script>&"switch', "]]>"] == shown


def test_the_drawing_is_told_to_those_who_cannot_see_it():
    """The file is an image with the graph as its title and the outline as its description."""
    diagram = build_diagram(PLANS["rich"])
    root = ElementTree.fromstring(render_svg(diagram))
    told = {
        element.get("id"): element.text for element in root if element.tag in (f"{NAMESPACE}title", f"{NAMESPACE}desc")
    }
    assert ("img", "title outline") == (root.attrib["role"], root.attrib["aria-labelledby"])
    assert {"title": "g/1", "outline": render_text(diagram)} == told


def test_every_colour_has_one_for_dark_pages():
    """What is coloured in light is coloured in dark, so that no text is dark on dark; nothing is loaded or run."""
    text = render_svg(build_diagram(PLANS["rich"]))
    light, dark = text[text.index("<style>") : text.index("</style>")].split("@media (prefers-color-scheme: dark)")
    rule = r"([.\w][.\w, ]*) \{[^}]*?\b(fill|stroke): #"
    assert len(re.findall(rule, light)) > 10
    assert sorted(re.findall(rule, light)) == sorted(re.findall(rule, dark))
    assert not re.search(r"<script|<image|<foreignObject|@import|url\((?!#)|href", text)


def test_no_character_is_measured_too_narrow():
    """The widest of DejaVu Sans, in parts of the font size, are no wider than measured."""
    widths = {"m": 0.975, "W": 0.989, "@": 1.0, "%": 0.951, ">": 0.838, "A": 0.685, "G": 0.775, "a": 0.613, "{": 0.637}
    assert [] == [text for text, width in widths.items() if text_width(text, 1.0) < width]
