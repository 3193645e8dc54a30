"""Files of KServe and Seldon that say something wrong: where, what, and the cure."""

from itertools import pairwise

import pytest

from weft.base.text.pbtxt import parse
from weft.language import ModelCatalog
from weft.tools.convert.graphs import convert
from weft.tools.convert.signatures import Signatures
from weft.tools.convert.yaml_tree import Source
from weft_protos import graph_pb2 as pb


def kserve(nodes: str, *, spec: str = "") -> str:
    """An InferenceGraph whose nodes begin at line 2, column 2."""
    head = "apiVersion: serving.kserve.io/v1alpha1, kind: InferenceGraph, metadata: {name: g}"
    return f"{{{head}, spec: {{{spec} nodes:\n {nodes}}}}}"


def seldon(graph: str, *, more: str = "") -> str:
    """A SeldonDeployment whose graph begins at line 2, column 2."""
    head = "apiVersion: machinelearning.seldon.io/v1, kind: SeldonDeployment, metadata: {name: g}"
    return f"{{{head}, spec: {{predictors: [{{name: p{more}, graph:\n {graph}}}]}}}}"


def converted(text: str, models: ModelCatalog | None = None) -> tuple[dict[str, str], list[tuple[int, int, str, str]]]:
    """What is written, and what is found."""
    source = Source(text, "f.yaml")
    texts = convert(source, source.documents(), Signatures(models), "f")
    return texts, [(d.line, d.column, d.severity, d.message) for d in source.diagnostics]


def check_fault(text: str, place: tuple[int, int] | None, message: str) -> None:
    """Nothing is written, and there is an error with this message, there if a place is given."""
    texts, found = converted(text)
    assert {} == texts
    errors = [(line, column) for line, column, severity, text in found if severity == "error" and message in text]
    assert errors, found
    assert place in (None, errors[0])


def chain(length: int) -> str:
    """Nodes that call one another, `length` deep."""
    names = ["root", *(f"n{i}" for i in range(length))]
    nodes = [f"{a}: {{routerType: Sequence, steps: [{{nodeName: {b}}}]}}" for a, b in pairwise(names)]
    return "{" + ", ".join([*nodes, f"{names[-1]}: {{routerType: Sequence, steps: [{{serviceName: m}}]}}"]) + "}"


STEP = "{serviceName: m}"


@pytest.mark.parametrize(
    ("nodes", "place", "message"),
    [
        ("{}", (2, 2), "there is no node 'root', which is where KServe begins"),
        ("[]", (2, 2), "nodes must be a mapping, got a list"),
        ("{rot: {routerType: Sequence, steps: [" + STEP + "]}}", (2, 2), "did you mean 'rot'?"),
        ("{root: {steps: [" + STEP + "]}}", (2, 9), "node 'root' has no 'routerType'"),
        ("{root: {routerType: sequence, steps: [" + STEP + "]}}", (2, 22), "did you mean 'Sequence'?"),
        ("{root: {routerType: Switch}}", (2, 9), "node 'root' has no 'steps'"),
        ("{root: {routerType: Switch, steps: 3}}", (2, 37), "steps must be a list, got a string"),
        ("{root: {routerType: Sequence, steps: [x]}}", (2, 40), "a step must be a mapping, got a string"),
        ("{root: {routerType: Sequence, steps: [{name: a}]}}", (2, 40), "this one has none"),
        (
            "{root: {routerType: Sequence, steps: [{serviceName: a, nodeName: root}]}}",
            (2, 67),
            "cycle: root -> root; KServe would call it without end",
        ),
        (
            "{root: {routerType: Sequence, steps: [{serviceName: a, serviceUrl: http://b}]}}",
            (2, 40),
            "this one has serviceName and serviceUrl",
        ),
        ("{root: {routerType: Sequence, steps: [{service: a}]}}", (2, 40), "the spelling of KServe before 0.9"),
        (
            "{root: {routerType: Sequence, steps: [{nodeName: a}]}, "
            "a: {routerType: Switch, steps: [{nodeName: root}]}}",
            (2, 100),
            "cycle: root -> a -> root",
        ),
        ("{root: {routerType: Sequence, steps: [{nodeName: rooot}]}}", (2, 51), "'rooot'; did you mean 'root'?"),
        ("{root: {routerType: Splitter, steps: [" + STEP + "]}}", (2, 40), "step 'm' of a Splitter has no weight"),
        ("{root: {routerType: Splitter, steps: [{serviceName: m, weight: -5}]}}", (2, 65), "weight -5 is below 0"),
        ("{root: {routerType: Splitter, steps: [{serviceName: m, weight: x}]}}", (2, 65), "must be a number, got 'x'"),
        ("{root: {routerType: Sequence, steps: [{serviceName: m, dependency: soft}]}}", (2, 69), "mean 'Soft'?"),
        ("{root: {routerType: Sequence, steps: [" + ", ".join([STEP] * 1001) + "]}}", (2, 9), "has 1001 steps"),
        (chain(40), None, "nodes are nested deeper than 32"),
    ],
)  # fmt: skip
def test_an_inference_graph_that_is_wrong(nodes: str, place: tuple[int, int] | None, message: str) -> None:
    """The error is at the value that is wrong."""
    check_fault(kserve(nodes), place, message)


