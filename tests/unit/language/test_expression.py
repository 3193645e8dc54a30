"""What an expression names, and the text that CEL gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.language.types.expression import read_expression


@pytest.mark.parametrize(
    "source",
    [
        "max(inputs.X) > 1",
        "get(parameters, 'k', text(inputs.T)) == \"a\"",
        "has(inputs.X) && inputs.X[0] > 1\n || get(headers, 'h', '') == ''",
        "max(\n  inputs.X\n) > 1",
    ],
)
def test_rewriting_keeps_every_position(source):
    """The text for CEL has the length and the line ends of the author's, so positions are the same."""
    rewritten = read_expression(source).rewritten
    assert len(source) == len(rewritten)
    assert [i for i, c in enumerate(source) if c == "\n"] == [i for i, c in enumerate(rewritten) if c == "\n"]
    assert "inputs" not in rewritten
    assert "get" not in rewritten


def test_references_are_where_the_name_stands():
    """Each use of a tensor is listed with the place of its name; strings and comments are not looked into."""
    source = "max(inputs.A) > 1 && outputs['b c'][0] == 'inputs.X' && steps.lid.ok // inputs.Y"
    expected = [("inputs", "A", 11), ("outputs", "b c", 30), ("steps", "lid", 62)]
    assert expected == [tuple(ref) for ref in read_expression(source).references]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("has(inputs.A)", {"A"}),
        ("has(inputs.A) && has(inputs['B']) && max(inputs.C) > 1", {"A", "B"}),
        ("(has(inputs.A))", {"A"}),
        ("!(!has(inputs.A) || has(inputs.B))", {"A"}),
        ("has(inputs.A) || true", set()),
        ("has(inputs.A) && (has(inputs.B) || true)", {"A"}),
        ("has(inputs.A) ? true : false", set()),
        ("!has(inputs.A)", set()),
        ("has(parameters.A)", set()),
        ("has(outputs.A)", set()),
        ("has(inputs.A) == false", set()),
    ],
)
def test_what_a_true_test_proves(source, expected):
    """A tensor is sure to be there where has() is one of the terms that must all hold."""
    assert expected == read_expression(source).narrowed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("steps.a.ok", {"a"}),
        ("steps.a.ok && steps['b-1'].ok && max(inputs.C) > 1", {"a", "b-1"}),
        ("!steps.a.ok", set()),
        ("steps.a.ok || true", set()),
        ("steps.a.ok == false", set()),
        ("(steps.a.ok)", {"a"}),
        ("steps.a.ok ? true : true", set()),
    ],
)
def test_which_steps_a_true_test_proves_to_have_answered(source, expected):
    """A step is sure to have answered where its ok is one of the terms that must all hold."""
    assert expected == read_expression(source).answered


@pytest.mark.parametrize(
    ("source", "entries", "asked"),
    [
        ("parameters.x == headers['y']", ["x", "y"], set()),
        ("has(parameters.x) && parameters.x == 1", ["x"], {("parameters", "x")}),
        ("'x' in headers && headers.x == ''", ["x"], {("headers", "x")}),
        ("parameters.exists(k, k == 'x') || get(parameters, 'x', 1) == 1 || size(headers) > 1", [], set()),
    ],
)
def test_which_entries_of_a_map_are_read(source, entries, asked):
    """An entry that is read fails where it is lacking, unless has() or in asks for it first."""
    expression = read_expression(source)
    assert (entries, asked) == ([ref.name for ref in expression.entries], expression.asked)


@pytest.mark.parametrize(("source", "expected"), [("true", True), (" false ", False), ("true && true", None)])
def test_constants(source, expected):
    """A bare true or false is known before the evaluation."""
    assert expected is read_expression(source).constant


@given(st.text(st.sampled_from("abinputsX.()[]'\"\\ \n,&|?:<1/get hasmx"), max_size=60))
def test_any_text_is_read(source):
    """Reading never raises, and never moves a line end."""
    rewritten = read_expression(source).rewritten
    assert source.count("\n") == rewritten.count("\n")
