"""What conditions evaluate to, and how they fail."""

import time

import ml_dtypes
import numpy as np
import pytest

from weft_common.errors import InvalidArgumentError
from weft_common.tensors import WireTensor, bytes_tensor, encode
from weft_router.graph.conditions import CelCondition, ConditionError, Purpose, compile_condition
from weft_router.graph.expression import read_expression
from weft_router.graph.plan import RequestScope
from weft_router.graph.readings import MAX_LIST_ELEMENTS
from weft_router.graph.types import TensorType

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
}
DIMS = {"COUNT": (2, 2), "PROBS": (4,), "HALF": (4,), "MANY": (-1,), "EMPTY": (2,)}
DATATYPES = {"ABSENT": "FP32"}


def _type(name: str) -> TensorType:
    tensor = TENSORS[name]
    datatype = tensor.datatype if tensor else "FP32"
    return TensorType(datatype, DIMS.get(name, (1,)), is_batched=True, is_optional=tensor is None, origin="the test")


TYPES = {name: _type(name) for name in TENSORS}
SLOTS = {name: slot for slot, name in enumerate(TENSORS)}
FRAME = list(TENSORS.values())
REQUEST = RequestScope({"tier": "std", "count": 3, "ratio": 2.5, "on": True}, {"x-user-id": "u1"}, "r1", 2, None)


def _compile(source: str, purpose: Purpose = Purpose.WHEN) -> CelCondition:
    return compile_condition(read_expression(source), purpose, types=TYPES, slots=SLOTS, node="n")


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
    assert expected == _compile(source, Purpose.ON).evaluate(FRAME, REQUEST)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("max(inputs.ABSENT) > 0.5", "inputs.ABSENT is absent; test it with has(inputs.ABSENT)"),
        ("inputs.ABSENT[0] > 0.5", "inputs.ABSENT is absent"),
        ("text(inputs.BROKEN) == ''", "inputs.BROKEN: the string is not UTF-8: byte 0xff at offset 0"),
        ("inputs.BROKEN[0] == ''", "the string is not UTF-8"),
        ("text(inputs.SHORT) == ''", "the tensor of shape [1, 1] has no first string"),
        ("text(inputs.WORDS) == 'a'", "text() reads one row, got shape [2, 1]"),
        ("text(inputs.NUL) == 'a'", "a string that conditions read has no NUL character"),
        ("inputs.NUL[0] == 'a'", "no NUL character"),
        ("max(inputs.EMPTY) > 0.5", "a reduction takes numbers, got FP32 of shape [0, 2]"),
        ("inputs.ROWS[0] > 0.5", "elements are read of one row, got shape [2, 1]"),
        ("argmax(inputs.ROWS) == 0", "elements are read of one row, got shape [2, 1]"),
        ("inputs.MANY[0] > 0.5", "a tensor of 1025 elements is too large to be read one by one, the limit is 1024"),
        ("inputs.PROBS[9] > 0.5", "Index error: index=9 size=4"),
        ("parameters.none == 1", 'Key not found in map : "none"'),
        ("parameters.tier", "the value must be bool, got 'std'"),
        ("parameters.tier > 3", "No matching overloads found"),
        ("inputs.COUNT[0][0] / 0 == 1", "divide by zero"),
        ("text(inputs.LANG).matches('(')", "invalid regular expression"),
        ("max(inputs.BIG) > 0", "inputs.BIG"),
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
        _compile(source, Purpose.ON).evaluate(FRAME, REQUEST)


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
    values = "inputs.MANY" if MAX_LIST_ELEMENTS < 0 else "inputs.PROBS"
    loops = "[1,2,3,4,5,6,7,8,9,10].all(a, [1,2,3,4,5,6,7,8,9,10].all(b, [1,2,3,4,5,6,7,8,9,10].all(c, {}))))"
    inner = f"[1,2,3,4,5,6,7,8,9,10].all(d, {values}.all(e, e + double(a + b + c + d) > 0.0))"
    with pytest.raises(InvalidArgumentError, match="Iteration budget exceeded"):
        _compile(loops.format(inner)[:-1]).evaluate(FRAME, REQUEST)


@pytest.mark.parametrize(
    ("source", "at", "message"),
    [
        ("max(inputs.PRBS) > 0.5", 11, "unknown tensor 'PRBS'; did you mean 'PROBS'?"),
        ("1 +\n  max(inputs.PRBS)", 17, "unknown tensor 'PRBS'"),
        ("maxi(inputs.PROBS) > 0.5", 0, "undeclared reference to 'maxi'; did you mean 'max'?"),
        ("PROBS[0] > 0.5", 0, "did you mean 'inputs.PROBS'?"),
        ("max(inputs.PROBS) > 1", 18, "found no matching overload for '_>_' applied to '(double, int)'"),
        ("max(inputs.PROBS) >", 19, "Syntax error"),
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
        ("max(outputs.PROBS) > 0.5", 4, "'outputs' is not supported by this version of Weft"),
        ("steps.a.ok", 0, "'steps' is not supported by this version of Weft"),
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


def test_every_fault_is_reported():
    """Two unknown tensors and a wrong header make three faults."""
    with pytest.raises(ConditionError) as caught:
        _compile("max(inputs.A) > max(inputs.B) && headers.C == ''")
    assert 3 == len(caught.value.faults)


def test_a_tensor_of_unknown_type_fits_everything():
    """Without a catalog a tensor has no type; conditions on it are checked as far as they go."""
    types = {"X": TensorType.unknown("the test")}
    for source in ("max(inputs.X) > 1", "text(inputs.X) == 'a'", "inputs.X[0][1] == 3"):
        compile_condition(read_expression(source), Purpose.WHEN, types=types, slots={"X": 0}, node="n")
