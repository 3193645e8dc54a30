"""The header of an ONNX file, read without onnxruntime, says what a session of it says."""

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.unit.backends.files import write_onnx

from weft.backends.onnx_file import read_onnx
from weft.backends.onnxruntime import OnnxRuntimeBackend, _session_tensors
from weft.base.errors import InvalidArgumentError

_MODELS = {
    "shapes": "m (float[N, 3] A, int64[2] B, float[1] C) => (float[N, 3] D, int64[2] E) { D = Add(A, C) E = Neg(B) }",
    "types": "m (float16[1] A, string[N] B, bool[N] C, double[2, M] D, uint8[1] F) => (float16[1] E) { E = Neg(A) }",
    "default": "m (float[4] A, float[4] W) => (float[4] Y) <float[4] W = {1, 2, 3, 4}> { Y = Add(A, W) }",
    "weights": "m (float[4] A) => (float[4] Y) <float[4] W = {1, 2, 3, 4}> { Y = Add(A, W) }",
}


@pytest.mark.parametrize("text", _MODELS.values(), ids=_MODELS)
def test_a_header_is_read_as_by_onnxruntime(text: str, tmp_path: Path) -> None:
    """Inputs, defaults and outputs with types and shapes are those of a session."""
    write_onnx(tmp_path / "model.onnx", text)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    found = read_onnx(tmp_path / "model.onnx")
    assert (found.inputs, found.defaults, found.outputs) == _session_tensors(session)


def _large(folder: Path, *, external: bool = False) -> Path:
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "W")
    nodes = [helper.make_node("MatMul", ["X", "W"], ["Y"])]
    inputs = [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["N", 64])]
    outputs = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)]
    model = helper.make_model(helper.make_graph(nodes, "m", inputs, outputs, [weight]), ir_version=10)
    model.opset_import[0].version = 20
    onnx.save(model, folder / "model.onnx", save_as_external_data=external, location="W.bin", size_threshold=0)
    return folder / "model.onnx"


@pytest.mark.parametrize("external", [False, True])
def test_onnxruntime_judges_the_file_without_its_weights(external: bool, tmp_path: Path) -> None:
    """The skeleton has no weights, opens, and gives the shape of an output that the file leaves out."""
    path = _large(tmp_path, external=external)
    found = read_onnx(path)
    assert len(found.skeleton) < 400
    assert found.left_out == {"W"}
    config = OnnxRuntimeBackend.auto_complete({"max_batch_size": 4}, tmp_path)
    assert config["input"] == [{"name": "X", "data_type": "TYPE_FP32", "dims": [64]}]
    assert config["output"] == [{"name": "Y", "data_type": "TYPE_FP32", "dims": [64]}]


def test_weights_in_another_file_must_be_there_whole_and_inside_the_folder(tmp_path: Path) -> None:
    """A file of weights that is missing, short or elsewhere is named, as when the model loads."""
    _large(tmp_path, external=True)
    weights = tmp_path / "W.bin"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    with pytest.raises(InvalidArgumentError, match=r"W\.bin is too short for the values of 'W'; fetch it again"):
        OnnxRuntimeBackend.auto_complete({}, tmp_path)
    weights.unlink()
    with pytest.raises(InvalidArgumentError, match=r"there is no .*W\.bin, which has the values of 'W'"):
        OnnxRuntimeBackend.auto_complete({}, tmp_path)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "../W.bin"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path.parent / "W.bin").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"is outside of .*; put it there"):
        OnnxRuntimeBackend.auto_complete({}, tmp_path)


def test_an_operator_set_that_is_too_new_is_refused_with_the_cure(tmp_path: Path) -> None:
    """The message says to export with a lower opset, or to install a newer onnxruntime."""
    path = _large(tmp_path)
    model = onnx.load(path)
    model.opset_import[0].version = 99
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InvalidArgumentError, match="export the model with a lower opset, or install a newer"):
        OnnxRuntimeBackend.auto_complete({}, tmp_path)


def test_without_onnxruntime_the_header_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where onnxruntime is not installed, inputs are read all the same, and a torn file is refused."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    write_onnx(tmp_path / "model.onnx", _MODELS["weights"])
    assert OnnxRuntimeBackend.auto_complete({}, tmp_path)["input"] == [
        {"name": "A", "data_type": "TYPE_FP32", "dims": [4]}
    ]
    content = (tmp_path / "model.onnx").read_bytes()
    for size in range(0, len(content), 7):
        (tmp_path / "model.onnx").write_bytes(content[:size])
        with pytest.raises(InvalidArgumentError, match=r"truncated|empty|no graph|'Y'|from which no datatype|is not"):
            OnnxRuntimeBackend.auto_complete({}, tmp_path)
    broken = content.replace(b"\x0a\x01Y", b"\x0a\xffY")  # behind initializers, which were read
    assert broken != content
    (tmp_path / "model.onnx").write_bytes(broken)
    with pytest.raises(InvalidArgumentError, match=r"is not an ONNX model|truncated"):
        OnnxRuntimeBackend.auto_complete({}, tmp_path)
