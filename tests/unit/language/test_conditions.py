"""What conditions evaluate to, and how they fail."""

import re
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.case_files import Case, cases

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import WireTensor, bytes_tensor, encode
from weft.language.plan import OK, Binding
from weft.language.request_scope import RequestScope
from weft.language.types.compile_condition import ConditionError, VisibleBindings, compile_condition
from weft.language.types.conditions import KEY, MAX_LIST_ELEMENTS, WHEN, CelCondition, Purpose
from weft.language.types.expression import read_expression
from weft.language.types.signatures import TensorType
from weft.router.tensors import split

PROBS = np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)
TENSORS = {
    "LANG": bytes_tensor(["de"], (1, 1)),
    "PROBS": encode(PROBS),
    "HALF": encode(PROBS.astype(ml_dtypes.bfloat16)),
    "COUNT": encode(np.array([[[1, 2], [3, 4]]], np.int64)),
    "FLAG": encode(np.array([[True]])),
    "BIG": encode(np.array([[2**63]], np.uint64)),
    "MANY": encode(np.ones((1, MAX_LIST_ELEMENTS + 1), np.float32)),
    "ROWS": encode(np.array([[0.5], [0.7]], np.float32)),
    "EMPTY": encode(np.zeros((0, 2), np.float32)),
    "ABSENT": None,
    "BROKEN": bytes_tensor([b"\xff\xfe"], (1, 1)),
    "SHORT": WireTensor("BYTES", (1, 1), b"\x09\0\0\0ab"),
    "odd name-1": bytes_tensor(["x"], (1, 1)),
    "WORDS": bytes_tensor(["a", "b"], (2, 1)),
    "NUL": bytes_tensor(["a\0b"], (1, 1)),
    "NOTHING": bytes_tensor([], (1, 0)),
    "CUT": WireTensor("FP32", (1, 4), bytes(15)),
    "TABLE": bytes_tensor(["a", "bc", "", "d"], (2, 2)),
    "SCALAR": encode(np.array(3, np.int32)),
}
DIMS = {
    "COUNT": (2, 2), "PROBS": (4,), "HALF": (4,), "MANY": (-1,), "EMPTY": (2,), "NOTHING": (-1,), "CUT": (4,),
    "TABLE": (2, 2), "SCALAR": (),
}  # fmt: skip
DATATYPES = {"ABSENT": "FP32"}


def _type(name: str) -> TensorType:
    tensor = TENSORS[name]
    datatype = tensor.datatype if tensor else "FP32"
    return TensorType(datatype, DIMS.get(name, (1,)), is_batched=True, is_optional=tensor is None, origin="the test")


TYPES = {name: _type(name) for name in TENSORS}
SLOTS = {name: slot for slot, name in enumerate(TENSORS)}
STEPS = VisibleBindings({"lid": TensorType.unknown("a step")}, {"lid": len(TENSORS)}, {"post": "stands later"})
VISIBLE = {"inputs": VisibleBindings(TYPES, SLOTS), "steps": STEPS}
FRAME = [*TENSORS.values(), None]
REQUEST = RequestScope({"tier": "std", "count": 3, "ratio": 2.5, "on": True}, {"x-user-id": "u1"}, "r1", 2, None)


def _compile(source: str, purpose: Purpose = WHEN) -> CelCondition:
    return compile_condition(read_expression(source), purpose, VISIBLE, node="n")


@cases(Path(__file__).with_name("conditions.txt"))
def test_a_condition(case: Case) -> None:
    """Each condition has the value, the failure (INVALID_ARGUMENT) or the faults at their characters, as is written."""
    name, _, source = case.title.partition(" ")
    purpose = {"when": WHEN, "key": KEY}.get(name) or Purpose(name, ("string", "int", "bool"))
    try:
        found = f"{_compile(source, purpose).evaluate(FRAME, REQUEST)!r}"
    except ConditionError as error:
        found = "\n".join(f"{fault.at}: {fault.message}" for fault in error.faults)
    except InvalidArgumentError as error:
        found = error.message.replace(f"{name} {source!r} of node 'n': ", "fails: ")
    case.check(found)


@pytest.mark.parametrize(
    ("source", "at", "message"),
    [
        ("1 +\n  max(inputs.PRBS)", 17, "unknown tensor 'PRBS'"),
        ("true\n||\nmax(inputs.PROBS) > zz", 28, "undeclared reference to 'zz'"),
        ("max(\n inputs.PROBS\n) > 0.1 && zz", 30, "undeclared reference to 'zz'"),
        (f"inputs.PROBS[{'9' * 5000}] > 0.5", 13, "invalid int literal"),
        (f"text(inputs.LANG) == '{'a' * 100_000}'", 0, "the text has 100023 characters, the limit is 100000"),
        ("(" * 300 + "true" + ")" * 300, 0, "recursion"),
    ],
)
def test_an_error_is_at_its_character(source: str, at: int, message: str) -> None:
    """Also in a text of several lines, and in one that is too long."""
    with pytest.raises(ConditionError) as caught:
        _compile(source)
    assert (at, True) in [(fault.at, message in fault.message) for fault in caught.value.faults]


