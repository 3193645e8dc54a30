"""Checks before the queue that depend on how much there is to check."""

import asyncio
import threading

import pytest
from tests.unit.serving.fake_backends import Echo

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, bytes_tensor, split_bytes
from weft.base.validation import validate
from weft.serving.runtime import model as intake

MANY = 20_000


@pytest.fixture
def signature():
    """IN BYTES [-1] and NUMBERS FP32 [-1, -1], both optional, to OUT BYTES [-1] and COUNT INT32 [1]."""
    return ModelSignature(
        "echo",
        "1",
        "test",
        8,
        (TensorSpec("IN", "BYTES", (-1,), is_optional=True), TensorSpec("NUMBERS", "FP32", (-1, -1), is_optional=True)),
        (TensorSpec("OUT", "BYTES", (-1,)), TensorSpec("COUNT", "INT32", (1,))),
    )


@pytest.fixture
def checked_on(monkeypatch):
    """Names of the threads on which requests are checked."""
    names = []

    def watched(call, signature, **options):
        names.append(threading.current_thread().name)
        return validate(call, signature, **options)

    monkeypatch.setattr(intake, "validate", watched)
    return names


def _call(count, **tensors):
    return InferCall("echo", inputs={"IN": bytes_tensor([b"a"] * count, (1, count)), **tensors})


async def test_many_strings_are_checked_on_a_thread(serve, checked_on):
    """The event loop checks a few strings itself, and leaves many to a thread; both are answered."""
    model = await serve(Echo)
    for count in (1, MANY):
        result = await model.infer(_call(count), CallContext())
        assert count == len(split_bytes(result.outputs["OUT"].data))
    assert [True, False] == [name == threading.current_thread().name for name in checked_on]


async def test_many_strings_may_be_wrong(serve):
    """A request that is refused on the thread counts as one that is refused on the event loop."""
    model = await serve(Echo)
    call = InferCall("echo", inputs={"IN": bytes_tensor([b"a"] * (MANY - 1), (1, MANY))})
    with pytest.raises(InvalidArgumentError, match=f"expected {MANY} string elements .* got {MANY - 1}$"):
        await model.infer(call, CallContext())
    assert {"OTHER": 1} == model.statistics.failures_by_reason


async def test_a_request_cancelled_while_it_is_checked_counts(serve, monkeypatch):
    """Whoever leaves before the queue is counted too, once, and nothing is executed."""
    has_begun, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(intake, "validate", lambda *_, **__: (has_begun.set(), may_end.wait(10), 1)[2])
    model = await serve(Echo)
    task = asyncio.create_task(model.infer(_call(MANY), CallContext()))
    assert await asyncio.to_thread(has_begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    assert ({"CANCELED": 1}, 0) == (model.statistics.failures_by_reason, model.statistics.execution_count)


async def test_surplus_strings_are_not_counted(serve):
    """Strings that the shape does not announce are not looked at, so that a small shape is a small check."""
    model = await serve(Echo)
    call = InferCall("echo", inputs={"IN": bytes_tensor([b"a"] * 5, (1, 1))})
    with pytest.raises(InvalidArgumentError, match=r"expected 1 string elements .* got 2 or more"):
        await model.infer(call, CallContext())


async def test_an_empty_tensor_of_impossible_shape_is_refused(serve):
    """Beside a dimension of 0, one that no array can have is the client's fault, not the model's."""
    model = await serve(Echo)
    call = _call(1, NUMBERS=WireTensor("FP32", (1, 0, 2**62), b""))
    with pytest.raises(InvalidArgumentError, match=r"shape \[1,0,4611686018427387904\] of 'NUMBERS' is too large"):
        await model.infer(call, CallContext())
