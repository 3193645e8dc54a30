"""Conditions: what is known of a request decides them, as far as it goes."""

from tests.unit.tools.explain.explanation import FAILS, MAYBE, RUNS, SKIPPED, explained, fates, find, switch
from tests.unit.tools.graphs import good, text_graph


def test_a_shape_is_enough_for_size():
    """size() of a tensor needs its shape alone, max() needs its values."""
    branches = """step { name: "a" when: 'has(inputs.HINT) && size(inputs.HINT) == 4' model_name: "xlmr" }
                  step { name: "b" when: 'has(inputs.HINT) && max(inputs.HINT) > 1.0' model_name: "xlmr" }
                  step { name: "c" otherwise: true model_name: "bert_en" }"""
    root = explained(switch(branches), shapes=[("HINT", "4")])
    assert {"a": RUNS, "b": SKIPPED, "c": SKIPPED} == fates(root)
    root = explained(switch(branches.replace("== 4", "== 5")), shapes=[("HINT", "4")])
    assert {"a": SKIPPED, "b": MAYBE, "c": MAYBE} == fates(root)
    assert ["HINT of the request"] == find(root, "b").depends_on


def test_an_optional_input_that_was_not_given_is_absent():
    """has() of it is false; of a required input nothing was said of, the values are unknown."""
    root = explained(good("optional"))
    assert [SKIPPED, RUNS] == [child.outcome for child in root.children]


def test_headers_priority_and_id_count():
    """Conditions see what the options say of the request."""
    branches = """step { name: "a" when: 'request.priority > 3 && headers["x-tier"] == "gold"' model_name: "xlmr" }
                  step { name: "b" when: 'request.id == "7"' model_name: "bert_de" }
                  step { name: "c" otherwise: true model_name: "bert_en" }"""
    assert RUNS is find(explained(switch(branches), priority=4, headers=[("X-Tier", "gold")]), "a").outcome
    assert RUNS is find(explained(switch(branches), request_id="7"), "b").outcome
    assert RUNS is find(explained(switch(branches)), "c").outcome


def test_the_time_left_counts():
    """request.remaining_ms is what --remaining-ms says, or the graph's timeout if that is less."""
    branches = """step { name: "a" when: 'request.remaining_ms >= 200' model_name: "xlmr" }
                  step { name: "c" otherwise: true model_name: "bert_en" }"""
    assert [RUNS, SKIPPED] == [child.outcome for child in explained(switch(branches), remaining_ms=200.0).children]
    assert [SKIPPED, RUNS] == [child.outcome for child in explained(switch(branches), remaining_ms=199.0).children]
    limited = switch(branches).replace("max_batch_size", "policy { timeout_ms: 100 } max_batch_size")
    assert [SKIPPED, RUNS] == [child.outcome for child in explained(limited, remaining_ms=900.0).children]


def test_a_condition_that_fails():
    """A condition that cannot be evaluated fails the request, softness and fallbacks notwithstanding."""
    text = text_graph(
        """node { name: "root" sequence {
          step { name: "clf" node: "by" dependency: SOFT
                 default { output: "PROBS" number: [ 0, 0, 0 ] dims: [ 3 ] } } } }
        node { name: "by" switch { on: 'parameters.lang' step { name: "a" case: "x" model_name: "xlmr" }
          step { name: "b" otherwise: true model_name: "xlmr" } } }"""
    )
    root = explained(text)
    assert root.outcome is FAILS
    assert root.failure.startswith("INVALID_ARGUMENT: g/1: root/clf/by: on 'parameters.lang' of node 'by': ")
    assert RUNS is explained(text, parameters=[("lang", "x")]).outcome


def test_an_error_that_depends_on_a_model_is_a_possible_one():
    """A condition whose error an unknown value may avert is open, and says which error that would be."""
    text = text_graph(
        """node { name: "root" sequence { step { name: "lid" model_name: "lang_id" } step { name: "clf" node: "by" } } }
        node { name: "by" switch {
          step { name: "a" when: 'text(inputs.LANG) == "de" && parameters.k == "v"' model_name: "xlmr" }
          step { name: "b" otherwise: true model_name: "xlmr" } } }"""
    )
    root = explained(text)
    assert {"a": MAYBE, "b": MAYBE} == fates(find(root, "clf"))
    assert ["LANG of lid -> lang_id"] == find(root, "a").depends_on
    assert RUNS is root.outcome


def test_an_error_that_a_soft_step_averts_by_failing_is_a_possible_one():
    """Of two rows the language cannot be read as one text; without a language nobody reads it."""
    text = text_graph(
        """node { name: "root" sequence { step { name: "lid" model_name: "lang_id" dependency: SOFT }
          step { name: "clf" model_name: "xlmr" when: 'steps.lid.ok && text(inputs.LANG) == "de"'
                 default { output: "PROBS" number: [ 0, 0, 1 ] dims: [ 3 ] } } } }"""
    )
    root = explained(text, inputs=[("TEXT", '[["a"], ["b"]]')])
    assert (RUNS, "") == (root.outcome, root.failure)
    assert any("inputs.LANG: text() reads one row, got shape [2, 1]" in error for error in root.may_fail)


def test_a_soft_step_may_be_absent():
    """steps.x.ok of a soft step is not known; has() of its output is neither."""
    text = text_graph(
        """node { name: "root" sequence {
          step { name: "lid" model_name: "lang_id" dependency: SOFT }
          step { name: "clf" node: "by" }
          step { name: "post" model_name: "format_label" when: 'steps.lid.ok' input_map { key: "P" value: "PROBS" }
                 default { output: "LABEL" text: "?" dims: [ 1 ] } } } }
        node { name: "by" switch { step { name: "a" when: 'has(inputs.LANG)' model_name: "xlmr" }
          step { name: "b" otherwise: true model_name: "xlmr" } } }""",
        outputs="PROBS LABEL",
    )
    root = explained(text)
    assert {"a": MAYBE, "b": MAYBE} == fates(find(root, "clf"))
    assert (MAYBE, ["whether lid answers"]) == (find(root, "post").outcome, find(root, "post").depends_on)
