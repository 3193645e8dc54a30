"""Models with ``reshape`` on a real service: in Python, in a process, decoupled, in ONNX, and behind a graph."""

from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.integration.batching import running_service
from tests.integration.routing import running_router, write
from tests.repositories import THREAD, write_model
from tritonclient import grpc as triton

from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

#: Y is X as the model got it, SHAPE its shape in each row.
MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "SHAPE", "data_type": "TYPE_INT64", "dims": [-1]})
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            shape = np.array([x.shape] * len(x), np.int64)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x), pb_utils.Tensor("SHAPE", shape)]))
        if not self.is_decoupled:
            return responses
        for request, response in zip(requests, responses):
            sender = request.get_response_sender()
            sender.send(response)
            sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ 1, -1 ] } }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 1 ] reshape { shape: [ 1, -1 ] } }
dynamic_batching { }
"""
OPTIONS = {
    "thread": f"response_cache {{ enable: true }} {THREAD}",
    "process": "",
    "decoupled": "model_transaction_policy { decoupled: true }",
}
VECTOR_CONFIG = """
backend: "onnxruntime"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
model_warmup { batch_size: 2 inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }
"""
GRAPH = """name: "graph" platform: "graph" max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Z" data_type: TYPE_FP32 dims: [ -1, 1 ] } ]
node { name: "root" sequence {
  step { model_name: "vector" }
  step { model_name: "thread" input_map { key: "X" value: "Y" } output_map { key: "Y" value: "Z" } } } }
"""


@dataclass(frozen=True)
class Addresses:
    """``host:port`` of each."""

    service: str
    router: str


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A service with the models, loaded, and a router in front of it."""
    root = tmp_path_factory.mktemp("reshape")
    for name, options in OPTIONS.items():
        write_model(root / "models", name, MODEL, CONFIG + options)
    folder = root / "models" / "vector" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(VECTOR_CONFIG)
    onnx.save(_doubling(), folder / "model.onnx")
    write(root / "graphs", GRAPH, "graph")
    with (
        running_service(root / "models", "--load-model", "*") as service,
        running_router(root / "graphs", service.grpc) as router,
    ):
        yield Addresses(service.grpc, router.grpc)


def _doubling() -> onnx.ModelProto:
    """Y = 2 X over a vector [rows], without any other dimension."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["X", "X"], ["Y"])],
        "doubling",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["rows"])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["rows"])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _infer(address: str, model: str, array: np.ndarray) -> triton.InferResult:
    x = triton.InferInput("X", array.shape, "FP32")
    x.set_data_from_numpy(array)
    with triton.InferenceServerClient(address) as client:
        return client.infer(model, [x])


@pytest.mark.parametrize("model", ["thread", "process"])
def test_python_models_get_the_reshaped_input(addresses: Addresses, model: str) -> None:
    """The client sends [2,3] and gets [2,3,1]; the model saw [2,1,3], also in a process; the cache gives the same."""
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(2):
        result = _infer(addresses.service, model, numbers)
        assert numbers.reshape(2, 3, 1).tolist() == result.as_numpy("Y").tolist()
        assert [[2, 1, 3]] * 2 == result.as_numpy("SHAPE").tolist()


def test_every_response_of_a_stream_is_reshaped(addresses: Addresses) -> None:
    """A decoupled model's responses have the client's shape, each."""
    request = pb.ModelInferRequest(model_name="decoupled")
    request.inputs.add(name="X", datatype="FP32", shape=(1, 3))
    request.raw_input_contents.append(bytes(12))
    with grpc.insecure_channel(addresses.service) as channel:
        responses = list(GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]), timeout=30))
    assert ["", ""] == [response.error_message for response in responses]
    assert [[1, 3, 1]] * 2 == [list(response.infer_response.outputs[0].shape) for response in responses]


def test_an_empty_reshape_makes_a_vector_of_the_batch(addresses: Addresses) -> None:
    """An ONNX model over [rows] serves clients that send [rows,1]; its warm-up did too."""
    result = _infer(addresses.service, "vector", np.array([[1], [2], [3]], np.float32))
    assert [[2], [4], [6]] == result.as_numpy("Y").tolist()


def test_steps_of_a_graph_see_the_shape_of_clients(addresses: Addresses) -> None:
    """A graph joins two models with reshape by their dims: [2,1] through the vector to [2,1,1]."""
    result = _infer(addresses.router, "graph", np.array([[1], [2]], np.float32))
    assert [[[2]], [[4]]] == result.as_numpy("Z").tolist()
