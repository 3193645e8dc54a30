"""What becomes of an ensemble: members, combines, and what may be absent."""

import pytest

from weft.language.plan import Binding, CallPlan
from weft.router.combine import METHODS

SOFT = "dependency: SOFT"
WHEN = "when: 'request.priority == 1'"
HEAD = 'name: "g" max_batch_size: 8 input { name: "TEXT" data_type: TYPE_STRING dims: 1 } '


def _member(name, extra="", model="xlmr"):
    return f'step {{ name: "{name}" model_name: "{model}" {extra} }}'


def _combine(method, output="PROBS", extra=""):
    return f'combine {{ output: "{output}" from: "PROBS" method: {method} {extra} }}'


def _ensemble(*parts, name="root"):
    return f'node {{ name: "{name}" ensemble {{ {" ".join(parts)} }} }}'


def _messages(found, text, code):
    return [one.message for one in found(text) if one.code == code]


@pytest.mark.parametrize("method", ["AVERAGE", "MEDIAN", "SUM", "MIN", "MAX", "FIRST"])
def test_a_combine_reads_every_member(compiled, method):
    """One source for each step, in slots of their own, and a slot for the result."""
    root = compiled(_ensemble(_member("a"), _member("b", model="bert_de"), _combine(method))).root
    (combine,) = root.combines
    assert (METHODS[method], ((0, 1), (1, 2)), 3) == (combine.method, combine.sources, combine.output)
    assert ((Binding("PROBS", 3),), 4) == (root.outputs, root.num_slots)
    assert [(Binding("PROBS", 1),), (Binding("PROBS", 2),)] == [step.outputs for step in root.steps]


@pytest.mark.parametrize(
    ("method", "axis", "dims", "planned"),
    [
        ("CONCAT", 0, (6,), -1),
        ("CONCAT", -1, (6,), -1),
        ("STACK", 0, (2, 3), -2),
        ("STACK", 1, (3, 2), -1),
        ("STACK", -1, (3, 2), -1),
        ("STACK", -2, (2, 3), -2),
    ],
)
def test_axes_do_not_count_the_batch_dimension(compiled, method, axis, dims, planned):
    """The result's dims say where the members are; the plan counts from the end, so that a batch changes nothing."""
    text = HEAD + _ensemble(_member("a"), _member("b"), _combine(method, "ALL", f"axis: {axis}"))
    plan = compiled(text)
    assert (dims, planned) == (plan.signature.outputs[0].dims, plan.root.combines[0].axis)
    assert dims == plan.root.specs[plan.root.combines[0].output].dims


@pytest.mark.parametrize(
    ("extra", "sizes"),
    [("", (6,)), (SOFT, (-1,)), (WHEN, (-1,)), (f"{SOFT} default {{ output: 'PROBS' number: [1, 2, 3] }}", (6,))],
)
def test_a_member_that_may_be_missing_leaves_the_size_open(compiled, extra, sizes):
    """CONCAT and STACK are as long as there are members; a default counts as one."""
    for method, expected in (("CONCAT", sizes), ("STACK", (2 if sizes == (6,) else -1, 3))):
        text = HEAD + _ensemble(_member("a"), _member("b", extra), _combine(method, "ALL"))
        assert expected == compiled(text).signature.outputs[0].dims


def test_quorum_and_patience_reach_the_plan(compiled):
    """With the members that may be missing, their weights and who counts."""
    steps = [_member("a", "weight: 2"), _member("b", SOFT), _member("c", SOFT)]
    root = compiled(_ensemble(*steps, "quorum: 2 straggler_ms: 25", _combine("AVERAGE", extra="weighted: true"))).root
    assert (2, 25, True) == (root.quorum, root.straggler_ms, root.combines[0].is_weighted)
    assert [(2.0, False), (1.0, True), (1.0, True)] == [(step.weight, step.is_soft) for step in root.steps]


def test_a_step_that_no_combine_reads_runs_only_for_a_quorum(compiled, found):
    """A quorum counts every step; without one the unread step is left out. A warning says so."""
    steps = [_member("a"), _member("b", SOFT, model="lang_id")]
    node = 'node { name: "root" sequence { step { node: "all" output_map { key: "a.PROBS" value: "PROBS" } } } }'
    keyed = 'combine { from: "PROBS" }'
    assert ["a"] == [
        step.name for step in compiled(node + _ensemble(*steps, keyed, name="all")).root.steps[0].action.steps
    ]
    text = node + _ensemble(*steps, keyed, "quorum: 2", name="all")
    assert ["a", "b"] == [step.name for step in compiled(text).root.steps[0].action.steps]
    assert ["step 'b' only counts for the quorum: no 'combine' reads its outputs"] == _messages(found, text, "G026")


@pytest.mark.parametrize(
    ("steps", "is_certain"),
    [
        ([_member("a", SOFT), _member("b", SOFT)], True),
        ([_member("a"), _member("b", SOFT)], True),
        ([_member("a", WHEN), _member("b", WHEN)], True),
        (["quorum: 2", _member("a", SOFT), _member("b", SOFT)], True),
    ],
)
def test_a_combined_tensor_is_there_if_the_node_answers(found, steps, is_certain):
    """At least one member has answered, and each of them gives the tensor."""
    assert is_certain == (not _messages(found, _ensemble(*steps, _combine("AVERAGE")), "G010"))


