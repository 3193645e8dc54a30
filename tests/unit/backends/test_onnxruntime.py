"""The ``onnxruntime`` backend against files built here."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from tests.unit.backends.files import write_onnx
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends import BACKENDS
from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.tensors import NUMPY_BY_DATATYPE
from weft.serving.backends.base import InstanceContext
from weft.serving.config.placement import count_gpus

INPUTS = {"A": ("FP32", (3,)), "B": ("FP32", (3,))}
OUTPUTS = {"SUM": ("FP32", (3,)), "DIFFERENCE": ("FP32", (3,))}


@pytest.fixture
def add_sub(version_folder):
    """A model of two inputs and two outputs."""
    write_onnx(
        version_folder / "model.onnx",
        "model (float[batch, 3] A, float[batch, 3] B) => (float[batch, 3] SUM, float[batch, 3] DIFFERENCE)"
        " { SUM = Add(A, B) DIFFERENCE = Sub(A, B) }",
    )


@pytest.fixture
def load_onnx(make_model_context):
    """Makes a loaded backend."""

    def load(inputs=INPUTS, outputs=OUTPUTS, **options):
        return load_backend(BACKENDS["onnxruntime"], make_model_context(inputs, outputs, **options))

    return load


def test_one_thread_by_default(add_sub, load_onnx):
    """Without parameters a session computes on the instance's thread alone."""
    options = load_onnx()._session.get_session_options()
    assert (1, 1) == (options.intra_op_num_threads, options.inter_op_num_threads)


@pytest.mark.parametrize(
    ("parameters", "can"),
    [
        ({}, True),
        ({"intra_op_thread_count": "2"}, False),
        ({"intra_op_thread_count": "0"}, False),
        ({"execution_mode": "1", "inter_op_thread_count": "2"}, False),
    ],
)
def test_only_a_session_without_threads_of_its_own_runs_in_the_background(add_sub, load_onnx, parameters, can):
    """Threads of the session work for every execution, at one priority of the operating system."""
    assert load_onnx(**parameters).can_share_processor() is can


def test_two_threads_get_their_own_answers_from_one_session(add_sub, load_onnx):
    """Executions beside each other do not mix up their rows."""
    backend = load_onnx()

    def executed(number):
        rows = np.full((1 + number % 7, 3), number, np.float32)
        (outcome,) = execute_batch(backend, make_served_request(A=rows, B=rows))
        return np.array_equal(outcome.outputs["SUM"], rows * 2)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(executed, range(200)))


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT16", "UINT32", "INT64", "UINT64", "FP16", "FP64"])
def test_datatypes_pass_unchanged(version_folder, load_onnx, datatype):
    """Each datatype goes through an identity bit for bit."""
    element = {"FP16": "FLOAT16", "FP64": "DOUBLE"}.get(datatype, datatype)
    text = f"model ({element.lower()}[n, 2] X) => ({element.lower()}[n, 2] Y) {{ Y = Identity(X) }}"
    write_onnx(version_folder / "model.onnx", text)
    array = np.array([[0, 1]], NUMPY_BY_DATATYPE[datatype])
    (outcome,) = execute_batch(
        load_onnx({"X": (datatype, (2,))}, {"Y": (datatype, (2,))}), make_served_request(X=array)
    )
    assert array.dtype == outcome.outputs["Y"].dtype
    np.testing.assert_array_equal(array, outcome.outputs["Y"])


@pytest.mark.skipif(count_gpus() > 0, reason="needs a machine without a GPU")
def test_gpu_instance_does_not_fall_back_to_the_cpu(add_sub, make_model_context):
    """Where CUDA does not load, a GPU instance is an error with the cure."""
    backend = BACKENDS["onnxruntime"](make_model_context(INPUTS, OUTPUTS), InstanceContext("model_0_0", kind="GPU"))
    with pytest.raises(UnavailableError, match=r"asks for GPU 0, but ONNX Runtime cannot load CUDA here; install"):
        backend.load()


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU")
def test_gpu_instance_runs_on_cuda(add_sub, make_model_context):
    """A GPU instance computes with the CUDA provider."""
    backend = BACKENDS["onnxruntime"](make_model_context(INPUTS, OUTPUTS), InstanceContext("model_0_0", kind="GPU"))
    backend.load()
    ones = np.ones((1, 3), np.float32)
    (outcome,) = execute_batch(backend, make_served_request(A=ones, B=ones))
    assert "CUDAExecutionProvider" == backend._session.get_providers()[0]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(ones * 2, outcome.outputs["SUM"])


def test_unknown_parameters_are_told_and_ignored(add_sub, load_onnx, caplog):
    """A configuration of Triton Inference Server may have parameters that mean nothing here."""
    load_onnx(intra_op_threads="1", unheard_of="x")
    told = [record.getMessage() for record in caplog.records]
    assert (
        "parameter 'intra_op_threads' is not known and has no effect; did you mean 'intra_op_thread_count'" in told[0]
    )
    assert "parameter 'unheard_of' is not known" in told[1]


def test_string_tensors_are_completed(version_folder):
    """A tensor of strings is declared as TYPE_STRING, of variable length as -1."""
    write_onnx(version_folder / "model.onnx", "model (string[n] flat) => (string[n] same) { same = Identity(flat) }")
    config = BACKENDS["onnxruntime"].auto_complete({"max_batch_size": 0, "output": [{}]}, version_folder)
    assert [{"name": "flat", "data_type": "TYPE_STRING", "dims": [-1]}] == config["input"]


@pytest.mark.parametrize("location", ["../../secret.bin", "{folder}/secret.bin", "link.bin"])
def test_weights_outside_of_the_model_are_not_read(version_folder, load_onnx, location):
    """A file that says that its weights lie elsewhere, also behind a link, is a load error and reads nothing there."""
    secret = version_folder.parents[1] / "secret.bin"
    secret.write_bytes(np.ones(2, np.float32).tobytes())
    (version_folder / "link.bin").symlink_to(secret)
    weights = onnx.TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location.format(folder=secret.parent)), ("offset", "0"), ("length", "8")):
        weights.external_data.add(key=key, value=value)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> model (float[2] X) => (float[2] Y) { Y = Add(X, W) }'
    )
    model.graph.initializer.append(weights)
    (version_folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InvalidArgumentError, match=r"with the values of 'W', is outside"):
        load_onnx({"X": ("FP32", (2,))}, {"Y": ("FP32", (2,))}, max_batch_size=0)
