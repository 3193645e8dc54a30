"""The layout of text that is written: what a person would write, read back as the same message."""

import math

import pytest
from google.protobuf.message import Message

from weft.base.text.pbtxt import parse
from weft.base.text.pbtxt_format import WIDTH
from weft.base.text.pbtxt_writer import one_line, quoted, text_of
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig

#: Text as a person may type it, and as it is written.
TEXTS: dict[str, tuple[type[Message], str, str]] = {
    "a short step on one line, a node over several": (
        pb.Graph,
        'node{name:"n" cascade{step{accept:"x" model_name:"m" name:"a"} per_row:true}}',
        'node {\n  name: "n"\n  cascade {\n    per_row: true\n'
        '    step { name: "a" model_name: "m" accept: \'x\' }\n  }\n}\n',
    ),
    "the order of a switch and a splitter": (
        pb.Graph,
        'node { switch { step { model_name: "m" when: "x" name: "a" } } } '
        'node { splitter { step { model_name: "m" weight: 1.50 name: "a" } } }',
        'node {\n  switch {\n    step { name: "a" when: \'x\' model_name: "m" }\n  }\n}\n'
        'node {\n  splitter {\n    step { name: "a" weight: 1.5 model_name: "m" }\n  }\n}\n',
    ),
    "one tensor on one line, several below one another": (
        pb.Graph,
        'output { dims: 1 name: "b" } output { name: "c" dims: [1, -1] optional: true } input { name: "a" }',
        'input [ { name: "a" } ]\n'
        'output [\n  { name: "b" dims: [ 1 ] },\n  { name: "c" dims: [ 1, -1 ] optional: true }\n]\n',
    ),
    "maps by key, messages without fields": (
        ModelConfig,
        'dynamic_batching {} parameters { key: "b" value { string_value: "2" } } parameters { key: "a" }',
        'parameters { key: "a" value { } }\nparameters { key: "b" value { string_value: "2" } }\n'
        "dynamic_batching { }\n",
    ),
    "strings as a list if there are several": (
        pb.Graph,
        'policy { retry { on: "A" } } node { map { over: "a" over: "b" } }',
        'policy { retry { on: "A" } }\nnode {\n  map {\n    over: [ "a", "b" ]\n  }\n}\n',
    ),
}


@pytest.mark.parametrize("title", TEXTS)
def test_a_layout(title: str) -> None:
    """Written once, it is written the same again."""
    kind, typed, written = TEXTS[title]
    assert written == text_of(parse(typed, kind(), file="x")[0])
    assert written == text_of(parse(written, kind(), file="x")[0])


def test_long_messages_and_lists_are_broken() -> None:
    """No line is longer than a page is wide, unless a text in it is."""
    graph = pb.Graph()
    step = graph.node.add(name="n").sequence.step.add(name="s" * 40, model_name="m" * 40)
    step.default.add(output="Y", number=[i / 7 for i in range(200)])
    step.fallback.model_name = "f" * 50
    text = text_of(graph)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert '      default {\n        output: "Y"\n        number: [\n          0, ' in text
    assert graph == parse(text, pb.Graph(), file="x")[0]


@pytest.mark.parametrize("number", [0.1, -0.0, 1e300, 5e-324, math.inf, -math.inf, 123456789.0, 2**53 + 2.0])
def test_a_number_is_exact(number: float) -> None:
    """As short as it may be."""
    constant = pb.Constant(input="X", number=[number, 1])
    read = parse(text_of(constant), pb.Constant(), file="x")[0]
    assert math.copysign(1, number) == math.copysign(1, read.number[0])
    assert constant == read


@pytest.mark.parametrize("text", ['a"b', "a'b", "both ' and \"", "\\ \n\r\t\0\x7f", "ä好\u2028", "", "it's"])
def test_any_text_comes_back(text: str) -> None:
    """In whichever quotes."""
    assert text == parse(f"name: {quoted(text)}", pb.Graph(), file="x")[0].name
    assert text == parse(text_of(pb.Step(when=text)), pb.Step(), file="x")[0].when


def test_comments_stand_above_what_they_are_about() -> None:
    """A message with a comment inside is not put on one line."""
    graph = parse('input { name: "a" } policy { timeout_ms: 5 }', pb.Graph(), file="x")[0]
    comments = {"": ["Head.", ""], "input[0]": ["A."], "policy.timeout_ms": ["Ms."]}
    expected = '# Head.\n#\ninput [\n  # A.\n  { name: "a" }\n]\npolicy {\n  # Ms.\n  timeout_ms: 5\n}\n'
    assert expected == text_of(graph, comments)
    assert 'input [ { name: "a" } ] policy { timeout_ms: 5 }' == one_line(graph)


def test_no_comment_is_lost() -> None:
    """Above a map or a repeated message as a whole it stands above the first, above an entry in front of that."""
    text = 'node { sequence { step { input_map { key: "a" value: "b" } after: "x" default { output: "y" } } } }'
    graph = parse(text, pb.Graph(), file="x")[0]
    step = "node[0].sequence.step[0]"
    paths = ("node", "node[0]", f"{step}.input_map", f"{step}.input_map[a]", f"{step}.after", f"{step}.default")
    written = text_of(graph, {path: [path] for path in paths})
    assert sorted(paths) == sorted(line.strip("# ") for line in written.splitlines() if "#" in line)
    assert graph == parse(written, pb.Graph(), file="x")[0]
