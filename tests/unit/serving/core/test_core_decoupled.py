"""A decoupled model behind the core: streams are served, unary calls are refused."""

from pathlib import Path

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall, RequestedOutput
from weft.base.errors import UnsupportedError
from weft.base.tensors import decode, encode
from weft.base.text.pbtxt import PbtxtError
from weft.serving.backends.python import PythonBackend
from weft.serving.config import define_model
from weft.serving.core import ServingCore
from weft.serving.lifecycle.warm_pool import WarmLimits

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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("max_batch_size: 2 dynamic_batching { preserve_ordering: true }", "preserve_ordering is not possible for a"),
        (
            'max_batch_size: 2 parameters { key: "split_large_requests" value { string_value: "true" } }',
            "split_large_requests is not possible for a decoupled model",
        ),
    ],
)
def test_contradictions_are_refused(write, more, message):
    """What needs exactly one response to each request is not possible."""
    with pytest.raises(PbtxtError, match=message):
        define_model(write(more) / "m", [1], {"python": PythonBackend}, num_gpus=0)
