"""Requests of different shapes in one ragged batch of a real model service process."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.integration.batching import Service, running_service
from tests.messages import request_from_call

from weft.base.core import InferCall
from weft.base.tensors import encode
from weft_protos import grpc_service_pb2 as pb

RAGGED_CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input { name: "R" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "TWICE" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "END" data_type: TYPE_INT32 dims: [ 1 ] }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_INT32 source_input: "R" }
batch_output { target_name: "TWICE" source_input: "R" }
dynamic_batching { }
"""


@pytest.fixture(scope="module")
def ragged_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model ``ragged``: TWICE is the numbers doubled, END where those of the request end in its batch."""
    repository = tmp_path_factory.mktemp("ragged")
    folder = repository / "ragged" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(RAGGED_CONFIG)
    graph = helper.make_graph(
        [helper.make_node("Add", ["R", "R"], ["TWICE"]), helper.make_node("Unsqueeze", ["ENDS", "AXES"], ["END"])],
        "ragged",
        [
            helper.make_tensor_value_info("R", TensorProto.FLOAT, ["elements"]),
            helper.make_tensor_value_info("ENDS", TensorProto.INT32, ["requests"]),
        ],
        [
            helper.make_tensor_value_info("TWICE", TensorProto.FLOAT, ["elements"]),
            helper.make_tensor_value_info("END", TensorProto.INT32, ["requests", 1]),
        ],
        [helper.make_tensor("AXES", TensorProto.INT64, [1], [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    return repository


def _message(model: str, **inputs: Any) -> pb.ModelInferRequest:
    return request_from_call(InferCall(model, inputs={name: encode(array) for name, array in inputs.items()}))


def _output(response: pb.ModelInferResponse, name: str, dtype: type) -> Any:
    position = [output.name for output in response.outputs].index(name)
    return np.frombuffer(response.raw_output_contents[position], dtype).reshape(response.outputs[position].shape)


async def test_ragged_batch(ragged_repository: Path) -> None:
    """Three requests of different length are one execution over their numbers in a row, and each gets its own."""
    with running_service(ragged_repository, num_to_hold=3) as process:
        await check_ragged(Service(process, ragged_repository))


async def check_ragged(service: Service) -> None:
    """Each gets its numbers, and where they end."""
    await service.load("ragged")
    arrays = [np.arange(size, dtype=np.float32).reshape(1, size) for size in (3, 4, 5)]
    responses = await service.stream(*(_message("ragged", R=array) for array in arrays))
    assert [(2 * array).tolist() for array in arrays] == [
        _output(found, "TWICE", np.float32).tolist() for found in responses
    ]
    assert [[[3]], [[7]], [[12]]] == [_output(found, "END", np.int32).tolist() for found in responses]
    assert {3: 1} == await service.executions("ragged")
    await service.channel.close()
