"""Requests above max_batch_size that are executed in parts."""

import gc

import numpy as np
import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import bytes_tensor, decode, encode, split_bytes
from weft.serving.request.request import InferenceRequest, SplitRequest, split_call

MS = 1_000_000


def _numbers(rows):
    """A call whose row i has the number i."""
    return InferCall("echo", request_id="r", inputs={"IN": encode(np.arange(rows, dtype=np.float32).reshape(rows, 1))})


async def test_counted_once(serve):
    """A request that was split is one request of its rows; its executions are counted each."""
    model = await serve(
        Echo, is_batching=True, can_split=True, num_instances=2, priority_levels=2, default_priority_level=2
    )
    await model.infer(make_call(rows=20), CallContext())
    statistics = model.statistics
    assert ([2], True) == (list(statistics.request_latency), 0 < statistics.success.total_ns < 60_000 * MS)
    assert (1, 20, 3) == (statistics.success.count, statistics.inference_count, statistics.execution_count)
    assert (1, 1) == (statistics.queue.count, statistics.compute_infer.count)
    parts = (statistics.queue, statistics.compute_input, statistics.compute_infer, statistics.compute_output)
    assert sum(part.total_ns for part in parts) <= statistics.success.total_ns
    assert (0, {2: 0}) == (statistics.pending_count, statistics.count_pending_by_level())


async def test_nothing_is_kept(serve):
    """Without the help of the garbage collector nothing of a split request is in memory once it is answered."""
    model = await serve(Echo, is_batching=True, can_split=True)
    gc.collect()
    gc.disable()
    try:
        await model.infer(_numbers(20), CallContext())
        await model.infer(_numbers(1), CallContext())  # the instance thread has let go of the last part
        assert [] == [found for found in gc.get_objects() if type(found) is SplitRequest]
    finally:
        gc.enable()


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
