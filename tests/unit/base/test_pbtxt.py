"""Text format with positions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('nme: "x"', [(1, 1, "unknown field 'nme' in Graph; did you mean 'name'?")]),
        ("input { data_type: 99 } input { data_type: 11 }", [(1, 20, "unknown value 99 of DataType")]),
        (
            "input { data_type: TYPE_FP31 }",
            [(1, 20, "unknown value 'TYPE_FP31' of DataType; did you mean 'TYPE_FP32'?")],
        ),
        ("\nnode { a: 1 }\nnode { b { c: 2 } }", [(2, 8, "unknown field 'a' in Node"), (3, 8, "unknown field 'b'")]),
        ("NAME: 'x'", [(1, 1, "did you mean 'name'?")]),
        ("name: x", [(1, 7, "'name' is text; put it in quotes: \"x\"")]),
        ("policy: 3", [(1, 9, "'policy' holds other fields; write policy { ... }")]),
        ("node { retry { } }", [(1, 8, "unknown field 'retry' in Node; it belongs in 'policy { }'")]),
        ("max_batch_size: 9999999999", [(1, 17, "'max_batch_size' is 9999999999; give -2147483648 to 2147483647")]),
        ('name: "x" name: "y"', [(1, 17, "'name' is given already; keep one")]),
        ("node { sequence { } switch { } }", [(1, 21, "'switch' cannot stand beside 'sequence'; keep one of them")]),
        ("node {", [(1, 1, "'node' is not closed; a '}' is missing")]),
        ("nod {", [(1, 1, "unknown field 'nod' in Graph; did you mean 'node'?")]),
        ("\nnode { sequence <", [(2, 8, "'sequence' is not closed; a '>' is missing")]),
        (
            "node { sequence { step { name: 'a'\n step { name: 'b' } policy { } } }",
            [
                (
                    2,
                    2,
                    "unknown field 'step' in Step; it belongs in the Sequence around it: a '}' is missing before it",
                ),
            ],
        ),
        ('name: "x', [(1, 7, "the closing quote of '\"x' is missing")]),
        ("name: 'a' }", [(1, 11, "this '}' closes nothing; leave it out")]),
        ("// a comment", [(1, 1, "a comment begins with '#'")]),
        ('{ "name": "x" }', [(1, 1, "this is protobuf text format, not JSON")]),
        ("name: 'a' 'b': 1", [(1, 14, "a field's name is expected here, got :")]),
        ("name", [(1, 5, 'Expected ":"')]),
        ("name = 'x'", [(1, 6, "write ':' for '=': name: ...")]),
        ("name 'x'", [(1, 6, "a ':' is missing after 'name'")]),
        ("name: [ 'x' ]", [(1, 7, "'name' takes one value, not a list; leave the brackets out")]),
        ("policy { timeout_ms: }", [(1, 22, "a number is expected here, got }")]),
        ("policy { timeout_ms: 1.5 }", [(1, 22, "'timeout_ms' is a whole number, got 1.5")]),
        ("policy { timeout_ms: '5' }", [(1, 22, "'timeout_ms' is a number, not text; leave the quotes out: 5")]),
        ("policy { timeout_ms: -1 }", [(1, 22, "'timeout_ms' is -1; give 0 to 4294967295")]),
        (f"max_batch_size: {'9' * 5000}", [(1, 17, f"'max_batch_size' is {'9' * 30}...; give -2147483648 to")]),
        (f"input {{ dims: {2**64} }}", [(1, 15, f"'dims' is {2**64}; give -{2**63} to {2**63 - 1}")]),
        ("node { sequence { ordered: yes } }", [(1, 28, "'ordered' is true or false, got yes")]),
        (
            "input { data_type: 'TYPE_FP32' }",
            [(1, 20, "'data_type' is a name, not text; leave the quotes out: TYPE_FP32")],
        ),
        ("input { data_type: TYPE_BYTES }", [(1, 20, "did you mean 'TYPE_STRING'?")]),
        ("---\nname: 'a'", [(1, 1, "this is YAML, not protobuf text format; of a KServe or Seldon Core graph, weft")]),
        (
            "node { step { }",
            [(1, 1, "'node' is not closed"), (1, 8, "'step' in Node; it belongs in 'sequence { }' or")],
        ),
        ("root: a b < c", [(1, 7, "'root' is text; put it in quotes: \"a b < c\"")]),
        ("root: a ? b : c nam: 1", [(1, 7, 'in quotes: "a ? b : c"'), (1, 17, "unknown field 'nam'")]),
        ("root: 'a'b", [(1, 10, 'one that has \' in it stands between " and "')]),
        ("nod { } " * 600, [(1, 1 + 8 * i, "unknown field 'nod' in Graph; did you mean 'node'?") for i in range(500)]),
        (
            "parameters { key: '\\xg' }",
            [(1, 19, "not an escape such as '\\n' or '\\x41'; write '\\\\'")],
        ),
        ("parameters { key: '\\xff' }", [(1, 26, "the text is not UTF-8 once its escapes are read")]),
        ("[a.b]: 1", [(1, 4, "does not have extensions")]),
        ("nme: 1 name: [", [(1, 1, "unknown field 'nme'"), (1, 14, "takes one value, not a list")]),
        ("name: 1 nme: 1", [(1, 7, "put it in quotes"), (1, 9, "unknown field 'nme'")]),
        ("\0\0", [(1, 1, "a binary file: it has a NUL byte")]),
        (b"name: 'a'\n# \xc3\xa4 \xff", [(2, 5, "not UTF-8 text: byte 0xff")]),
        ("node { cascade { step { " + "fallback { " * 3000, [(0, 0, "nested too deeply")]),
        (" " * (pbtxt.MAX_FILE_BYTES + 1), [(0, 0, "the file has 4194305 bytes, the limit is 4194304")]),
    ],
    ids=itertools.count(),
)
def test_what_does_not_parse(text, expected):
    """Errors have line and column; every unknown name is reported at once, with the one that was meant."""
    with pytest.raises(PbtxtError) as caught:
        parse(text, Graph(), file="g.pbtxt")
    found = caught.value.diagnostics
    assert [(line, column) for line, column, _ in expected] == [(one.line, one.column) for one in found]
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