@pytest.mark.parametrize(
    ("graph", "place", "message"),
    [
        ("{type: MODEL}", (2, 2), "the unit has no 'name'"),
        ("[]", (2, 2), "a unit of the graph must be a mapping, got a list"),
        ("{name: a, type: MODLE}", (2, 18), "unknown type 'MODLE'; did you mean 'MODEL'?"),
        ("{name: a, type: ROUTER}", (2, 2), "router 'a' has no 'children'"),
        ("{name: a, type: COMBINER}", (2, 2), "combiner 'a' has no 'children'"),
        ("{name: a, implementation: RANDOM_ABTEST, children: [{name: b}, {name: c}]}", (2, 2), "no parameter 'ratioA'"),
        (
            "{name: a, implementation: RANDOM_ABTEST, parameters: [{name: ratioA, value: '1.5'}], children: "
            "[{name: b}, {name: c}]}",
            (2, 78),
            "ratioA is 1.5; it must be above 0 and below 1",
        ),
        (
            "{name: a, implementation: RANDOM_ABTEST, parameters: [{name: ratioA, value: 0.5}], children: [{name: b}]}",
            (2, 2),
            "RANDOM_ABTEST has 2 children, this one has 1",
        ),
        ("{name: a, children: [" + ", ".join(["{name: m}"] * 1001) + "]}", None, "more than 1000 units"),
    ],
)
def test_a_seldon_deployment_that_is_wrong(graph: str, place: tuple[int, int] | None, message: str) -> None:
    """The error is at the value that is wrong."""
    check_fault(seldon(graph), place, message)


def pipeline(spec: str, kind: str = "Pipeline") -> str:
    """An object of Seldon Core 2 whose spec begins at line 2, column 2."""
    return f"{{apiVersion: mlops.seldon.io/v1alpha1, kind: {kind}, metadata: {{name: g}}, spec:\n {spec}}}"


