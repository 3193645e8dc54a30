"""Integer matrix products and convolutions: ``int8-dynamic``, ``int8-static``, ``int8-smooth`` and ``int8-mixed``."""

import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from weft.base.errors import UnsupportedError
from weft.optimize.methods.integer_matmul import KINDS, find_products, has_integer_instructions, quantize_products
from weft.optimize.methods.method import Inputs, SourceModel
from weft.optimize.methods.onnx_model import (
    ChannelRange,
    ExpectedAnswers,
    add_constant,
    copied,
    keep_layer_norms,
    observe,
    onnx_method,
    open_session,
    replace_nodes,
    save_model,
    some_rows,
    weighted_nodes,
    why_not_quantizable,
)

#: Rows that strengths of smoothing, and layers, are compared on.
_NUM_COMPARED = 32
_STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9)
# Softmax and the like stay in FP32: 256 values are too few for probabilities.
_QDQ_OPS = ["Add", "AveragePool", "Concat", "Conv", "Flatten", "Gemm", "GlobalAveragePool", "MatMul", "MaxPool", "Relu"]
_QDQ_OPS += ["Clip", "Reshape", "Resize", "Split", "Squeeze", "Transpose", "Unsqueeze"]
#: Share of the error, summed over the layers one by one, that the layers left in FP32 make up.
_SHARE_OF_ERROR = 0.5
#: Most of the weights that stay in FP32.
_SHARE_OF_WEIGHTS = 0.34
_SWITCHES = "weft.quantized_layers"


def _why_not_products(model: Any, source: SourceModel, kinds: Collection[str] = KINDS) -> str:
    if source.has_gpu_instances():
        return "ONNX Runtime multiplies integers of this form on CPUs alone, and the model has instances on a GPU"
    return why_not_quantizable(model, kinds)


def _why_not_static(model: Any, source: SourceModel) -> str:
    return _why_not_products(model, source, ("Conv", *KINDS))


def _why_not_smooth(model: Any, source: SourceModel) -> str:
    why = _why_not_products(model, source)
    if not why and weighted_nodes(model, ("Conv",)):
        return "smoothing is for matrix products, and this model has convolutions"
    return why


def _why_not_mixed(model: Any, source: SourceModel) -> str:
    why = _why_not_static(model, source)
    if not why and len(weighted_nodes(model)) < 2:
        return "there is a single layer with weights: int8-static is all or nothing"
    return why


def _dynamic(model: Any, source: SourceModel, calibration: Sequence[Inputs]) -> tuple[Any, str]:
    keep_layer_norms(model)
    count = quantize_products(model, None)
    return model, f"{count} matrix products as int8, per output channel; activations as they come"


def _static(
    model: Any, source: SourceModel, calibration: Sequence[Inputs], keep: Collection[str] = ()
) -> tuple[Any, str]:
    if weighted_nodes(model, ("Conv",)):
        return _with_convolutions(model, calibration, keep)
    keep_layer_norms(model)
    ranges = observe(model, dict.fromkeys(product.x for product in find_products(model)), calibration)
    count = quantize_products(model, ranges, keep=keep)
    return model, f"{count} matrix products as int8, per output channel; fixed scales from {len(calibration)} batches"


def _smooth(model: Any, source: SourceModel, calibration: Sequence[Inputs]) -> tuple[Any, str]:
    smooth, count, strength = _smoothed(model, calibration, keep=())
    if strength is None:
        raise UnsupportedError("smoothing does not help: int8-static is as close to the model's answers")
    return smooth, f"{count} matrix products as int8, per output channel; activations smoothed by {strength}"


def _mixed(model: Any, source: SourceModel, calibration: Sequence[Inputs]) -> tuple[Any, str]:
    errors = _layer_errors(model, calibration)
    kept = _costliest(model, errors)
    if not kept:
        raise UnsupportedError("no layer stands out: int8-static loses as much in each")
    notes = f"{len(kept)} of {len(errors)} layers in FP32 by sensitivity"
    if weighted_nodes(model, ("Conv",)):
        candidate, _ = _static(model, source, calibration, kept)
    else:
        candidate, _, strength = _smoothed(model, calibration, kept)
        notes += f"; activations smoothed by {strength}" if strength else ""
    return candidate, f"{notes}; the others as int8"


#: Needs no calibration; an answer depends on the rows that share its batch. Convolutions stay in FP32: ONNX Runtime's
#: ``ConvInteger`` is slower than that on CPUs.
INT8_DYNAMIC = onnx_method("int8-dynamic", _why_not_products, _dynamic)
#: Matrix products alone, or, in a model with convolutions, everything between them too.
INT8_STATIC = onnx_method("int8-static", _why_not_static, _static)
#: ``int8-static`` with the differences between channels moved from activations to weights, as far as it helps.
INT8_SMOOTH = onnx_method("int8-smooth", _why_not_smooth, _smooth)
#: The layers are quantised one at a time to see what each costs; the dearest for their size stay in FP32.
INT8_MIXED = onnx_method("int8-mixed", _why_not_mixed, _mixed)


