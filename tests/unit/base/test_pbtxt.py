"""Text format with positions."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.notation import read_cases

from weft.base.text import pbtxt
from weft.base.text.pbtxt import Diagnostic, PbtxtError, parse, render, suggestion
from weft_protos.graph_pb2 import Graph
from weft_protos.model_config_pb2 import ModelConfig

TEXT = """# a comment: with "quotes"
name: "g"  platform: 'gra' "ph"
input [ { name: "A" dims: [ 1, -1 ] }, { name: "B" } ]
output { name: "C" dims: 2; dims: 3 }
output < name: "D" >
node { name: "root" switch {
  on: 'text(inputs.A)'
  step { case: "de" case: "nl" input_map { key: "X" value: "A" } input_map: { value: "B" key: "Y.[0]" } }
  step { otherwise: true } } }
parameters { key: "k" value { string_value: "v" } }
"""


@pytest.fixture
def parsed():
    """The message and the positions of TEXT."""
    return parse(TEXT, Graph(), file="g.pbtxt")


def test_the_message_is_what_text_format_makes_of_it(parsed):
    """Values come from protobuf: lists, maps, joined strings."""
    message, _ = parsed
    assert ("g", "graph") == (message.name, message.platform)
    assert ["A", "B"] == [tensor.name for tensor in message.input]
    assert {"X": "A", "Y.[0]": "B"} == dict(message.node[0].switch.step[0].input_map)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("name", (2, 7)),
        ("platform", (2, 22)),
        ("input", (3, 9)),
        ("input[1]", (3, 40)),
        ("input[1].name", (3, 48)),
        ("input[0].dims[1]", (3, 32)),
        ("output[0]", (4, 1)),
        ("output[0].dims[1]", (4, 35)),
        ("output[1].name", (5, 16)),
        ("node[0].switch.on", (7, 7)),
        ("node[0].switch.step[0].case[1]", (8, 27)),
        ("node[0].switch.step[0].input_map[X]", (8, 60)),
        ("node[0].switch.step[0].input_map[X].key", (8, 49)),
        ("node[0].switch.step[0].input_map[Y.[0]]", (8, 86)),
        ("parameters[k].string_value", (10, 45)),
    ],
)
def test_positions_of_values(parsed, path, expected):
    """A path leads to the line and column of the value, of a message to its name or bracket."""
    assert expected == parsed[1].find(path)
    assert path in parsed[1]


def test_position_of_a_name(parsed):
    """A field's name has a position of its own."""
    assert (7, 3) == parsed[1].find_name("node[0].switch.on")
    assert (9, 10) == parsed[1].find_name("node[0].switch.step[1].otherwise")


def test_what_is_not_in_the_file_is_where_it_would_be(parsed):
    """A path that is not in the file falls back to the nearest enclosing one; without one to 0."""
    positions = parsed[1]
    assert "node[0].switch.step[1].policy.timeout_ms" not in positions
    assert positions.find("node[0].switch.step[1]") == positions.find("node[0].switch.step[1].policy.timeout_ms")
    assert (6, 1) == positions.find("node[0].policy")
    assert (0, 0) == positions.find("policy")


def test_position_inside_a_string():
    """Character i of a value is found through escapes and joined pieces; past the end is the closing quote."""
    text = "root: \"a\\tb\\x41\"\n  'c'  "
    message, positions = parse(text, Graph(), file="g.pbtxt")
    assert "a\tbAc" == message.root
    expected = [(1, 8), (1, 9), (1, 11), (1, 12), (2, 4), (2, 5), (2, 5)]
    assert expected == [positions.locate("root", i) for i in range(7)]
    assert (0, 0) == positions.locate("name", 3)


def test_keys_that_stand_twice_are_known():
    """Protobuf keeps the last of two entries of one key; the positions tell that there were two."""
    text = 'parameters { key: "k" } parameters { key: "j" } parameters { key: "k" }'
    _, positions = parse(text, ModelConfig(), file="config.pbtxt")
    assert ("parameters[k]",) == positions.duplicate_keys


