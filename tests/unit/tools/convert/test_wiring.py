"""Tensors of converted graphs: names, batches, optional inputs."""

from weft.base.text.pbtxt import parse
from weft.language import GraphSource, ModelCatalog
from weft.router.compile import check_graph
from weft.tools.convert.graphs import convert
from weft.tools.convert.signatures import Signatures
from weft.tools.convert.yaml_tree import Source
from weft_protos import graph_pb2 as pb


def kserve(kind: str, *steps: str, nodes: str = "") -> str:
    """An InferenceGraph with a root of the kind; every step is Hard."""
    given = ", ".join(f"{{{'' if 'dependency' in step else 'dependency: Hard, '}{step}}}" for step in steps)
    head = "apiVersion: serving.kserve.io/v1alpha1, kind: InferenceGraph, metadata: {name: g}"
    return f"{{{head}, spec: {{nodes: {{root: {{routerType: {kind}, steps: [{given}]}}{nodes}}}}}}}"


def seldon(graph: str) -> str:
    """A SeldonDeployment with one predictor."""
    head = "apiVersion: machinelearning.seldon.io/v1, kind: SeldonDeployment, metadata: {name: g}"
    return f"{{{head}, spec: {{predictors: [{{name: p, graph: {graph}}}]}}}}"


def converted(text: str, models: ModelCatalog | None) -> tuple[pb.Graph, list[str]]:
    """The graph, which passes the check if models are known, and the warnings."""
    source = Source(text, "f.yaml")
    ((_, written),) = convert(source, source.documents(), Signatures(models), "f").items()
    if models is not None:
        found = check_graph(GraphSource(written, "g"), models)
        assert [] == [d for d in found if d.severity == "error"]
    graph, _ = parse(written, pb.Graph(), file="g")
    return graph, [d.message for d in source.diagnostics]


def test_a_condition_of_one_row_is_told_only_where_there_can_be_several(models: ModelCatalog) -> None:
    """A request goes one way as a whole in KServe; not with batches of one, nor where all rows are asked together."""
    row, every = "condition: '[@this].#(FEATURES.0.1>2)'", "condition: 'instances.#(FEATURES>2)'"
    for model, test, is_told in (
        ("small", row, True),
        ("lone", row, False),
        ("flat", row, False),
        ("small", every, False),
    ):
        graph, found = converted(kserve("Switch", f"serviceName: {model}, {test}"), models)
        assert not graph.node[0].switch.per_row
        assert is_told == any("answers may differ: there a request of several rows" in text for text in found)
    assert "max(inputs.FEATURES) > 2.0" == graph.node[0].switch.step[0].when
    graph, _ = converted(kserve("Switch", f"serviceName: flat, {row}"), models)
    assert "inputs.FEATURES[0][1] > 2.0" == graph.node[0].switch.step[0].when


def test_a_step_that_nobody_reads_is_a_guard(models: ModelCatalog) -> None:
    """Steps of KServe's Sequence run in order whatever they read; only a Soft one may fail."""
    steps = (
        "serviceName: small, name: a, dependency: Hard",
        "serviceName: small, name: b, dependency: Soft",
        "serviceName: small, name: c",
    )
    graph, _ = converted(kserve("Sequence", *steps), models)
    given = [(step.name, list(step.after), step.dependency) for step in graph.node[0].sequence.step]
    assert [("a", [], 0), ("b", ["a"], 1), ("c", ["b"], 0)] == given


def test_a_graph_has_the_smallest_batch_of_its_models(models: ModelCatalog) -> None:
    """None where one model has none: then the other's batch dimension is one like any other."""
    graph, _ = converted(kserve("Splitter", "serviceName: small, weight: 50", "serviceName: large, weight: 50"), models)
    assert (8, [4]) == (graph.max_batch_size, list(graph.input[0].dims))
    graph, _ = converted(kserve("Splitter", "serviceName: small, weight: 50", "serviceName: flat, weight: 50"), models)
    assert (0, [-1, 4], [-1, 3]) == (graph.max_batch_size, list(graph.input[0].dims), list(graph.output[0].dims))


