"""Rewrites matrix products by constants to integer products, with ONNX Runtime's operator ``MatMulIntegerToFloat``.

Used instead of ``onnxruntime.quantization``, which has no smoothing, quantises products of two activations too, and
whose QDQ form leaves a separate Add for each bias and, in MiniLM, 42 QuantizeLinear in place of 24.

Activations are asymmetric uint8 with one scale for a tensor, weights symmetric int8 with one scale for each output
channel: the form for which CPUs have instructions (VNNI). Smoothing is that of Xiao et al., "SmoothQuant", 2022
(https://arxiv.org/abs/2211.10438).
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from weft.optimize.methods.onnx_model import (
    MICROSOFT,
    ChannelRange,
    Floats,
    add_constant,
    readers,
    replace_nodes,
    weighted_nodes,
)

#: Operators that this module rewrites.
KINDS = ("Gemm", "MatMul")

_TINY = 1e-6


class Product(NamedTuple):
    """``x @ weight + bias``.

    Attributes:
        x: Name of the activation.
        weight: FP32 ``[inputs, outputs]``.
        bias: Name of its constant ``[outputs]``; empty without.
        add: The Add of the bias, if it is a node of its own.
    """

    node: Any
    x: str
    weight: Floats
    bias: str
    add: Any

    @property
    def output(self) -> str:
        """Name of the result, with the bias."""
        return str((self.node if self.add is None else self.add).output[0])


def find_products(model: Any) -> list[Product]:
    """Every MatMul and Gemm with a constant matrix, in order of execution; a Gemm that scales is left out."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    num_readers = readers(model)
    reader = {name: node for node in model.graph.node for name in node.input}
    found = []
    for node in weighted_nodes(model, KINDS):
        weight = numpy_helper.to_array(constants[node.input[1]])
        if weight.ndim != 2:
            continue
        bias, add = "", None
        if node.op_type == "Gemm":
            settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            bias = node.input[2] if len(node.input) > 2 else ""
            if settings.get("transA") or settings.get("alpha", 1.0) != 1.0 or settings.get("beta", 1.0) != 1.0:
                continue
            if bias and not _is_vector(constants.get(bias)):
                continue
            weight = weight.T if settings.get("transB") else weight
        elif num_readers.get(node.output[0]) == 1 and (after := reader.get(node.output[0])) is not None:
            others = [name for name in after.input if name != node.output[0]]
            if after.op_type == "Add" and len(others) == 1 and _is_vector(constants.get(others[0])):
                bias, add = others[0], after
        found.append(Product(node, node.input[0], weight, bias, add))
    return found


def quantize_products(
    model: Any,
    ranges: Mapping[str, ChannelRange] | None,
    *,
    smoothing: float | None = None,
    keep: Collection[str] = (),
) -> int:
    """Convert matrix products of a ``ModelProto`` to integers, in place; return how many.

    Args:
        ranges: Of each multiplied activation, for fixed scales; None: scales are computed from each tensor, so that an
            answer depends on the other rows of its batch.
        smoothing: From 0 to 1, how much of the difference between channels moves from activations to weights; None is
            none at all. Needs ``ranges``.
        keep: Names of nodes that stay in FP32.
    """
    products = {product.node.name: product for product in find_products(model) if product.node.name not in keep}
    by_input: dict[str, list[Product]] = {}
    for product in products.values():
        by_input.setdefault(product.x, []).append(product)
    scales = _smoothing_scales(by_input, ranges, smoothing) if smoothing is not None and ranges else {}
    folded = _fold_into_layer_norms(model, scales, by_input)
    merged = {product.add.name for product in products.values() if product.add is not None}
    limit = 127 if has_integer_instructions() else 63
    nodes: list[Any] = []
    quantized: set[str] = set()
    for node in model.graph.node:
        if node.name in merged:
            continue
        if node.name not in products:
            nodes.append(node)
            continue
        product = products[node.name]
        scale = scales.get(product.x)
        if product.x not in quantized:
            quantized.add(product.x)
            limits = None if ranges is None else ranges[product.x].limits(np.float32(1) if scale is None else scale)
            nodes += _quantized_input(model, product.x, None if product.x in folded else scale, limits)
        weight = product.weight if scale is None else product.weight * scale[:, None]
        nodes.append(_integer_product(model, product, weight, limit))
    replace_nodes(model, nodes)
    return len(products)


