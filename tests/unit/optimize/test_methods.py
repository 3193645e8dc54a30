"""What every method of optimisation must hold, on small models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.unit.optimize.tiny_models import (
    batches,
    save_block,
    save_convolutions,
    save_perceptron,
    save_sum,
    source,
)

from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.optimize.methods import METHODS
from weft.optimize.methods.integer_matmul import find_products
from weft.optimize.methods.method import SourceModel
from weft.optimize.methods.onnx_model import read_model

CPU = ["CPUExecutionProvider"]

# Largest distance of the answers from the original's, over the size of those.
BUILDS = [
    ("fusion", save_block, 1e-5),
    *((name, save, 1e-3) for name in ("fp16",) for save in (save_perceptron, save_block, save_convolutions)),
    *((name, save, 0.02) for name in ("int8-weights",) for save in (save_perceptron, save_block)),
    *((name, save, 0.3) for name in ("int4-weights",) for save in (save_perceptron, save_block)),
    *((name, save, 0.1) for name in ("int8-dynamic", "int8-static") for save in (save_perceptron, save_block)),
    ("int8-dynamic", save_convolutions, 0.1),
    ("int8-static", save_convolutions, 0.1),
    ("int8-smooth", save_block, 0.05),
    *(("int8-mixed", save, 0.1) for save in (save_perceptron, save_block, save_convolutions)),
]


def built(model: SourceModel, name: str, folder: Path) -> Any:
    folder.mkdir()
    assert METHODS[name].unsuitable(model) == ""
    assert METHODS[name].build(model, batches(model), folder).notes
    return onnx.load(folder / "model.onnx")


def answer(file: Path, inputs: Any) -> np.ndarray:
    return onnxruntime.InferenceSession(file, providers=CPU).run(None, inputs)[0]


def distance(model: SourceModel, folder: Path, inputs: Any) -> float:
    right = answer(model.file, inputs)
    return float(np.linalg.norm(answer(folder / "model.onnx", inputs) - right) / np.linalg.norm(right))


@pytest.mark.parametrize(("name", "save", "limit"), BUILDS, ids=[f"{n}-{s.__name__}" for n, s, _ in BUILDS])
def test_a_candidate_answers_like_the_original(
    tmp_path: Path, name: str, save: Callable[[Path], None], limit: float
) -> None:
    """It loads, has the same inputs and outputs with their dynamic dimensions, and is near for other batches."""
    model = source(tmp_path, save)
    before = model.file.read_bytes()
    candidate = built(model, name, tmp_path / "built")
    original = onnx.load_from_string(before)
    assert [*candidate.graph.input] == [*original.graph.input]
    assert [*candidate.graph.output] == [*original.graph.output]
    assert all(distance(model, tmp_path / "built", inputs) <= limit for inputs in batches(model, 5))
    assert model.file.read_bytes() == before
    assert [path.name for path in (tmp_path / "built").iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("name", "save", "why"),
    [
        ("fusion", save_perceptron, "no transformer"),
        ("fp16", save_sum, "no constant of FP32"),
        ("int8-weights", save_sum, "no Gemm or MatMul has a constant weight"),
        ("int4-weights", save_convolutions, ""),
        ("int8-dynamic", save_sum, "no Gemm or MatMul has a constant weight"),
        ("int8-static", save_sum, "no Conv or Gemm or MatMul has a constant weight"),
        ("int8-smooth", save_convolutions, "has convolutions"),
        ("int8-mixed", save_sum, "no Conv or Gemm or MatMul has a constant weight"),
    ],
)
def test_an_unsuitable_model_is_told_why(tmp_path: Path, name: str, save: Callable[[Path], None], why: str) -> None:
    """The reason names what the model lacks."""
    found = METHODS[name].unsuitable(source(tmp_path, save))
    assert why in found if why else found == ""


@pytest.mark.parametrize("name", ["int8-dynamic", "int8-static", "int8-smooth", "int8-mixed"])
def test_integers_are_for_cpus(tmp_path: Path, name: str) -> None:
    """A model with instances on a GPU is left alone."""
    model = source(tmp_path, save_block, "instance_group { kind: KIND_GPU }")
    assert "GPU" in METHODS[name].unsuitable(model)


@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith(("int8", "int4"))])
def test_what_is_quantised_is_not_quantised_again(tmp_path: Path, name: str) -> None:
    """The reason names the operators."""
    model = source(tmp_path, save_block)
    (tmp_path / "again").mkdir()
    METHODS["int8-dynamic"].build(model, batches(model), tmp_path / "again")
    assert "MatMulIntegerToFloat" in METHODS[name].unsuitable(model._replace(file=tmp_path / "again" / "model.onnx"))


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("torch")])
@pytest.mark.parametrize("content", [b"", b"no model"], ids=["empty", "other"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """The message names the file."""
    model = source(tmp_path, save_sum)
    model.file.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=str(model.file)):
        METHODS[name].unsuitable(model)


def test_other_formats_are_left_alone(tmp_path: Path) -> None:
    """Methods for ONNX say that a file is none."""
    model = source(tmp_path, save_sum)._replace(file=tmp_path / "model.py")
    assert all(METHODS[name].unsuitable(model) for name in METHODS)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "no calibration data"),
        ([{"X": np.zeros((2, 7), np.float32)}], "does not take the calibration data"),
        ([{"Z": np.zeros((2, 32), np.float32)}], "does not take the calibration data"),
        ([{"X": np.full((2, 32), np.nan, np.float32)}], "not finite"),
        ([{"X": np.zeros((0, 32), np.float32)}], "no calibration batch has rows"),
    ],
    ids=["none", "width", "name", "nan", "no-rows"],
)
def test_calibration_data_that_does_not_fit_is_refused(tmp_path: Path, calibration: Any, message: str) -> None:
    """The message says what is wrong with it."""
    with pytest.raises(InvalidArgumentError, match=message):
        METHODS["int8-static"].build(source(tmp_path, save_perceptron), calibration, tmp_path)


def test_an_answer_with_fixed_scales_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    """With scales that are found as they come it does."""
    model = source(tmp_path, save_perceptron)
    row = batches(model)[0]["X"][:1]
    beside = np.concatenate([row, row * 50])
    for name, is_equal in (("int8-static", True), ("int8-dynamic", False)):
        built(model, name, tmp_path / name)
        alone, together = (answer(tmp_path / name / "model.onnx", {"X": x})[0] for x in (row, beside))
        assert np.allclose(alone, together, atol=1e-6) == is_equal


def test_smoothing_comes_closer_where_activations_are_skewed(tmp_path: Path) -> None:
    """The block's layer norms give a few channels 30 times the size of the others."""
    model = source(tmp_path, save_block)
    for name in ("int8-static", "int8-smooth"):
        built(model, name, tmp_path / name)
    inputs = batches(model)[0]
    assert distance(model, tmp_path / "int8-smooth", inputs) < 0.8 * distance(model, tmp_path / "int8-static", inputs)


