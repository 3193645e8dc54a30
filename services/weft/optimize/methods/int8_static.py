"""``int8-static`` and ``int8-smooth``: int8 with scales of activations from calibration data."""

import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from weft.base.errors import UnsupportedError
from weft.optimize.methods.calibration import ChannelRange, ExpectedAnswers, observe, open_session, some_rows
from weft.optimize.methods.integer_matmul import KINDS, find_products, has_integer_instructions, quantize_products
from weft.optimize.methods.method import Built, Inputs, SourceModel
from weft.optimize.methods.onnx_model import (
    has_gpu_instances,
    keep_layer_norms,
    read_model,
    save_model,
    weighted_nodes,
    why_not_quantizable,
)

#: Rows that strengths of smoothing are compared on.
_NUM_COMPARED = 32
_STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9)
# Softmax and the like stay in FP32: 256 values are too few for probabilities.
_QDQ_OPS = ["Add", "AveragePool", "Concat", "Conv", "Flatten", "Gemm", "GlobalAveragePool", "MatMul", "MaxPool", "Relu"]
_QDQ_OPS += ["Clip", "Reshape", "Resize", "Split", "Squeeze", "Transpose", "Unsqueeze"]


class Int8Static:
    """Matrix products alone, or, in a model with convolutions, everything between them too."""

    name = "int8-static"

    def unsuitable(self, source: SourceModel) -> str:
        """Empty if there are constant weights."""
        return why_not_static(source)

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Write the quantised model."""
        notes = write_static(source, calibration, folder, keep=())
        return Built({}, notes)


class Int8Smooth:
    """``int8-static`` with the differences between channels moved from activations to weights, as far as it helps."""

    name = "int8-smooth"

    def unsuitable(self, source: SourceModel) -> str:
        """Empty if there are matrix products, and no convolutions."""
        if why := why_not_static(source, KINDS):
            return why
        if weighted_nodes(read_model(source), ("Conv",)):
            return "smoothing is for matrix products, and this model has convolutions"
        return ""

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Write the quantised model.

        Raises:
            UnsupportedError: No strength of smoothing comes closer to the answers of the model than none.
        """
        model, count, strength = smoothed(source, calibration, keep=())
        if strength is None:
            raise UnsupportedError("smoothing does not help: int8-static is as close to the model's answers")
        save_model(model, folder / source.file.name)
        return Built({}, f"{count} matrix products as int8, per output channel; activations smoothed by {strength}")


def smoothed(
    source: SourceModel, calibration: Sequence[Inputs], *, keep: Collection[str]
) -> tuple[Any, int, float | None]:
    """The integer model with the strength of smoothing that is closest to the source's answers.

    Args:
        source: Has matrix products and no convolutions.
        calibration: Batches of its inputs.
        keep: Names of nodes that stay in FP32.

    Returns:
        The model, how many of its products are integer, the strength; None: without smoothing it is closest.

    Raises:
        InvalidArgumentError: The model does not take the calibration data.
    """
    model = read_model(source)
    keep_layer_norms(model)
    strengths = (None, *_STRENGTHS)
    # Ranges fit the batches that they come from best of all: strengths are compared on others, as far as there are any.
    compared = some_rows(calibration[-max(1, len(calibration) // 4) :], _NUM_COMPARED)
    known = calibration[: -len(compared)] or calibration
    names = dict.fromkeys(product.x for product in find_products(model))
    ranges, reference = observe(model, names, known), ExpectedAnswers(model, compared)

    def error(strength: float | None) -> float:
        return reference.error(open_session(_quantized(model, ranges, strength, keep)[0]))

    errors = {strength: error(strength) for strength in strengths}
    best = min(errors, key=errors.__getitem__)
    quantized, count = _quantized(model, observe(model, names, calibration), best, keep)
    return quantized, count, best


def _quantized(
    model: Any, ranges: Mapping[str, ChannelRange], strength: float | None, keep: Collection[str]
) -> tuple[Any, int]:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    count = quantize_products(copy, ranges, smoothing=strength, keep=keep)
    return copy, count


def write_static(source: SourceModel, calibration: Sequence[Inputs], folder: Path, *, keep: Collection[str]) -> str:
    """Write an int8 version without smoothing; what was done, in one line.

    Raises:
        InvalidArgumentError: The model does not take the calibration data.
    """
    model = read_model(source)
    if weighted_nodes(model, ("Conv",)):
        return _write_qdq(source, calibration, folder, keep)
    keep_layer_norms(model)
    ranges = observe(model, dict.fromkeys(product.x for product in find_products(model)), calibration)
    count = quantize_products(model, ranges, keep=keep)
    save_model(model, folder / source.file.name)
    return f"{count} matrix products as int8, per output channel; fixed scales from {len(calibration)} batches"


class _Batches(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, batches: Iterable[Inputs]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        return None if batch is None else dict(batch)


def _write_qdq(source: SourceModel, calibration: Sequence[Inputs], folder: Path, keep: Collection[str]) -> str:
    """By ONNX Runtime's own quantiser, in QDQ form, which it fuses to integer convolutions as it loads the file."""
    model = read_model(source)
    observe(model, (), calibration)  # what is wrong with the data is said before the quantiser meets it
    with tempfile.TemporaryDirectory(prefix="weft-optimize-") as stage:
        prepared = Path(stage) / "prepared.onnx"
        quant_pre_process(_simplified(model, Path(stage)), prepared, skip_optimization=True, skip_symbolic_shape=True)
        nodes = [node.name for node in weighted_nodes(onnx.load(prepared)) if node.name not in keep]
        quantize_static(
            prepared,
            folder / source.file.name,
            _Batches(calibration),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QDQ_OPS,
            nodes_to_exclude=[*keep],
            per_channel=True,
            reduce_range=not has_integer_instructions(),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    return f"{len(nodes)} convolutions and products as int8, per output channel; what is between them too"


def _simplified(model: Any, stage: Path) -> Path:
    """The model with batch norms folded into convolutions and constants computed, in standard operators alone.

    The optimisation within ``quant_pre_process`` goes on to operators such as FusedConv, which nothing quantises.
    """
    options, path = onnxruntime.SessionOptions(), stage / "simplified.onnx"
    save_model(model, stage / "named.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(stage / "named.onnx", options, ["CPUExecutionProvider"])
    return path


def why_not_static(source: SourceModel, kinds: Collection[str] = ("Conv", *KINDS)) -> str:
    """Why int8 with fixed scales cannot apply; empty if it may. Raises InvalidArgumentError."""
    if has_gpu_instances(source):
        return "ONNX Runtime multiplies integers of this form on CPUs alone, and the model has instances on a GPU"
    return why_not_quantizable(source, kinds)
