"""Tensors that may be absent: where they come from, where they may go, and what takes the doubt away."""

import pytest

from weft.base.tensors import decode
from weft.language.plan import Binding

LID = 'step { name: "lid" model_name: "lang_id" EXTRA output_map { key: "LANG" value: "L" } }'
#: Its TEXT is required.
READER = 'step { name: "clf" model_name: "xlmr" EXTRA input_map { key: "TEXT" value: "L" } }'
#: Its HINT is optional.
HINTER = 'step { name: "hint" model_name: "distil" EXTRA output_map { key: "PROBS" value: "HINT" } }'
SOFT = "dependency: SOFT"
DEFAULT = 'default { output: "L" text: "en" }'


def _sequence(*steps):
    return f'node {{ name: "root" sequence {{ {" ".join(steps)} }} }}'


@pytest.mark.parametrize(
    ("guard", "test", "is_certain"),
    [
        ("", "has(steps.lid)", True),
        ("", "steps.lid.ok", True),
        ("", "has(steps.lid) && steps.other.ok", True),
        ("", "has(steps.lid) && has(steps.third)", True),
        ("", "!has(steps.lid)", False),
        ("", "has(steps.lid) && request.priority == 1", False),
        ("", "has(steps.lid) || has(steps.other)", False),
        ("dependency: SOFT", "has(steps.lid)", False),
        ("dependency: SOFT", "has(steps.other) && has(steps.lid)", False),
        ("dependency: SOFT", "has(steps.third)", False),
        ("when: 'request.priority == 1'", "has(steps.lid)", False),
    ],
)
def test_what_only_asks_for_hard_steps_always_runs(found, guard, test, is_certain):
    """`when: 'has(steps.guard)'` is never false for a HARD guard that always runs: the request fails before."""
    steps = (
        LID.replace("EXTRA", guard),
        'step { name: "other" model_name: "distil" output_map { key: "PROBS" value: "P" } }',
        """step { name: "third" model_name: "half" when: 'has(steps.lid)' output_map { key: "PROBS" value: "H" } }""",
        f'step {{ name: "clf" model_name: "xlmr" when: \'{test}\' }}',
    )
    errors = [one for one in found(_sequence(*steps)) if one.severity == "error"]
    assert (["G010"] * (not is_certain)) == [one.code for one in errors]


def _g010(found, text):
    return [one.message for one in found(text) if one.code == "G010" and one.severity == "error"]


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (SOFT, "step 'lid' may fail softly: give it a 'default' for 'L' or make it 'dependency: HARD'"),
        ("when: 'request.priority == 1'", "step 'lid' may be skipped: give it a 'default' for 'L'"),
        (f"{SOFT} when: 'request.priority == 1'", "step 'lid' may fail softly or be skipped: give it a 'default'"),
    ],
)
def test_a_required_input_refuses_what_may_be_absent(found, extra, reason):
    """The error names the input, where the tensor comes from, why it may be absent, and the cures."""
    (message,) = _g010(found, _sequence(LID.replace("EXTRA", extra), READER.replace("EXTRA", "")))
    assert message.startswith("input 'TEXT' of model 'xlmr' is required, but the tensor may be absent; it comes from")
    assert "output 'LANG' of model 'lang_id' in step 'lid' (g.pbtxt:4:" in message
    assert reason in message
    assert message.endswith("or let the step run only when: 'has(inputs.L)'")