@cache
def has_integer_instructions() -> bool:
    """Whether ONNX Runtime's products of 8-bit integers are exact; on x86 without VNNI they saturate.

    It asks the CPU itself, whatever settings say, so it is tried. Where they saturate, weights need 7 bits.
    """
    ends = [
        helper.make_tensor_value_info(name, kind, [1, 64])
        for name, kind in (("x", onnx.TensorProto.UINT8), ("y", onnx.TensorProto.INT32))
    ]
    weight = numpy_helper.from_array(np.full((64, 64), 127, np.int8), "weight")
    node = helper.make_node("MatMulInteger", ["x", "weight"], ["y"])
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (product,) = session.run(None, {"x": np.full((1, 64), 255, np.uint8)})
    return bool((product == 64 * 255 * 127).all())


def _is_vector(tensor: Any) -> bool:
    return tensor is not None and len(tensor.dims) == 1 and tensor.data_type == onnx.TensorProto.FLOAT


def _smoothing_scales(
    by_input: Mapping[str, Sequence[Product]], ranges: Mapping[str, ChannelRange], smoothing: float
) -> dict[str, Floats]:
    """What each channel of an activation is divided by, and its row of the weights multiplied by."""
    scales = {}
    for name, products in by_input.items():
        activation = np.maximum(np.maximum(np.abs(ranges[name].low), np.abs(ranges[name].high)), _TINY)
        weight = np.maximum(np.max([np.abs(product.weight).max(axis=1) for product in products], axis=0), _TINY)
        scale = activation**smoothing / weight ** (1 - smoothing)
        scales[name] = (scale / np.exp(np.log(scale).mean())).astype(np.float32)
    return scales


def _fold_into_layer_norms(
    model: Any, scales: Mapping[str, Floats], by_input: Mapping[str, Sequence[Product]]
) -> set[str]:
    """Divide the outputs of layer norms that feed products alone, by their constants; the names of these outputs."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    num_readers = readers(model)
    folded = set()
    for node in model.graph.node:
        name = node.output[0]
        if node.op_type != "LayerNormalization" or name not in scales or num_readers[name] != len(by_input[name]):
            continue
        if not all(_is_vector(constants.get(constant)) for constant in node.input[1:]):
            continue
        for position in range(1, len(node.input)):
            value = numpy_helper.to_array(constants[node.input[position]]) / scales[name]
            node.input[position] = add_constant(model, f"{node.input[position]}.{name}.smooth", value)
        folded.add(name)
    return folded


def _quantized_input(model: Any, name: str, divisor: Floats | None, limits: tuple[float, float] | None) -> list[Any]:
    """Nodes that compute ``<name>.u8``, ``<name>.scale`` and ``<name>.zero`` of an activation."""
    source, nodes = name, []
    if divisor is not None:
        source = f"{name}.smooth"
        factor = add_constant(model, f"{name}.smoothing", 1 / divisor)
        nodes.append(helper.make_node("Mul", [name, factor], [source], name=source))
    outputs = [f"{name}.u8", f"{name}.scale", f"{name}.zero"]
    if limits is None:
        return [*nodes, helper.make_node("DynamicQuantizeLinear", [source], outputs, name=outputs[0])]
    low, high = limits
    scale = (high - low) / 255 or 1.0
    add_constant(model, outputs[1], np.float32(scale))
    add_constant(model, outputs[2], np.uint8(np.clip(round(-low / scale), 0, 255)))
    return [*nodes, helper.make_node("QuantizeLinear", [source, *outputs[1:]], outputs[:1], name=outputs[0])]


def _integer_product(model: Any, product: Product, weight: Floats, limit: int) -> Any:
    name = product.node.name
    scale = np.maximum(np.abs(weight).max(axis=0) / limit, _TINY * _TINY).astype(np.float32)
    integers = np.clip(np.round(weight / scale), -limit, limit).astype(np.int8)
    inputs = [
        f"{product.x}.u8",
        add_constant(model, f"{name}.weight.s8", integers),
        f"{product.x}.scale",
        add_constant(model, f"{name}.weight.scale", scale),
        f"{product.x}.zero",
        add_constant(model, f"{name}.weight.zero", np.zeros(len(scale), np.int8)),
        *([product.bias] if product.bias else []),
    ]
    return helper.make_node("MatMulIntegerToFloat", inputs, [product.output], name=name, domain=MICROSOFT)
