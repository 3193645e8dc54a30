"""Batches of no rows: refused, unless the model's configuration says that it takes them."""

import asyncio
from dataclasses import replace

import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo

from weft.base.core import CallContext
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.base.tensors import decode


@pytest.fixture
def signature(signature: ModelSignature, request: pytest.FixtureRequest) -> ModelSignature:
    """That of the model of ``serve``; with ``TAKING`` it takes batches of no rows."""
    return replace(signature, allows_empty_batch=getattr(request, "param", False))


TAKING = pytest.mark.parametrize("signature", [True], indirect=True)


async def test_a_model_that_does_not_say_so_refuses_them(serve):
    """With the shape that came, those that are allowed, and the cure."""
    model = await serve(Echo)
    text = r"got \[0,2\].*batch size, 1 to 8\. A model takes .* its configuration has the parameter 'allow_empty_batch'"
    with pytest.raises(InvalidArgumentError, match=text):
        await model.infer(make_call(rows=0), CallContext())


@TAKING
async def test_a_model_that_takes_them_answers_with_no_rows(serve):
    """The backend runs, and its outputs have no rows and their declared dims."""
    model = await serve(Echo)
    result = await model.infer(make_call(rows=0), CallContext())
    assert {"OUT": (0, 2), "COUNT": (0, 1)} == {name: one.shape for name, one in result.outputs.items()}


@TAKING
async def test_they_share_batches_with_others(serve, gate):
    """A request of no rows between two others changes nothing for these."""
    gate.open()
    model = await serve(Echo, preferred_batch_sizes=(8,), max_queue_delay_us=20_000)
    results = await asyncio.gather(
        *(model.infer(make_call(value, rows), CallContext()) for value, rows in ((1, 2), (0, 0), (3, 1)))
    )
    assert [[1, 1], [], [3]] == [decode(result.outputs["OUT"])[:, 0].tolist() for result in results]
