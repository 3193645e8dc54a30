"""Some of the published graphs, over models in processes of their own, give the same answers as in one process."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import text_format
from tests.compat.graphs.all_shapes import SHAPES
from tests.compat.graphs.fake_models import SampleTarget
from tests.compat.graphs.run import SampleGraphs, difference
from tests.compat.graphs.shape import Model, Shape
from tritonclient.utils import np_to_triton_dtype

from weft.mesh.running import running_mesh
from weft.router.repository.config import config_of_signature

ROOT = Path(__file__).parents[2]
#: Other numbers of rows, outputs left out, streams of streams, a cascade, a combiner, a choice; no two models alike.
FILES = (
    "triton/guides/read_text.pbtxt",
    "triton/optional/left_out.pbtxt",
    "triton/streams/nested_square.pbtxt",
    "kserve/dog_breeds.yaml",
    "seldon1/combiner.yaml",
    "seldon2/one_of_two.yaml",
)
SAMPLES = [shape for shape in SHAPES if shape.file in FILES]
PROGRAM = """
import sys

sys.path.insert(0, {root!r})

import numpy as np
import triton_python_backend_utils as pb_utils
from tests.compat.graphs.all_shapes import SHAPES
from tests.compat.graphs.shape import Given


class TritonPythonModel:
    def initialize(self, args):
        (shape,) = [shape for shape in SHAPES if shape.file == {file!r}]
        (self.model,) = [model for model in shape.models if model.name == {name!r}]

    def execute(self, requests):
        answers = []
        for request in requests:
            given = Given({{tensor.name(): tensor.as_numpy() for tensor in request.inputs()}}, {{}})
            outputs = self.model.answer(given)
            if not self.model.is_decoupled:
                answers.append(response(outputs))
                continue
            sender = request.get_response_sender()
            for one in outputs:
                sender.send(response(one))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return answers if not self.model.is_decoupled else None


def response(outputs):
    tensors = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in outputs.items()]
    return pb_utils.InferenceResponse(tensors)
"""


def write_model(root: Path, shape: Shape, model: Model) -> None:
    """A Python model that answers as the sample's does."""
    config = config_of_signature(model.signature("1"))
    config.backend, config.platform = "python", ""
    config.parameters["EXECUTION"].string_value = "thread"  # a process for each model would take seconds
    (root / model.name / "1").mkdir(parents=True)
    (root / model.name / "config.pbtxt").write_text(text_format.MessageToString(config))
    program = PROGRAM.format(root=str(ROOT), file=shape.file, name=model.name)
    (root / model.name / "1/model.py").write_text(program)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Router of a mesh over the samples."""
    root = tmp_path_factory.mktemp("published")
    for shape in SAMPLES:
        for model in shape.models:
            write_model(root / "model", shape, model)
        SampleGraphs(shape, SampleTarget(shape)).write(root / "graphs")
    with running_mesh(root) as endpoints:
        yield endpoints["router"].grpc


@pytest.mark.parametrize("shape", SAMPLES, ids=lambda shape: shape.file)
def test_a_published_graph_answers_over_processes(url: str, shape: Shape) -> None:
    """Every tensor, shape and response."""
    with triton.InferenceServerClient(url) as client:
        for request in shape.requests:
            inputs = []
            for name, array in request.inputs.items():
                tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
                tensor.set_data_from_numpy(np.ascontiguousarray(array))
                inputs.append(tensor)
            outputs = [triton.InferRequestedOutput(name) for name in request.outputs] or None
            if isinstance(request.expected, list):
                got = streamed(client, shape.name, inputs)
            else:
                got = arrays(client.infer(shape.name, inputs, outputs=outputs))
            assert not difference(got, request.expected)


def arrays(result: triton.InferResult) -> dict[str, np.ndarray]:
    """Outputs by name."""
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def streamed(client: triton.InferenceServerClient, name: str, inputs: list[Any]) -> list[dict[str, np.ndarray]]:
    """Outputs of every response."""
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: came.put((result, error)))
    client.async_stream_infer(name, inputs, enable_empty_final_response=True)
    got: list[dict[str, np.ndarray]] = []
    is_final = False
    while not is_final:
        result, error = came.get(timeout=60)
        assert error is None
        got += [arrays(result)] if result.get_response().outputs else []
        is_final = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    return got
