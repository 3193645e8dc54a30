"""The plan that a good file becomes."""

from dataclasses import replace
from pathlib import Path

import pytest

from weft.base.errors import InvalidArgumentError
from weft.language import GraphError, GraphSource, model_config
from weft.language.dialects import TRITON
from weft.language.plan import Binding, CallPlan, NodePlan
from weft.router.combine import METHODS
from weft.router.compile import check_graph, compile_graph
from weft.router.operators.ensemble import CombinePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.switch import SwitchPlan

GOOD = Path(__file__).parent / "good"
IO = """
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "PROBS" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


def _node(step):
    assert isinstance(step.action, NodePlan)
    return step.action


def test_a_sequence_knows_who_waits_for_whom(compiled):
    """Dependencies follow the tensors: lid -> clf -> post, each with the slots that it reads and writes."""
    root = compiled("languages").root
    assert isinstance(root, SequencePlan)
    assert [("lid", (1,), 0), ("clf", (2,), 1), ("post", (), 1)] == [
        (step.name, step.consumers, step.num_dependencies) for step in root.steps
    ]
    assert (Binding("TEXT", 0),) == root.inputs == root.steps[0].inputs
    assert (Binding("LANG", 1),) == root.steps[0].outputs
    assert {Binding("TEXT", 0), Binding("LANG", 1)} == set(root.steps[1].inputs)
    assert (Binding("P", 2),) == root.steps[2].inputs
    assert (Binding("LABEL", 3), Binding("PROBS", 2)) == root.outputs
    assert 4 == root.num_slots


def test_a_node_in_a_step_has_a_frame_of_its_own(compiled):
    """Inputs of a nested node take its first slots, in order; every alternative writes the slot of the output."""
    switch = _node(compiled("languages").root.steps[1])
    assert isinstance(switch, SwitchPlan)
    assert [0, 1] == [slot for _, slot in switch.inputs]
    assert ["LANG", "TEXT"] == sorted(name for name, _ in switch.inputs)
    assert (Binding("PROBS", 2),) == switch.outputs
    assert {(Binding("PROBS", 2),)} == {step.outputs for step in switch.steps}
    assert 3 == switch.num_slots


def test_branches_of_a_switch(compiled):
    """Cases, tests and otherwise are where the file has them; unnamed steps are named by their first case."""
    switch = _node(compiled("languages").root.steps[1])
    assert ["long", "de", "en", "rest"] == [step.name for step in switch.steps]
    assert [(), ("de", "nl"), ("en",), ()] == [step.cases for step in switch.steps]
    assert [False, False, False, True] == [step.is_otherwise for step in switch.steps]
    assert "size(text(inputs.TEXT)) > 4000" == switch.steps[0].when.source
    assert 'get(parameters, "lang", text(inputs.LANG))' == switch.on.source
    assert ["LANG"] == [name for name, _ in switch.on.tensors]


def test_paths_show_the_way_from_the_root(compiled):
    """A path has a slash for a step of a sequence and brackets for an alternative."""
    clf = compiled("languages").root.steps[1]
    assert "root/clf" == clf.path
    assert "root/clf/by_language" == _node(clf).path
    assert "root/clf/by_language[de]" == _node(clf).steps[1].path


def test_limits_are_where_the_file_has_them(compiled):
    """Timeouts of graph, node and step, and the limit of requests in flight, reach the plan."""
    plan = compiled("languages")
    assert (400, 64) == (plan.timeout_ms, plan.max_inflight)
    assert 30 == plan.root.steps[0].timeout_ms
    assert 200 == _node(plan.root.steps[1]).timeout_ms


def test_the_signature_is_what_clients_see(compiled):
    """Name, platform, batch size, inputs and outputs are the file's; dependencies name target and model."""
    plan = compiled("languages")
    signature = plan.signature
    assert ("languages", "1", "graph", 32) == (
        signature.name, signature.version, signature.platform, signature.max_batch_size
    )  # fmt: skip
    assert [("TEXT", "BYTES", (1,))] == [(spec.name, spec.datatype, spec.dims) for spec in signature.inputs]
    assert ["LABEL", "PROBS"] == [spec.name for spec in signature.outputs]
    assert ("model", "bert_de") in plan.dependencies
    assert 6 == len(plan.dependencies)
    assert {0: "TEXT", 1: "LANG", 2: "PROBS", 3: "LABEL"} == {slot: spec.name for slot, spec in plan.root.specs.items()}