@pytest.mark.parametrize(
    ("giver", "reader"),
    [
        (f"{SOFT} {DEFAULT}", ""),
        (f"when: 'request.priority == 1' {DEFAULT}", ""),
        ('fallback { model_name: "lang_id" model_version: 1 output_map { key: "LANG" value: "L" } }', ""),
        (SOFT, "when: 'has(inputs.L)' default { output: \"PROBS\" number: [0, 0, 1] }"),
        (SOFT, "when: 'steps.lid.ok' default { output: \"PROBS\" number: [0, 0, 1] }"),
        (SOFT, "when: 'has(steps.lid)' default { output: \"PROBS\" number: [0, 0, 1] }"),
        (SOFT, 'when: \'has(steps["lid"]) && text(inputs.L) == "de"\' default { output: "PROBS" number: [0, 0, 1] }'),
        (SOFT, 'when: \'steps.lid.ok && text(inputs.L) == "de"\' default { output: "PROBS" number: [0, 0, 1] }'),
        (SOFT, 'when: \'has(inputs.L) && text(inputs.L) == "de"\' default { output: "PROBS" number: [0, 0, 1] }'),
    ],
)
def test_what_takes_the_doubt_away(found, giver, reader):
    """A default, a fallback, and a `when` of the reader that tests the tensor or the step."""
    assert [] == found(_sequence(LID.replace("EXTRA", giver), READER.replace("EXTRA", reader)))


@pytest.mark.parametrize(
    "test", ["has(inputs.L) || true", "!steps.lid.ok", "steps.lid.ok || true", "!has(inputs.L)", "has(inputs.TEXT)"]
)
def test_a_test_that_proves_nothing(found, test):
    """Only what must be true for the step to run narrows a tensor."""
    reader = READER.replace("EXTRA", f"when: '{test}' default {{ output: \"PROBS\" number: [0, 0, 1] }}")
    assert 1 == len(_g010(found, _sequence(LID.replace("EXTRA", SOFT), reader)))


def test_an_optional_input_takes_what_may_be_absent(compiled):
    """The slot of the soft step's output is bound to the optional input."""
    steps = compiled(_sequence(HINTER.replace("EXTRA", SOFT), 'step { model_name: "context" }')).root.steps
    assert steps[0].is_soft
    assert Binding("HINT", steps[0].outputs[0].slot) in steps[1].inputs


@pytest.mark.parametrize("extra", [SOFT, "when: 'request.priority == 1'"])
def test_an_output_of_a_graph_is_in_every_answer(found, extra):
    """A declared output of the graph that a step may leave out is an error at its declaration."""
    (one,) = [
        one for one in found(_sequence(f'step {{ name: "clf" model_name: "xlmr" {extra} }}')) if one.code == "G010"
    ]
    assert (3, 18) == (one.line, one.column)
    assert "output 'PROBS' of graph 'g' must be in every answer, but it may be absent" in one.message
    assert "give it a 'default' for 'PROBS'" in one.message


def test_an_output_that_repeats_an_optional_input_may_be_absent(compiled):
    """The client that leaves the input out does not miss the output."""
    text = """name: "g" max_batch_size: 8
    input [ { name: "TEXT" data_type: TYPE_STRING dims: 1 },
            { name: "HINT" data_type: TYPE_FP32 dims: 4 optional: true } ]
    output [ { name: "PROBS" data_type: TYPE_FP32 dims: 3 }, { name: "HINT" data_type: TYPE_FP32 dims: 4 } ]
    node { name: "root" sequence { step { model_name: "context" } } }"""
    assert ["PROBS", "HINT"] == [name for name, _ in compiled(text).root.outputs]


@pytest.mark.parametrize(
    ("inner", "may_be_absent"),
    [
        ("switch { step { name: 'a' when: 'request.priority == 1' M } step { name: 'b' otherwise: true M } }", False),
        ("switch { step { name: 'a' when: 'true' M } step { name: 'b' otherwise: true dependency: SOFT M } }", True),
        ("splitter { step { name: 'a' weight: 1 M } step { name: 'b' weight: 1 dependency: SOFT M } }", True),
        ("splitter { step { name: 'a' weight: 1 M } step { name: 'b' weight: 1 when: 'has(inputs.TEXT)' M } }", True),
        ("cascade { step { name: 'a' when: 'request.priority == 1' M } step { name: 'b' dependency: SOFT M } }", False),
        ("sequence { step { name: 'a' dependency: SOFT M } }", True),
    ],
)  # fmt: skip
def test_absence_passes_through_nodes(found, inner, may_be_absent):
    """What a node gives may be absent if one of its alternatives may; of a cascade some step answers, or it fails."""
    model = 'model_name: "lang_id"'
    nodes = f'node {{ name: "n" {inner.replace("M", model)} }}'
    outer = _sequence('step { name: "n" node: "n" output_map { key: "LANG" value: "L" } }', READER.replace("EXTRA", ""))
    assert may_be_absent == bool(_g010(found, outer + nodes))


