"""Which answers differ, and how it is told."""

from typing import Any

import numpy as np
import pytest

from weft.base.core import InferResult
from weft.base.errors import RemoteError
from weft.base.tensors import bytes_tensor, encode
from weft.changes.comparison import Comparison, Outcome, compare_answers


def floats(*values: float, shape: tuple[int, ...] = (-1,)) -> Any:
    return encode(np.array(values, np.float32).reshape(shape))


def texts(*values: bytes) -> Any:
    return bytes_tensor(values, (len(values),))


def answer(*tensors: Any, name: str = "Y", **more: Any) -> Outcome:
    """An answer with a response for each tensor; None is a response without the output."""
    return Outcome([InferResult("g", "1", outputs={} if one is None else {name: one}) for one in tensors], **more)


@pytest.mark.parametrize(
    ("before", "after", "rule", "text"),
    [
        (floats(1.0, 2.0), floats(1.000001, 2.0), "", ""),
        (floats(1.0, 2.0), floats(1.000001, 2.0), "exact", "1 -> 1, 1 of 2 elements"),
        (floats(1.0, 2.0, 3.0), floats(1.0, 2.5, 3.5), "", "2 -> 2.5, 2 of 3 elements"),
        (floats(float("nan")), floats(float("nan")), "close", ""),
        (floats(float("nan"), 1.000001, 1.0), floats(float("nan"), 1.0, 2.0), "", "1 -> 2, 1 of 3 elements"),
        (floats(1.0), floats(1.0, 2.0), "", "FP32[1] -> FP32[2]"),
        (encode(np.array([7])), encode(np.array([8])), "close", "7 -> 8"),
        (floats(0.1, 0.9, 0.6, 0.4, shape=(2, 2)), floats(0.4, 0.5, 0.9, 0.1, shape=(2, 2)), "top1", ""),
        (floats(0.1, 0.9, 0.6, 0.4, shape=(2, 2)), floats(0.1, 0.9, 0.4, 0.6, shape=(2, 2)), "top1",
         "0 -> 1, 1 of 2 elements"),
        (texts(b"a b", b"c"), texts(b" a  b\n", b"c"), "text", ""),
        (texts(b"a b", b"c"), texts(b"a b", b"d"), "text", "'c' -> 'd', 1 of 2 elements"),
        (texts(b"a b"), texts(b"a  b"), "", "'a b' -> 'a  b'"),
        (floats(1.0), floats(9.0), "ignore", ""),
        (floats(1.0), None, "", "in 1 responses -> in 0"),
    ],
)  # fmt: skip
def test_tensors_are_compared_by_their_rule(before: Any, after: Any, rule: str, text: str) -> None:
    """Without a rule floats have a tolerance and all else is exact; the first difference is shown."""
    comparison = Comparison({"Y": rule} if rule else {})
    found = compare_answers(answer(before), answer(after), comparison)
    assert [("output Y", text)] * bool(text) == found


def test_streams_are_compared_one_by_one_and_strings_as_one_text() -> None:
    """A server may cut a text elsewhere; with the rule exact that is a difference, and numbers always are."""
    before, after = answer(texts(b"to"), texts(b"day")), answer(texts(b"today"))
    assert [] == compare_answers(before, after)
    assert ["output Y"] == [one.what for one in compare_answers(before, after, Comparison({"Y": "exact"}))]
    assert [("output Y", "'today' -> 'to'")] == compare_answers(after, answer(texts(b"to")))
    assert [("output Y", "in 2 responses -> in 1")] == compare_answers(answer(floats(1), floats(2)), answer(floats(1)))
    assert [("output Y", "2 -> 3")] == compare_answers(answer(floats(1), floats(2)), answer(floats(1), floats(3)))


def test_errors_and_paths_are_compared() -> None:
    """An error that comes or goes, with its message; equal ones agree; a path that one side does not know is none."""
    good, bad = answer(floats(1), path="root.a"), Outcome(status="NOT_FOUND", message="no x", path="root.a!")
    assert [("path", "root.a -> root.a!"), ("status", "OK -> NOT_FOUND: no x")] == compare_answers(good, bad)
    assert [] == compare_answers(bad, Outcome(status="NOT_FOUND", message="no y"))
    part = answer(floats(1))
    part.results[0].error = RemoteError("INTERNAL", "")
    assert [("status", "OK, INTERNAL -> OK")] == compare_answers(part, answer(floats(1)))
    assert [] == compare_answers(answer(floats(2), status="CANCELLED"), good)  # its client left