def test_a_splitter_has_weights_salt_and_key(compiled):
    """Weights, salt and key are the file's; versions are sent as it says."""
    splitter = _node(compiled("shares").root.steps[1])
    assert [90.0, 9.0, 1.0] == [step.weight for step in splitter.steps]
    assert ("resnet-vs-convnext", 'get(headers, "x-user-id", request.id)') == (
        splitter.salt, splitter.sticky_by.source
    )  # fmt: skip
    assert ["3", "", ""] == [step.action.model_version for step in splitter.steps]
    assert (0, 80, 0) == tuple(step.timeout_ms for step in splitter.steps)


def test_members_of_an_ensemble_have_slots_of_their_own(compiled):
    """Each combine reads one slot of each member; CONCAT counts its axis from the end."""
    plan = compiled("votes")
    vote, concat = plan.root.combines
    assert CombinePlan(8, METHODS["VOTE"], ((0, 2), (1, 4), (2, 6)), is_weighted=True) == vote
    assert CombinePlan(9, METHODS["CONCAT"], ((0, 3), (1, 5), (2, 7)), axis=-1) == concat
    assert (Binding("LABEL", 6), Binding("PROB", 7)) == plan.root.steps[2].outputs
    assert (Binding("LABEL", 8), Binding("SCORES", 9)) == plan.root.outputs
    assert [2.0, 1.0, 1.0] == [step.weight for step in plan.root.steps]


def test_outputs_that_are_not_declared_are_inferred(compiled):
    """A keyed ensemble at the root gives every tensor of every step, named by step."""
    plan = compiled("inferred")
    shown = [(spec.name, spec.datatype, spec.dims) for spec in plan.signature.outputs]
    assert [
        ("a.LABEL", "INT64", (1,)), ("a.SCORE", "FP32", (1,)), ("b.CLASS", "BYTES", (1,)), ("b.SCORE", "FP32", (2,))
    ] == shown  # fmt: skip
    assert [slot for _, slot in plan.root.outputs] == [slot for c in plan.root.combines for _, slot in c.sources]


def test_another_graph_is_inlined(compiled):
    """A step that names a graph, by import or as a model, becomes that graph's root, with its name and timeout."""
    steps = compiled("nested").root.steps
    assert ["inner/7", "inner/7"] == [_node(step).graph for step in steps]
    assert [50, 50] == [_node(step).timeout_ms for step in steps]
    assert "root/one/root[xlmr]" == _node(steps[0]).steps[0].path
    assert [("PROBS", 1)] == [tuple(binding) for binding in steps[0].outputs]


def test_an_optional_input_is_bound_where_it_may_be_absent(compiled):
    """The slot of an optional input is bound; the executor leaves it out when it is absent."""
    plan = compiled("optional")
    assert [False, True] == [spec.is_optional for spec in plan.signature.inputs]
    assert {Binding("TEXT", 0), Binding("HINT", 1)} == set(plan.root.steps[1].inputs)


def test_a_triton_ensemble_is_a_graph(compiled):
    """Steps of a Triton Inference Server ensemble may stand in any order; data dependencies make the sequence."""
    plan = compiled("ensemble_pipeline")
    assert plan.dialect is TRITON
    assert "ensemble" == plan.signature.platform
    assert [("resnet50", (), 1), ("decode_resize", (0,), 0)] == [
        (step.name, step.consumers, step.num_dependencies) for step in plan.root.steps
    ]


