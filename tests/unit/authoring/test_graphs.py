"""Graphs in Python: what they are written as."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message
from tests.case_files import Case, cases

from weft.authoring.graph import Graph
from weft.language.syntax.parse import step_names
from weft_protos import graph_pb2 as pb

HERE = Path(__file__).parent
SAMPLES = HERE.parents[2] / "model_repository" / "graphs"


@cases(HERE / "graphs.txt")
def test_graph(case: Case, run: Callable[[str], dict[str, Any]]) -> None:
    """A function of a case file is the graph that is written there; with ``@equals`` it is that sample's file."""
    names = run(case.text)
    graph = next(value for value in reversed(names.values()) if isinstance(value, Graph))
    if sample := case.option("equals"):
        parsed = text_format.Parse((SAMPLES / sample / "1" / "graph.pbtxt").read_text(), pb.Graph())
        assert _named(parsed) == _named(graph.message)
    case.check("\n".join([*_lines(graph.message), *(f"# {one.code} {one.severity}" for one in graph.diagnostics)]))


def _named(message: pb.Graph) -> pb.Graph:
    """The same with the names that steps have by default."""
    copy = pb.Graph()
    copy.CopyFrom(message)
    for node in copy.node:
        steps = getattr(node, node.WhichOneof("kind")).step
        for name, step in zip(step_names(steps), steps, strict=True):
            step.name = name
    return copy


def _lines(message: pb.Graph) -> list[str]:
    """What steps are, a line for each node; names, types and policies of the graph itself are in few cases."""
    shown = []
    for field, value in message.ListFields():
        if field.name in ("name", "platform", "max_batch_size", "input"):
            continue
        for one in value if field.is_repeated else [value]:
            text = (
                text_format.MessageToString(one, as_one_line=True, as_utf8=True)
                if isinstance(one, Message)
                else repr(one)
            )
            shown.append(f"{field.name}: {text}")
    return shown


def test_the_issue_s_graph_is_the_hand_written_one(run: Callable[[str], dict[str, Any]]) -> None:
    """The README's example, character by character of its meaning, beside the file that says the same."""
    written = text_format.Parse((HERE / "readings.pbtxt").read_text(), pb.Graph())
    assert written == run((HERE / "readings.txt").read_text())["readings"].message


def test_a_graph_knows_the_lines_that_wrote_it(run: Callable[[str], dict[str, Any]]) -> None:
    """A field that a call or a method sets has the line of that; what else is in a step has the line of its call."""
    text = """
@weft.graph(max_batch_size=32)
def g(IMAGE: Tensor[STRING, 1]):
    pixels = m.decode_digit(IMAGE).PIXELS
    return (
        m.digits_cnn(pixels)
        .when(header("x", "") == "1")
        .soft(default={"LABEL": 0, "PROBS": [0.1] * 10})
    )
"""
    graph = run(text)["g"]
    lines = {path: graph.place_of(path).line for path in ("node[0].sequence.step[0].model_name", "policy.retry")}
    assert {"node[0].sequence.step[0].model_name": 4, "policy.retry": 2} == lines
    assert 6 == graph.place_of("node[0].sequence.step[1].input_map[PIXELS]").line
    assert 7 == graph.place_of("node[0].sequence.step[1].when").line
    assert 8 == graph.place_of("node[0].sequence.step[1].dependency").line


def test_a_graph_knows_what_in_python_it_calls(run: Callable[[str], dict[str, Any]]) -> None:
    """Graphs in Python that a function calls are listed, whose models are found through them."""
    text = """
@weft.graph(max_batch_size=32)
def inner(PIXELS: Tensor[FP32, 1, 8, 8]):
    return m.digits_cnn(PIXELS)

@weft.graph(max_batch_size=32)
def outer(PIXELS: Tensor[FP32, 1, 8, 8]):
    return {"A": inner(PIXELS).LABEL, "B": inner(PIXELS).LABEL}
"""
    names = run(text)
    assert [names["inner"]] == names["outer"].called
    assert {"inner"} <= set(names["outer"].graphs.names())
    assert ["A", "B"] == [output.name for output in names["outer"].message.output]