def test_an_input_of_a_node_may_be_absent(found):
    """A node of which nobody declares inputs takes what its caller has; in it the same rules hold."""
    inner = 'node { name: "n" sequence { step { model_name: "xlmr" } } }'
    outer = _sequence(LID.replace("EXTRA", SOFT), 'step { name: "n" node: "n" input_map { key: "TEXT" value: "L" } }')
    (message,) = _g010(found, outer + inner)
    assert "input 'TEXT' of model 'xlmr' is required" in message
    assert "step 'lid' may fail softly" in message


def test_a_condition_tests_first_what_may_be_absent(found):
    """An untested use is an error at its character."""
    reader = READER.replace("EXTRA", 'when: \'text(inputs.L) == "de"\' default { output: "PROBS" number: [0, 0, 1] }')
    messages = _g010(found, _sequence(LID.replace("EXTRA", SOFT), reader))
    origin = "output 'LANG' of model 'lang_id' in step 'lid' (g.pbtxt:4:32)"
    assert f"'L' may be absent; it comes from {origin}; test it first: has(inputs.L) && ..." in messages


def test_a_default_is_one_row_of_a_batch(compiled):
    """In a batching graph the default's leading dimension is 1, for the row that is repeated."""
    step = compiled(_sequence(LID.replace("EXTRA", f"{SOFT} {DEFAULT}"), READER.replace("EXTRA", ""))).root.steps[0]
    (default,) = step.defaults
    assert (step.outputs[0].slot, True, (1, 1)) == (default.slot, default.is_batched, default.tensor.shape)
    assert [[b"en"]] == decode(default.tensor).tolist()


def test_a_default_without_batch_dimension(compiled):
    """In a graph without a batch dimension, a default has the shape that the output has."""
    text = 'name: "g" input { name: "TEXT" data_type: TYPE_STRING dims: 1 } ' + _sequence(
        'step { name: "clf" model_name: "xlmr" dependency: SOFT default { output: "PROBS" number: [0, 0, 1] } }'
    )
    (default,) = compiled(text).root.steps[0].defaults
    assert (False, (3,)) == (default.is_batched, default.tensor.shape)


def test_a_default_of_a_model_without_batch_dimension(compiled):
    """In a batching graph, such a model's output has none, and neither has its default."""
    step = 'step { model_name: "single" dependency: SOFT default { output: "PROBS" number: [0, 0, 1] } }'
    (default,) = compiled(_sequence(step)).root.steps[0].defaults
    assert (False, (3,)) == (default.is_batched, default.tensor.shape)


def test_a_default_of_an_output_that_is_not_there(found):
    """The name is that in the node, after 'output_map'."""
    extra = f'{SOFT} default {{ output: "LANG" text: "en" }} {DEFAULT}'
    messages = [one.message for one in found(_sequence(LID.replace("EXTRA", extra), READER.replace("EXTRA", "")))]
    assert ["step 'lid' gives no 'LANG'; use one of: L"] == messages


def test_a_default_that_nobody_reads_is_not_in_the_plan(compiled):
    """Defaults are bound to slots; an output without readers has none."""
    extra = f'{SOFT} default {{ output: "PROBS" number: [0, 0, 1] }} default {{ output: "SURE" boolean: false }}'
    root = compiled(_sequence(f'step {{ name: "clf" model_name: "sure" {extra} }}')).root
    assert ["PROBS"] == [root.specs[default.slot].name for default in root.steps[0].defaults]


