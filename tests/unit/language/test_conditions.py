"""What conditions evaluate to, and how they fail."""

import re
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import WireTensor, bytes_tensor, encode
from weft.language.plan import OK, Binding
from weft.language.request_scope import RequestScope
from weft.language.types.compile_condition import ConditionError, VisibleBindings, compile_condition
from weft.language.types.conditions import KEY, MAX_LIST_ELEMENTS, WHEN, CelCondition, Purpose
from weft.language.types.expression import Fault, read_expression
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


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("text(inputs.LANG) == 'de'", True),
        ("inputs.LANG[0] == 'de'", True),
        ("size(text(inputs.LANG)) > 4000", False),
        ("text(inputs.LANG).startsWith('d') && text(inputs.LANG).matches('^d.$')", True),
        ("max(inputs.PROBS) > 0.39 && min(inputs.PROBS) < 0.11", True),
        ("mean(inputs.PROBS) > 0.24 && mean(inputs.PROBS) < 0.26", True),
        ("argmax(inputs.PROBS) == 3", True),
        ("max(inputs.HALF) > 0.39", True),
        ("inputs.PROBS[3] > 0.39 && size(inputs.PROBS) == 4", True),
        ("inputs.PROBS.exists(p, p > 0.35)", True),
        ("inputs.COUNT[1][0] == 3 && max(inputs.COUNT) == 4", True),
        ("inputs.COUNT[1] == [3, 4] && inputs.COUNT == [[1, 2], [3, 4]] && size(inputs.COUNT[0]) == 2", True),
        ("inputs.COUNT[0][1 - 1] == 1 && inputs.COUNT[1 - 1][1] == 2", True),
        ("inputs.MANY[1024] == 1.0 && size(inputs.MANY) == 1025 && inputs.HALF[3] > 0.39", True),
        ("inputs.TABLE[1] == ['', 'd'] && inputs.TABLE[0][1] == 'bc' && size(inputs.TABLE) == 2", True),
        ("inputs.SCALAR == 3 && max(inputs.SCALAR) == 3", True),
        ("size(inputs.ROWS) == 1 && size(inputs.NOTHING) == 0 && size(inputs['LANG']) == 1", True),
        ("size(inputs.PROBS.map(p, p * 2.0)) == 4 && inputs.PROBS.size() == 4", True),
        ("inputs.FLAG[0]", True),
        ("max(inputs.ROWS) > 0.6 && min(inputs.ROWS) < 0.6", True),
        ("has(inputs.PROBS) && !has(inputs.ABSENT)", True),
        ("has(inputs.ABSENT) && max(inputs.ABSENT) > 0.5", False),
        ("!has(inputs.ABSENT) || max(inputs.ABSENT) > 0.5", True),
        ('inputs["odd name-1"][0] == "x" && has(inputs["odd name-1"])', True),
        ("max ( inputs . PROBS ) > 0.3 // a comment, max(inputs.NONE)", True),
        ('get(parameters, "tier", "free") == "std"', True),
        ('get(parameters, "none", "free") == "free"', True),
        ('get(parameters, "count", 0) > 2', True),
        ('get(headers, "x-user-id", request.id) == "u1"', True),
        ('get(headers, "none", request.id) == "r1"', True),
        ('get(parameters, "none", get(headers, "none", "last")) == "last"', True),
        ('get(parameters, "none", 1 > 2 ? "a" : "b") == "b"', True),
        ("parameters.tier == 'std' && has(parameters.count) && !has(parameters.none)", True),
        ("'tier' in parameters && parameters['ratio'] == 2.5 && parameters.on", True),
        ("headers['x-user-id'] == 'u1'", True),
        ("request.id == 'r1' && request.priority == 2", True),
        ("request.remaining_ms > 1000000", True),
        ("'inputs.NONE' == \"inputs.NONE\" && r'\\max(inputs.X)' != ''", True),
        ("true", True),
    ],
)
def test_value_of_a_test(source, expected):
    """A `when` gives true or false from tensors, parameters, headers and the request."""
    assert expected is _compile(source).evaluate(FRAME, REQUEST)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('get(parameters, "lang", text(inputs.LANG))', "de"),
        ("parameters.count", "3"),
        ("parameters.on", "true"),
        ("size(text(inputs.LANG)) == 3", "false"),
        ("argmax(inputs.PROBS)", "3"),
        ("1 > 0 ? 'a' : 'b'", "a"),
    ],
)
def test_value_to_compare_with_cases(source, expected):
    """An `on` gives text; true, false and integers are written as `case` has them."""
    assert expected == _compile(source, Purpose("on", ("string", "int", "bool"))).evaluate(FRAME, REQUEST)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("max(inputs.ABSENT) > 0.5", "inputs.ABSENT is absent; test it with has(inputs.ABSENT)"),
        ("inputs.ABSENT[0] > 0.5", "inputs.ABSENT is absent"),
        ("text(inputs.BROKEN) == ''", "inputs.BROKEN: the string is not UTF-8: byte 0xff at offset 0"),
        ("inputs.BROKEN[0] == ''", "the string is not UTF-8"),
        ("text(inputs.SHORT) == ''", "the tensor ends inside its string 0"),
        ("inputs.SHORT[0] == ''", "the tensor ends inside its string 0"),
        ("text(inputs.NOTHING) == ''", "the BYTES tensor of shape [1, 0] has no first string"),
        ("text(inputs.WORDS) == 'a'", "text() reads one row, got shape [2, 1]"),
        ("text(inputs.NUL) == 'a'", "a string that conditions read has no NUL character"),
        ("inputs.NUL[0] == 'a'", "no NUL character"),
        ("max(inputs.EMPTY) > 0.5", "a reduction takes numbers, got FP32 of shape [0, 2]"),
        ("inputs.ROWS[0] > 0.5", "elements are read of one row, got shape [2, 1]"),
        ("argmax(inputs.ROWS) == 0", "elements are read of one row, got shape [2, 1]"),
        ("inputs.MANY.exists(x, x > 2.0)", "1025 elements are too many to be read at once, the limit is 1024"),
        ("inputs.MANY[1025] > 0.5", "there is no element [1025] in a row of shape [1025]"),
        ("inputs.NOTHING[0] == ''", "there is no element [0] in a row of shape [0]"),
        ("inputs.PROBS[2 + 2] > 0.5", "Index error: index=4 size=4"),
        ("size(inputs.CUT) == 4", "15 bytes are not a FP32 tensor of shape [1, 4]"),
        ("inputs.CUT[0] > 0.5", "Expected 16, got 15"),
        ("parameters.none == 1", 'there is no "none" in parameters; give a default: get(parameters, "none", ...)'),
        ("headers.none == ''", 'there is no "none" in headers; give a default: get(headers, "none", ...)'),
        ("parameters.tier", "the value must be bool, got 'std'"),
        ("parameters.tier > 3", "'>' does not take (string, int64)"),
        ("inputs.COUNT[0][0] / 0 == 1", "divide by zero"),
        ("text(inputs.LANG).matches('(')", "invalid regular expression"),
        ("max(inputs.BIG) > 0", "inputs.BIG: 9223372036854775808 is beyond the integers of conditions"),
        ("inputs.BIG[0] > 0", "inputs.BIG: 9223372036854775808 is beyond the integers of conditions"),
    ],
)
def test_a_condition_that_fails_fails_the_request(source, cause):
    """The error is INVALID_ARGUMENT and names node, expression and cause; there is no silent false."""
    with pytest.raises(InvalidArgumentError) as caught:
        _compile(source).evaluate(FRAME, REQUEST)
    assert caught.value.message.startswith(f"when {source!r} of node 'n': ")
    assert cause in caught.value.message


