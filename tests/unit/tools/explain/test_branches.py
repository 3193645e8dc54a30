"""Switches, splitters and ensembles: what is certain of them, and what is not."""

from tests.unit.tools.explain.explanation import FAILS, MAYBE, RUNS, SHORT, SKIPPED, explained, fates, find, switch
from tests.unit.tools.graphs import CUSTOM, good, text_graph

from weft.tools.explain.render import StepOutcome


def test_a_switch_that_depends_on_a_model_is_open():
    """Branches that a model's answer chooses may all run; the entry names tensor, step and model."""
    clf = find(explained(good("sentiment"), inputs=[SHORT]), "clf")
    assert {"long": SKIPPED, "de": MAYBE, "en": MAYBE, "rest": MAYBE} == fates(clf)
    assert ["LANG of lid -> lang_id"] == find(clf, "de").depends_on
    assert ['on get(parameters, "lang", text(inputs.LANG)) = ?'] == clf.decisions


def test_a_parameter_decides_though_a_tensor_is_unknown():
    """What is not needed need not be known: with the parameter the language model does not count."""
    clf = find(explained(good("sentiment"), inputs=[SHORT], parameters=[("lang", "nl")]), "clf")
    assert {"long": SKIPPED, "de": RUNS, "en": SKIPPED, "rest": SKIPPED} == fates(clf)
    assert ["'de' comes first"] == find(clf, "en").why


def test_a_branch_after_an_open_one_may_run():
    """A certain hit behind a test that is not known may run only; behind it nothing does."""
    clf = find(explained(good("sentiment"), parameters=[("lang", "en")]), "clf")
    assert {"long": MAYBE, "de": SKIPPED, "en": MAYBE, "rest": SKIPPED} == fates(clf)
    assert ["TEXT of the request"] == find(clf, "en").depends_on


def test_values_of_inputs_are_evaluated():
    """A condition on the request's own tensors is evaluated as the router does."""
    clf = find(explained(good("sentiment"), inputs=[("TEXT", f'"{"a" * 5000}"')]), "clf")
    assert {"long": RUNS, "de": SKIPPED, "en": SKIPPED, "rest": SKIPPED} == fates(clf)


def test_no_branch():
    """A switch that certainly has no branch fails with the text that the client would get."""
    text = switch('step { name: "a" case: "x" model_name: "xlmr" }', 'on: \'get(parameters, "k", "none")\'')
    root = explained(text)
    message = (
        "INVALID_ARGUMENT: g/1: root: no branch of switch 'root' matches: value 'none' of "
        "'get(parameters, \"k\", \"none\")' is no case; branches are 'a', and there is no 'otherwise'"
    )
    assert (FAILS, message) == (root.outcome, root.failure)


def test_perhaps_no_branch():
    """Where a branch may match, the error is a possible one."""
    text = text_graph(
        """node { name: "root" sequence { step { name: "lid" model_name: "lang_id" } step { name: "clf" node: "by" } } }
        node { name: "by" switch { on: 'text(inputs.LANG)' step { name: "a" case: "x" model_name: "xlmr" } } }"""
    )
    root = explained(text)
    assert (RUNS, MAYBE) == (root.outcome, find(root, "a").outcome)
    (message,) = find(root, "clf").may_fail
    expected = "INVALID_ARGUMENT: g/1: root/clf/by: no branch of switch 'by' matches: value ? of 'text(inputs.LANG)'"
    assert message.startswith(expected)


def test_rows_go_their_own_ways():
    """per_row: each row of the values given is decided for itself."""
    text = text_graph(
        """node { name: "root" switch { per_row: true on: 'text(inputs.TEXT)'
          step { name: "a" case: "x" model_name: "xlmr" } step { name: "b" case: "y" model_name: "bert_de" }
          step { name: "c" otherwise: true model_name: "bert_en" } } }"""
    )
    root = explained(text, inputs=[("TEXT", '[["x"], ["z"], ["x"], ["x"]]')])
    assert {"a": RUNS, "b": SKIPPED, "c": RUNS} == fates(root)
    assert ['case "x": rows 0, 2-3 of 4'] == find(root, "a").why
    assert ["otherwise: row 1 of 4"] == find(root, "c").why
    assert {"a": MAYBE, "b": MAYBE, "c": MAYBE} == fates(explained(text))


