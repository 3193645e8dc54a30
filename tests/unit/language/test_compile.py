"""Whole files: names, configurations, and files that are too large; corpora of plans are in test_corpus.py."""

from pathlib import Path

import pytest

from weft.base.errors import InvalidArgumentError
from weft.language import GraphError, GraphSource, model_config
from weft.router.compile import check_graph, compile_graph
from weft.router.policies import POLICIES
from weft_protos import graph_pb2 as pb

GOOD = Path(__file__).parent / "good"
TEXT = 'max_batch_size: 8 input { name: "TEXT" data_type: TYPE_STRING dims: 1 }'
PROBS = 'output { name: "PROBS" data_type: TYPE_FP32 dims: 3 }'


def test_every_policy_of_the_language_is_registered():
    """By the name of its field; the fields that are numbers are limits."""
    fields = [field.name for field in pb.Policy.DESCRIPTOR.fields if field.message_type is not None]
    assert sorted(fields) == sorted(POLICIES)
    assert all(name == kind.field for name, kind in POLICIES.items())


def test_model_config_shows_the_graph_without_its_own_fields(catalog):
    """It has the fields that models have, the name, and outputs that were inferred; nodes are not in it."""
    source = GraphSource((GOOD / "inferred.pbtxt").read_text(), "g.pbtxt", "inferred", "2")
    config = model_config(source, compile_graph(source, catalog))
    assert ("inferred", "graph", 8) == (config.name, config.platform, config.max_batch_size)
    assert ["a.LABEL", "a.SCORE", "b.CLASS", "b.SCORE"] == [output.name for output in config.output]
    assert b"xgb" not in config.SerializeToString()


def test_model_config_of_an_ensemble_is_its_file(catalog, graphs):
    """An ensemble keeps its scheduling and its parameters."""
    source = GraphSource((GOOD / "ensemble_pipeline.pbtxt").read_text(), "config.pbtxt", "ensemble_pipeline")
    config = model_config(source, compile_graph(source, catalog, graphs))
    assert ["resnet50", "decode_resize"] == [step.model_name for step in config.ensemble_scheduling.step]
    assert "vision" == config.parameters["owner"].string_value


def test_the_name_must_be_that_of_the_folder(catalog):
    """A file that names another graph than its folder is refused."""
    source = GraphSource((GOOD / "votes.pbtxt").read_text(), "g.pbtxt", "vote")
    with pytest.raises(GraphError, match="the file says 'votes', but its folder is 'vote'"):
        compile_graph(source, catalog)


def test_a_graph_error_is_an_invalid_argument_with_every_error(catalog):
    """The message shows each error with place and caret, warnings left out."""
    source = GraphSource((GOOD.parent / "bad" / "g013_cases.pbtxt").read_text(), "g.pbtxt")
    with pytest.raises(InvalidArgumentError) as caught:
        compile_graph(source, catalog)
    assert 7 == caught.value.message.count("[G013]")


def _chain(length: int, node: str) -> str:
    """Nodes n0, n1, ... that each run the next one, as ``node`` says."""
    nodes = "\n".join(f'node {{ name: "n{i}" {node.replace("NEXT", f"n{i + 1}")} }}' for i in range(length))
    return f'root: "n0" {nodes} node {{ name: "n{length}" sequence {{ step {{ model_name: "xlmr" }} }} }}'


KEYED = "ensemble { " + " ".join(f'step {{ name: "s{k}" node: "NEXT" }}' for k in range(8)) + " }"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PROBS + _chain(200, 'sequence { step { node: "NEXT" } }'), "nested deeper than 32"),
        (PROBS + _chain(24, 'splitter { step { node: "NEXT" } step { node: "NEXT" } }'), "expands to more than 1000"),
        (_chain(10, KEYED), "more than 1000 outputs"),
        ('node { name: "root" splitter { ' + 'step { model_name: "xlmr" } ' * 1001 + "} }", "more than 1000"),
    ],
    ids=["depth", "nodes", "keyed outputs", "steps"],
)
def test_a_plan_cannot_grow_without_end(catalog, text, message):
    """What is too deep, or too large when it is expanded, is refused (G024), not compiled until the memory ends."""
    found = check_graph(GraphSource(f'name: "g" {TEXT} {text}', "g.pbtxt"), catalog)
    assert {"G024"} == {one.code for one in found if one.severity == "error"}
    assert any(message in one.message for one in found)
