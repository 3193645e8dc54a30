"""Failures, fallbacks, shadows and deadlines of the steps that a request takes."""

import pytest
from tests.unit.tools.explain.explanation import FAILS, MAYBE, RUNS, SHORT, SKIPPED, explained, fates, find
from tests.unit.tools.graphs import RICH, good, text_graph

from weft.tools.explain.render import StepOutcome


def test_a_failing_switch_of_a_soft_step_is_left_out():
    """Without a matching branch a soft step goes on with its default; what follows knows its value."""
    text = text_graph(
        """node { name: "root" sequence {
          step { name: "lid" node: "by" dependency: SOFT default { output: "LANG" text: "fr" dims: [ 1 ] } }
          step { name: "clf" node: "by_language" } } }
        node { name: "by" switch { on: 'get(parameters, "k", "none")' step { case: "x" model_name: "lang_id" } } }
        node { name: "by_language" switch { on: 'text(inputs.LANG)'
          step { name: "fr" case: "fr" model_name: "xlmr" }
          step { name: "en" otherwise: true model_name: "xlmr" } } }"""
    )
    root = explained(text)
    assert (RUNS, FAILS) == (root.outcome, find(root, "lid").outcome)
    assert {"fr": RUNS, "en": SKIPPED} == fates(find(root, "clf"))


def test_the_default_of_a_soft_step_is_only_one_possible_value():
    """A soft step that runs gives an unknown value, or its default."""
    clf = find(explained(good("sentiment"), inputs=[SHORT]), "clf")
    assert MAYBE is find(clf, "en").outcome


def test_a_value_that_a_fallback_may_replace_is_not_known():
    """A node that passes an input on gives a known value, but not if its fallback may answer."""
    text = text_graph(
        """node { name: "root" sequence {
          step { name: "lid" node: "echo" fallback { model_name: "lang_id" } }
          step { name: "clf" node: "by_language" } } }
        node { name: "echo" output [ { name: "LANG" data_type: TYPE_STRING dims: [ 1 ] } ] sequence {
          step { name: "first" model_name: "lang_id" when: 'get(parameters, "detect", false)'
                 default { output: "LANG" text: "de" dims: [ 1 ] } } } }
        node { name: "by_language" switch { on: 'text(inputs.LANG)'
          step { name: "de" case: "de" model_name: "xlmr" }
          step { name: "en" otherwise: true model_name: "xlmr" } } }"""
    )
    assert {"de": MAYBE, "en": MAYBE} == fates(find(explained(text), "clf"))
    alone = text.replace('fallback { model_name: "lang_id" }', "")
    assert {"de": RUNS, "en": SKIPPED} == fates(find(explained(alone), "clf"))


def test_a_fallback_runs_on_error_only():
    """A fallback is shown below its step."""
    b = find(explained(good("classify"), headers=[("x-graph-route", "ab=B")]), "B")
    assert [("resnet50", StepOutcome.ON_ERROR)] == [(child.name, child.outcome) for child in b.children]


def test_a_step_without_enough_time_is_bound_to_fail():
    """Outside a cascade min_remaining_ms fails the step before its call, and then its fallback runs."""
    text = text_graph(
        """node { name: "root" sequence { step { name: "s" model_name: "xlmr" policy { min_remaining_ms: 300 }
          fallback { name: "f" model_name: "bert_en" } } } }"""
    )
    root = explained(text, remaining_ms=100.0)
    assert (RUNS, RUNS) == (root.outcome, find(root, "f").outcome)
    assert "100 ms are left, and 'min_remaining_ms' of the step asks for 300" in find(root, "s").why[0]
    assert StepOutcome.ON_ERROR is find(explained(text), "f").outcome


def test_shadows_are_copies():
    """A shadow is shown as such, and what it calls does not decide anything."""
    root = explained(RICH, parameters=[("lang", "en")], inputs=[SHORT])
    assert StepOutcome.SHADOW is find(root, "audit").outcome
    assert RUNS is root.outcome


def test_deadlines_are_the_least_of_all_around():
    """A step has the least of its own, its nodes', the graph's and the client's time."""
    root = explained(RICH, parameters=[("lang", "de")], inputs=[SHORT])
    assert (400, 30, 400) == tuple(find(root, name).deadline_ms for name in ("root", "lid", "large"))
    root = explained(RICH, remaining_ms=20.0)
    assert (20, 20) == tuple(find(root, name).deadline_ms for name in ("root", "lid"))


def test_policies_are_noted():
    """What a step's policy says is there, the graph's defaults worked in."""
    lid = find(explained(RICH), "lid")
    assert ["soft: the request goes on without it", 'LANG defaults to "e\\"n"'] == lid.notes[:2]
    assert "2 attempts on UNAVAILABLE, backoff 5 ms" in lid.notes


@pytest.mark.parametrize("name", ["ensemble_chain", "ensemble_of_ensembles", "nested", "languages", "shares", "votes"])
def test_good_graphs_run(name):
    """A request of which nothing is known can pass each good graph."""
    assert RUNS is explained(good(name)).outcome


def test_a_shadow_with_a_test():
    """A request for which the test is false is not copied."""
    copied = RICH.replace("shadow { percent: 1 }", "when: 'has(inputs.HINT)' shadow { percent: 1 }")
    asked = {"parameters": [("lang", "en")], "inputs": [SHORT]}
    assert (StepOutcome.SKIPPED, ["shadow of 1 % of requests", "when has(inputs.HINT) = false"]) == (
        find(explained(copied, **asked), "C").outcome,
        find(explained(copied, **asked), "C").why,
    )
    assert StepOutcome.SHADOW is find(explained(copied, **asked, shapes=[("HINT", "4")]), "C").outcome
