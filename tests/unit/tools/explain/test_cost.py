"""How many calls a request may lead to, and how long the limits let it take."""

import math

from tests.unit.tools.explain.explanation import explained
from tests.unit.tools.graphs import LOOP, RICH, good, text_graph

from weft.tools.explain.render import Calls, count_calls, longest


def test_one_branch_counts():
    """Of a switch the branch that calls most counts, or the one that is certain."""
    short = ("TEXT", '"short"')
    languages = ("de", "en", "fr")
    usual = [count_calls(explained(RICH, inputs=[short], parameters=[("lang", one)])).usual for one in languages]
    assert [5, 3, 4] == usual
    assert 5 == count_calls(explained(RICH)).usual


def test_attempts_hedges_and_fallbacks_multiply():
    """At worst every attempt is hedged and fails, and the fallback makes as many as it may."""
    calls = count_calls(explained(good("sentiment"), parameters=[("lang", "de")], inputs=[("TEXT", '"a"')]))
    assert Calls(usual=3, worst=2 + (2 + 2) + 2) == calls
    calls = count_calls(explained(good("classify"), headers=[("x-graph-route", "ab=B")]))
    assert Calls(usual=2, worst=1 + (2 + 1), shadows=1) == calls


def test_a_retried_node_repeats_all_its_calls():
    """Attempts of a step that is a node multiply those of the steps inside."""
    text = text_graph(
        """node { name: "root" sequence { step { name: "s" node: "in"
             policy { retry { attempts: 3 on: "UNAVAILABLE" } } } } }
        node { name: "in" sequence { step { name: "a" model_name: "xlmr"
             policy { retry { attempts: 2 on: "UNAVAILABLE" } } } } }"""
    )
    assert Calls(usual=1, worst=6) == count_calls(explained(text))


def test_rounds_of_a_loop_multiply():
    """A loop that may go on counts all its rounds; one that certainly stops counts one."""
    assert Calls(usual=8, worst=8) == count_calls(explained(LOOP))
    once = LOOP.replace("max(outputs.PROBS) < 0.9", "false")
    assert Calls(usual=2, worst=2) == count_calls(explained(once))


def test_what_is_skipped_or_pruned_calls_nothing():
    """Steps that do not run do not count."""
    assert 2 == count_calls(explained(good("fraud_vote"))).usual
    assert 2 == count_calls(explained(good("sentiment"), outputs=["PROBS"])).usual


def test_timeouts_add_up_along_the_longest_chain():
    """Steps that wait for one another add up, others do not; a fallback has its own time."""
    text = text_graph(
        """node { name: "root" sequence {
          step { name: "lid" model_name: "lang_id" policy { timeout_ms: 30 } }
          step { name: "clf" model_name: "xlmr" policy { timeout_ms: 50 }
                 fallback { name: "f" model_name: "bert_en" policy { timeout_ms: 20 } } }
          step { name: "post" model_name: "format_label" input_map { key: "P" value: "PROBS" }
                 policy { timeout_ms: 5 } } } }""",
        outputs="PROBS LABEL LANG",
    )
    span = longest(explained(text))
    assert (75, ["root/clf", "root/clf>f", "root/post"]) == (span.ms, [path for path, _ in span.parts])


def test_a_node_cuts_the_time_of_its_steps():
    """The timeout of a node, or of the step that runs it, is all that its steps have together."""
    text = text_graph(
        """node { name: "root" sequence { step { name: "s" node: "in" policy { timeout_ms: 40 } } } }
        node { name: "in" sequence {
          step { name: "a" model_name: "xlmr" policy { timeout_ms: 30 } }
          step { name: "b" model_name: "format_label" input_map { key: "P" value: "PROBS" }
                 policy { timeout_ms: 30 } } } }""",
        outputs="LABEL",
    )
    assert (40, (("root/s", 40),)) == (longest(explained(text)).ms, longest(explained(text)).parts)


def test_a_step_without_timeout_has_no_limit():
    """One step without limit makes the path endless."""
    assert math.isinf(longest(explained(good("sentiment"))).ms)


def test_alternatives_take_as_long_as_the_longest():
    """Members of an ensemble run at once, steps of a cascade one after another."""
    steps = """step { name: "a" model_name: "xlmr" policy { timeout_ms: 30 } %s }
               step { name: "b" model_name: "bert_en" policy { timeout_ms: 20 } }"""
    accept = "accept: 'max(outputs.PROBS) > 0.5'"
    cascade = text_graph(f'node {{ name: "root" cascade {{ {steps % accept} }} }}')
    combine = 'combine { output: "PROBS" method: AVERAGE }'
    ensemble = text_graph(f'node {{ name: "root" ensemble {{ {steps % ""} {combine} }} }}')
    assert [50, 30] == [longest(explained(text)).ms for text in (cascade, ensemble)]