#: Its HINT is an output that the model may leave out; the graph answers with what follows it.
UNSURE = 'step { name: "u" model_name: "unsure" EXTRA output_map { key: "PROBS" value: "P" } }'


@pytest.mark.parametrize(
    ("extra", "reader"),
    [
        ("", 'step { model_name: "context" input_map { key: "HINT" value: "HINT" } }'),
        ('default { output: "HINT" number: [ 0, 0, 0, 1 ] }', 'step { model_name: "hinted" }'),
        ("", 'step { model_name: "hinted" when: "has(inputs.HINT)" default { output: "PROBS" number: [ 0, 0, 1 ] } }'),
        ("", 'step { model_name: "hinted" when: "has(inputs.HINT)" dependency: SOFT default { output: "PROBS" number: '
             '[ 0, 0, 1 ] } }'),
    ],
)  # fmt: skip
def test_where_an_optional_output_of_a_model_may_go(found, extra, reader):
    """To an optional input, with a default of its step, or where a `when` tests for it."""
    assert [] == found(_sequence(UNSURE.replace("EXTRA", extra), reader))


@pytest.mark.parametrize("extra", ["", 'fallback { model_name: "unsure" output_map { key: "PROBS" value: "P" } }'])
def test_an_optional_output_of_a_model_does_not_reach_a_required_input(found, extra):
    """The error tells the step that may leave it out, and the cures."""
    (message,) = _g010(found, _sequence(UNSURE.replace("EXTRA", extra), 'step { model_name: "hinted" }'))
    assert "input 'HINT' of model 'hinted' is required, but the tensor may be absent" in message
    cures = "the model of step 'u' may leave it out: give it a 'default' for 'HINT', or let the step run only when"
    assert cures in message


def test_that_a_step_has_answered_does_not_show_an_optional_output(found):
    """`steps.u.ok` says that there was an answer, not that the answer has everything."""
    reader = 'step { model_name: "hinted" when: "steps.u.ok" default { output: "PROBS" number: [ 0, 0, 1 ] } }'
    assert 1 == len(_g010(found, _sequence(UNSURE.replace("EXTRA", ""), reader)))


@pytest.mark.parametrize(
    ("accept", "num_errors"),
    [("has(outputs.HINT)", 0), ("max(outputs.HINT) > 0.5", 1), ("has(outputs.HINT) && max(outputs.HINT) > 0.5", 0)],
)
def test_an_accept_tests_for_an_optional_output(found, accept, num_errors):
    """Before it reads one; the answer of the cascade may lack it all the same."""
    steps = f"step {{ name: 'a' model_name: 'unsure' accept: '{accept}' }} step {{ name: 'b' model_name: 'xlmr' }}"
    assert num_errors == len(_g010(found, f'node {{ name: "root" cascade {{ {steps} }} }}'))


OPTIONAL = """name: "g" max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "PROBS" data_type: TYPE_FP32 dims: [ 3 ] },
         { name: "HINT" data_type: TYPE_FP32 dims: [ 4 ] optional: true } ]
"""


@pytest.mark.parametrize(
    "nodes",
    [
        _sequence('step { model_name: "unsure" }'),
        _sequence('step { model_name: "xlmr" }', HINTER.replace("EXTRA", SOFT)),
        _sequence('step { model_name: "xlmr" }', HINTER.replace("EXTRA", "")),
        "node { name: 'root' switch { step { name: 'a' when: 'request.priority == 1' model_name: 'unsure' } "
        "step { name: 'b' otherwise: true model_name: 'xlmr' } } }",
        "node { name: 'root' cascade { step { name: 'a' when: 'request.priority == 1' model_name: 'unsure' } "
        "step { name: 'b' model_name: 'xlmr' } } }",
        "node { name: 'root' splitter { step { name: 'a' weight: 1 model_name: 'unsure' } "
        "step { name: 'b' weight: 2 model_name: 'xlmr' } } }",
    ],
)
def test_an_optional_output_of_the_graph(compiled, nodes):
    """May be left out by a model, a soft step, or some of the steps that stand for one another; or always be there."""
    outputs = compiled(OPTIONAL + nodes).signature.outputs
    assert [("PROBS", False), ("HINT", True)] == [(spec.name, spec.is_optional) for spec in outputs]


