"""Cascades: which steps are reached."""

from tests.unit.tools.explain.explanation import FAILS, MAYBE, RUNS, SKIPPED, explained, fates, find
from tests.unit.tools.graphs import good, text_graph


def test_a_cascade_depends_on_answers():
    """The first step runs, the others if no answer before them is accepted; the tests are shown."""
    root = explained(good("moderate"))
    assert {"tiny": RUNS, "base": MAYBE, "large": MAYBE} == fates(root)
    assert ["accepted if max(outputs.PROBS) >= 0.92 || outputs.PROBS[3] < 0.01 = ?"] == find(root, "tiny").decisions
    assert ["PROBS of tiny -> distil"] == find(root, "base").depends_on
    assert "whether 250 ms are left" in find(root, "large").depends_on
    root = explained(good("moderate"), parameters=[("tier", "free")])
    assert {"tiny": RUNS, "base": SKIPPED, "large": MAYBE} == fates(root)


def test_a_cascade_passes_over_what_there_is_no_time_for():
    """With less time than min_remaining_ms the step is certain not to run."""
    root = explained(good("moderate"), remaining_ms=200.0)
    assert (SKIPPED, ["at most 200 ms are left, it needs 250"]) == (
        find(root, "large").outcome,
        find(root, "large").why,
    )


def test_a_cascade_whose_tests_are_all_false():
    """No step is for the request: the router's error."""
    text = text_graph(
        """node { name: "root" cascade {
          step { name: "a" model_name: "xlmr" accept: 'max(outputs.PROBS) > 0.5' when: 'has(inputs.HINT)' }
          step { name: "b" model_name: "bert_en" when: 'get(parameters, "b", false)' } } }"""
    )
    root = explained(text)
    assert {"a": SKIPPED, "b": SKIPPED} == fates(root)
    assert "INVALID_ARGUMENT: g/1: root: no step of cascade 'root' is for this request: no 'when' holds of" in (
        root.failure
    )
    assert {"a": SKIPPED, "b": RUNS} == fates(explained(text, parameters=[("b", "true")]))


def test_a_soft_step_of_a_cascade_may_fail():
    """Though its answer would be accepted for certain, a soft step may pass the request on."""
    text = text_graph(
        """node { name: "root" cascade {
          step { name: "a" model_name: "xlmr" accept: 'has(outputs.PROBS)' dependency: SOFT }
          step { name: "b" model_name: "bert_en" } } }"""
    )
    assert (MAYBE, ["whether a answers"]) == (find(explained(text), "b").outcome, find(explained(text), "b").depends_on)
    hard = explained(text.replace("dependency: SOFT", ""))
    assert (SKIPPED, ["'a' is accepted"]) == (find(hard, "b").outcome, find(hard, "b").why)


def test_a_soft_step_that_is_bound_to_fail_passes_the_request_on():
    """Its answer is not waited for: the next step runs for certain; where there is none, its error is the node's."""
    text = text_graph(
        """node { name: "root" cascade {
          step { name: "a" node: "never" accept: 'has(outputs.PROBS)' dependency: SOFT }
          step { name: "b" model_name: "bert_en" when: 'has(inputs.HINT)' } } }
        node { name: "never" switch { on: 'get(parameters, "k", "none")'
          step { name: "x" case: "x" model_name: "xlmr" } } }"""
    )
    assert {"a": FAILS, "b": RUNS} == fates(explained(text, shapes=[("HINT", "4")]))
    root = explained(text)
    assert {"a": FAILS, "b": SKIPPED} == fates(root)
    assert root.failure.startswith("INVALID_ARGUMENT: g/1: root[a]/never: no branch of switch 'never' matches")


def test_rows_of_a_cascade_are_tested_one_by_one():
    """per_row: `when` of each row decides, and its rows are named; `accept` may read text of a batch."""
    text = text_graph(
        """node { name: "root" cascade { per_row: true
          step { name: "a" model_name: "xlmr" when: 'text(inputs.TEXT) == "x"' accept: 'max(outputs.PROBS) > 0.5' }
          step { name: "b" node: "by" accept: 'text(inputs.TEXT) == "y" && outputs.PROBS[0] > 0.5' }
          step { name: "c" model_name: "bert_en" } } }
        node { name: "by" switch { on: 'text(inputs.TEXT)'
          step { name: "y" case: "y" model_name: "bert_de" }
          step { name: "z" otherwise: true model_name: "xlmr" } } }"""
    )
    root = explained(text, inputs=[("TEXT", '[["x"], ["y"], ["x"]]')])
    assert (RUNS, ['when text(inputs.TEXT) == "x": rows 0, 2 of 3']) == (find(root, "a").outcome, find(root, "a").why)
    assert {"a": RUNS, "b": RUNS, "c": MAYBE} == fates(root)  # row 1 is not for a
    assert {"y": MAYBE, "z": MAYBE} == fates(find(root, "b"))
    root = explained(text, inputs=[("TEXT", '[["y"]]')])
    assert ({"a": SKIPPED, "b": RUNS, "c": MAYBE}, {"y": RUNS, "z": SKIPPED}) == (fates(root), fates(find(root, "b")))


def test_a_test_that_is_neither_true_nor_false():
    """A parameter of another type fails the request with the router's text."""
    text = text_graph(
        """node { name: "root" cascade {
          step { name: "a" model_name: "xlmr" accept: 'max(outputs.PROBS) > 0.5' when: 'parameters.k' }
          step { name: "b" model_name: "bert_en" } } }"""
    )
    root = explained(text, parameters=[("k", "1")])
    assert "INVALID_ARGUMENT: g/1: root: when 'parameters.k' of node 'root': the value must be bool, got 1" == (
        root.failure
    )
    assert RUNS is explained(text, parameters=[("k", "true")]).outcome


def test_steps_that_may_all_be_passed_over():
    """Where no step is certain to answer, that none does is a possible error; one without a test answers in the end."""
    text = text_graph(
        """node { name: "root" cascade {
          step { name: "a" model_name: "xlmr" when: 'text(inputs.TEXT) == "a"' accept: 'max(outputs.PROBS) > 0.5' }
          step { name: "b" model_name: "bert_en" when: 'text(inputs.TEXT) != "a"' } } }"""
    )
    (message,) = explained(text).may_fail
    assert message.startswith("INVALID_ARGUMENT: g/1: root: no step of cascade 'root' is for this request")
    assert [] == explained(text.replace("when: 'text(inputs.TEXT) != \"a\"'", "")).may_fail
