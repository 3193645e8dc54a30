"""Cutting a call into parts and joining their answers, without a model."""

import numpy as np
import pytest

from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import bytes_tensor, decode, encode, split_bytes
from weft.serving.core import CallContext  # type: ignore[attr-defined]
from weft.serving.request.request import InferenceRequest, SplitRequest, split_call


def _call():
    numbers = np.arange(10, dtype=np.int16).reshape(5, 2)
    texts = bytes_tensor([b"x" * length for length in range(5)], (5, 1))
    return InferCall(
        "m", "3", "id", {"priority": 1}, {"N": encode(numbers), "T": texts, "E": encode(np.empty((5, 0)))},
        (RequestedOutput("OUT", {}),),
    )  # fmt: skip


def test_cut():
    """Each part has its rows of every input, numbers, texts and empty ones alike, and all else of the call."""
    parts = split_call(_call(), 5, 2)
    assert [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] == [decode(part.inputs["N"]).ravel().tolist() for part in parts]
    assert [[b"", b"x"], [b"xx", b"xxx"], [b"xxxx"]] == [split_bytes(part.inputs["T"].data) for part in parts]
    assert [(2, 0), (2, 0), (1, 0)] == [part.inputs["E"].shape for part in parts]
    for part in parts:
        assert ("m", "3", "id", {"priority": 1}, (("OUT", {}),)) == (
            part.model_name, part.model_version, part.request_id, part.parameters, part.outputs
        )  # fmt: skip


def _join(*outputs):
    whole = InferenceRequest(_call(), CallContext(), 5, 2, 7)
    split = SplitRequest(whole, split_call(whole.call, 5, 2), 2)
    assert [(2, 2, 7), (2, 2, 7), (1, 2, 7)] == [(p.num_rows, p.priority, p.queue_timeout_us) for p in split.parts]
    answers = [InferResult("m", "3", "id", {}, output) for output in outputs]
    joined = [split.add(part, answer) for part, answer in reversed(list(zip(split.parts, answers, strict=True)))]
    assert [None, None] == joined[:-1]
    return joined[-1]


def test_join():
    """Whatever part is answered last, the rows of all outputs are in the order of the request."""
    texts = [bytes_tensor([b"a", b"bb"], (2, 1)), bytes_tensor([b"", b"c"], (2, 1)), bytes_tensor([b"d"], (1, 1))]
    joined = _join(*({"OUT": text} for text in texts))
    assert (5, 1) == joined.outputs["OUT"].shape
    assert [b"a", b"bb", b"", b"c", b"d"] == split_bytes(joined.outputs["OUT"].data)


@pytest.mark.parametrize("last", [{"OUT": encode(np.zeros((1, 4)))}, {}])
def test_rows_that_do_not_fit_together(last):
    """Parts whose rows differ in shape, or that lack an output, cannot be joined; the error has the cure."""
    full = {"OUT": encode(np.zeros((2, 3)))}
    error = _join(full, full, last)
    assert isinstance(error, InvalidArgumentError)
    assert "output 'OUT' has rows of shapes" in error.message
    assert "send at most as many rows as the model's max_batch_size" in error.message


def test_an_output_that_only_later_parts_have():
    """It cannot be joined either, and is not dropped."""
    error = _join({}, {"OUT": encode(np.zeros((2, 3)))}, {"OUT": encode(np.zeros((1, 3)))})
    assert isinstance(error, InvalidArgumentError)
    assert "output 'OUT' has rows of shapes" in error.message
