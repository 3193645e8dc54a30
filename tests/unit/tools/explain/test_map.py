"""Maps: whether the step runs, where only the models can tell how many rows there are."""

from tests.unit.tools.explain.explanation import MAYBE, RUNS, SKIPPED, explained, fates, find
from tests.unit.tools.graphs import compiled, good

COUNTED = """name: "g" platform: "graph"
input [ { name: "TEXTS" data_type: TYPE_STRING dims: [ -1, 1 ] },
        { name: "FEATURES" data_type: TYPE_FP32 dims: [ 40 ] } ]
node { name: "root" sequence {
  step { name: "count" model_name: "xgb" output_map { key: "LABEL" value: "COUNT" } }
  step { name: "each" node: "each" } } }
node { name: "each" map { over: "TEXTS" lengths: "COUNT" max_rows: 5
  step { name: "judge" model_name: "bert_de" input_map { key: "TEXT" value: "TEXTS" } } } }"""


def test_a_map_says_what_it_is_over():
    """With the rows of a chunk, and what becomes of the answers."""
    root = explained(good("passages"))
    assert {"judge": RUNS, "locate": RUNS} == fates(root)
    (notes, collected) = find(root, "locate").decisions
    assert "each row of PASSAGES: 64 rows at once; 8 chunks in work" == notes
    assert "BOXES: LIST, lengths PER_PASSAGE" == collected


def test_lengths_that_only_a_model_knows():
    """The step may run for all rows that there are, or for none, which depends on the model."""
    root = explained(compiled(COUNTED))
    judge = find(root, "judge")
    assert (MAYBE, "", []) == (judge.outcome, root.failure, root.may_fail)
    assert ["the rows that come here"] == judge.depends_on


def test_a_list_without_rows():
    """The step does not run."""
    root = explained(compiled(COUNTED), shapes=[("TEXTS", "0,1")])
    assert SKIPPED == find(root, "judge").outcome
