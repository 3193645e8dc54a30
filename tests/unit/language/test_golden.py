"""Graph files and what is said about them; WEFT_UPDATE_GOLDEN=1 writes ``.expected`` and ``.plan`` files anew."""

import os
import re
from pathlib import Path

import pytest
from tests.unit.language.plan_text import plan_text

from weft.base.text.pbtxt import render
from weft.language import GraphError, GraphSource
from weft.router.compile import check_graph, compile_graph

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[2] / "docs" / "graphs.md"
BAD = sorted((FOLDER / "bad").glob("*.pbtxt"))
GOOD = sorted((FOLDER / "good").glob("*.pbtxt"))
#: The first column of the table of codes that users read.
CODES = set(re.findall(r"G\d{3}", "".join(re.findall(r"^\| (G[^|]*)\|", DOCS.read_text(), re.MULTILINE))))


def _expect(file: Path, found: str) -> None:
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        file.write_text(found + "\n")
    assert file.read_text() == found + "\n"


def _source(file: Path) -> GraphSource:
    return GraphSource(file.read_bytes(), file.name)


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_diagnostics_of_a_bad_file(file, catalog, graphs):
    """Every diagnostic of a bad file, its place and its caret are as written down beside it."""
    _expect(file.with_suffix(".expected"), render(check_graph(_source(file), catalog, graphs)))


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_a_bad_file_has_the_code_of_its_name(file, catalog, graphs):
    """A file g007_... has a finding G007."""
    codes = {found.code for found in check_graph(_source(file), catalog, graphs)}
    assert file.stem[:4].upper() in codes


def test_every_code_has_a_bad_file():
    """No check is without an example of what it says, nor without a row in the guide."""
    text = "".join(file.with_suffix(".expected").read_text() for file in BAD)
    assert CODES == set(re.findall(r"  \[(G\d+)\]$", text, re.MULTILINE))


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_a_bad_file_compiles_only_with_warnings_alone(file, catalog, graphs):
    """compile_graph raises exactly where check_graph finds an error, with the same diagnostics."""
    found = check_graph(_source(file), catalog, graphs)
    if any(one.severity == "error" for one in found):
        with pytest.raises(GraphError) as caught:
            compile_graph(_source(file), catalog, graphs)
        assert found == caught.value.diagnostics
        assert "warning" not in caught.value.message.partition("\n")[0]
    else:
        assert compile_graph(_source(file), catalog, graphs).signature.name == "g"


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.stem)
def test_a_good_file_compiles(file, catalog, graphs):
    """A good file has no diagnostics, and the plan that is written down beside it."""
    assert [] == check_graph(_source(file), catalog, graphs)
    _expect(file.with_suffix(".plan"), plan_text(compile_graph(_source(file), catalog, graphs)))


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.stem)
def test_without_a_catalog_nothing_is_said_about_models(file):
    """Without a catalog, a good file has no diagnostics though its models and graphs are unknown."""
    assert [] == check_graph(_source(file))


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_without_a_catalog_nothing_new_is_wrong(file, catalog, graphs):
    """Every error that is found without a catalog is found with one too."""
    known = {(one.line, one.column, one.code) for one in check_graph(_source(file), catalog, graphs)}
    blind = check_graph(_source(file))
    assert known >= {(one.line, one.column, one.code) for one in blind if one.severity == "error"}
