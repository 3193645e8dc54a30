"""Methods for programs of ``torch.export``."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.optimize.tiny_models import save_sum, source

from weft.backends.pt2 import load_program
from weft.base.errors import InvalidArgumentError
from weft.optimize.methods import METHODS
from weft.optimize.methods.method import SourceModel

WIDTH = 64


def program(folder: Path, layers: torch.nn.Module) -> SourceModel:
    """X ``[1 to 8, length, 64]`` through some layers, as version 1 of a model."""
    model = source(folder, save_sum)
    file = model.folder / "model.pt2"
    batch, length = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("length", min=1, max=512)
    dims = ({0: batch, 1: length},)
    torch.export.save(torch.export.export(layers.eval(), (torch.zeros(2, 3, WIDTH),), dynamic_shapes=dims), file)
    return model._replace(file=file)


@pytest.fixture(scope="module")
def perceptron(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    """Two linear layers, one without a bias."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16, bias=False), torch.nn.Softmax(-1)
    )
    return program(tmp_path_factory.mktemp("perceptron"), layers)


def run(file: Path, x: torch.Tensor) -> torch.Tensor:
    """Answer of a program, loaded as the backend loads it."""
    with torch.inference_mode():
        return load_program(torch, file).module()(x)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_integers_answer_like_the_original(perceptron: SourceModel, tmp_path: Path, num_rows: int) -> None:
    """Any batch that the original takes, and an answer that does not depend on the other rows."""
    method = METHODS["torch-int8"]
    assert method.unsuitable(perceptron) == ""
    calibration = [{"input": np.random.default_rng(0).normal(size=(num_rows, 5, WIDTH)).astype(np.float32)}]
    built = method.build(perceptron, calibration, tmp_path)
    assert built.notes.startswith("2 linear layers")
    torch.manual_seed(1)
    for shape in ((1, 1), (8, 7)):
        x = torch.randn(*shape, WIDTH)
        answer, right = run(tmp_path / "model.pt2", x), run(perceptron.file, x)
        assert answer.shape == right.shape
        assert (answer - right).norm() / right.norm() < 0.02
        torch.testing.assert_close(run(tmp_path / "model.pt2", x[:1]), answer[:1])
    assert (tmp_path / "model.pt2").stat().st_size < perceptron.file.stat().st_size


def test_a_program_without_linear_layers_is_told_so(tmp_path: Path) -> None:
    """There is nothing to quantise."""
    model = program(tmp_path, torch.nn.Sequential(torch.nn.Tanh()))
    assert "no linear layer" in METHODS["torch-int8"].unsuitable(model)


def test_integers_need_an_example(perceptron: SourceModel, tmp_path: Path) -> None:
    """Nothing is written without a batch of inputs."""
    with pytest.raises(InvalidArgumentError, match="no calibration data"):
        METHODS["torch-int8"].build(perceptron, [], tmp_path)


@pytest.mark.parametrize("name", ["torch-bf16", "torch-compile"])
def test_settings_leave_the_program_as_it_is(
    perceptron: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Only a parameter of the backend is added, where the machine can do it."""
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/c++")
    monkeypatch.setattr("weft.optimize.methods.torch_programs._has_bf16", lambda: True)
    assert METHODS[name].unsuitable(perceptron) == ""
    built = METHODS[name].build(perceptron, [], tmp_path)
    assert dict(built.parameters) in ({"AUTOCAST": "bf16"}, {"TORCH_COMPILE": "inductor"})
    assert (tmp_path / "model.pt2").read_bytes() == perceptron.file.read_bytes()


def test_what_the_machine_lacks_is_named(perceptron: SourceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler, and instructions."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("weft.optimize.methods.torch_programs._has_bf16", lambda: False)
    assert "compiler for C++" in METHODS["torch-compile"].unsuitable(perceptron)
    assert "bfloat16" in METHODS["torch-bf16"].unsuitable(perceptron)


@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith("torch")])
def test_onnx_files_are_left_alone(tmp_path: Path, name: str) -> None:
    """The reason says what they are not."""
    assert "not a program of torch.export" in METHODS[name].unsuitable(source(tmp_path, save_sum))
