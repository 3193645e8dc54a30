"""Whole files: what is written for each is in the ``.pbtxt`` beside the ``.yaml``, letter by letter."""

from pathlib import Path

import pytest

from weft.base.text.pbtxt import parse
from weft.language import GraphSource, ModelCatalog
from weft.router.compile import check_graph
from weft.tools.convert.graphs import convert
from weft.tools.convert.signatures import Signatures
from weft.tools.convert.yaml_tree import Source
from weft_protos import graph_pb2 as pb

GOLDEN = Path(__file__).with_name("golden")
#: What a step has to be for is known only with signatures.
UNSHAPED = ("seldon2_requests",)
#: Questions that only a person can answer are errors of `weft check` until they are.
OPEN = {
    "kserve_no_types": {"G002", "G011"},
    "seldon2_no_types": {"G002"},
    "seldon_no_types": {"G002"},
}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_is_written_is_as_expected_and_passes_the_check(path: Path, models: ModelCatalog) -> None:
    """The text, and every error that it leaves to a person; each question is a warning as well."""
    source = Source(path.read_text(), path.name)
    ((name, text),) = convert(source, source.documents(), Signatures(models), path.stem).items()
    assert path.with_suffix(".pbtxt").read_text() == text
    assert not source.has_errors
    graph, _ = parse(text, pb.Graph(), file="graph.pbtxt")
    assert name == graph.name
    found = check_graph(GraphSource(text, "graph.pbtxt"), models)
    assert OPEN.get(path.stem, set()) == {d.code for d in found if d.severity == "error"}
    assert text.count("# CHECK: ") <= len(source.diagnostics)
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_without_signatures_names_and_conditions_stay_to_be_checked(path: Path) -> None:
    """The file can be read, says that it has no types, and has every node."""
    source = Source(path.read_text(), path.name)
    ((_, text),) = convert(source, source.documents(), Signatures(), path.stem).items()
    assert not source.has_errors
    assert "# CHECK: the file has no types." in text
    graph, _ = parse(text, pb.Graph(), file="graph.pbtxt")
    assert (0, 0) == (len(graph.input), len(graph.output))
    typed, _ = parse(path.with_suffix(".pbtxt").read_text(), pb.Graph(), file="graph.pbtxt")
    assert path.stem in UNSHAPED or [node.name for node in typed.node] == [node.name for node in graph.node]