def test_an_optional_output_of_a_node_reaches_no_required_input(found):
    """What only some of its steps give may be absent around it; the message names those that do not."""
    inner = (
        "node { name: 'n' output [ { name: 'PROBS' data_type: TYPE_FP32 dims: [ 3 ] }, { name: 'HINT' data_type: "
        "TYPE_FP32 dims: [ 4 ] optional: true } ] switch { step { name: 'a' when: 'request.priority == 1' model_name: "
        "'unsure' } step { name: 'b' otherwise: true model_name: 'xlmr' } } }"
    )
    to_optional = _sequence(
        'step { node: "n" output_map { key: "PROBS" value: "P" } }',
        'step { model_name: "context" input_map { key: "HINT" value: "HINT" } }',
    )
    assert [] == found(to_optional + inner)
    (message,) = _g010(found, to_optional.replace("context", "hinted") + inner)
    assert "step 'b' of node 'n' gives none: give the step that runs the node a 'default' for 'HINT'" in message


def test_an_optional_output_that_no_step_gives(found):
    """Is the same error as any other output that nothing gives."""
    nodes = (
        "node { name: 'root' switch { step { name: 'a' when: 'request.priority == 1' model_name: 'bert_de' } "
        "step { name: 'b' otherwise: true model_name: 'xlmr' } } }"
    )
    assert {"G017"} == {one.code for one in found(OPTIONAL + nodes)}


def test_a_default_completes_the_answer_of_a_stage(found):
    """What the model of a step of a cascade leaves out has the step's default: the node always gives it."""
    stage = UNSURE.replace("EXTRA", 'EXTRA accept: "outputs.HINT[0] > 0.5"')
    nodes = f'node {{ name: "c" cascade {{ {stage} {UNSURE.replace("EXTRA", "EXTRA")} }} }}'.replace('"u"', '"one"', 1)
    text = _sequence('step { name: "c" node: "c" }', 'step { model_name: "hinted" }') + nodes
    assert [] == _g010(found, text.replace("EXTRA", 'default { output: "HINT" number: [ 0, 0, 0, 1 ] }'))
    assert _g010(found, text.replace("EXTRA", ""))


def test_what_is_merged_lacks_what_an_answer_lacks(found):
    """Each response is one step's: the tensor may be absent if one of them may leave it out."""
    sure = UNSURE.replace("EXTRA", 'default { output: "HINT" number: [ 0, 0, 0, 1 ] }').replace('"u"', '"sure"')
    for other, is_certain in [(UNSURE.replace("EXTRA", ""), False), (sure.replace('"sure"', '"other"'), True)]:
        nodes = f'node {{ name: "m" ensemble {{ {sure} {other} combine {{ output: "HINT" method: MERGE }} }} }}'
        text = _sequence('step { name: "m" node: "m" }', 'step { model_name: "hinted" }') + nodes
        assert is_certain == (not _g010(found, text))


@pytest.mark.parametrize(
    ("test", "is_certain"),
    [
        ("has(outputs.L)", True),
        ("has(outputs.L) && request.priority == 1", True),
        ("!has(outputs.L)", False),
        ("has(outputs.L) || request.priority == 1", False),
    ],
)
def test_a_loop_carries_what_its_test_shows_to_be_there(found, test, is_certain):
    """There is another round only where the test holds."""
    reader = 'step { name: "clf" model_name: "xlmr" }'
    rounds = f'loop {{ while: \'{test}\' max_iterations: 3 carry {{ key: "L" value: "TEXT" }} }}'
    errors = _g010(found, _sequence(LID.replace("EXTRA", SOFT), reader, rounds))
    assert (0 if is_certain else 1) == len(errors)
