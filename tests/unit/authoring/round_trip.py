"""A graph's way from a file to Python and back, twice."""

import linecache
from inspect import cleandoc
from typing import Any
from unittest.mock import patch

from tests.unit.language.plan_text import plan_text

import weft
from weft.authoring.models import Models
from weft.authoring.to_python import python_text
from weft.authoring.writing import read
from weft.language import GraphSource
from weft.router.compile import compile_graph


def made_by(code: str, catalog: Any, graphs: Any) -> weft.Graph:
    """The graph that the Python makes, with these in place of a repository."""
    models = Models(None, None)
    models.__dict__.update(catalog=catalog, graphs=graphs)
    linecache.cache["graph.py"] = (len(code), None, code.splitlines(keepends=True), "graph.py")
    names: dict[str, Any] = {"__name__": "graph", "__file__": "/repository/graphs/g/1/graph.py"}
    with patch("weft.models", lambda *_, **__: models):
        exec(compile(code, "graph.py", "exec"), names)
    (graph,) = [one for one in names.values() if isinstance(one, weft.Graph)]
    return graph


def plan_of(text: str, catalog: Any, graphs: Any) -> str:
    """The plan, as text."""
    return plan_text(compile_graph(GraphSource(text, "graph.pbtxt"), catalog, graphs))


def check_round_trip(text: str, catalog: Any, graphs: Any = None) -> str:
    """Check the laws, and return the canonical text that the Python of the graph writes.

    Reading and writing keep the plan, and what is written is written again as it is. So does the way through Python,
    whose text is the same each time.
    """
    plan = plan_of(text, catalog, graphs)
    given = read(text + "\n")
    assert given.text == read(given.text).text
    assert given.message == read(given.text).message
    assert plan == plan_of(given.text, catalog, graphs)
    code = python_text(given.source, catalog, graphs)
    made = made_by(code, catalog, graphs)
    assert plan == plan_of(made.text, catalog, graphs)
    assert cleandoc(made.__doc__ or "") == cleandoc(given.__doc__ or "")
    again = python_text(made.source, catalog, graphs)
    assert code == again
    assert made.text == made_by(again, catalog, graphs).text
    return made.text