@pytest.mark.parametrize(
    ("spec", "place", "message"),
    [
        ("{}", (2, 2), "the Pipeline has no 'steps'"),
        ("{steps: [3]}", (2, 11), "a step must be a mapping, got a string"),
        ("{steps: [{inputs: [a]}]}", (2, 11), "the step has no 'name'"),
        ("{steps: [{name: g}]}", (2, 18), "step 'g' has the name of its pipeline"),
        ("{steps: [{name: a.b}]}", (2, 18), "has a '.' in its name, which divides references"),
        ("{steps: [{name: a}, {name: a}]}", (2, 29), "a second step is called 'a'"),
        ("{steps: [{name: a, inputs: [~]}]}", (2, 30), "an entry of inputs is empty"),
        ("{steps: [{name: aa, inputs: [ab]}]}", (2, 31), "no step is called 'ab'; use one of: aa"),
        ("{steps: [{name: a, inputs: [g.input.X]}]}", (2, 30), "'g.input.X' is no reference"),
        ("{steps: [{name: a, inputs: [g.outputs]}]}", (2, 30), "is what the pipeline answers"),
        ("{steps: [{name: a, inputs: [b]}, {name: b, inputs: [a]}]}", (1, 1), "cycle: a -> b -> a; Weft has bounded"),
        ("{steps: [{name: a, inputsJoinType: most}]}", (2, 37), "unknown inputsJoinType 'most'"),
        ("{steps: [{name: a, tensorMap: {g.inputs: x}}]}", (2, 43), "names no tensor"),
        ("{steps: [{name: a}], output: {steps: [g.inputs.X]}}", (2, 40), "answers with its own input"),
        ("{steps: [{name: a}], input: {}}", (2, 30), "has no 'externalInputs'"),
        ("{steps: [{name: a}], input: {externalInputs: [p.step.s.outputs]}}", (2, 48), "put it here too"),
        ("{steps: [" + ", ".join(f"{{name: m{i}}}" for i in range(1001)) + "]}", (2, 2), "has 1001 steps"),
        (
            "{steps: [{name: m0}, "
            + ", ".join(f"{{name: m{i + 1}, inputs: [m{i}.inputs]}}" for i in range(40))
            + "], output: {steps: [m40]}}",
            None,
            "references are nested deeper than 32",
        ),
    ],
)
def test_a_pipeline_that_is_wrong(spec: str, place: tuple[int, int] | None, message: str) -> None:
    """The error is at the value that is wrong."""
    check_fault(pipeline(spec), place, message)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{}", "the Experiment has no 'candidates'"),
        ("{candidates: [{weight: 3}]}", "a candidate has no 'name'"),
        ("{candidates: [{name: a, weight: -3}]}", "weight -3 is below 0"),
        ("{candidates: [{name: a, weight: 1}, {name: a, weight: 1}]}", "'a' takes part twice"),
        ("{candidates: [{name: a, weight: 1}], default: b}", "the default 'b' is none of the candidates"),
        ("{candidates: [{name: a, weight: 1}], mirror: {name: b, percent: 101}}", "between 0 and 100"),
        ("{candidates: [{name: a, weight: 1}], resourceType: pipe}", "unknown resourceType 'pipe'"),
    ],
)
def test_an_experiment_that_is_wrong(spec: str, message: str) -> None:
    """The error says why."""
    check_fault(pipeline(spec, "Experiment"), None, message)


def test_pipelines_of_one_file_read_one_another(models: ModelCatalog) -> None:
    """The steps of the other are called in the same graph, once; an experiment splits between the two graphs."""
    left = pipeline("{steps: [{name: adder}], output: {steps: [adder]}}").replace("name: g}", "name: left}")
    right = pipeline(
        "{input: {externalInputs: [left.step.adder.outputs], externalTriggers: [left.outputs], tensorMap: "
        "{left.step.adder.outputs.OUTPUT0: INPUT0, left.step.adder.outputs.OUTPUT1: INPUT1}}, "
        "steps: [{name: adder2}], output: {steps: [adder2]}}"
    ).replace("name: g}", "name: right}")
    both = pipeline(
        "{resourceType: pipeline, candidates: [{name: left, weight: 1}, {name: right, weight: 1}]}", "Experiment"
    )
    texts, found = converted("\n---\n".join([both, left, right]), models)
    assert [] == found
    graphs = {name: parse(text, pb.Graph(), file="g")[0] for name, text in texts.items()}
    assert ["g", "left", "right"] == sorted(graphs)
    assert ["adder", "adder2"] == [step.model_name for step in graphs["right"].node[0].sequence.step]
    assert ["left", "right"] == [step.graph for step in graphs["g"].node[0].splitter.step]
    assert (
        ["INPUT0", "INPUT1"] == [one.name for one in graphs["g"].input] == [one.name for one in graphs["right"].input]
    )


@pytest.mark.parametrize(
    "text",
    [
        "{apiVersion: serving.kserve.io/v1alpha1, kind: InferenceGraph}",
        "{apiVersion: serving.kserve.io/v1alpha1, kind: InferenceGraph, metadata: [], spec: 3}",
        "{apiVersion: serving.kserve.io/v1alpha1, kind: InferenceGraph, metadata: {name: [1]}, spec: {nodes: }}",
        "{apiVersion: machinelearning.seldon.io/v1, kind: SeldonDeployment, spec: {predictors: [3, ~]}}",
        "{apiVersion: machinelearning.seldon.io/v1, kind: SeldonDeployment, spec: {predictors: [{name: p}]}}",
        seldon("{name: m}", more=", shadow: true").replace(
            "predictors: [", "predictors: [{graph: {name: x}, shadow: yes},"
        ),
    ],
)
def test_what_is_hollow_is_an_error_not_a_crash(text: str) -> None:
    """Missing and wrong parts of the object around the graph."""
    texts, found = converted(text)
    assert {} == texts
    assert any(severity == "error" for _, _, severity, _ in found)