def _smoothed(model: Any, calibration: Sequence[Inputs], keep: Collection[str]) -> tuple[Any, int, float | None]:
    """The integer model whose strength of smoothing is closest to the model's answers; None: none is closest.

    Also how many of its products are integer. ``keep`` names nodes that stay in FP32.
    """
    keep_layer_norms(model)
    # Ranges fit the batches that they come from best of all: strengths are compared on others, as far as there are any.
    compared = some_rows(calibration[-max(1, len(calibration) // 4) :], _NUM_COMPARED)
    known = calibration[: -len(compared)] or calibration
    names = dict.fromkeys(product.x for product in find_products(model))
    ranges, reference = observe(model, names, known), ExpectedAnswers(model, compared)

    def quantized(ranges: Mapping[str, ChannelRange], strength: float | None) -> tuple[Any, int]:
        copy = copied(model)
        return copy, quantize_products(copy, ranges, smoothing=strength, keep=keep)

    errors = {
        strength: reference.error(open_session(quantized(ranges, strength)[0])) for strength in (None, *_STRENGTHS)
    }
    best = min(errors, key=errors.__getitem__)
    return *quantized(observe(model, names, calibration), best), best


class _Batches(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, batches: Iterable[Inputs]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        return None if batch is None else dict(batch)


def _with_convolutions(model: Any, calibration: Sequence[Inputs], keep: Collection[str]) -> tuple[Any, str]:
    """By ONNX Runtime's own quantiser, in QDQ form, which it fuses to integer convolutions as it loads the file."""
    observe(model, (), calibration)  # what is wrong with the data is said before the quantiser meets it
    with tempfile.TemporaryDirectory(prefix="weft-optimize-") as folder:
        named, simplified, prepared, written = (Path(folder) / f"{name}.onnx" for name in ("n", "s", "p", "w"))
        save_model(model, named)
        # Batch norms are folded into convolutions and constants computed, in standard operators alone: the optimisation
        # within ``quant_pre_process`` goes on to operators such as FusedConv, which nothing quantises.
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(simplified)
        onnxruntime.InferenceSession(named, options, ["CPUExecutionProvider"])
        quant_pre_process(simplified, prepared, skip_optimization=True, skip_symbolic_shape=True)
        num_layers = sum(node.name not in keep for node in weighted_nodes(onnx.load(prepared)))
        quantize_static(
            prepared,
            written,
            _Batches(calibration),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QDQ_OPS,
            nodes_to_exclude=[*keep],
            per_channel=True,
            reduce_range=not has_integer_instructions(),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        notes = f"{num_layers} convolutions and products as int8, per output channel; what is between them too"
        return onnx.load(written), notes


def _layer_errors(model: Any, calibration: Sequence[Inputs]) -> dict[str, float]:
    """Error of the answers when only one layer is rounded to int8, by the name of its node."""
    nodes = weighted_nodes(model)
    ranges = observe(model, dict.fromkeys(node.input[0] for node in nodes), calibration)
    compared = some_rows(calibration, _NUM_COMPARED)
    reference, switched = ExpectedAnswers(model, compared), open_session(_with_switches(model, ranges))
    errors = {}
    for number, node in enumerate(nodes):
        switches = np.arange(len(nodes)) == number
        errors[node.name] = reference.error(switched, [{**batch, _SWITCHES: switches} for batch in compared])
    return errors


def _costliest(model: Any, errors: Mapping[str, float]) -> list[str]:
    """Layers to keep in FP32: most error per weight, up to a share of the error and of all weights."""
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in model.graph.initializer}
    num_weights = {node.name: sizes[node.input[1]] for node in weighted_nodes(model)}
    total, room = sum(errors.values()), _SHARE_OF_WEIGHTS * sum(num_weights.values())
    left, kept = total, list[str]()
    for name in sorted(errors, key=lambda name: errors[name] / num_weights[name], reverse=True):
        if left <= (1 - _SHARE_OF_ERROR) * total:
            break
        if num_weights[name] <= room:
            room -= num_weights[name]
            left -= errors[name]
            kept.append(name)
    return kept


def _with_switches(model: Any, ranges: Mapping[str, ChannelRange]) -> Any:
    """A copy with a BOOL input for each layer: whether its values are rounded to int8."""
    copy = copied(model)
    numbers = {node.name: number for number, node in enumerate(weighted_nodes(copy))}
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in copy.graph.initializer}
    copy.graph.input.append(helper.make_tensor_value_info(_SWITCHES, onnx.TensorProto.BOOL, [len(numbers)]))
    nodes: list[Any] = []
    for node in copy.graph.node:
        if node.name in numbers:
            nodes += _switch(copy, node, numbers[node.name], weights[node.input[1]], ranges[node.input[0]].limits())
        nodes.append(node)
    replace_nodes(copy, nodes)
    return copy


def _switch(model: Any, node: Any, number: int, weight: NDArray[Any], limits: tuple[float, float]) -> list[Any]:
    """Nodes before a layer, which reads what they choose from then on."""
    name, (low, high) = f"{node.name}.switch", limits
    # All axes but that of the output channels.
    is_output_first = node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute)
    axes = tuple(range(1, weight.ndim)) if is_output_first else tuple(range(weight.ndim - 1))
    scale = np.maximum(np.abs(weight).max(axis=axes, keepdims=True) / 127, 1e-12)
    step = np.float32((high - low) / 255 or 1.0)
    add_constant(model, f"{name}.number", np.int64(number))
    add_constant(model, f"{name}.weight", (np.round(weight / scale) * scale).astype(np.float32))
    scaling = [
        add_constant(model, f"{name}.step", step),
        add_constant(model, f"{name}.zero", np.uint8(np.clip(round(-low / step), 0, 255))),
    ]
    x, given = node.input[0], node.input[1]
    node.input[0], node.input[1] = f"{name}.x", f"{name}.chosen"
    made = [
        ("Gather", [_SWITCHES, f"{name}.number"], f"{name}.on"),
        ("QuantizeLinear", [x, *scaling], f"{name}.u8"),
        ("DequantizeLinear", [f"{name}.u8", *scaling], f"{name}.rounded"),
        ("Where", [f"{name}.on", f"{name}.rounded", x], f"{name}.x"),
        ("Where", [f"{name}.on", f"{name}.weight", given], f"{name}.chosen"),
    ]
    return [helper.make_node(kind, read, [written], name=written) for kind, read, written in made]