@pytest.mark.parametrize("source", ["get(parameters, 'who', '') == 'a'", "parameters.who == 'a'"])
def test_a_parameter_that_cel_would_cut_short_fails_the_request(source):
    """CEL ends a string at a NUL character, so that what follows would not be seen."""
    condition = _compile(source)
    assert condition.evaluate(FRAME, RequestScope({"who": "a"}, {}))
    with pytest.raises(InvalidArgumentError, match="parameter 'who': a string that conditions read has no NUL"):
        condition.evaluate(FRAME, RequestScope({"who": "a\0b"}, {}))


@pytest.mark.parametrize("source", ["parameters.ratio", "parameters.none", "null"])
def test_on_must_be_text_an_integer_or_a_boolean(source):
    """An `on` that is anything else fails, at load where its type is known, else in the request."""
    with pytest.raises((InvalidArgumentError, ConditionError)):
        _compile(source, Purpose("on", ("string", "int", "bool"))).evaluate(FRAME, REQUEST)


def test_an_unused_tensor_may_be_bad():
    """What CEL does not evaluate cannot fail: the other side of a decided && or || is not looked at."""
    assert not _compile("false && text(inputs.BROKEN) == ''").evaluate(FRAME, REQUEST)
    assert _compile("true || max(inputs.ABSENT) > 0.0").evaluate(FRAME, REQUEST)


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


