"""Sequences and loops: which steps run, and what they get."""

import pytest
from tests.unit.tools.explain.explanation import FAILS, MAYBE, RUNS, SKIPPED, explained, fates, find
from tests.unit.tools.graphs import LOOP, good, text_graph

from weft.base.errors import InvalidArgumentError
from weft.tools.explain.render import StepOutcome, render_text


def test_a_loop_may_go_round():
    """The body is explained as it holds in every round."""
    again = find(explained(LOOP), "again")
    assert ["again while max(outputs.PROBS) < 0.9 = ?: at most 4 rounds"] == again.decisions
    assert {"draft": RUNS, "retext": RUNS} == fates(again)
    assert 4 == again.num_rounds


def test_a_later_round_may_go_another_way():
    """What an input decides in the first round is open where the loop carries something over it."""
    text = (
        LOOP.replace(
            'step { name: "draft" model_name: "context" }',
            'step { name: "draft" node: "by" }',
        )
        + """node { name: "by" switch { on: 'text(inputs.TEXT)' step { name: "a" case: "x" model_name: "xlmr" }
      step { name: "b" otherwise: true model_name: "bert_en" } } }"""
    )
    assert {"a": MAYBE, "b": MAYBE} == fates(find(explained(text, inputs=[("TEXT", '"x"')]), "draft"))
    once = text.replace("max(outputs.PROBS) < 0.9", "has(inputs.HINT)")
    assert {"a": RUNS, "b": SKIPPED} == fates(find(explained(once, inputs=[("TEXT", '"x"')]), "draft"))


def test_steps_that_no_output_needs_are_pruned():
    """With --output, steps that feed only other outputs do not run."""
    plan = good("sentiment")
    assert StepOutcome.PRUNED is find(explained(plan, outputs=["PROBS"]), "post").outcome
    assert RUNS is find(explained(plan, outputs=["LABEL"]), "post").outcome


def test_an_intermediate_output_needs_its_step_alone():
    """A tensor of a step can be asked for by the step's path."""
    root = explained(good("sentiment"), outputs=["lid/LANG"])
    assert {"lid": RUNS, "clf": StepOutcome.PRUNED, "post": StepOutcome.PRUNED} == fates(root)
    root = explained(good("sentiment"), outputs=["clf/by_language[de]/PROBS"])
    assert {"lid": RUNS, "clf": RUNS, "post": StepOutcome.PRUNED} == fates(root)


def test_what_follows_a_node_that_streams_runs_for_each_response():
    """A node inside may stream, by a branch or by responses that are merged; so may what stands within it."""
    root = explained(good("streamed_inside"))
    assert (["for each response of both"], "both") == (find(root, "say").why, find(root, "say").stream)
    assert ["for each response of chat"] == find(root, "mix").why
    assert {"long": MAYBE, "any": MAYBE} == fates(find(root, "old"))


def test_what_waits_for_a_guard_says_so():
    """A guard runs for what follows it; beside the steps that wait for an end alone stands for whose."""
    text = text_graph("""node { name: "root" sequence { answer_after: "audit"
      step { name: "guard" model_name: "lang_id" }
      step { name: "soft" model_name: "distil" output_map { key: "PROBS" value: "P" } }
      step { name: "clf" model_name: "xlmr" after: "guard" after: "soft" }
      step { name: "audit" model_name: "format_label" input_map { key: "P" value: "PROBS" } }
      step { name: "idle" model_name: "bert_de" output_map { key: "PROBS" value: "Q" } } } }""")
    root = explained(text)
    assert {"guard": RUNS, "soft": RUNS, "clf": RUNS, "audit": RUNS} == fates(root)
    assert ["after guard, soft"] == find(root, "clf").notes
    assert ["the answer waits for it"] == find(root, "audit").notes
    assert [] == find(root, "guard").notes
    both = text.replace("output [", 'output [ { name: "LANG" data_type: TYPE_STRING dims: [ 1 ] },')
    assert (
        StepOutcome.PRUNED
        is find(explained(both.replace('answer_after: "audit"', ""), outputs=["LANG"]), "soft").outcome
    )