def test_a_row_without_a_branch_fails_the_request():
    """per_row without otherwise: one row that nothing matches is enough."""
    text = text_graph(
        """node { name: "root" switch { per_row: true on: 'text(inputs.TEXT)'
          step { name: "a" case: "x" model_name: "xlmr" } } }"""
    )
    assert RUNS is explained(text, inputs=[("TEXT", '[["x"], ["x"]]')]).outcome
    root = explained(text, inputs=[("TEXT", '[["x"], ["y"]]')])
    assert "no branch of switch 'root' matches row 1: value 'y'" in root.failure


def test_a_sticky_splitter_is_decided_by_its_key():
    """With a key the step is certain, and it is the one that the router draws; each key keeps its step."""
    plan = good("classify")
    seen = set()
    for user in range(40):
        ab = find(explained(plan, headers=[("x-user-id", f"u{user}")]), "ab")
        taken = [child.name for child in ab.children if child.outcome is RUNS]
        assert 1 == len(taken)
        assert f'sticky by get(headers, "x-user-id", request.id) = "u{user}": {taken[0]}' == ab.decisions[0]
        seen.add(taken[0])
    assert {"A", "B"} == seen


def test_a_splitter_without_key_is_random():
    """Without a key the shares are shown."""
    ab = find(explained(good("classify")), "ab")
    assert {"C": StepOutcome.SHADOW, "A": MAYBE, "B": MAYBE} == fates(ab)
    assert "random: 90 % A, 10 % B" == ab.decisions[-1]


def test_a_pinned_splitter():
    """x-graph-route pins the step, on the condition that the router allows it."""
    ab = find(explained(good("classify"), headers=[("x-graph-route", "ab=B")]), "ab")
    assert {"C": StepOutcome.SHADOW, "A": SKIPPED, "B": RUNS} == fates(ab)
    assert "--allow-route-header" in ab.decisions[0]


def test_a_bandit_is_open():
    """A bandit's choice is not known; the weights are what it starts with."""
    text = text_graph(
        """node { name: "root" splitter { bandit { algorithm: UCB1 min_pulls: 5 }
          step { name: "a" weight: 1 model_name: "xlmr" } step { name: "b" weight: 3 model_name: "bert_en" } } }"""
    )
    root = explained(text)
    assert {"a": MAYBE, "b": MAYBE} == fates(root)
    assert ["UCB1 on feedback; before it: 25 % a, 75 % b"] == root.decisions


def test_members_of_an_ensemble():
    """Members run at once; one whose test is false is skipped, and what is combined is said."""
    root = explained(good("fraud_vote"))
    assert {"gbdt": RUNS, "mlp": RUNS, "gnn": SKIPPED} == fates(root)
    assert ["quorum 2 of 3", "stragglers 25 ms"] == root.decisions[-2:]
    assert "LABEL: VOTE, weighted" in root.decisions
    assert RUNS is find(explained(good("fraud_vote"), shapes=[("GRAPH_EMB", "128")]), "gnn").outcome


def test_a_model_that_combines_runs_after_the_members():
    """It is one more call, after the members."""
    root = explained(CUSTOM)
    assert {"a": RUNS, "b": RUNS, "judge": RUNS} == fates(root)
    assert "PROBS: CUSTOM by judge" in root.decisions
    assert ["combines"] == find(root, "judge").why


def test_a_quorum_that_cannot_be_reached():
    """If too few members run, the node fails as it would at run time."""
    text = text_graph(
        """node { name: "root" ensemble { quorum: 2
          step { name: "a" model_name: "xlmr" dependency: SOFT when: 'has(inputs.HINT)' }
          step { name: "b" model_name: "bert_en" dependency: SOFT }
          combine { output: "PROBS" method: AVERAGE } } }"""
    )
    root = explained(text)
    expected = "2 of 2 steps must answer, and cannot any more: a did not run, its 'when' is false"
    assert root.failure.startswith(f"INVALID_ARGUMENT: g/1: root: {expected}")
    assert RUNS is explained(text, shapes=[("HINT", "4")]).outcome


