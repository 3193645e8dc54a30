"""Whatever a graph file holds, the compiler answers with diagnostics."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.base.text.pbtxt import PbtxtError, render
from weft.language import GraphError, GraphSource
from weft.language.syntax.parse import parse_graph
from weft.router.compile import check_graph, compile_graph
from weft.router.operators import KINDS
from weft.router.policies import POLICIES

FOLDER = Path(__file__).parent
FILES = sorted(file for folder in ("good", "bad", "others") for file in (FOLDER / folder).glob("*.pbtxt"))
TEXTS = [file.read_text() for file in FILES]
#: Pieces of every file: words, strings, brackets, whitespace.
PIECES = sorted({piece for text in TEXTS for piece in re.findall(r"'[^']*'|\"[^\"]*\"|\w+|\s|.", text)})

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def _survives(content, catalog, graphs):
    source = GraphSource(content, "noise.pbtxt")
    found = check_graph(source, catalog, graphs)
    assert render(found) or not found
    assert all(one.line >= 0 and one.column >= 0 and one.message for one in found)
    if "error" in {one.severity for one in found}:
        with pytest.raises(GraphError) as caught:
            compile_graph(source, catalog, graphs)
        assert found == caught.value.diagnostics
    else:
        compile_graph(source, catalog, graphs)


@SETTINGS
@given(content=st.binary(max_size=200))
def test_random_bytes(content, catalog, graphs):
    """Random bytes give diagnostics, never another exception."""
    _survives(content, catalog, graphs)


@SETTINGS
@given(content=st.text(max_size=200))
def test_random_text(content, catalog, graphs):
    """Random characters give diagnostics, lone surrogates among them."""
    _survives(content, catalog, graphs)


@SETTINGS
@given(data=st.data())
def test_mutated_files(data, catalog, graphs):
    """A graph file with pieces replaced, removed, repeated or swapped gives diagnostics or compiles."""
    pieces = re.findall(r"'[^']*'|\"[^\"]*\"|\w+|\s|.", data.draw(st.sampled_from(TEXTS)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(pieces) - 1))
        match data.draw(st.sampled_from(["replace", "remove", "repeat", "swap"])):
            case "replace":
                pieces[at] = data.draw(st.sampled_from(PIECES))
            case "remove":
                pieces[at] = ""
            case "repeat":
                pieces.insert(at, pieces[at])
            case _:
                other = data.draw(st.integers(0, len(pieces) - 1))
                pieces[at], pieces[other] = pieces[other], pieces[at]
    _survives("".join(pieces), catalog, graphs)


@SETTINGS
@given(data=st.data())
def test_swapped_names(data, catalog, graphs):
    """A graph file in which one name stands for another gives diagnostics or compiles."""
    text = data.draw(st.sampled_from(TEXTS))
    names = sorted(set(re.findall(r"\"(\w+)\"", text)))
    if names:
        old, new = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
        text = text.replace(f'"{old}"', f'"{new}"')
    _survives(text, catalog, graphs)


@pytest.mark.parametrize(
    "content",
    ["node { " * 5000, "node { sequence { step { " + "fallback { " * 5000 + "}" * 5003, b"\0" * 100, "x" * (5 << 20)],
    ids=["unclosed", "nested", "zeros", "huge"],
)
def test_hostile_files(content, catalog, graphs):
    """Files that are deeply nested, binary or huge are refused at once."""
    with pytest.raises(PbtxtError):
        parse_graph(GraphSource(content, "hostile.pbtxt"), KINDS, POLICIES)
    _survives(content, catalog, graphs)