def test_smoothing_that_does_not_help_is_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method refuses rather than write int8-static again."""
    monkeypatch.setattr("weft.optimize.methods.int8._STRENGTHS", ())
    model = source(tmp_path, save_block)
    with pytest.raises(UnsupportedError, match="smoothing does not help"):
        METHODS["int8-smooth"].build(model, batches(model), tmp_path)


def test_mixed_precision_leaves_the_costliest_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some products are integer, some are not, and the answers are closer than with all of them integer."""
    monkeypatch.setattr("weft.optimize.methods.int8._STRENGTHS", ())
    model = source(tmp_path, save_block)
    built(model, "int8-static", tmp_path / "all")
    candidate = built(model, "int8-mixed", tmp_path / "mixed")
    num_integer = sum(node.op_type == "MatMulIntegerToFloat" for node in candidate.graph.node)
    assert 0 < num_integer < 6
    inputs = batches(model)[0]
    assert distance(model, tmp_path / "mixed", inputs) < distance(model, tmp_path / "all", inputs)


def test_residuals_keep_their_layer_norms(tmp_path: Path) -> None:
    """ONNX Runtime does not fuse them as it loads the file, which would cost more than all the integers save."""
    built(source(tmp_path, save_block), "int8-dynamic", tmp_path / "built")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(tmp_path / "built" / "model.onnx", options, CPU)
    kinds = {node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node}
    assert "LayerNormalization" in kinds
    assert "SkipLayerNormalization" not in kinds


def test_a_bias_becomes_part_of_its_product(tmp_path: Path) -> None:
    """That of a Gemm, and one that an Add adds."""
    for save in (save_perceptron, save_block):
        products = find_products(read_model(source(tmp_path / save.__name__, save)))
        assert products
        assert all(product.bias for product in products)


def test_a_weight_that_is_shared_stays_for_its_other_readers(tmp_path: Path) -> None:
    """As the embedding of a language model that is its LM head, too."""

    def save(path: Path) -> None:
        save_perceptron(path)
        model = onnx.load(path)
        weight = model.graph.node[-2].input[1]
        model.graph.node.append(onnx.helper.make_node("ReduceSum", [weight], ["SUM"], keepdims=0))
        model.graph.output.append(onnx.helper.make_tensor_value_info("SUM", onnx.TensorProto.FLOAT, []))
        onnx.save(model, path)

    model = source(tmp_path, save)
    built(model, "int8-static", tmp_path / "built")
    sums = [
        onnxruntime.InferenceSession(file, providers=CPU).run(["SUM"], batches(model)[0])
        for file in (model.file, tmp_path / "built" / "model.onnx")
    ]
    assert np.allclose(*sums)