def test_a_step_that_is_skipped_gives_its_default():
    """`when` is false: the output has its default, and steps.x.ok is false."""
    text = text_graph(
        """node { name: "root" sequence {
          step { name: "lid" model_name: "lang_id" when: 'get(parameters, "detect", false)'
                 default { output: "LANG" text: "de" dims: [ 1 ] } }
          step { name: "clf" node: "by_language" }
          step { name: "post" model_name: "format_label" when: 'steps.lid.ok' input_map { key: "P" value: "PROBS" }
                 default { output: "LABEL" text: "?" dims: [ 1 ] } } } }
        node { name: "by_language" switch { on: 'text(inputs.LANG)'
          step { name: "de" case: "de" model_name: "xlmr" }
          step { name: "en" otherwise: true model_name: "xlmr" } } }""",
        outputs="PROBS LABEL",
    )
    root = explained(text)
    assert {"lid": SKIPPED, "clf": RUNS, "post": SKIPPED} == fates(root)
    assert {"de": RUNS, "en": SKIPPED} == fates(find(root, "clf"))
    assert ['when get(parameters, "detect", false) = false'] == find(root, "lid").why
    root = explained(text, parameters=[("detect", "true")])
    assert {"lid": RUNS, "clf": RUNS, "post": RUNS} == fates(root)
    assert {"de": MAYBE, "en": MAYBE} == fates(find(root, "clf"))


def test_a_batch_where_one_row_is_needed():
    """A shape alone tells that text() will fail: the message is the router's."""
    root = explained(good("sentiment"), shapes=[("TEXT", "2,1")])
    assert "text() reads one row, got shape [2, 1]" in root.failure
    assert ["'clf' fails: not reached"] == find(root, "post").why


def test_steps_beside_one_that_fails_may_be_cancelled():
    """What waits for the failing step is not reached; what does not may have started, or not."""
    text = text_graph(
        """node { name: "root" sequence {
          step { name: "lid" model_name: "lang_id" }
          step { name: "clf" node: "never" }
          step { name: "post" model_name: "format_label" input_map { key: "P" value: "PROBS" } } } }
        node { name: "never" switch { on: 'get(parameters, "k", "none")'
          step { name: "x" case: "x" model_name: "xlmr" } } }""",
        outputs="PROBS LANG LABEL",
    )
    root = explained(text)
    assert {"lid": MAYBE, "clf": FAILS, "post": SKIPPED} == fates(root)
    assert ["whether clf fails first"] == find(root, "lid").depends_on


def test_a_loop_of_one_round_tests_nothing():
    """After the last round `while` is not evaluated, so that it cannot fail."""
    text = LOOP.replace("max(outputs.PROBS) < 0.9", "parameters.none == 1")
    assert FAILS is explained(text).outcome
    assert RUNS is explained(text.replace("max_iterations: 4", "max_iterations: 1")).outcome


def test_what_follows_a_stream_runs_for_each_response():
    """A decoupled step may give no response: its readers may run, each as often as there are responses."""
    root = explained(good("streamed"))
    assert {"lid": RUNS, "talk": RUNS, "say": MAYBE} == fates(root)
    say = find(root, "say")
    assert ("talk", ["for each response of talk"], ["the responses of talk -> stream"]) == (
        say.stream,
        say.why,
        say.depends_on,
    )
    assert ["answers with a stream of responses"] == root.decisions
    assert "calls at most: 3, with one response of talk\n" in render_text(root, None)


def test_what_a_model_may_leave_out_decides():
    """A step under `has` of such an output may run, and the output is what that depends on."""
    text = text_graph("""node { name: "root" sequence {
      step { name: "first" model_name: "unsure"
        output_map { key: "PROBS" value: "P" } output_map { key: "HINT" value: "H" } }
      step { name: "then" model_name: "hinted" input_map { key: "HINT" value: "H" } when: 'has(inputs.H)'
        default { output: "PROBS" number: [ 0, 0, 0 ] } dependency: SOFT } } }""")
    then = find(explained(text), "then")
    assert (MAYBE, ["H of first -> unsure"]) == (then.outcome, then.depends_on)


LACKING = """name: "g" platform: "graph" max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output [ { name: "H" data_type: TYPE_FP32 dims: 4 optional: true }, { name: "PROBS" data_type: TYPE_FP32 dims: 3 } ]
node { name: "root" sequence {
  step { name: "first" model_name: "unsure" output_map [ { key: "PROBS" value: "P" }, { key: "HINT" value: "H" } ] }
  step { name: "fill" model_name: "unsure" output_map [ { key: "PROBS" value: "Q" }, { key: "HINT" value: "F" } ]
         default { output: "F" number: [ 0, 0, 0, 0 ] dims: [ 4 ] } }
  step { name: "then" model_name: "hinted" input_map { key: "HINT" value: "F" } output_map { key: "PROBS" value: "R" }
         when: 'has(inputs.F) && max(inputs.F) < 1.0' default { output: "R" number: [ 0, 0, 0 ] dims: [ 3 ] } }
  step { name: "last" model_name: "context" input_map { key: "HINT" value: "H" } after: "then" } } }"""