def test_what_follows_in_a_member_of_a_race_may_be_cancelled():
    """Members of a race start for certain; what one does after its first step another may come before."""
    text = text_graph(
        """node { name: "root" ensemble { step { name: "a" model_name: "xlmr" } step { name: "b" node: "in" }
          combine { output: "PROBS" method: FIRST } } }
        node { name: "in" sequence { step { name: "c" model_name: "bert_en" } } }"""
    )
    root = explained(text)
    assert {"a": RUNS, "b": RUNS} == fates(root)
    assert {"c": MAYBE} == fates(find(root, "b"))
    assert ["whether b is cancelled before"] == find(root, "c").depends_on
    assert ["PROBS: FIRST"] == root.decisions


def test_a_quorum_of_soft_steps_that_fail_has_their_code():
    """Where the missing members are bound to fail, the node fails with their code, and says how each does."""
    text = text_graph(
        """node { name: "root" ensemble { quorum: 2
          step { name: "a" model_name: "xlmr" dependency: SOFT policy { min_remaining_ms: 300 } }
          step { name: "b" model_name: "bert_en" dependency: SOFT }
          combine { output: "PROBS" method: AVERAGE } } }"""
    )
    message = explained(text, remaining_ms=100.0).failure
    assert message.startswith("DEADLINE_EXCEEDED: g/1: root: 2 of 2 steps must answer, and cannot any more: a failed: ")
    assert RUNS is explained(text, remaining_ms=300.0).outcome


def test_rows_of_a_branch_that_fails():
    """One branch that is bound to fail fails the node, and may come before what the others do."""
    text = text_graph(
        """node { name: "root" switch { per_row: true on: 'text(inputs.TEXT)'
          step { name: "a" case: "x" node: "in" }
          step { name: "b" otherwise: true model_name: "bert_en" policy { min_remaining_ms: 300 } } } }
        node { name: "in" sequence { step { name: "c" model_name: "xlmr" } } }"""
    )
    both, one = [("TEXT", '[["x"], ["y"]]')], [("TEXT", '[["x"], ["x"]]')]
    root = explained(text, inputs=both, remaining_ms=100.0)
    assert (FAILS, {"a": RUNS, "b": FAILS}, {"c": MAYBE}) == (root.outcome, fates(root), fates(find(root, "a")))
    root = explained(text, inputs=one, remaining_ms=100.0)
    assert (RUNS, {"a": RUNS, "b": SKIPPED}, {"c": RUNS}) == (root.outcome, fates(root), fates(find(root, "a")))


def test_a_step_of_a_splitter_has_a_test_of_its_own():
    """A step that is drawn and whose `when` is false gives its default."""
    text = text_graph(
        """node { name: "root" splitter { sticky_by: 'get(parameters, "k", "")'
          step { name: "a" model_name: "xlmr" when: 'has(inputs.HINT)'
                 dependency: SOFT default { output: "PROBS" number: [ 0, 0, 1 ] dims: [ 3 ] } }
          step { name: "b" model_name: "bert_en" } } }"""
    )
    pinned = [("x-graph-route", "root=a")]
    root = explained(text, headers=pinned)
    assert (SKIPPED, ["when has(inputs.HINT) = false"]) == (find(root, "a").outcome, find(root, "a").why)
    assert RUNS is find(explained(text, headers=pinned, shapes=[("HINT", "4")]), "a").outcome
    assert (SKIPPED, MAYBE) == tuple(find(explained(text), name).outcome for name in "ab")


def test_members_that_may_all_be_skipped():
    """Where no member is certain to run, that too few do is a possible error."""
    text = text_graph(
        """node { name: "root" ensemble {
          step { name: "a" model_name: "xlmr" when: 'text(inputs.TEXT) == "a"' }
          step { name: "b" model_name: "bert_en" when: 'text(inputs.TEXT) != "a"' }
          combine { output: "PROBS" method: AVERAGE } } }"""
    )
    (message,) = explained(text).may_fail
    assert message.startswith(
        "INVALID_ARGUMENT: g/1: root: 1 of 2 steps must answer, and cannot any more: a did not run"
    )
    assert [] == explained(text, inputs=[SHORT]).may_fail