def test_every_error_is_told_at_once() -> None:
    """In every node and step, beside an unknown node, a cycle and an unknown kind."""
    nodes = (
        "{root: {routerType: Sequence, steps: [{name: a}, {nodeName: b}, {serviceName: m, dependency: Firm}]}, "
        "b: {routerType: Splitter, steps: [{serviceName: m}, {nodeName: c, weight: 1}, {nodeName: d, weight: 1}]}, "
        "c: {routerType: Sequense, steps: [{nodeName: root}, {name: x}]}}"
    )
    _, found = converted(kserve(nodes))
    errors = [message for _, _, severity, message in found if severity == "error"]
    wrong = ("this one has none", "'Firm'", "no weight", "unknown node 'd'", "cycle: root -> b -> c", "'Sequense'")
    assert [2, 1, 1, 1, 1, 1] == [sum(text in message for message in errors) for text in wrong]
    assert 7 == len(errors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (kserve("{root: {routerType: Sequence, steps: [" + STEP + "]}}", spec="timeuot: 5,"), "'timeuot' of the"),
        (kserve("{root: {routerTypo: x, routerType: Sequence, steps: [{serviceName: m}]}}"), "'routerTypo' of node"),
        (kserve("{root: {routerType: Sequence, steps: [{serviceName: m, nam: x}]}}"), "did you mean 'name'?"),
        (seldon("{name: m, chidren: []}"), "'chidren' of the unit is left out; did you mean 'children'?"),
        (seldon("{name: m}", more=", trafic: 5"), "'trafic' of the predictor is left out; did you mean 'traffic'?"),
        (seldon("{name: m}").replace("spec: {", "spec: {anotations: {},"), "did you mean 'annotations'?"),
    ],
)
def test_a_field_that_nothing_reads_is_named(text: str, message: str) -> None:
    """A misspelt field is not lost without a word; the graph is written, and says that answers may differ."""
    texts, found = converted(text)
    assert ["g"] == list(texts)
    assert 1 == texts["g"].count("# CHECK: answers may differ: unknown field")
    assert [True] == [message in text for *_, severity, text in found if text.startswith("unknown field")]


@pytest.mark.parametrize(("image", "fields"), [
    ("seldonio/mab_epsilon_greedy:1.17.1", "algorithm: EPSILON_GREEDY epsilon: 0.5"),
    ("registry:5000/x/mab_thompson_sampling@sha256:0", "algorithm: THOMPSON"),
])  # fmt: skip
def test_the_bandits_of_seldon_are_bandits(image: str, fields: str) -> None:
    """A router with one of Seldon's own images learns here, too; an exploration that cannot be is an error."""
    graph = "{name: r, type: ROUTER, parameters: [{name: epsilon, value: '0.5'}], children: [{name: a}, {name: b}]}"
    more = f", componentSpecs: [{{spec: {{containers: [{{name: r, image: '{image}'}}]}}}}]"
    texts, _ = converted(seldon(graph, more=more))
    assert f"bandit {{ {fields} }}" in texts["g"]
    assert "ROUTE" not in texts["g"]
    _, found = converted(seldon(graph.replace("0.5", "1.5"), more=more))
    assert ("epsilon" in fields) == any("must be above 0 and at most 1" in message for *_, message in found)


def test_an_average_of_labels_is_a_question(models: ModelCatalog) -> None:
    """Seldon's mean of whole numbers has fractions; one of labels means nothing."""
    graph = "{name: c, implementation: AVERAGE_COMBINER, children: [{name: chooser}, {name: chooser}]}"
    texts, found = converted(seldon(graph), models)
    assert "# CHECK: the mean of 'ROUTE', INT32, is rounded here; if it is a label, write VOTE" in texts["g"]
    assert any("write VOTE for AVERAGE" in message for *_, message in found)