def test_steps_that_nothing_reads_are_left_out(compiled, catalog):
    """A step without readers is not in the plan; of a nested node only outputs that are read are kept."""
    text = f"""name: "g" max_batch_size: 8 {IO} node {{ name: "root" sequence {{
      step {{ name: "clf" node: "both" }}
      step {{ name: "lid" model_name: "lang_id" output_map {{ key: "LANG" value: "L" }} }} }} }}
      node {{ name: "both" sequence {{ step {{ model_name: "xlmr" }} step {{ name: "x" model_name: "lang_id" }} }} }}"""
    plan = compiled(text)
    assert ["clf"] == [step.name for step in plan.root.steps]
    assert ["xlmr"] == [step.name for step in _node(plan.root.steps[0]).steps]
    assert ["warning"] == [found.severity for found in check_graph(GraphSource(text, "g.pbtxt"), catalog)]


def test_input_map_gives_a_tensor_to_a_node_under_another_name(compiled):
    """The node's input TEXT is the caller's LANG, although the caller has a TEXT too."""
    text = f"""name: "g" max_batch_size: 8 {IO} node {{ name: "root" sequence {{
      step {{ name: "a" model_name: "lang_id" }}
      step {{ name: "b" node: "inner" input_map {{ key: "TEXT" value: "LANG" }} }} }} }}
      node {{ name: "inner" sequence {{ step {{ model_name: "xlmr" }} }} }}"""
    root = compiled(text).root
    assert (Binding("TEXT", 1),) == root.steps[1].inputs


def test_steps_of_one_model_get_different_names(compiled):
    """Unnamed steps of the same model are told apart by a number."""
    text = f"""name: "g" max_batch_size: 8 {IO} node {{ name: "root" splitter {{
      step {{ model_name: "xlmr" }} step {{ model_name: "xlmr" }} step {{ model_name: "xlmr" }} }} }}"""
    assert ["xlmr", "xlmr-2", "xlmr-3"] == [step.name for step in compiled(text).root.steps]


def test_a_node_is_compiled_for_each_step_that_runs_it(compiled):
    """Two steps that run one node have two plans, each with its path."""
    text = f"""name: "g" max_batch_size: 8 {IO} node {{ name: "root" splitter {{
      step {{ name: "a" node: "n" }} step {{ name: "b" node: "n" }} }} }}
      node {{ name: "n" sequence {{ step {{ model_name: "xlmr" }} }} }}"""
    assert ["root[a]/n", "root[b]/n"] == [_node(step).path for step in compiled(text).root.steps]


def test_model_config_shows_the_graph_without_its_own_fields(catalog):
    """It has the fields that models have, the name, and outputs that were inferred; nodes are not in it."""
    source = GraphSource((GOOD / "inferred.pbtxt").read_text(), "g.pbtxt", "inferred", "2")
    config = model_config(source, compile_graph(source, catalog))
    assert ("inferred", "graph", 8) == (config.name, config.platform, config.max_batch_size)
    assert ["a.LABEL", "a.SCORE", "b.CLASS", "b.SCORE"] == [output.name for output in config.output]
    assert b"xgb" not in config.SerializeToString()


def test_model_config_of_an_ensemble_is_its_file(catalog, graphs):
    """An ensemble keeps its scheduling and its parameters."""
    source = GraphSource((GOOD / "ensemble_pipeline.pbtxt").read_text(), "config.pbtxt", "ensemble_pipeline")
    config = model_config(source, compile_graph(source, catalog, graphs))
    assert ["resnet50", "decode_resize"] == [step.model_name for step in config.ensemble_scheduling.step]
    assert "vision" == config.parameters["owner"].string_value


def test_the_name_must_be_that_of_the_folder(catalog):
    """A file that names another graph than its folder is refused."""
    source = GraphSource((GOOD / "votes.pbtxt").read_text(), "g.pbtxt", "vote")
    with pytest.raises(GraphError, match="the file says 'votes', but its folder is 'vote'"):
        compile_graph(source, catalog)