UNPARSED = [
    pytest.param(
        ast.literal_eval(case.starting_with("text")[0]),
        [re.fullmatch(r"(\d+):(\d+) (.*)", line).groups() for line in case.starting_with("at")],  # type: ignore[union-attr]
        id=case.name,
    )
    for case in read_cases(Path(__file__).with_name("pbtxt.txt"))
]
LARGE = [
    (f"max_batch_size: {'9' * 5000}", [(1, 17, f"'max_batch_size' is {'9' * 30}...; give -2147483648 to")]),
    ("nod { } " * 600, [(1, 1 + 8 * i, "unknown field 'nod' in Graph; did you mean 'node'?") for i in range(500)]),
    (b"name: 'a'\n# \xc3\xa4 \xff", [(2, 5, "not UTF-8 text: byte 0xff")]),
    ("node { cascade { step { " + "fallback { " * 3000, [(0, 0, "nested too deeply")]),
    (" " * (pbtxt.MAX_FILE_BYTES + 1), [(0, 0, "the file has 4194305 bytes, the limit is 4194304")]),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [*UNPARSED, *(pytest.param(*case, id=case[1][0][2]) for case in LARGE)],
)
def test_what_does_not_parse(text, expected):
    """Errors have line and column; every unknown name is reported at once, with the one that was meant."""
    with pytest.raises(PbtxtError) as caught:
        parse(text, Graph(), file="g.pbtxt")
    found = caught.value.diagnostics
    assert [(int(line), int(column)) for line, column, _ in expected] == [(one.line, one.column) for one in found]
    assert all(message in one.message for (_, _, message), one in zip(expected, found, strict=True))


@pytest.mark.parametrize("text", ["\ufeff name: 'x'", b"\xef\xbb\xbf name: 'x'"])
def test_a_byte_order_mark_is_passed_over(text):
    """Some editors begin a file with it; columns count without it."""
    message, positions = parse(text, Graph(), file="g.pbtxt")
    assert "x" == message.name
    assert (1, 2) == positions.find_name("name")


def test_an_empty_file_is_an_empty_message():
    """A configuration may be empty."""
    message, positions = parse(b"", ModelConfig(), file="config.pbtxt")
    assert ModelConfig() == message
    assert (0, 0) == positions.find("name")


def test_what_is_rendered():
    """File, line, column, severity, code; the source line; the caret under the character, tabs kept."""
    found = Diagnostic("g.pbtxt", 7, 6, "unknown tensor", "G011", "warning", "\tstep x")
    assert "g.pbtxt:7:6: warning: unknown tensor  [G011]\n\tstep x\n\t    ^" == render([found])
    assert "g.pbtxt: error: too large" == render([Diagnostic("g.pbtxt", 0, 0, "too large")])
    assert "g.pbtxt: error: no 'a\\nb\\x00é'" == render([Diagnostic("g.pbtxt", 0, 0, "no 'a\nb\0é'")])


def test_a_long_line_is_cut_around_the_caret():
    """At most 200 characters of a line are shown, the character in question among them."""
    found = Diagnostic("g.pbtxt", 1, 5001, "here", source_line="x" * 5000 + "y" + "z" * 5000)
    _, line, caret = render([found]).split("\n")
    assert 200 == len(line)
    assert "y" == line[caret.index("^")]


def test_the_error_is_an_invalid_argument_with_the_rendered_text():
    """The message of the exception is what render gives, so a log line is enough."""
    with pytest.raises(PbtxtError) as caught:
        parse("a: 1\nb: 2", Graph(), file="g.pbtxt")
    assert "INVALID_ARGUMENT" == caught.value.code
    assert render(caught.value.diagnostics) == caught.value.message


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("PRBS", ["PROBS", "LABEL"], "; did you mean 'PROBS'?"),
        ("zzz", ["PROBS", "LABEL"], "; use one of: PROBS, LABEL"),
        ("zzz", [f"n{i}" for i in range(17)], ""),
        ("zzz", ["", ""], ""),
        ("model", ["node", "model_version", "model_name"], "; did you mean 'model_name'?"),
        ("NODE", ["model", "node"], "; did you mean 'node'?"),
    ],
)
def test_suggestions(name, names, expected):
    """The nearest name, else all of a few names, else nothing."""
    assert expected == suggestion(name, names)


@given(st.text(st.sampled_from("abnode{}<>[]:;,\"'\\#\n 0-1.name"), max_size=80))
def test_any_text_parses_or_is_refused(text):
    """No text makes anything but a message or a PbtxtError."""
    try:
        message, positions = parse(text, Graph(), file="g.pbtxt")
    except PbtxtError as error:
        message, positions = Graph(), None
        found = error.diagnostics
    else:
        found = []
    assert bool(found) == (positions is None)
    assert all(positions.find(field.name) != (0, 0) for field, _ in message.ListFields())