def test_an_evaluation_is_bounded():
    """Loops over loops over a tensor end with an error, not after minutes."""
    loops = "[1,2,3,4,5,6,7,8,9,10].all(a, [1,2,3,4,5,6,7,8,9,10].all(b, [1,2,3,4,5,6,7,8,9,10].all(c, {}))))"
    inner = "[1,2,3,4,5,6,7,8,9,10].all(d, inputs.PROBS.all(e, e + double(a + b + c + d) > 0.0))"
    with pytest.raises(InvalidArgumentError, match="Iteration budget exceeded"):
        _compile(loops.format(inner)[:-1]).evaluate(FRAME, REQUEST)


@pytest.mark.parametrize(
    ("source", "at", "message"),
    [
        ("max(inputs.PRBS) > 0.5", 11, "unknown tensor 'PRBS'; did you mean 'PROBS'?"),
        ("1 +\n  max(inputs.PRBS)", 17, "unknown tensor 'PRBS'"),
        ("maxi(inputs.PROBS) > 0.5", 0, "undeclared reference to 'maxi'; did you mean 'max'?"),
        ("PROBS[0] > 0.5", 0, "did you mean 'inputs.PROBS'?"),
        ("max(inputs.PROBS) > 1", 18, "'>' does not take (double, int); write 1.0 for 1"),
        ("text(inputs.LANG) != null", 18, "'!=' does not take (string, null_type)"),
        ("inputs.PROBS > 0.5", 13, "'>' does not take (list(double), double); a tensor is a list of its elements"),
        ("max(inputs.PROBS) >", 19, "the expression ends too early"),
        ("has(inputs.PROBS) true", 18, "'true' is not expected here; tests are joined with '&&' or '||'"),
        ("(has(inputs.PROBS)", 18, "a ')' is missing here"),
        ("has(inputs.PROBS))", 17, "')' is not expected here"),
        ("text(inputs.LANG) == 'de", 21, "the closing quote of this text is missing"),
        (r"text(inputs.LANG).matches('\d+')", 26, r"'\d' is not an escape; write a pattern as r"),
        ("text(inputs.LANG) = 'de'", 18, "'=' means nothing in a condition; write '=='"),
        ("has(inputs.LANG) & true", 17, "write '&&'"),
        ("has(inputs.LANG) | true", 17, "write '||'"),
        ("has(inputs.LANG) and true", 17, "write '&&'"),
        ("has(inputs.LANG) or True", 17, "write '||'"),
        ("has(inputs.LANG) or True", 20, "write 'true'"),
        ("not has(inputs.LANG)", 0, "write '!'"),
        ("len(inputs.LANG) > 1", 0, "there is no function 'len'; write size(X)"),
        ("LANG.size > 1", 0, "did you mean 'inputs.LANG'?"),
        ("input.LANG == 'a'", 0, "undeclared reference to 'input.LANG'; did you mean 'inputs'?"),
        ("inputs.PROBS[4] > 0.5", 13, "there is no such element: 'PROBS' is FP32 [-1,4], from the test; elements are"),
        ("inputs.COUNT[0][2] > 5", 13, "there is no such element: 'COUNT' is INT64 [-1,2,2]"),
        ("inputs.PROBS[0][0] > 0.5", 13, "2 indexes are too many: 'PROBS' is FP32 [-1,4], from the test; give 1"),
        ("inputs.PROBS[-1] > 0.5", 13, "elements are counted from 0; there is no negative index"),
        (f"inputs.PROBS[{'9' * 5000}] > 0.5", 13, "invalid int literal"),
        ("size(inputs.SCALAR) == 1", 12, "size() takes a tensor with dims; 'SCALAR' is INT32 [-1], from the test"),
        ("text(LANG) == 'a'", 0, "text() takes one tensor: text(inputs.LANG)"),
        (f"text(inputs.LANG) == '{'a' * 100_000}'", 0, "the text has 100023 characters, the limit is 100000"),
        ("text(inputs.PROBS) == ''", 12, "text() takes a BYTES tensor; 'PROBS' is FP32 [-1,4], from the test"),
        ("max(inputs.LANG) > 1", 11, "max() takes a tensor of numbers"),
        ("max(inputs) > 1", 0, "max() takes one tensor"),
        ("inputs == 1", 0, "name one tensor"),
        ("request == 1", 0, "name one field of request"),
        ("request.idd == ''", 8, "did you mean 'id'?"),
        ("get(parameters, 'x') == 1", 0, "get() takes a map, a key and a default"),
        ("get(request, 'x', 1) == 1", 0, "get() takes a map, a key and a default"),
        ("get(headers, 'X', '') == ''", 13, "names of headers are lower-case: 'x'"),
        ("headers['a-bin'] == ''", 8, "header 'a-bin' is binary"),
        ("has(headers.A)", 12, "names of headers are lower-case: 'a'"),
        (
            "max(outputs.PROBS) > 0.5",
            12,
            "'when' does not see 'outputs'",
        ),
        ("steps.lid", 0, "ask whether a step gave an answer: has(steps.NAME)"),
        ("steps.lif.ok", 6, "unknown step 'lif'; did you mean 'lid'?"),
        ("has(inputs.PROBS) && steps.post.ok", 27, "step 'post' stands later"),
        ("has(steps.lid.ok)", 0, "ask whether a step gave an answer: has(steps.NAME)"),
        ("outputs == 1", 0, 'name one tensor: outputs.NAME, or outputs["NAME"]'),
        ("max(outputs) > 1", 0, "max() takes one tensor: max(outputs.NAME)"),
        ("_w0 > 1 && max(inputs.PROBS) > 0.5", 0, "undeclared reference to '_w0'"),
        ("text(inputs.LANG)", 0, "'when' must be bool, this is string"),
        ("(" * 300 + "true" + ")" * 300, 0, "recursion"),
        ("true\n||\nmax(inputs.PROBS) > zz", 28, "undeclared reference to 'zz'"),
        ("max(\n inputs.PROBS\n) > 0.1 && zz", 30, "undeclared reference to 'zz'"),
        ("get(parameters, 'a', 1) > 0 && zz", 31, "undeclared reference to 'zz'"),
    ],
)
def test_an_error_is_at_its_character(source, at, message):
    """What does not compile is reported at the character of the author's text."""
    with pytest.raises(ConditionError) as caught:
        _compile(source)
    faults = caught.value.faults
    assert (at, True) in [(fault.at, message in fault.message) for fault in faults], faults


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


