"""Models without a configuration, or with a part of one: what their files say is what they serve."""

import pytest
import torch
from tests.unit.backends import files

from weft.backends import BACKENDS
from weft.base.errors import InvalidArgumentError, WeftError
from weft.serving.config import define_model

PYTHON = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "Y", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return []
"""


class Scores(torch.nn.Module):
    """A dict of two tensors for two inputs."""

    def forward(self, pixels, mask):
        return {"scores": pixels * mask, "best": pixels.argmax(dim=1)}


class Sum(torch.nn.Module):
    """One tensor."""

    def forward(self, x):
        return x.sum(dim=1, keepdim=True)


def write_onnx(folder, batch="batch"):
    """X [batch, 3] to Y [batch, 3] and N [batch]."""
    files.write_onnx(
        folder / "model.onnx",
        f"model (float[{batch}, 3] X) => (float[{batch}, 3] Y, float[{batch}] N) <int64[1] axes = {{1}}>"
        " { Y = Neg(X) N = ReduceSum<keepdims = 0>(X, axes) }",
    )


def write_pt2(folder, module, *arguments, limit=None):
    """A program with a first dimension of any size, up to a limit."""
    batch = {0: torch.export.Dim("batch", max=limit) if limit else torch.export.Dim("batch")}
    program = torch.export.export(module, arguments, dynamic_shapes=(batch,) * len(arguments))
    torch.export.save(program, folder / "model.pt2")


def defined(folder, text=None, **options):
    """The configuration of the model whose version folder this is."""
    if text is not None:
        (folder.parent / "config.pbtxt").write_text(text)
    return define_model(folder.parent, [1], BACKENDS, num_gpus=0, **options).config


def shown(tensors):
    """Name, type and dims of each, and the reshape where there is one."""
    rows = []
    for tensor in tensors:
        reshape = [list(tensor.reshape.shape)] if tensor.HasField("reshape") else []
        rows.append((tensor.name, tensor.data_type, list(tensor.dims), *reshape))
    return rows


def test_an_onnx_file_is_a_model(version_folder):
    """Without config.pbtxt: backend and platform by the file's name, tensors and batching by the file."""
    write_onnx(version_folder)
    config = defined(version_folder)
    assert ("model", "onnxruntime", "onnxruntime_onnx", "model.onnx", 4) == (
        config.name, config.backend, config.platform, config.default_model_filename, config.max_batch_size,
    )  # fmt: skip
    assert config.HasField("dynamic_batching")
    assert [("X", 11, [3])] == shown(config.input)
    assert [("Y", 11, [3]), ("N", 11, [1], [])] == shown(config.output)


def test_a_file_of_fixed_shapes_has_no_batch_dimension(version_folder):
    """Its tensors have the shapes of the file as they are."""
    write_onnx(version_folder, batch=2)
    config = defined(version_folder, "")
    assert (0, [("X", 11, [2, 3])], [("Y", 11, [2, 3]), ("N", 11, [2])]) == (
        config.max_batch_size, shown(config.input), shown(config.output),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "max_batch_size", "inputs", "num_outputs"),
    [
        ("max_batch_size: 32", 32, [("X", 11, [3])], 2),
        ('input { name: "X" data_type: TYPE_FP32 dims: [ -1, 3 ] }', 0, [("X", 11, [-1, 3])], 2),
        ('input { name: "X" }', 0, [("X", 11, [-1, 3])], 2),
        ('max_batch_size: 2 input { name: "X" data_type: TYPE_FP32 }', 2, [("X", 11, [3])], 2),
        ('max_batch_size: 2 input { name: "X" dims: [ 3 ] } output { name: "N" }', 2, [("X", 11, [3])], 1),
        ('platform: "onnxruntime_onnx" max_batch_size: 2 output { name: "Y" }', 2, [("X", 11, [3])], 1),
        ('default_model_filename: "model.onnx"', 4, [("X", 11, [3])], 2),
    ],
)
def test_a_part_of_a_configuration_is_completed(version_folder, text, max_batch_size, inputs, num_outputs):
    """What is declared stays; types and shapes of declared tensors are filled in too."""
    write_onnx(version_folder)
    config = defined(version_folder, text)
    assert (max_batch_size, inputs, num_outputs) == (config.max_batch_size, shown(config.input), len(config.output))
    assert config.HasField("dynamic_batching") is (
        max_batch_size == 4
    )  # where nothing of tensors or batches is declared


def test_an_exported_program_is_a_model(version_folder):
    """Names are those of the arguments and of the keys of the result."""
    write_pt2(version_folder, Scores(), torch.ones(2, 5), torch.ones(2, 5))
    config = defined(version_folder)
    assert ("pytorch", "pytorch_libtorch", 4) == (config.backend, config.platform, config.max_batch_size)
    assert [("pixels", 11, [5]), ("mask", 11, [5])] == shown(config.input)
    assert [("scores", 11, [5]), ("best", 9, [1], [])] == shown(config.output)


def test_results_without_names_are_numbered(version_folder):
    """As in Triton Inference Server; and no batch is larger than the program takes."""
    write_pt2(version_folder, Sum(), torch.ones(2, 5), limit=3)
    config = defined(version_folder)
    assert (3, [("x", 11, [5])], [("OUTPUT__0", 11, [1])]) == (
        config.max_batch_size, shown(config.input), shown(config.output),
    )  # fmt: skip


def test_a_python_file_is_a_model(version_folder):
    """Without config.pbtxt its ``auto_complete_config`` says everything."""
    (version_folder / "model.py").write_text(PYTHON)
    config = defined(version_folder)
    assert ("python", "", 8, [("X", 11, [4])], [("Y", 13, [1])]) == (
        config.backend, config.platform, config.max_batch_size, shown(config.input), shown(config.output),
    )  # fmt: skip


def test_a_torchscript_file_is_refused_with_the_cure(version_folder):
    """It is code that a load would run."""
    (version_folder / "model.pt").write_bytes(b"x")
    with pytest.raises(InvalidArgumentError, match=r"model.pt: only .pt2 files are loaded, .*torch.export.save"):
        defined(version_folder)


def test_a_broken_file_says_what_is_broken(version_folder):
    """The error is that of the file, not of the missing configuration."""
    (version_folder / "model.onnx").write_bytes(b"x")
    with pytest.raises(InvalidArgumentError, match=r"ONNX Runtime cannot load .*model.onnx"):
        defined(version_folder)


@pytest.mark.parametrize("text", [None, 'input { name: "X" }', 'backend: "onnxruntime"', "max_batch_size: 4"])
def test_nothing_is_completed_where_it_is_turned_off(version_folder, text):
    """The configuration must be there and complete."""
    write_onnx(version_folder)
    with pytest.raises(WeftError, match=r"there is no .*config.pbtxt|backend|must have at least one"):
        defined(version_folder, text, completes=False)


def test_an_override_may_be_a_part(version_folder):
    """The configuration of a load, in JSON, is completed as a file is."""
    write_onnx(version_folder)
    config = defined(version_folder, override='{"max_batch_size": 16}')
    assert ("onnxruntime", 16, [("X", 11, [3])]) == (config.backend, config.max_batch_size, shown(config.input))