def test_a_combined_tensor_may_be_absent_if_another_member_can_answer_alone(found):
    """A member without the tensor, which is known to be a model of which nothing is known, does not count."""
    optional = 'node { name: "maybe" sequence { ' + _member("x", SOFT) + " } }"
    steps = ['step { name: "a" node: "maybe" }', 'step { name: "b" node: "maybe" }']
    (message,) = _messages(found, _ensemble(*steps, _combine("AVERAGE")) + optional, "G010")
    assert "output 'PROBS' of graph 'g' must be in every answer, but it may be absent" in message
    assert [] == _messages(found, _ensemble(*steps, _member("c"), _combine("AVERAGE")) + optional, "G010")


def test_keyed_tensors_are_absent_with_their_member(found):
    """The tensor of a SOFT member keeps its doubt, that of a HARD one has none."""
    text = HEAD + _ensemble(_member("a"), _member("b", SOFT))
    (message,) = _messages(found, text, "G010")
    assert "output 'b.PROBS'" in message
    assert "give it a 'default' for 'PROBS'" in message
    default = "default { output: 'PROBS' number: [0, 0, 1] }"
    assert [] == found(HEAD + _ensemble(_member("a"), _member("b", f"{SOFT} {default}")))
    assert [] == found(HEAD + _ensemble(_member("a"), _member("b", SOFT), "quorum: 2"))


def test_only_first_of_several_combines_is_no_race(compiled):
    """Where outputs by other methods are not read, they are combined all the same: FIRST alone would be a race."""
    steps = [_member("a"), _member("b"), _combine("FIRST"), _combine("AVERAGE", "MEAN")]
    text = 'node { name: "root" sequence { step { node: "all" } } }' + _ensemble(*steps, name="all")
    node = compiled(text).root.steps[0].action
    assert [METHODS["FIRST"], METHODS["AVERAGE"]] == [combine.method for combine in node.combines]
    assert ["PROBS"] == [name for name, _ in node.outputs]


CUSTOM = 'custom { model_name: "judge" output_map { key: "VERDICT" value: "PROBS" } EXTRA }'


def test_a_model_combines(compiled):
    """CUSTOM: stack and mask in slots that the node fills, other inputs from the node, one output."""
    custom = CUSTOM.replace("EXTRA", "policy { timeout_ms: 9 retry { attempts: 2 } }")
    root = compiled(_ensemble(_member("a"), _member("b", SOFT), _combine("CUSTOM", extra=custom))).root
    (combine,) = root.combines
    assert combine.custom is not None
    assert {"PROBS": combine.stack, "MASK": combine.mask, "TEXT": 0} == dict(combine.custom.inputs)
    assert (Binding("VERDICT", combine.output),) == combine.custom.outputs
    assert {0, 1, 2, combine.stack, combine.mask, combine.output} == set(range(root.num_slots))
    assert isinstance(combine.custom.action, CallPlan)
    assert ("judge", 9, 2) == (combine.custom.name, combine.custom.timeout_ms, combine.custom.policies[0].attempts)
    specs = [root.specs[slot] for slot in (combine.stack, combine.mask)]
    assert [("FP32", (2, 3)), ("BOOL", (2,))] == [(spec.datatype, spec.dims) for spec in specs]
    assert (
        frozenset({("model", "xlmr"), ("model", "judge")})
        == compiled(
            _ensemble(_member("a"), _member("b"), _combine("CUSTOM", extra=CUSTOM.replace("EXTRA", "")))
        ).dependencies
    )


def test_inputs_of_a_combining_model_may_be_renamed(compiled):
    """`input_map` gives any input the combined tensor or an input of the node; a model without MASK has none."""
    renamed = """custom { model_name: "merge" output_map { key: "OUT" value: "PROBS" }
                 input_map [ { key: "LEFT" value: "S" }, { key: "RIGHT" value: "S" } ] }"""
    step = 'step { model_name: "xlmr" output_map { key: "PROBS" value: "S" } }'
    text = _ensemble(step, f'combine {{ output: "PROBS" from: "S" method: CUSTOM {renamed} }}')
    (combine,) = compiled(text).root.combines
    assert {"LEFT": combine.stack, "RIGHT": combine.stack} == dict(combine.custom.inputs)
    assert -1 == combine.mask


def test_what_a_combining_model_reads_is_an_input_of_the_node(compiled):
    """A node that declares none takes what its combining model needs beside what its steps need."""
    members = [_member("a", 'input_map { key: "TEXT" value: "T" }')]
    text = 'node { name: "root" sequence { step { node: "all" input_map { key: "T" value: "TEXT" } } } }'
    custom = _combine("CUSTOM", extra=CUSTOM.replace("EXTRA", ""))
    node = compiled(text + _ensemble(*members, custom, name="all")).root.steps[0].action
    assert ["T", "TEXT"] == sorted(name for name, _ in node.inputs)
