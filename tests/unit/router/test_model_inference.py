"""Models called by their own name whose answers are not as they declare."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import InternalError
from weft.base.tensors import WireTensor, bytes_tensor
from weft.router.repository.config import config_of_signature
from weft.router.serving import ServedTargetModel
from weft.router.target import TargetModel


@pytest.fixture
def model() -> TargetModel:
    """A model that batches: X to Y, [rows, 2]."""
    x, y = make.spec("X", dims=(2,)), make.spec("Y", dims=(2,))
    signature = make.signature("double", [x], [y], max_batch_size=8)
    return TargetModel(signature, True, config_of_signature(signature))


async def answered(model: TargetModel, **outputs: WireTensor) -> dict[str, WireTensor]:
    """What a client of the router gets when the model answers two rows with these outputs."""

    async def answer(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
        return outputs

    call = InferCall("double", inputs={"X": make.tensor(1, 2, 3, 4, shape=(2, 2))})
    return (await make.infer_of_model(FakeTarget(double=answer), model, call, CallContext())).outputs


async def test_an_answer_may_have_another_number_of_rows(model: TargetModel) -> None:
    """It is the model's affair, as in Triton Inference Server."""
    tensor = make.tensor(*range(6), shape=(3, 2))
    assert {"Y": tensor} == await answered(model, Y=tensor)


async def test_an_answer_of_another_shape_is_refused(model: TargetModel, caplog: pytest.LogCaptureFixture) -> None:
    """The error names the model, says what is wrong, and is in the log under its id."""
    text = "output 'Y' of model 'double' is not as it declares: its shape is [2,3], declared as [-1,2]"
    with pytest.raises(InternalError) as caught:
        await answered(model, Y=make.tensor(*range(6), shape=(2, 3)))
    assert f"{text} (error id {caught.value.error_id})" == caught.value.message
    assert [caught.value.error_id] == [record.error_id for record in caplog.records]  # type: ignore[attr-defined]


async def test_classes_are_no_broken_promise(model: TargetModel) -> None:
    """The target answers the best classes of an output in place of its tensor, which the model declares."""

    async def answer(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
        assert (RequestedOutput("Y", {"classification": 1}),) == call.outputs
        return {"Y": bytes_tensor(["4.0:1:owl", "2.0:0:cat"], (2, 1))}

    inputs = {"X": make.tensor(1, 2, 3, 4, shape=(2, 2))}
    call = InferCall("double", inputs=inputs, outputs=(RequestedOutput("Y", {"classification": 1}),))
    result = await make.infer_of_model(FakeTarget(double=answer), model, call, CallContext())
    assert "BYTES" == result.outputs["Y"].datatype


@pytest.mark.parametrize(
    ("datatype", "shape", "fault"),
    [
        ("INT32", (2, 2), "it is INT32"),
        ("FP32", (4,), r"its shape is \[4\]"),
        ("FP32", (2, 1), r"its shape is \[2,1\]"),
    ],
)
async def test_an_answer_of_another_type_or_shape_is_refused(
    model: TargetModel, datatype: str, shape: tuple[int, ...], fault: str
) -> None:
    """As a step of a graph would."""
    with pytest.raises(InternalError, match=fault):
        await answered(model, Y=WireTensor(datatype, shape, bytes(16)))


async def test_what_is_not_declared_or_not_known_goes_through(model: TargetModel) -> None:
    """An output that the configuration does not have; any answer of a model that has none; a lack of one."""
    more = {"Y": make.tensor(*range(4), shape=(2, 2)), "MORE": make.tensor(1)}
    assert more == await answered(model, **more)
    assert {} == await answered(model)
    odd = {"Y": make.tensor(1)}
    assert odd == await answered(model._replace(config=None), **odd)


async def test_responses_of_a_stream_are_checked_but_for_their_rows(model: TargetModel) -> None:
    """A decoupled model answers when it likes, not row by row; what comes before a bad response is given."""

    class Target(FakeTarget):
        async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
            for shape in ((1, 2), (3, 2), (2,)):
                outputs = {"Y": WireTensor("FP32", shape, bytes(4 * shape[0] * shape[-1]))}
                yield InferResult("double", "1", outputs=outputs, is_final=False)

    decoupled: Any = model._replace(signature=replace(model.signature, is_decoupled=True))
    results = ServedTargetModel(Target(), decoupled).stream(InferCall("double"), CallContext())
    assert [(1, 2), (3, 2)] == [(await anext(results)).outputs["Y"].shape for _ in range(2)]
    with pytest.raises(InternalError, match=r"its shape is \[2\], declared as \[-1,2\]"):
        await anext(results)
