"""What an expression names and proves, and the text that CEL gets."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.case_files import Case, cases

from weft.base.tensors import encode
from weft.language.request_scope import RequestScope
from weft.language.types.compile_condition import VisibleBindings, compile_condition
from weft.language.types.conditions import WHEN
from weft.language.types.expression import read_expression
from weft.language.types.signatures import TensorType

KNOWN = TensorType("FP32", (1,), is_batched=True, is_optional=True, origin="the test")
VISIBLE = {"inputs": VisibleBindings({"PROBS": KNOWN, "ABSENT": KNOWN}, {"PROBS": 0, "ABSENT": 1})}
FRAME = [encode(np.array([[0.7]], np.float32)), None]


@cases(Path(__file__).with_name("expressions.txt"))
def test_an_expression(case: Case) -> None:
    """Each expression names and proves what is written."""
    read = read_expression(case.title)
    found = {
        "constant": [] if read.constant is None else [str(read.constant)],
        "references": [f"{ref.space}.{ref.name}@{ref.at}" for ref in read.references],
        "unproved": sorted(ref.name for ref in read.unproved),
        "narrowed": sorted(read.narrowed),
        "answered": sorted(read.answered),
        "entries": [ref.name for ref in read.entries],
        "asked": sorted(".".join(one) for one in read.asked),
    }
    case.check("\n".join(f"{name}: {' '.join(named)}" for name, named in found.items() if named) or "nothing")


def test_a_condition_of_any_depth_is_read():
    """Neither depth nor length of a text is a trouble."""
    deep = "(" * 20_000 + "max(inputs.A) > 1 && has(inputs.A)" + ")" * 20_000
    assert ["A"] == [ref.name for ref in read_expression(deep).unproved]
    assert not read_expression("has(inputs.A) ? 1 : " * 4000 + "2").unproved
    assert {"A"} == read_expression(" && ".join(["has(inputs.A)"] * 5000)).narrowed


_TESTS = st.recursive(
    st.sampled_from(
        [
            f"{test}(inputs.{name}){more}"
            for name in ("ABSENT", "PROBS")
            for test, more in (("has", ""), ("max", " > 0.5"))
        ]
    )
    | st.sampled_from(["true", "false"]),
    lambda inner: (
        st.builds("({} && {})".format, inner, inner)
        | st.builds("({} || {} || {})".format, inner, inner, inner)
        | st.builds("({} ? {} : {})".format, inner, inner, inner)
        | st.builds("!({})".format, inner)
    ),
    max_leaves=8,
)


@given(_TESTS)
def test_a_test_whose_tensors_are_proved_never_fails(source):
    """Where every tensor that may be absent is tested as the compiler demands, no absence fails a request."""
    expression = read_expression(source)
    if not expression.unproved:
        condition = compile_condition(expression, WHEN, VISIBLE, node="n")
        assert condition.evaluate(FRAME, RequestScope({}, {})) in (True, False)


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


@given(st.text(st.sampled_from("abinputsX.()[]'\"\\ \n,&|?:<1/get hasmx"), max_size=60))
def test_any_text_is_read(source):
    """Reading never raises, and never moves a line end."""
    rewritten = read_expression(source).rewritten
    assert source.count("\n") == rewritten.count("\n")
