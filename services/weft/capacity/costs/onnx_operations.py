"""Nodes of an ONNX graph as operations: which family, how much arithmetic, how many bytes."""

import math
from collections.abc import Mapping
from typing import Any

from weft.capacity.costs.operation import Operation

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int64": 8, "int32": 4, "fp64": 8, "bool": 1, "int4": 0.5}
_FAMILIES = {
    "view": "Reshape Flatten Squeeze Unsqueeze Identity Shape Constant Dropout Size ConstantOfShape Range",
    "function": "Erf Gelu BiasGelu FastGelu QuickGelu Tanh Sigmoid Exp Log Pow Sqrt Softplus Swish Silu Elu Selu Sin"
    " Cos HardSwish Mish Celu",
    "norm": "LayerNormalization SkipLayerNormalization SimplifiedLayerNormalization BatchNormalization"
    " InstanceNormalization GroupNormalization RMSNormalization EmbedLayerNormalization LpNormalization",
    "softmax": "Softmax LogSoftmax",
    "reduce": "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL2 ArgMax ArgMin MaxPool AveragePool GlobalAveragePool"
    " GlobalMaxPool TopK CumSum Mean",
    "transpose": "Transpose ReorderInput ReorderOutput DepthToSpace SpaceToDepth",
    "gather": "Gather GatherElements GatherND ScatterND ScatterElements EmbeddingBag",
    "copy": "Concat Slice Pad Expand Split Tile Resize Upsample",
}
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names.split()}
_PRODUCTS = {
    "MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
    "QLinearMatMul", "MatMulNBits", "QGemm", "MatMulFpQ4", "GemmFloat8",
}  # fmt: skip
_CONVOLUTIONS = {"Conv", "FusedConv", "ConvInteger", "QLinearConv", "ConvTranspose", "NhwcConv", "NhwcFusedConv"}
#: Position of the second factor where it is not input 1.
_SECOND = {"QLinearMatMul": 3, "QGemm": 3, "QLinearConv": 3}
#: Operations for each element of a result.
_PER_ELEMENT = {"element": 1, "function": 10, "norm": 8, "softmax": 8, "reduce": 1}


def operation_of(
    node: Any, dims: Mapping[str, tuple[int, ...]], types: Mapping[str, str], weights: Mapping[str, int]
) -> Operation:
    """What a node does.

    Args:
        node: ``onnx.NodeProto``.
        dims: Shape of each tensor, weights included.
        types: Type of each tensor: ``"fp32"``, ``"int64"``, ...
        weights: Bytes of the tensors that are weights.
    """
    moved = sum(_size(name, dims, types) for name in (*node.input, *node.output) if name and name not in weights)
    read = sum(weights[name] for name in node.input if name in weights)
    second = _SECOND.get(node.op_type, 1)
    if node.op_type in _PRODUCTS and len(node.input) > second:
        return _product(node, node.input[second], dims, types, weights, moved, read)
    if node.op_type in _CONVOLUTIONS and len(node.input) > second:
        return _convolution(node, node.input[second], dims, types, moved, read)
    family = _FAMILY_OF.get(node.op_type, "element")
    if family == "gather":  # of a table it reads the rows that it needs
        written = sum(_size(name, dims, types) for name in node.output if name)
        return Operation(family, 0.0, 0, 2 * written)
    if family == "view":
        return Operation(family)
    num_elements = max((math.prod(dims.get(name, ())) for name in (*node.input[:1], *node.output) if name), default=0)
    return Operation(family, float(num_elements * _PER_ELEMENT.get(family, 0)), read, moved)


def fused_dims(node: Any, dims: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of the result of a node that only the runtime knows: a convolution or pooling, else that of its input."""
    first = dims.get(node.input[0], ()) if node.input else ()
    ints = {attribute.name: list(attribute.ints) for attribute in node.attribute}
    if node.op_type in _CONVOLUTIONS:
        filters = dims.get(node.input[1], ())
        channels, window = (filters[0], list(filters[2:])) if filters else (1, [])
    elif node.op_type in ("MaxPool", "AveragePool"):
        channels, window = (first[1] if len(first) > 1 else 1), ints.get("kernel_shape", [])
    else:
        return first
    if len(first) != len(window) + 2:
        return first
    strides, pads = ints.get("strides") or [1] * len(window), ints.get("pads") or [0] * (2 * len(window))
    pixels = [
        (size + pads[axis] + pads[axis + len(window)] - window[axis]) // strides[axis] + 1
        for axis, size in enumerate(first[2:])
    ]
    return (first[0], channels, *pixels)


def _product(
    node: Any,
    second: str,
    dims: Mapping[str, tuple[int, ...]],
    types: Mapping[str, str],
    weights: Mapping[str, int],
    moved: int,
    read: int,
) -> Operation:
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    first_dims, second_dims = dims.get(node.input[0], ()), dims.get(second, ())
    if node.op_type == "MatMulNBits":
        num_inputs, num_outputs = int(attributes["K"]), int(attributes["N"])
        rows = math.prod(first_dims[:-1])
        return Operation(
            "product", 2.0 * rows * num_inputs * num_outputs, read, moved, "int8", (rows, num_inputs, num_outputs)
        )
    if len(first_dims) < 1 or len(second_dims) < 1:
        return Operation("element", 0.0, read, moved)
    first_dims = first_dims if len(first_dims) > 1 else (1, *first_dims)
    second_dims = second_dims if len(second_dims) > 1 else (*second_dims, 1)
    is_swapped = bool(attributes.get("transB"))
    num_inputs, num_outputs = second_dims[-2:][::-1] if is_swapped else second_dims[-2:]
    kind = types.get(second, "fp32")
    kind = kind if kind in ("fp32", "fp16", "bf16", "int8") else "fp32"
    if second in weights and math.prod(second_dims[:-2]) == 1:
        rows = max(math.prod(first_dims) // max(num_inputs, 1), 1)
        flops = 2.0 * rows * num_inputs * num_outputs
        return Operation("product", flops, read, moved, kind, (rows, num_inputs, num_outputs))
    rows = first_dims[-1] if attributes.get("transA") else first_dims[-2]
    count = max(math.prod(first_dims[:-2]), math.prod(second_dims[:-2]), 1)
    return Operation(
        "matmul",
        2.0 * count * rows * num_inputs * num_outputs,
        read,
        moved,
        kind,
        (rows, num_inputs, num_outputs),
        count,
    )


def _convolution(
    node: Any, second: str, dims: Mapping[str, tuple[int, ...]], types: Mapping[str, str], moved: int, read: int
) -> Operation:
    filters = dims.get(second, (1, 1))  # [out, in / groups, height, width]
    output = dims.get(node.output[0], (1, 1))
    num_inputs = math.prod(filters[1:])
    num_outputs = output[1] if len(output) > 1 else filters[0]
    pixels = math.prod(output[2:])
    kind = "int8" if types.get(second) == "int8" else "fp32"
    rows = output[0] * pixels
    flops = 2.0 * rows * num_inputs * num_outputs
    return Operation("conv", flops, read, moved, kind, (rows, num_inputs, num_outputs))


def _size(name: str, dims: Mapping[str, tuple[int, ...]], types: Mapping[str, str]) -> int:
    return math.ceil(math.prod(dims.get(name, ())) * _BYTES.get(types.get(name, "fp32"), 4))
