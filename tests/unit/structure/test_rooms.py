"""The rooms of every package are layers: folders and files beside each other never import in a circle."""

import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from grimp import ImportGraph

ROOT = Path(__file__).parents[3]
PACKAGES = ["weft"]


def shortest_circle(graph: ImportGraph, package: str) -> list[str]:
    """The rooms of the shortest circle among the children of ``package``, the first one again at the end; [] if none.

    Imports inside functions count, and those for type checking alone.
    """
    rooms = graph.find_children(package)
    imports = defaultdict[str, set[str]](set)
    for room in rooms:
        for module in {room, *graph.find_descendants(room)}:
            for imported in graph.find_modules_directly_imported_by(module):
                other = next((one for one in rooms if imported == one or imported.startswith(f"{one}.")), room)
                if other != room:
                    imports[room].add(other)
    circles = [circle for room in rooms if (circle := _shortest_way_back(imports, room))]
    return min(circles, key=lambda circle: (len(circle), circle), default=[])


def _shortest_way_back(imports: dict[str, set[str]], start: str) -> list[str]:
    ways = [[start]]
    seen: set[str] = set()
    for way in ways:  # breadth first: ``ways`` grows while it is walked
        for room in sorted(imports[way[-1]] - seen):
            if room == start:
                return [*way, start]
            seen.add(room)
            ways.append([*way, room])
    return []


def _folders(graph: ImportGraph, package: str) -> Iterator[str]:
    yield package
    for child in sorted(graph.find_children(package)):
        if graph.find_children(child):
            yield from _folders(graph, child)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_imports_itself_through_others(package: str) -> None:
    """In no folder of a package do rooms import each other in a circle; the message is the shortest one."""
    graph = grimp.build_graph(package, cache_dir=None)
    circles = {folder: shortest_circle(graph, folder) for folder in _folders(graph, package)}
    assert [] == [f"{folder}: {' -> '.join(circle)}" for folder, circle in circles.items() if circle]


def test_the_shortest_circle_is_found() -> None:
    """Of two circles between rooms the shorter one is reported, found through files deep inside the rooms."""
    graph = ImportGraph()
    for module in ("p", "p.a", "p.b", "p.b.x", "p.c", "p.d"):
        graph.add_module(module)
    for importer, imported in [("p.a", "p.b.x"), ("p.b", "p.c"), ("p.c", "p.a"), ("p.b.x", "p.d"), ("p.d", "p.b")]:
        graph.add_import(importer=importer, imported=imported)
    assert ["p.b", "p.d", "p.b"] == shortest_circle(graph, "p")


def test_the_house_keeps_its_budget() -> None:
    """Lines of services and tests, and modules, are at most what ``budget.toml`` says: growth is a decision."""
    services, tests = ([*(ROOT / folder).rglob("*.py")] for folder in ("services", "tests"))
    found = {
        "services_lines": sum(len(path.read_bytes().splitlines()) for path in services),
        "tests_lines": sum(len(path.read_bytes().splitlines()) for path in tests),
        "modules": len(services),
    }
    budget = tomllib.loads((Path(__file__).parent / "budget.toml").read_text())
    assert {} == {what: number for what, number in found.items() if number > budget[what]}
