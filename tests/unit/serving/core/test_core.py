"""A repository behind the V2 interface: versions, states, errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall, RequestedOutput
from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.base.tensors import decode, encode
from weft.serving.backends.python import PythonBackend
from weft.serving.core import ServingCore
from weft.serving.lifecycle.warm_pool import WarmLimits


async def test_result_names_the_version_that_answered(repository: Any) -> None:
    """Id and version are in the answer, also where the request left the version open."""
    repository.write("good", {2: 2, 10: 10})
    core = await repository.serve()
    call = InferCall("good", request_id="r7", inputs={"X": encode(np.zeros((1, 2), np.float32))})
    call.outputs = (RequestedOutput("Y", {}),)
    results = [result async for result in core.stream_infer(call, CallContext())]
    assert [(result.model_version, result.request_id, result.is_final) for result in results] == [("10", "r7", True)]


LABELLED = 'output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ]'


def call(count: object = 1) -> InferCall:
    """Asks for the best classes of [[0, 1], [3, 2]] + value."""
    inputs = {"X": encode(np.array([[0, 1], [3, 2]], np.float32))}
    return InferCall("m", inputs=inputs, outputs=(RequestedOutput("Y", {"classification": count}),))  # type: ignore[dict-item]


@pytest.mark.parametrize("folder", ["", "1/"])
async def test_labels_of_the_config(repository: Any, folder: str) -> None:
    """Labels are the lines of ``label_filename``, in the model's folder or the version's."""
    config = repository.CONFIG.replace(LABELLED, LABELLED + ' label_filename: "names.txt"')
    repository.write("m", {1: 1}, config)
    (repository.root / "m" / f"{folder}names.txt").write_text("süß\nsour\n")
    core = await repository.serve()
    answer = (await core.infer(call(), CallContext())).outputs["Y"]
    assert [[b"2.000000:1:sour"], ["4.000000:0:süß".encode()]] == decode(answer).tolist()


async def test_the_others_of_the_batch_get_their_tensors(repository: Any) -> None:
    """A request that asks for classes and one that does not are answered each in its way."""
    repository.write("m", {1: 1})
    core = await repository.serve()
    plain = InferCall("m", inputs=call().inputs)
    assert [[b"2.000000:1"], [b"4.000000:0"]] == decode((await core.infer(call(), CallContext())).outputs["Y"]).tolist()
    assert [[1, 2], [4, 3]] == decode((await core.infer(plain, CallContext())).outputs["Y"]).tolist()


async def test_a_bad_number_of_classes_is_refused_before_the_model_runs(repository: Any) -> None:
    """The request is INVALID_ARGUMENT and nothing was executed."""
    repository.write("m", {1: 1})
    core = await repository.serve()
    with pytest.raises(InvalidArgumentError, match="must be an integer above 0, got 0"):
        await core.infer(call(0), CallContext())
    assert [0] == [entry.execution_count for entry in core.statistics("m", "1")]


async def test_labels_of_the_model_come_first(repository: Any) -> None:
    """Of a file in both folders that of the model's is read, as Triton Inference Server does."""
    config = repository.CONFIG.replace(LABELLED, LABELLED + ' label_filename: "names.txt"')
    repository.write("m", {1: 1}, config)
    (repository.root / "m" / "names.txt").write_text("a\r\nb")
    (repository.root / "m" / "1" / "names.txt").write_text("x\ny\n")
    core = await repository.serve()
    assert ("a", "b") == core.signature("m", "").outputs[0].labels


CONFIG = """
backend: "python"
parameters { key: "EXECUTION" value { string_value: "thread" } }
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "VALUE" data_type: TYPE_FP32 dims: [ 2 ] }
model_transaction_policy { decoupled: true }
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in range(int(request.inputs()[0].as_numpy()[0])):
                array = np.array([value, -value], np.float32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", array)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture
def write(tmp_path):
    """Writes the model ``m`` with ``CONFIG`` and more."""

    def write_(more: str = "") -> Path:
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
        (tmp_path / "m" / "config.pbtxt").write_text(CONFIG + more)
        return tmp_path

    return write_


@pytest.mark.parametrize("on_demand", [None, WarmLimits()])
async def test_streams_are_served(write, on_demand):
    """Every response comes, also of a model that loads on demand, and as classes where they are asked for."""
    core = ServingCore(write(), {"python": PythonBackend}, num_gpus=0, on_demand=on_demand)
    await core.start()
    try:
        call = InferCall("m", inputs={"N": encode(np.array([2], np.int32))})
        results = [result async for result in core.stream_infer(call, CallContext())]
        assert [[0, 0], [1, -1]] == [decode(result.outputs["VALUE"]).tolist() for result in results[:-1]]
        assert (True, True) == (results[-1].is_final, results[-1].is_null)
        call.outputs = (RequestedOutput("VALUE", {"classification": 1}),)
        classes = [result async for result in core.stream_infer(call, CallContext())]
        assert [[b"0.000000:0"], [b"1.000000:0"]] == [decode(r.outputs["VALUE"]).tolist() for r in classes[:-1]]
        with pytest.raises(UnsupportedError) as error:
            await core.infer(call, CallContext())
        assert "ModelInfer RPC doesn't support models with decoupled transaction policy" == error.value.message
    finally:
        await core.close(grace_s=5)
