"""The order of a sequence, its conditions and its loop."""

import pytest

from weft.language import GraphSource
from weft.language.plan import Binding
from weft.router.compile import check_graph

LOOP_HEAD = """name: "g" max_batch_size: 8
input [ { name: "DRAFT" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "BETTER" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


def _sequence(*steps, extra=""):
    return f'node {{ name: "root" sequence {{ {" ".join(steps)} {extra} }} }}'


def _loop(loop, steps='step { model_name: "improve" }'):
    return f'{LOOP_HEAD}node {{ name: "root" sequence {{ {steps} {loop} }} }}'


def _waits(root):
    """Name of each step -> names of the steps that wait for it, and the number of steps that it waits for."""
    return {
        step.name: ([root.steps[i].name for i in step.consumers], step.num_dependencies) for step in root.steps
    }  # fmt: skip


def test_a_condition_waits_for_the_tensors_that_it_reads(compiled):
    """inputs.X of a `when` is the output X of an earlier step; the step waits for it and reads its slot."""
    root = compiled(
        _sequence(
            'step { name: "lid" model_name: "lang_id" }',
            """step { name: "clf" model_name: "xlmr" when: 'text(inputs.LANG) == "de"'
                      default { output: "PROBS" number: [0, 0, 1] } }""",
        )
    ).root
    lid, clf = root.steps
    assert {"lid": (["clf"], 0), "clf": ([], 1)} == _waits(root)
    assert (Binding("LANG", lid.outputs[0].slot),) == clf.when.tensors


def test_a_condition_waits_for_the_steps_that_it_asks(compiled):
    """steps.X.ok makes a dependency and a slot; only steps that are asked have one, and they run though unread."""
    root = compiled(
        _sequence(
            'step { name: "lid" model_name: "lang_id" dependency: SOFT }',
            'step { name: "probe" model_name: "bert_de" dependency: SOFT output_map { key: "PROBS" value: "P" } }',
            """step { name: "clf" model_name: "xlmr" when: 'steps.probe.ok || steps["lid"].ok'
                      default { output: "PROBS" number: [0, 0, 1] } }""",
        )
    ).root
    lid, probe, clf = root.steps
    assert {"lid": (["clf"], 0), "probe": (["clf"], 0), "clf": ([], 2)} == _waits(root)
    assert ((), ()) == (lid.outputs, probe.outputs)
    assert {Binding("steps.probe.ok", probe.ok_slot), Binding("steps.lid.ok", lid.ok_slot)} == set(clf.when.tensors)
    assert -1 == clf.ok_slot
    assert root.num_slots == len(root.specs) == 4
    assert "steps.lid.ok" == root.specs[lid.ok_slot].name


def test_a_cache_key_waits_for_the_tensors_that_it_reads(compiled):
    """The key sees what a `when` would see."""
    root = compiled(
        _sequence(
            'step { name: "lid" model_name: "lang_id" }',
            'step { name: "clf" model_name: "xlmr" policy { cache { key: \'text(inputs.LANG)\' } } }',
        )
    ).root
    assert {"lid": (["clf"], 0), "clf": ([], 1)} == _waits(root)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("steps.lidd.ok", "unknown step 'lidd'; did you mean 'lid'?"),
        ("steps.post.ok", "step 'post' stands later; only earlier steps are seen"),
        ("steps.clf.ok", "step 'clf' is this one; only earlier steps are seen"),
        ("has(steps.lidd)", "unknown step 'lidd'; did you mean 'lid'?"),
        ("has(steps.post)", "step 'post' stands later; only earlier steps are seen"),
        ("has(steps.copy)", "step 'copy' is a shadow, whose answer is dropped"),
        ("max(inputs.P2) > 0.5", "tensor 'P2' is an output of step 'post'; only outputs of earlier steps are seen"),
        ("max(inputs.PROBS) > 0.5", "tensor 'PROBS' is an output of step 'clf'; only outputs of earlier steps"),
        ("max(inputs.LANGG) > 0.5", "unknown tensor 'LANGG'; did you mean 'LANG'?"),
        ("max(outputs.PROBS) > 0.5", "'when' does not see 'outputs'"),
    ],
)
def test_a_condition_sees_earlier_steps_only(found, test, message):
    """A step or tensor that is unknown or stands later is an error at its name."""
    messages = [
        one.message
        for one in found(
            _sequence(
                'step { name: "lid" model_name: "lang_id" }',
                'step { name: "copy" model_name: "xlmr" shadow { percent: 1 } }',
                f'step {{ name: "clf" model_name: "xlmr" when: \'{test}\''
                ' default { output: "PROBS" number: [0, 0, 1] } }',
                'step { name: "post" model_name: "bert_de" output_map { key: "PROBS" value: "P2" } }',
            )
        )
        if one.code == "G011"
    ]
    assert [True] == [message in one for one in messages], messages


def test_conditions_of_unknown_models_are_not_judged(catalog):
    """Without a catalog, a condition may name any tensor that an earlier step could give."""
    text = """name: "g" max_batch_size: 8 input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
      output { name: "PROBS" data_type: TYPE_FP32 dims: 3 } node { name: "root" sequence {
      step { name: "lid" model_name: "lang_id" dependency: SOFT }
      step { name: "clf" model_name: "xlmr" when: 'text(inputs.LANG) == "de" && steps.lid.ok'
             default { output: "PROBS" number: [0, 0, 1] } }
      step { node: "c" output_map { key: "PROBS" value: "Q" } } } }
      node { name: "c" cascade { step { name: "a" model_name: "x" accept: 'max(outputs.PROBS) > 0.5' }
                                 step { name: "b" model_name: "y" } } }"""
    assert [] == [one for one in check_graph(GraphSource(text, "g.pbtxt")) if one.severity == "error"]


def test_ordered_steps_run_one_after_another(compiled):
    """Each step waits for the one before it, beside those whose outputs it reads; the last that runs makes all run."""
    steps = (
        'step { name: "a" model_name: "lang_id" }',
        'step { name: "idle" model_name: "wide" output_map { key: "PROBS" value: "Q" } }',
        'step { name: "copy" model_name: "wide" shadow { percent: 1 } }',
        'step { name: "b" model_name: "xlmr" input_map { key: "TEXT" value: "LANG" } }',
        'step { name: "late" model_name: "wide" output_map { key: "PROBS" value: "R" } }',
    )
    root = compiled(_sequence(*steps, extra="ordered: true")).root
    assert {"a": (["idle", "b"], 0), "idle": (["copy", "b"], 1), "copy": ([], 1), "b": ([], 2)} == _waits(root)
    assert {"a": (["b"], 0), "copy": ([], 0), "b": ([], 1)} == _waits(compiled(_sequence(*steps)).root)


def test_an_ordered_step_cannot_read_from_a_later_one(found):
    """A step that waits for a later one, which waits for its turn, is a cycle."""
    (one,) = found(
        _sequence(
            'step { name: "a" model_name: "xlmr" input_map { key: "TEXT" value: "LANG" } }',
            'step { name: "b" model_name: "lang_id" }',
            extra="ordered: true",
        )
    )
    assert "G003" == one.code
    assert "cycle: b -> a -> b" in one.message or "cycle: a -> b -> a" in one.message
    assert "the sequence is 'ordered'" in one.message


def test_a_loop_carries_outputs_to_inputs(compiled):
    """`while` reads inputs and outputs of the round, of any step; carried outputs and what it reads are computed."""
    root = compiled(
        _loop(
            "loop { while: '!outputs.DONE[0] && max(outputs.BETTER) > max(inputs.DRAFT)' max_iterations: 4 "
            'carry { key: "BETTER" value: "DRAFT" } }'
        )
    ).root
    slots = {spec.name: slot for slot, spec in root.specs.items()}
    assert (4, ((slots["BETTER"], slots["DRAFT"]),)) == (root.loop.max_iterations, root.loop.carry)
    assert [("DONE", slots["DONE"]), ("BETTER", slots["BETTER"]), ("DRAFT", slots["DRAFT"])] == list(
        map(tuple, root.loop.again.tensors)
    )
    assert {"BETTER", "DONE"} == {name for name, _ in root.steps[0].outputs}
    assert (Binding("BETTER", slots["BETTER"]),) == root.outputs


def test_a_step_that_only_a_loop_reads_runs(found):
    """`while` and `carry` count as readers."""
    loop = 'loop { while: \'!outputs.DONE[0]\' max_iterations: 4 carry { key: "B2" value: "DRAFT" } }'
    steps = """step { model_name: "improve" output_map { key: "DONE" value: "D" } }
      step { name: "two" model_name: "improve" output_map { key: "BETTER" value: "B2" } }"""
    assert [] == found(_loop(loop, steps))


LAST = "while: 'true' max_iterations: 3"


@pytest.mark.parametrize(
    ("loop", "code", "message"),
    [
        (
            "while: '!outputs.DONE[0]'",
            "G020",
            "the loop of 'root' has no bound; give it one, for example max_iterations: 10",
        ),
        ("max_iterations: 3", "G020", "the loop of 'root' has no 'while'"),
        ("while: 'outputs.DNE[0]' max_iterations: 3", "G011", "unknown tensor 'DNE'; did you mean 'DONE'?"),
        ("while: 'inputs.DONE[0]' max_iterations: 3", "G011", "of step 'improve'; write outputs.DONE"),
        ("while: 'steps.improve.ok' max_iterations: 3", "G011", "'while' does not see 'steps'"),
        ("while: 'max(outputs.BETTER)' max_iterations: 3", "G011", "'while' must be bool, this is double"),
        (LAST + " carry { key: 'DONE' value: 'DRAFT' }", "G007", "input 'DRAFT' of the next round is FP32, got BOOL"),
        (LAST + " carry { key: 'BETER' value: 'DRAFT' }", "G006", "did you mean 'BETTER'?"),
        (LAST + " carry { key: 'BETTER' value: 'DRAT' }", "G006", "did you mean 'DRAFT'?"),
        (
            LAST + " carry { key: 'BETTER' value: 'DRAFT' } carry { key: 'DONE' value: 'DRAFT' }",
            "G005",
            "input 'DRAFT' of the next round is carried twice",
        ),
    ],
)
def test_what_is_wrong_with_a_loop(found, loop, code, message):
    """A loop has a bound and a test, and carries tensors to inputs that they fit."""
    diagnostics = found(_loop(f"loop {{ {loop} }}"))
    assert any(message in one.message for one in diagnostics if one.code == code), diagnostics


def test_a_carried_tensor_must_fit_and_be_there(found):
    """Its shape is that of the input, and a soft step's output is no substitute for a required input."""
    loop = 'loop { while: \'true\' max_iterations: 3 carry { key: "W" value: "DRAFT" } }'
    steps = """step { model_name: "improve" } step { name: "w" model_name: "distil" dependency: SOFT
      input_map { key: "TEXT" value: "T" } output_map { key: "PROBS" value: "W" } }"""
    text = _loop(loop, steps).replace("input [", 'input [ { name: "T" data_type: TYPE_STRING dims: 1 },')
    assert {"G008", "G010"} <= {one.code for one in found(text) if "of the next round" in one.message}