@pytest.mark.parametrize(
    ("source", "expected"), [("request.id", "r1"), ("parameters.count", "3"), ("parameters.on", "true")]
)
def test_value_of_a_cache_key(source, expected):
    """A `key` gives text, as `on` does."""
    assert expected == _compile(source, KEY).evaluate(FRAME, REQUEST)


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
    types = {
        "X": TensorType("FP32", (-1,), is_batched=True, is_optional=False, origin="the test"),
        "T": TensorType("BYTES", (-1,), is_batched=True, is_optional=False, origin="the test"),
    }
    bindings = VisibleBindings(types, {"X": 0, "T": 1})
    condition = compile_condition(read_expression(source), WHEN, {"inputs": bindings}, node="n")
    count = 1_000_000
    frame = [WireTensor("FP32", (1, count), bytes(4 * count)), WireTensor("BYTES", (1, count), bytes(4 * count))]
    tracemalloc.start()
    try:
        condition.evaluate(frame, REQUEST)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_a_header_in_place_of_its_value_is_no_subtraction():
    """`x-user-id` is three names to CEL; the message has what was meant."""
    with pytest.raises(ConditionError, match='to read a header, write get\\(headers, "x-user-id", ""\\)'):
        _compile("x-user-id", Purpose("sticky_by", ("string", "int")))


