"""Files of KServe and Seldon that say something wrong: where, what, and the cure.

After a title stands ``kserve:`` and the nodes of an InferenceGraph, ``seldon:`` and the graph of a SeldonDeployment,
``pipeline:`` or ``experiment:`` and the spec of one of Seldon Core 2, or ``file:`` and a whole object; what is found
stands below. Nodes and specs are in line 2.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tests.case_files import Case, cases

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


def chain(length: int) -> str:
    """Nodes that call one another, `length` deep."""
    names = ["root", *(f"n{i}" for i in range(length))]
    nodes = [f"{a}: {{routerType: Sequence, steps: [{{nodeName: {b}}}]}}" for a, b in pairwise(names)]
    return "{" + ", ".join([*nodes, f"{names[-1]}: {{routerType: Sequence, steps: [{{serviceName: m}}]}}"]) + "}"


STEP = "{serviceName: m}"


def pipeline(spec: str, kind: str = "Pipeline") -> str:
    """An object of Seldon Core 2 whose spec begins at line 2, column 2."""
    return f"{{apiVersion: mlops.seldon.io/v1alpha1, kind: {kind}, metadata: {{name: g}}, spec:\n {spec}}}"


FORMS: dict[str, Callable[[str], str]] = {
    "kserve": kserve,
    "seldon": seldon,
    "pipeline": pipeline,
    "experiment": lambda spec: pipeline(spec, "Experiment"),
    "file": str,
}


@cases(*Path(__file__).parent.glob("cases/*.txt"))
def test_what_is_wrong_is_told(case: Case) -> None:
    """Every finding with its place, and what is written in spite of it."""
    form, _, text = case.text.partition(": ")
    texts, diagnostics = converted(FORMS[form](text))
    found = [f"{line}:{column}: {severity}: {message}" for line, column, severity, message in diagnostics]
    found += [f"{name} is written: {line}" for name in texts for line in texts[name].splitlines() if "differ" in line]
    case.check("\n".join(found))
    assert (not texts) == any(severity == "error" for *_, severity, _ in diagnostics)


LEVELS = ", ".join(f"{{name: m{i + 1}, inputs: [m{i}.inputs]}}" for i in range(40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (kserve("{root: {routerType: Sequence, steps: [" + ", ".join([STEP] * 1001) + "]}}"), "has 1001 steps"),
        (kserve(chain(40)), "nodes are nested deeper than 32"),
        (seldon("{name: a, children: [" + ", ".join(["{name: m}"] * 1001) + "]}"), "more than 1000 units"),
        (pipeline("{steps: [" + ", ".join(f"{{name: m{i}}}" for i in range(1001)) + "]}"), "has 1001 steps"),
        (
            pipeline(f"{{steps: [{{name: m0}}, {LEVELS}], output: {{steps: [m40]}}}}"),
            "references are nested deeper than 32",
        ),
    ],
)
def test_what_is_too_large_is_refused(text: str, message: str) -> None:
    """Nothing is written."""
    texts, found = converted(text)
    assert {} == texts
    assert any(severity == "error" and message in told for *_, severity, told in found)


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


@pytest.mark.parametrize(("image", "fields"), [
    ("seldonio/mab_epsilon_greedy:1.17.1", "epsilon: 0.5"),
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
