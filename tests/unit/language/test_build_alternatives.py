"""Cascades, rows that go their own ways, and bandits."""

import pytest

from weft.language.bandit_algorithms import ALGORITHMS, BanditPlan
from weft.language.plan import Binding
from weft.router.operators.cascade import CascadePlan


def _cascade(*steps, extra=""):
    return f'node {{ name: "root" cascade {{ {extra} {" ".join(steps)} }} }}'


SURE = 'step { name: "tiny" model_name: "sure" accept: \'outputs.SURE[0] && max(outputs.PROBS) > 0.9\' }'
LAST = 'step { name: "large" model_name: "xlmr" }'


def test_every_step_of_a_cascade_offers_the_nodes_outputs(compiled):
    """Outputs share slots; `accept` reads the step's own outputs after 'output_map'."""
    root = compiled("moderate").root
    assert isinstance(root, CascadePlan)
    assert root.per_row
    assert {(Binding("PROBS", 1),)} == {step.outputs for step in root.steps}
    assert [(Binding("PROBS", 1),), (Binding("PROBS", 1),), None] == [
        step.accept and step.accept.tensors for step in root.steps
    ]
    assert [None, 'get(parameters, "tier", "std") != "free"', None] == [
        step.when and step.when.source for step in root.steps
    ]
    assert [(False, 0), (False, 0), (True, 250)] == [(step.is_soft, step.min_remaining_ms) for step in root.steps]


def test_accept_may_read_what_is_no_output_of_the_node(compiled):
    """Such a tensor gets a slot of its own and is requested."""
    root = compiled(_cascade(SURE, LAST)).root
    tiny, large = root.steps
    assert {Binding("PROBS", 1), Binding("SURE", 2)} == set(tiny.outputs) == set(tiny.accept.tensors)
    assert (Binding("PROBS", 1),) == large.outputs == root.outputs
    assert (3, "SURE") == (root.num_slots, root.specs[2].name)


def test_accept_reads_outputs_that_the_caller_does_not(compiled):
    """What the node's caller leaves out is still there for `accept`."""
    text = """node { name: "root" sequence { step { node: "c" output_map { key: "SURE" value: "S" } } } }
      node { name: "c" cascade { step { name: "a" model_name: "sure" accept: 'outputs.SURE[0]' }
                                 step { name: "b" model_name: "sure" } } }"""
    cascade = compiled(text).root.steps[0].action
    assert ["PROBS"] == [name for name, _ in cascade.outputs]
    assert [["PROBS", "SURE"], ["PROBS"]] == [[name for name, _ in step.outputs] for step in cascade.steps]


@pytest.mark.parametrize(
    ("accept", "code", "message"),
    [
        ("max(outputs.PROS) > 0.5", "G011", "unknown tensor 'PROS'; did you mean 'PROBS'?"),
        ("max(outputs.PROBS)", "G011", "'accept' must be bool, this is double"),
        ("steps.large.ok", "G011", "step 'large' stands later"),
        ("text(outputs.PROBS) == ''", "G011", "text() takes a BYTES tensor; 'PROBS' is FP32 [-1,3]"),
    ],
)
def test_what_is_wrong_with_accept(found, accept, code, message):
    """Errors are those of every condition."""
    step = f'step {{ name: "tiny" model_name: "sure" accept: \'{accept}\' }}'
    assert any(message in one.message for one in found(_cascade(step, LAST)) if one.code == code)


def test_a_fallback_gives_what_accept_reads(found):
    """A fallback stands in for every output that is used."""
    step = SURE.replace("accept", 'fallback { model_name: "xlmr" } accept')
    (one,) = found(_cascade(step, LAST))
    assert ("G017", True) == (one.code, "gives no 'SURE'" in one.message)


def test_later_steps_of_a_cascade_may_ask_whether_earlier_ones_answered(compiled):
    """steps.X.ok has a slot; an accept may ask too."""
    step = 'step { name: "large" model_name: "xlmr" when: \'steps.tiny.ok\' }'
    tiny, large = compiled(_cascade(SURE, step)).root.steps
    assert (Binding("steps.tiny.ok", tiny.ok_slot),) == large.when.tensors
    assert -1 == large.ok_slot


def test_a_cascade_without_an_answer_fails_hence_outputs_are_there(found):
    """Steps that are soft or skipped do not make the cascade's outputs doubtful."""
    steps = (
        'step { name: "a" dependency: SOFT model_name: "xlmr" accept: \'max(outputs.PROBS) > 0.5\' }',
        'step { name: "b" when: \'request.priority == 1\' model_name: "xlmr" }',
    )
    assert [] == found(_cascade(*steps))


@pytest.mark.parametrize("kind", ["switch", "cascade"])
def test_rows_need_a_batch_dimension(found, kind):
    """per_row is refused in a graph without one, and where a tensor of the node has none; both ends are named."""
    first = "when: 'request.priority == 1'" if kind == "switch" else "accept: 'max(outputs.PROBS) > 0.5'"
    last = "otherwise: true" if kind == "switch" else ""
    node = f"""node {{ name: "root" {kind} {{ per_row: true
      step {{ name: "a" model_name: "xlmr" {first} }} step {{ name: "b" model_name: "MODEL" {last} }} }} }}"""
    assert [] == found(node.replace("MODEL", "xlmr"))
    head = 'name: "g" input { name: "TEXT" data_type: TYPE_STRING dims: 1 } '
    (one,) = [one for one in found(head + node.replace("MODEL", "xlmr")) if one.severity == "error"]
    assert ("G023", True) == (one.code, "graph 'g' has none; give it a 'max_batch_size'" in one.message)
    messages = [one.message for one in found(node.replace("MODEL", "single")) if one.code == "G023"]
    assert [True] == ["'PROBS' is FP32 [3] and has none" in one and "model 'single'" in one for one in messages]


def test_a_bandit_reaches_the_plan(compiled):
    """Weights are the prior; epsilon is 0.1 where none is given."""
    text = """node { name: "root" splitter { bandit { ALGORITHM min_pulls: 5 }
      step { name: "a" weight: 2 model_name: "xlmr" } step { name: "b" weight: 1 model_name: "bert_de" } } }"""
    plain = compiled(text.replace("ALGORITHM", "")).root
    assert BanditPlan(ALGORITHMS["EPSILON_GREEDY"], 0.1, 5) == plain.bandit
    assert [2.0, 1.0] == [step.weight for step in plain.steps]
    assert (
        BanditPlan(ALGORITHMS["EXP3"], 0.25, 5)
        == compiled(text.replace("ALGORITHM", "algorithm: EXP3 epsilon: 0.25")).root.bandit
    )
    assert None is compiled(text.replace("bandit { ALGORITHM min_pulls: 5 }", "")).root.bandit


@pytest.mark.parametrize("name", ["sentiment", "classify", "fraud_vote", "moderate", "nested", "votes"])
def test_every_slot_of_every_node_is_known(compiled, name):
    """Datatype and dims of what each slot holds are in the plan, for tools that draw it."""
    waiting = [compiled(name).root]
    while waiting:
        node = waiting.pop()
        assert set(range(node.num_slots)) == set(node.specs)
        assert all(spec.name and spec.datatype and spec.dims for spec in node.specs.values())
        waiting += [step.action for step in (*node.steps, *node.shadows) if hasattr(step.action, "steps")]
