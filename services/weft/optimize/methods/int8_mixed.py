"""``int8-mixed``: int8, but for the layers whose quantisation costs most, which stay in FP32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from weft.base.errors import UnsupportedError
from weft.optimize.methods.calibration import ExpectedAnswers, observe, open_session, some_rows
from weft.optimize.methods.int8_static import smoothed, why_not_static, write_static
from weft.optimize.methods.method import Built, Inputs, SourceModel
from weft.optimize.methods.onnx_model import read_model, replace_nodes, save_model, weighted_nodes

#: Share of the error, summed over the layers one by one, that the layers left in FP32 make up.
_SHARE_OF_ERROR = 0.5
#: Most of the weights that stay in FP32.
_SHARE_OF_WEIGHTS = 0.34
#: Rows that layers are compared on.
_NUM_COMPARED = 32
_SWITCHES = "weft.quantized_layers"


class Int8Mixed:
    """The layers are quantised one at a time to see what each costs; the dearest for their size stay in FP32."""

    name = "int8-mixed"

    def unsuitable(self, source: SourceModel) -> str:
        """Empty if there are at least two layers to choose from."""
        if why := why_not_static(source):
            return why
        if len(weighted_nodes(read_model(source))) < 2:
            return "there is a single layer with weights: int8-static is all or nothing"
        return ""

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Write the quantised model.

        Raises:
            UnsupportedError: No layer is both small enough and costly enough.
        """
        model = read_model(source)
        errors = layer_errors(model, calibration)
        kept = costliest(errors, _num_weights(model))
        if not kept:
            raise UnsupportedError("no layer stands out: int8-static loses as much in each")
        notes = f"{len(kept)} of {len(errors)} layers in FP32 by sensitivity"
        if weighted_nodes(model, ("Conv",)):
            write_static(source, calibration, folder, keep=kept)
        else:
            smooth, _, strength = smoothed(source, calibration, keep=kept)
            save_model(smooth, folder / source.file.name)
            notes += f"; activations smoothed by {strength}" if strength else ""
        return Built({}, f"{notes}; the others as int8")


def layer_errors(model: Any, calibration: Sequence[Inputs]) -> dict[str, float]:
    """Error of the model's answers when one layer alone has the precision of int8, by the name of its node.

    Raises:
        InvalidArgumentError: The model does not take the calibration data.
    """
    nodes = weighted_nodes(model)
    inputs = dict.fromkeys(node.input[0] for node in nodes)
    ranges = observe(model, inputs, calibration)
    limits = {name: (min(0.0, float(r.low.min())), max(0.0, float(r.high.max()))) for name, r in ranges.items()}
    compared = some_rows(calibration, _NUM_COMPARED)
    reference, switched = ExpectedAnswers(model, compared), open_session(_with_switches(model, limits))
    errors = {}
    for number, node in enumerate(nodes):
        switches = np.arange(len(nodes)) == number
        errors[node.name] = reference.error(switched, [{**batch, _SWITCHES: switches} for batch in compared])
    return errors


def costliest(errors: dict[str, float], num_weights: dict[str, int]) -> list[str]:
    """Layers to leave in FP32: those with most error for a weight, up to a share of the error and of all weights."""
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


def _num_weights(model: Any) -> dict[str, int]:
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in model.graph.initializer}
    return {node.name: sizes[node.input[1]] for node in weighted_nodes(model)}


def _with_switches(model: Any, limits: dict[str, tuple[float, float]]) -> Any:
    """A copy with an input of one BOOL for each layer: whether its values are rounded to those of int8."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    numbers = {node.name: number for number, node in enumerate(weighted_nodes(copy))}
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in copy.graph.initializer}
    copy.graph.input.append(helper.make_tensor_value_info(_SWITCHES, onnx.TensorProto.BOOL, [len(numbers)]))
    nodes: list[Any] = []
    for node in copy.graph.node:
        if node.name in numbers:
            nodes += _switch(copy, node, numbers[node.name], weights[node.input[1]], limits[node.input[0]])
        nodes.append(node)
    replace_nodes(copy, nodes)
    return copy


def _switch(model: Any, node: Any, number: int, weight: NDArray[Any], limits: tuple[float, float]) -> list[Any]:
    """Nodes before a layer, which reads what they choose from then on."""
    name, (low, high) = f"{node.name}.switch", limits
    scale = np.maximum(np.abs(weight).max(axis=_input_axes(node, weight.ndim), keepdims=True) / 127, 1e-12)
    step = np.float32((high - low) / 255 or 1.0)
    constants = {
        f"{name}.number": np.int64(number),
        f"{name}.weight": (np.round(weight / scale) * scale).astype(np.float32),
        f"{name}.step": step,
        f"{name}.zero": np.uint8(np.clip(round(-low / step), 0, 255)),
    }
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items())
    x, given, scaling = node.input[0], node.input[1], [f"{name}.step", f"{name}.zero"]
    node.input[0], node.input[1] = f"{name}.x", f"{name}.chosen"
    made = [
        ("Gather", [_SWITCHES, f"{name}.number"], f"{name}.on"),
        ("QuantizeLinear", [x, *scaling], f"{name}.u8"),
        ("DequantizeLinear", [f"{name}.u8", *scaling], f"{name}.rounded"),
        ("Where", [f"{name}.on", f"{name}.rounded", x], f"{name}.x"),
        ("Where", [f"{name}.on", f"{name}.weight", given], f"{name}.chosen"),
    ]
    return [helper.make_node(kind, read, [written], name=written) for kind, read, written in made]


def _input_axes(node: Any, num_axes: int) -> tuple[int, ...]:
    """Axes of a weight but for that of the output channels."""
    is_first = node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute)
    return tuple(range(1, num_axes)) if is_first else tuple(range(num_axes - 1))