def test_a_row_without_strings_has_no_text():
    """text() of rows that are empty fails the request."""
    types = {"T": TensorType("BYTES", (-1,), is_batched=True, is_optional=False, origin="the test")}
    condition = compile_condition(
        read_expression("text(inputs.T) == 'a'"), WHEN, {"inputs": VisibleBindings(types, {"T": 0})}, node="n"
    )
    with pytest.raises(InvalidArgumentError, match=r"the BYTES tensor of shape \[2, 0\] has no first string"):
        condition.evaluate_rows([bytes_tensor([], (2, 0))], REQUEST, 2)


def test_a_row_with_many_elements_is_not_turned_into_a_list():
    """The limit of elements is one of a row."""
    types = {"X": TensorType("FP32", (-1,), is_batched=True, is_optional=False, origin="the test")}
    condition = compile_condition(
        read_expression("inputs.X.all(x, x > 0.5)"), WHEN, {"inputs": VisibleBindings(types, {"X": 0})}, node="n"
    )
    frame = [encode(np.ones((2, MAX_LIST_ELEMENTS), np.float32))]
    assert [True, True] == condition.evaluate_rows(frame, REQUEST, 2)
    with pytest.raises(InvalidArgumentError, match="1025 elements are too many"):
        condition.evaluate_rows([encode(np.ones((2, MAX_LIST_ELEMENTS + 1), np.float32))], REQUEST, 2)


def test_a_syntax_error_is_reported_once():
    """What CEL's parser says of the rest of the text only follows from the first error."""
    with pytest.raises(ConditionError) as caught:
        _compile("(1 + ) * ) + (")
    assert [Fault(5, "')' is not expected here")] == caught.value.faults


def test_every_fault_is_reported():
    """Two unknown tensors and a wrong header make three faults."""
    with pytest.raises(ConditionError) as caught:
        _compile("max(inputs.A) > max(inputs.B) && headers.C == ''")
    assert 3 == len(caught.value.faults)


def test_a_tensor_of_unknown_type_fits_everything():
    """Without a catalog a tensor has no type; conditions on it are checked as far as they go."""
    types = {"X": TensorType.unknown("the test")}
    for source in ("max(inputs.X) > 1", "text(inputs.X) == 'a'", "inputs.X[0][1] == 3"):
        compile_condition(read_expression(source), WHEN, {"inputs": VisibleBindings(types, {"X": 0})}, node="n")