def test_an_optional_input_may_stay_open(models: ModelCatalog) -> None:
    """In a step that reads an answer without it; a graph's input is required where any step requires it."""
    graph, warnings = converted(
        kserve("Sequence", "serviceName: measure", "serviceName: large, data: $response"), models
    )
    assert ([], ["TEXT"]) == (warnings, [tensor.name for tensor in graph.input])
    graph, _ = converted(
        kserve("Splitter", "serviceName: large, weight: 50", "serviceName: strict, weight: 50"), models
    )
    assert [("FEATURES", False), ("LENGTH", False)] == [(tensor.name, tensor.optional) for tensor in graph.input]


def test_an_input_that_no_answer_has_is_told(models: ModelCatalog) -> None:
    """With what there is to choose from."""
    source = Source(kserve("Sequence", "serviceName: tokenizer", "serviceName: scorer, data: $response"), "f.yaml")
    convert(source, source.documents(), Signatures(models), "f")
    (found,) = source.diagnostics
    assert "nothing that the step reads is called 'INPUT'; map it from one of: 'IDS', 'MASK'" == found.message


def test_alternatives_without_a_common_output_are_told(models: ModelCatalog) -> None:
    """Each with what it gives."""
    text = kserve("Splitter", "serviceName: small, weight: 50", "serviceName: tokenizer, weight: 50")
    source = Source(text, "f.yaml")
    convert(source, source.documents(), Signatures(models), "f")
    first, second = (found.message for found in source.diagnostics)
    assert first.endswith("same name: 'small' gives 'PROBS'; 'tokenizer' gives 'IDS', 'MASK'")
    assert "the root's steps have no output in common; name them alike" == second


def test_a_field_is_a_tensor_of_an_answer_and_a_parameter_of_a_request() -> None:
    """A node that gets an answer, directly or through another node, asks that answer."""
    switch = "{routerType: Switch, steps: [{serviceName: m, condition: '[@this].#(target==\"blue\")'}]}"
    graph, _ = converted(kserve("Sequence", "nodeName: s", nodes=f", s: {switch}"), None)
    assert 'get(parameters, "target", "") == "blue"' == graph.node[1].switch.step[0].when
    graph, _ = converted(
        kserve("Sequence", "serviceName: m", "nodeName: s, data: $response", nodes=f", s: {switch}"), None
    )
    assert 'text(inputs.target) == "blue"' == graph.node[1].switch.step[0].when
    between = ", t: {routerType: Ensemble, steps: [{nodeName: s}]}"
    graph, _ = converted(
        kserve("Sequence", "serviceName: m", "nodeName: t, data: $response", nodes=f"{between}, s: {switch}"), None
    )
    assert 'text(inputs.target) == "blue"' == graph.node[2].switch.step[0].when


def test_children_before_a_chain_do_not_change_what_it_reads(models: ModelCatalog) -> None:
    """Seldon's first child is a chain of two and answers; the second is called, and its failure is the graph's."""
    chain = "{name: cleaner, type: TRANSFORMER, children: [{name: scorer, type: MODEL}]}"
    graph, _ = converted(
        seldon(f"{{name: cleaner, type: TRANSFORMER, children: [{chain}, {{name: scorer, type: MODEL}}]}}"), models
    )
    first, other, second, last = graph.node[0].sequence.step
    assert ([other.name], {"INPUT": "cleaner_TEXT"}) == (
        list(graph.node[0].sequence.answer_after),
        dict(other.input_map),
    )
    assert {"TEXT": "cleaner_TEXT"} == dict(first.output_map) == dict(second.input_map)
    assert {"INPUT": dict(second.output_map)["TEXT"]} == dict(last.input_map)
