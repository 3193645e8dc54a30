"""The rooms of every package are layers: folders and files beside each other never import in a circle."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from grimp import ImportGraph

ROOT = Path(__file__).parents[3]
PACKAGES = ["weft"]
#: Python files beside each other in one folder, ``__init__.py`` not counted.
MAX_FILES = 16


def shortest_circle(graph: ImportGraph, package: str) -> list[str]:
    """The rooms of the shortest circle among the children of ``package``, the first one again at the end; [] if none.

    Imports inside functions count; imports for type checking do not.
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
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
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


def test_no_folder_is_a_heap() -> None:
    """No folder under services/ has more than 16 Python files beside each other."""
    counts: dict[Path, int] = defaultdict(int)
    for path in (ROOT / "services").rglob("*.py"):
        counts[path.parent] += path.name != "__init__.py"
    assert [] == [f"{folder.relative_to(ROOT)}: {count}" for folder, count in counts.items() if count > MAX_FILES]


#: The interface of Triton Inference Server for Python names these; the engine's own classes have the field's name too.
_NAMED_BY_TRITON = {"InferenceRequest", "InferenceResponse"}


def test_one_class_name_means_one_thing() -> None:
    """No two modules under services/ define classes of one name, but for those that Triton Inference Server names."""
    defined = defaultdict[str, list[str]](list)
    for path in (ROOT / "services").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in _NAMED_BY_TRITON:
                defined[node.name].append(str(path.relative_to(ROOT)))
    assert {} == {name: where for name, where in defined.items() if len(where) > 1}