@pytest.mark.parametrize("source", ["get(parameters, 'who', '') == 'a'", "parameters.who == 'a'"])
def test_a_parameter_that_cel_would_cut_short_fails_the_request(source):
    """CEL ends a string at a NUL character, so that what follows would not be seen."""
    condition = _compile(source)
    assert condition.evaluate(FRAME, RequestScope({"who": "a"}, {}))
    with pytest.raises(InvalidArgumentError, match="parameter 'who': a string that conditions read has no NUL"):
        condition.evaluate(FRAME, RequestScope({"who": "a\0b"}, {}))


def test_only_named_tensors_are_bound():
    """A condition lists the tensors that it names, once each, and no others."""
    condition = _compile("max(inputs.PROBS) > min(inputs.PROBS) && has(inputs.LANG)")
    assert ["PROBS", "LANG"] == [name for name, _ in condition.tensors]
    assert [SLOTS["PROBS"], SLOTS["LANG"]] == [slot for _, slot in condition.tensors]


def test_remaining_time_is_that_of_the_deadline():
    """request.remaining_ms counts down to the deadline and stops at 0."""
    condition = _compile("request.remaining_ms > 0")
    late = RequestScope({}, {}, deadline_ns=time.monotonic_ns() - 1)
    early = RequestScope({}, {}, deadline_ns=time.monotonic_ns() + 60 * 10**9)
    assert [False, True] == [condition.evaluate(FRAME, late), condition.evaluate(FRAME, early)]


@pytest.mark.parametrize("ok", [None, OK])
def test_a_step_is_ok_if_its_slot_holds_something(ok):
    """steps.NAME.ok is whether the step's slot is filled, alike for every row."""
    condition = _compile("steps.lid.ok")
    assert (Binding("steps.lid.ok", len(TENSORS)),) == condition.tensors
    frame = [*TENSORS.values(), ok]
    assert (ok is not None) is condition.evaluate(frame, REQUEST)
    assert [ok is not None] * 3 == condition.evaluate_rows(frame, REQUEST, 3)


@pytest.mark.parametrize("purpose", [Purpose("accept"), Purpose("while")], ids=lambda one: one.name)
def test_accept_and_while_see_outputs_beside_inputs(purpose):
    """inputs.X and outputs.X are two tensors; the value is true or false."""
    types = {"X": TensorType("INT64", (1,), is_batched=False, is_optional=False, origin="the test")}
    visible = {"inputs": VisibleBindings(types, {"X": 0}), "outputs": VisibleBindings(types, {"X": 1})}
    condition = compile_condition(
        read_expression("inputs.X[0] < outputs.X[0] && max(outputs.X) == 2"), purpose, visible, node="n"
    )
    assert (Binding("X", 0), Binding("X", 1)) == condition.tensors
    assert condition.evaluate([encode(np.array([1])), encode(np.array([2]))], REQUEST) is True
    with pytest.raises(InvalidArgumentError, match=r"outputs\.X is absent"):
        condition.evaluate([encode(np.array([1])), None], REQUEST)


ROW_SOURCES = [
    "max(inputs.P) >= 0.9 || inputs.P[3] < 0.1",
    "mean(inputs.P) > min(inputs.P) && argmax(inputs.P) != 2",
    "inputs.N[1][0] / inputs.N[0][0] > 1",
    "max(inputs.N) > 0 && mean(inputs.N) < 100.0 && mean(inputs.H) > 0.0",
    "text(inputs.T) == 'de' || inputs.T[1] == 'nl'",
    "inputs.H[2] > 0.5 || size(inputs.H) == 4 || inputs.N[1] == [2]",
    "inputs.U[0] > 5",
    "has(inputs.P) && get(parameters, 'tier', '') == 'std' && request.priority == 2",
    "has(inputs.NONE) && max(inputs.NONE) > 0.5",
    "max(inputs.NONE) > 0.5 || text(inputs.T) == 'de'",
]
ROW_TYPES = {
    "P": TensorType("FP32", (4,), is_batched=True, is_optional=False, origin="the test"),
    "H": TensorType("BF16", (-1,), is_batched=True, is_optional=False, origin="the test"),
    "N": TensorType("INT64", (2, 1), is_batched=True, is_optional=False, origin="the test"),
    "T": TensorType("BYTES", (2,), is_batched=True, is_optional=False, origin="the test"),
    "NONE": TensorType("FP32", (1,), is_batched=True, is_optional=True, origin="the test"),
    "U": TensorType("UINT64", (1,), is_batched=True, is_optional=False, origin="the test"),
}
ROW_CONDITIONS = [
    compile_condition(
        read_expression(source), WHEN, {"inputs": VisibleBindings(ROW_TYPES, {n: i for i, n in enumerate(ROW_TYPES)})},
        node="n",
    )
    for source in ROW_SOURCES
]  # fmt: skip


