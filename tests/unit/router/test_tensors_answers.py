"""Models that answer something else than they declare."""

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError
from weft.base.signature import TensorSpec
from weft.base.tensors import WireTensor, bytes_tensor
from weft.router.operators.sequence import SequencePlan
from weft.router.tensors import misfit

FLOATS = TensorSpec("OUT", "FP32", (-1, 2))
TEXT = TensorSpec("OUT", "BYTES", (1,))


@pytest.mark.parametrize(
    ("spec", "tensor", "fault"),
    [
        (FLOATS, WireTensor("FP32", (1, 3, 2), bytes(24)), ""),
        (FLOATS, WireTensor("FP32", (0, 3, 2), b""), ""),
        (FLOATS, WireTensor("INT32", (1, 3, 2), bytes(24)), "it is INT32, declared as FP32"),
        (FLOATS, WireTensor("FP32", (1, 3, 3), bytes(36)), "its shape is [1,3,3], declared as [-1,-1,2]"),
        (FLOATS, WireTensor("FP32", (3, 2), bytes(24)), "its shape is [3,2], declared as [-1,-1,2]"),
        (FLOATS, WireTensor("FP32", (), bytes(4)), "its shape is [], declared as [-1,-1,2]"),
        (FLOATS, WireTensor("FP32", (1, -3, 2), b""), "its shape is [1,-3,2], declared as [-1,-1,2]"),
        (FLOATS, WireTensor("FP32", (1, 3, 2), bytes(23)), "it has 23 bytes, its shape [1,3,2] takes 24"),
        (TEXT, bytes_tensor(["a", "b"], (2, 1)), ""),
        (TEXT, bytes_tensor(["a"], (2, 1)), "its 5 bytes are not the 2 strings of shape [2,1]"),
        (TEXT, WireTensor("BYTES", (1, 1), b"\xff\xff\xff\xff"), "its 4 bytes are not the 1 strings of shape [1,1]"),
    ],
)
def test_what_differs_from_the_declaration_is_said(spec: TensorSpec, tensor: WireTensor, fault: str) -> None:
    """Datatype, rank, sizes that are fixed, and the number of bytes."""
    assert fault == misfit(tensor, spec, has_batch=True)


def test_without_batch_dimension_the_dims_are_the_shape() -> None:
    """A model that does not batch declares the whole shape."""
    tensor = WireTensor("FP32", (3, 2), bytes(24))
    assert "" == misfit(tensor, FLOATS, has_batch=False)


async def test_a_wrong_answer_fails_the_step_that_gave_it() -> None:
    """The error is INTERNAL and names that model, not the next one that would have refused the tensor."""

    async def lie(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
        return {"OUT": make.text("no float")}

    target = FakeTarget(liar=lie)
    steps = [make.step("a", "liar", {"IN": "X"}, {"OUT": "M"}), make.step("b", "next", {"IN": "M"}, {"OUT": "Y"})]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))
    with pytest.raises(InternalError, match="root/a -> liar@1: output 'OUT' of model 'liar' is not as it declares"):
        await make.run(plan, target)
    assert ["liar"] == target.called()
