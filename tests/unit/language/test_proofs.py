"""What conditions prove of the tensors that they read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.tensors import encode
from weft.language.request_scope import RequestScope
from weft.language.types.compile_condition import VisibleBindings, compile_condition
from weft.language.types.conditions import WHEN
from weft.language.types.expression import read_expression
from weft.language.types.signatures import TensorType

KNOWN = TensorType("FP32", (1,), is_batched=True, is_optional=True, origin="the test")
VISIBLE = {"inputs": VisibleBindings({"PROBS": KNOWN, "ABSENT": KNOWN}, {"PROBS": 0, "ABSENT": 1})}
FRAME = [encode(np.array([[0.7]], np.float32)), None]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("max(inputs.A) > 1", ["A"]),
        ("has(inputs.A) && max(inputs.A) > 1", []),
        ("max(inputs.A) > 1 && has(inputs.A)", []),
        ("has(inputs.A) || max(inputs.A) > 1", ["A"]),
        ("!has(inputs.A) || max(inputs.A) > 1", []),
        ("!(has(inputs.A) && has(inputs.B)) || inputs.A[0] > inputs.B[0]", []),
        ("!has(inputs.A) && max(inputs.A) > 1", ["A"]),
        ("has(inputs.A) ? max(inputs.A) > 1 : min(inputs.A) > 1", ["A"]),
        ("has(inputs.A) ? max(inputs.A) > 1 : has(inputs.B) ? min(inputs.B) > 1 : true", []),
        ("!has(inputs.A) ? true : inputs.A[0] > 1 ? true : false", []),
        ("!has(inputs.A) ? true : has(inputs.B) ? min(inputs.A) > max(inputs.B) : min(inputs.A) > 1", []),
        ("(has(inputs.A) ? max(inputs.A) : 0.0) > 1", []),
        ("has(inputs.A) == true && max(inputs.A) > 1", ["A"]),
        ("(has(inputs.A) && max(inputs.A) > 1) || min(inputs.A) > 1", ["A"]),
        ("has(outputs.A) && max(inputs.A) > 1", ["A"]),
        ("has(inputs.A) && [1, 2].exists(i, inputs.A[0] > i)", []),
        ("has(inputs.A) && {'k': inputs.A[0], 'l': inputs.B[0]}['k'] > 1", ["B"]),
        ("has(inputs.A) && has(inputs.A) && max(inputs.A) > 1", []),
        ("max(inputs.A) > 1) && has(inputs.A)", ["A"]),
        ("has(inputs.A) && " + "(" * 40 + "max(inputs.A) > 1" + ")" * 40, []),
    ],
)
def test_which_tensors_are_read_unproved(source, expected):
    """A tensor may be absent where no other side of &&, || and no test of ? : says that it is there."""
    assert expected == [ref.name for ref in read_expression(source).unproved]


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