def _rows_of(source: str, **datatypes: str) -> CelCondition:
    """A condition on inputs of rows of any length."""
    types = {
        n: TensorType(one, (-1,), is_batched=True, is_optional=False, origin="the test") for n, one in datatypes.items()
    }
    visible = {"inputs": VisibleBindings(types, {name: slot for slot, name in enumerate(types)})}
    return compile_condition(read_expression(source), WHEN, visible, node="n")


def _outcome(function):
    try:
        return function()
    except InvalidArgumentError as error:
        return error.message


@settings(deadline=None)
@given(data=st.data(), num_rows=st.integers(0, 5), condition=st.sampled_from(ROW_CONDITIONS))
def test_rows_are_evaluated_as_if_each_came_alone(data, num_rows, condition):
    """The value of each row is that of a request with this row alone; the first that fails fails all, and is named."""
    floats = st.floats(-1, 1, width=32) | st.sampled_from([float("nan"), float("inf")])
    texts = st.sampled_from([b"de", b"nl", b"", b"\xff", b"a\0b"])

    def rows(elements, *dims):
        size = num_rows * int(np.prod(dims))
        return data.draw(st.lists(elements, min_size=size, max_size=size)), (num_rows, *dims)

    def array(elements, dtype, *dims):
        values, shape = rows(elements, *dims)
        return encode(np.array(values, dtype).reshape(shape))

    width = data.draw(st.integers(0, 9))
    frame = [
        array(floats, np.float32, 4), array(floats, ml_dtypes.bfloat16, width),
        array(st.integers(-2, 2), np.int64, 2, 1), bytes_tensor(*rows(texts, 2)), None,
        array(st.sampled_from([5, 6, 2**63]), np.uint64, 1),
    ]  # fmt: skip

    def alone(row):
        own = [None if tensor is None else split(tensor, [[row]])[0] for tensor in frame]
        return _outcome(lambda: condition.evaluate(own, REQUEST))

    expected = [alone(row) for row in range(num_rows)]
    faults = [(row, value) for row, value in enumerate(expected) if isinstance(value, str)]
    result = _outcome(lambda: condition.evaluate_rows(frame, REQUEST, num_rows))
    if faults:
        row, message = faults[0]
        start, cause = message.split(": ", 1)
        named = f"{start}, row {row}: {cause}"
        assert isinstance(result, str)
        assert result == named or re.sub(r"shape \[\d+, ", "shape [1, ", result) == named
    else:
        assert expected == result


def test_rows_of_another_number_fail():
    """A tensor with more or fewer rows than there are cannot be read row by row."""
    condition = _compile("max(inputs.ROWS) > 0.6")
    assert [False, True] == condition.evaluate_rows(FRAME, REQUEST, 2)
    with pytest.raises(InvalidArgumentError, match=r"inputs.ROWS: 3 rows are read one by one, got shape \[2, 1\]"):
        condition.evaluate_rows(FRAME, REQUEST, 3)


@pytest.mark.parametrize(
    "source", ["inputs.X[3] > 0.5", "size(inputs.X) > 3", "text(inputs.T) == 'a'", "inputs.T[3] == 'a'"]
)
def test_one_element_of_a_large_tensor_is_read_without_the_others(source):
    """A condition on one element, or on the size, takes no longer where the tensor is a thousand times as large."""
    condition = _rows_of(source, X="FP32", T="BYTES")
    count = 1_000_000
    frame = [WireTensor("FP32", (1, count), bytes(4 * count)), WireTensor("BYTES", (1, count), bytes(4 * count))]
    tracemalloc.start()
    try:
        condition.evaluate(frame, REQUEST)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_a_row_without_strings_has_no_text():
    """text() of rows that are empty fails the request."""
    condition = _rows_of("text(inputs.T) == 'a'", T="BYTES")
    with pytest.raises(InvalidArgumentError, match=r"the BYTES tensor of shape \[2, 0\] has no first string"):
        condition.evaluate_rows([bytes_tensor([], (2, 0))], REQUEST, 2)


def test_a_row_with_many_elements_is_not_turned_into_a_list():
    """The limit of elements is one of a row."""
    condition = _rows_of("inputs.X.all(x, x > 0.5)", X="FP32")
    frame = [encode(np.ones((2, MAX_LIST_ELEMENTS), np.float32))]
    assert [True, True] == condition.evaluate_rows(frame, REQUEST, 2)
    with pytest.raises(InvalidArgumentError, match="1025 elements are too many"):
        condition.evaluate_rows([encode(np.ones((2, MAX_LIST_ELEMENTS + 1), np.float32))], REQUEST, 2)


def test_a_tensor_of_unknown_type_fits_everything():
    """Without a catalog a tensor has no type; conditions on it are checked as far as they go."""
    types = {"X": TensorType.unknown("the test")}
    for source in ("max(inputs.X) > 1", "text(inputs.X) == 'a'", "inputs.X[0][1] == 3"):
        compile_condition(read_expression(source), WHEN, {"inputs": VisibleBindings(types, {"X": 0})}, node="n")