def test_an_optional_output_of_the_graph_may_be_left_out():
    """The answer lacks it as the model does, which the user may say; a default takes the place of what is left out."""
    (found,) = explained(LACKING).left_out
    assert ("H", ("H of first -> unsure",)) == (found.name, found.depends_on)
    assert [] == explained(LACKING, gives=["first/HINT"]).left_out
    root = explained(LACKING, lacks=["first/HINT", "fill/HINT"])
    assert [("H", ())] == [(one.name, one.depends_on) for one in root.left_out]
    assert "│    output H is left out\n" in render_text(root, None)
    assert (RUNS, MAYBE) == (find(root, "then").outcome, find(explained(LACKING), "then").outcome)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"lacks": ["frst/HINT"]}, "may leave out 'frst/HINT'; did you mean 'first/HINT'?"),
        ({"gives": ["first/PROBS"]}, "outputs that may be left out: first/HINT, fill/HINT"),
        ({"gives": ["first/HINT"], "lacks": ["first/HINT"]}, "output 'first/HINT' is both given and left out"),
    ],
)
def test_what_cannot_be_said_of_answers(texts, message):
    """Only outputs that models may leave out can be given or left out, and not both."""
    with pytest.raises(InvalidArgumentError) as caught:
        explained(LACKING, **texts)
    assert message in caught.value.message


def test_what_is_left_out_in_an_ensemble_fails_the_step_that_needs_it():
    """By Triton Inference Server's rules absence travels; the user may say that there is nothing left out."""
    text = """name: "e" platform: "ensemble" max_batch_size: 8
    input { name: "TEXT" data_type: TYPE_STRING dims: 1 } output { name: "PROBS" data_type: TYPE_FP32 dims: 3 }
    ensemble_scheduling {
      step { model_name: "unsure" model_version: -1 input_map { key: "TEXT" value: "TEXT" }
             output_map { key: "HINT" value: "H" } }
      step { model_name: "hinted" model_version: -1 output_map { key: "PROBS" value: "PROBS" }
             input_map [ { key: "TEXT" value: "TEXT" }, { key: "HINT" value: "H" } ] } }"""
    (error,) = explained(text).may_fail
    assert "missing required input(s) ['HINT']" in error
    assert [] == explained(text, gives=["unsure/HINT"]).may_fail
    assert FAILS is explained(text, lacks=["unsure/HINT"]).outcome


def test_calls_of_a_map_are_those_of_one_chunk():
    """How many chunks there are only the data says; each has as many rows as the model takes."""
    root = explained(
        """name: "m" platform: "graph"
        input { name: "TEXT" data_type: TYPE_STRING dims: -1 }
        output { name: "PROBS" data_type: TYPE_FP32 dims: [ -1, 3 ] }
        node { name: "root" sequence { step { node: "each" } } }
        node { name: "each" map { over: "TEXT" max_rows: 9 step { model_name: "small" policy { timeout_ms: 30 } } } }"""
    )
    each = find(root, "each")
    assert ("chunk of TEXT", "each row of TEXT: 4 rows at once; 8 chunks in work; at most 9 rows") == (
        each.each,
        each.decisions[0],
    )
    text = render_text(root, None)
    assert "calls at most: 1, with one chunk of TEXT\n" in text
    assert "time at most: 30 ms: root/each/each[small] 30 ms, with one chunk of TEXT\n" in text


def test_a_reshaped_input_is_as_unknown_as_it_was():
    """What reads it is explained with the dims inside."""
    root = explained("""name: "r" platform: "graph" max_batch_size: 8
    input { name: "FEATURES" data_type: TYPE_FP32 dims: [ 4, 10 ] reshape { shape: [ 40 ] } }
    output { name: "SCORE" data_type: TYPE_FP32 dims: 1 }
    node { name: "root" sequence { step { node: "hot" } } }
    node { name: "hot" switch { step { name: "a" when: 'max(inputs.FEATURES) > 1.0' model_name: "xgb" }
      step { name: "b" otherwise: true model_name: "mlp" } } }""")
    assert {"a": MAYBE, "b": MAYBE} == fates(find(root, "hot"))