def test_names_that_weft_does_not_take_are_changed_and_told() -> None:
    """Blanks, duplicates, names of nodes; the steps that name a node follow."""
    nodes = (
        "{root: {routerType: Sequence, steps: [{name: a b, nodeName: x/y}, {name: a_b, nodeName: x y}]}, "
        "x/y: {routerType: Sequence, steps: [" + STEP + "]}, x y: {routerType: Sequence, steps: [" + STEP + "]}}"
    )
    texts, found = converted(kserve(nodes))
    graph, _ = parse(texts["g"], pb.Graph(), file="f")
    assert ["root", "x_y", "x_y-2"] == [node.name for node in graph.node]
    assert [("a_b", "x_y"), ("a_b-2", "x_y-2")] == [(step.name, step.node) for step in graph.node[0].sequence.step]
    messages = [message for *_, message in found]
    assert any(message.startswith("'a b' is called 'a_b' here: names are letters") for message in messages)
    assert any(message.startswith("'a_b' is called 'a_b-2' here: that name is taken") for message in messages)


@pytest.mark.parametrize("name", ["../../etc", "a\\b", '"; }', "{{x", "é", "-", "a" * 5000, "\\x00"])
def test_no_name_breaks_the_file_or_leaves_the_folder(name: str) -> None:
    """Of a graph, a step, a service: what is written can be read."""
    text = kserve(f"{{root: {{routerType: Sequence, steps: [{{serviceName: {name!r}, name: {name!r}}}]}}}}")
    texts, _ = converted(text.replace("name: g}", f"name: {name!r}}}"))
    ((written, pbtxt),) = texts.items()
    assert "/" not in written
    assert not written.startswith(".")
    parse(pbtxt, pb.Graph(), file="f")


def test_text_of_the_file_does_not_leave_its_comment() -> None:
    """A line end in a condition, a URL or a name ends no comment."""
    nodes = (
        '{root: {routerType: Splitter, steps: [{serviceUrl: "http://a/\\nb\\rname: 3", weight: 100, '
        'condition: "x\\nname: \\"evil\\""}]}}'
    )
    texts, found = converted(kserve(nodes))
    graph, _ = parse(texts["g"], pb.Graph(), file="f")
    assert "g" == graph.name
    assert all(message.isprintable() for *_, message in found)


def test_a_node_that_two_steps_share_is_written_once(models: ModelCatalog) -> None:
    """With the tensors of its first use."""
    nodes = (
        "{root: {routerType: Splitter, steps: [{name: a, nodeName: n, weight: 50}, {name: b, nodeName: n, weight: 50}]}"
        ", n: {routerType: Sequence, steps: [{serviceName: tiny, dependency: Hard}]}}"
    )
    texts, found = converted(kserve(nodes), models)
    assert [] == found
    assert 1 == texts["g"].count('name: "n"')


def test_timeouts_stay_timeouts() -> None:
    """Seconds of KServe, milliseconds of Seldon; of the request, and of each call."""
    spec = "timeout: 3, routerTimeouts: {serviceClient: 1.5},"
    texts, _ = converted(kserve("{root: {routerType: Sequence, steps: [" + STEP + "]}}", spec=spec))
    graph, _ = parse(texts["g"], pb.Graph(), file="f")
    assert (3000, 1500) == (graph.policy.timeout_ms, graph.node[0].sequence.step[0].policy.timeout_ms)


def test_a_condition_on_the_first_step_leads_to_it() -> None:
    """KServe fails every request there; here the file does not pass the check."""
    nodes = "{root: {routerType: Sequence, steps: [{serviceName: m, condition: a}, {serviceName: m}]}}"
    texts, found = converted(kserve(nodes))
    assert "when: 'CHECK(\"a\")'" in texts["g"]
    assert any("KServe fails every request here" in message for *_, message in found)


def test_a_deep_chain_of_children_is_one_sequence() -> None:
    """Seldon's tree without branches, at the depth that YAML may have."""
    graph = "{name: m}"
    for i in range(29):
        graph = f"{{name: t{i}, type: TRANSFORMER, children: [{graph}]}}"
    texts, _ = converted(seldon(graph))
    written, _ = parse(texts["g"], pb.Graph(), file="f")
    assert [30] == [len(node.sequence.step) for node in written.node]