def test_a_graph_error_is_an_invalid_argument_with_every_error(catalog):
    """The message shows each error with place and caret, warnings left out."""
    source = GraphSource((GOOD.parent / "bad" / "g013_cases.pbtxt").read_text(), "g.pbtxt")
    with pytest.raises(InvalidArgumentError) as caught:
        compile_graph(source, catalog)
    assert 7 == caught.value.message.count("[G013]")


def test_nodes_cannot_be_nested_without_end(catalog):
    """More than 32 nodes inside one another are refused, not compiled until the stack ends."""
    nodes = "".join(f'node {{ name: "n{i}" sequence {{ step {{ node: "n{i + 1}" }} }} }}\n' for i in range(200))
    last = 'node { name: "n200" sequence { step { model_name: "xlmr" } } }'
    text = f'name: "g" root: "n0" max_batch_size: 8 {IO} {nodes} {last}'
    found = check_graph(GraphSource(text, "g.pbtxt"), catalog)
    assert ["G024"] == [one.code for one in found]
    assert "nested deeper than 32" in found[0].message


def test_a_plan_cannot_grow_without_end(catalog):
    """Nodes that each run the next one twice are refused at 1000 nodes, not compiled 2 to the power of 24 times."""
    nodes = "".join(
        f'node {{ name: "n{i}" splitter {{ step {{ node: "n{i + 1}" }} step {{ node: "n{i + 1}" }} }} }}\n'
        for i in range(24)
    )
    last = 'node { name: "n24" sequence { step { model_name: "xlmr" } } }'
    text = f'name: "g" root: "n0" max_batch_size: 8 {IO} {nodes} {last}'
    found = check_graph(GraphSource(text, "g.pbtxt"), catalog)
    assert ["G024"] == [one.code for one in found]
    assert "expands to more than 1000" in found[0].message


def test_keyed_ensembles_of_ensembles_are_bounded(catalog):
    """Outputs that multiply with each keyed ensemble are refused at 1000."""
    steps = " ".join(f'step {{ name: "s{k}" node: "NEXT" }}' for k in range(8))
    nodes = "".join(f'node {{ name: "n{i}" ensemble {{ {steps.replace("NEXT", f"n{i + 1}")} }} }}\n' for i in range(10))
    text = (
        f'name: "g" root: "n0" max_batch_size: 8 input {{ name: "TEXT" data_type: TYPE_STRING dims: 1 }} {nodes} '
        'node { name: "n10" sequence { step { model_name: "xlmr" } } }'
    )
    found = check_graph(GraphSource(text, "g.pbtxt"), catalog)
    assert any("more than 1000 outputs" in one.message for one in found)


def test_a_file_of_too_many_steps_is_refused(catalog):
    """A node of 1001 steps is refused before anything is compiled."""
    steps = 'step { model_name: "xlmr" } ' * 1001
    found = check_graph(GraphSource(f'name: "g" node {{ name: "root" splitter {{ {steps} }} }}', "g.pbtxt"), catalog)
    assert ["G024"] == [one.code for one in found]


def test_an_unbatched_graph_over_a_batching_model(catalog):
    """A model that batches fits a graph that does not by its dims alone, as Triton Inference Server has it."""
    text = f'name: "g" {IO} node {{ name: "root" sequence {{ step {{ model_name: "xlmr" }} }} }}'
    plan = compile_graph(GraphSource(text, "g.pbtxt"), catalog)
    assert isinstance(plan.root.steps[0].action, CallPlan)
    assert 0 == plan.signature.max_batch_size


def test_a_plan_is_immutable(compiled):
    """Neither graph nor node can be changed after compilation."""
    plan = compiled("votes")
    with pytest.raises(AttributeError):
        plan.timeout_ms = 3
    assert plan == replace(plan)
