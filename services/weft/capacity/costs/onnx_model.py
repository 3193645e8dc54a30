"""Cost of an ONNX model: its graph as ONNX Runtime would run it, walked with shape inference. Nothing is executed."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from onnx import TensorProto, shape_inference

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.capacity.costs import BatchCost, Operation, Weights

_TYPE_NAMES = {
    TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16", TensorProto.INT8: "int8",
    TensorProto.UINT8: "int8", TensorProto.DOUBLE: "fp64", TensorProto.INT4: "int4", TensorProto.UINT4: "int4",
}  # fmt: skip
#: Bytes of an element by type; of any other 4.
_BYTES = {
    "fp16": 2, "bf16": 2, "int8": 1, "int16": 2, "uint16": 2, "int64": 8, "uint64": 8, "fp64": 8, "bool": 1,
    "int4": 0.5,
}  # fmt: skip
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


def _operation(
    node: Any, dims: Mapping[str, tuple[int, ...]], types: Mapping[str, str], weights: Mapping[str, int]
) -> Operation:
    """What a node does.

    Args:
        node: ``onnx.NodeProto``.
        dims: Shape of each tensor, weights included.
        types: Type of each tensor: ``"fp32"``, ``"int64"``, ...
        weights: Bytes of the tensors that are weights.
    """

    def size(name: str) -> int:
        return _size(types.get(name, "fp32"), dims.get(name, ()))

    moved = sum(size(name) for name in (*node.input, *node.output) if name and name not in weights)
    read = sum(weights[name] for name in node.input if name in weights)
    second = _SECOND.get(node.op_type, 1)
    if node.op_type in _PRODUCTS and len(node.input) > second:
        return _product(node, node.input[second], dims, types, weights, moved, read)
    if node.op_type in _CONVOLUTIONS and len(node.input) > second:
        return _convolution(node, node.input[second], dims, types, moved, read)
    family = _FAMILY_OF.get(node.op_type, "element")
    if family == "gather":  # of a table it reads the rows that it needs
        written = sum(size(name) for name in node.output if name)
        return Operation(family, 0.0, 0, 2 * written)
    if family == "view":
        return Operation(family)
    num_elements = max((math.prod(dims.get(name, ())) for name in (*node.input[:1], *node.output) if name), default=0)
    return Operation(family, float(num_elements * _PER_ELEMENT.get(family, 0)), read, moved)


def _fused_dims(node: Any, dims: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
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


def _size(kind: str, dims: Sequence[int]) -> int:
    return math.ceil(math.prod(dims) * _BYTES.get(kind, 4))


#: Operators whose constant matrix ONNX Runtime lays out anew on a CPU, and keeps beside the original.
_PACKED = {
    "MatMul",
    "Gemm",
    "FusedMatMul",
    "FusedGemm",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
}


class OnnxModel:
    """The cost of an ONNX file.

    Args:
        path: The file.
        signature: Of the model: which inputs have a batch dimension.

    Raises:
        InvalidArgumentError: The file is no ONNX model.
    """

    def __init__(self, path: Path, signature: ModelSignature) -> None:
        self._path = path
        self._signature = signature
        try:
            self._model = onnx.load(str(path), load_external_data=False)
        except Exception as error:  # protobuf's own, of no common base
            raise InvalidArgumentError(f"{path} is no ONNX model: {error}") from error
        if not self._model.graph.node:
            raise InvalidArgumentError(f"{path} is no ONNX model: it has no graph")
        self._initializers = {tensor.name: tensor for tensor in self._model.graph.initializer}

    @cached_property
    def weights(self) -> Weights:
        """Initializers of the file, and what the runtime packs of them."""
        graph = self._optimized.graph
        held = {tensor.name: tensor for tensor in graph.initializer}
        packed = 0
        for node in graph.node:
            if node.op_type in _PACKED and len(node.input) > 1 and (tensor := held.get(node.input[1])) is not None:
                packed += _tensor_bytes(tensor)
        return Weights(sum(map(_tensor_bytes, self._initializers.values())), packed)

    def batch(self, num_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> BatchCost:
        """See ``CostModel``."""
        tensors = self._tensors(num_rows, shapes)
        graph = self._optimized.graph
        weights = {tensor.name: _tensor_bytes(tensor) for tensor in graph.initializer}
        dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        types = {tensor.name: _type_name(tensor.data_type) for tensor in graph.initializer}
        for name, (data_type, shape) in tensors.items():
            dims.setdefault(name, shape)
            types.setdefault(name, _type_name(data_type))
        for node in graph.node:  # fused nodes of the runtime, and the names that it makes
            for name in node.output:
                if name not in dims:
                    dims[name] = _fused_dims(node, dims)
                types.setdefault(name, types.get(node.input[0], "fp32") if node.input else "fp32")
        sizes = {name: _size(types[name], shape) for name, shape in dims.items()}
        operations = tuple(_operation(node, dims, types, weights) for node in graph.node)
        inputs = [value.name for value in graph.input if value.name not in weights]
        return BatchCost(
            num_rows,
            operations,
            _peak_bytes(graph, sizes, weights, operations),
            sum(sizes.get(name, 0) for name in inputs),
            sum(sizes.get(value.name, 0) for value in graph.output),
            len(inputs) + len(graph.output),
        )

    @cached_property
    def _optimized(self) -> Any:
        """The graph after the runtime's fusions; as it is in the file where ONNX Runtime is not installed."""
        try:
            import onnxruntime as ort  # noqa: PLC0415  # optional, and slow to import
        except ImportError:
            return self._model
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        with TemporaryDirectory() as folder:
            options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
            try:
                ort.InferenceSession(str(self._path), options, providers=["CPUExecutionProvider"])
                return onnx.load(options.optimized_model_filepath)
            except Exception:  # what it cannot run here, a GPU might
                return self._model

    def _tensors(self, num_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Type and shape of each tensor of the file for inputs of these shapes."""
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        has_rows = self._signature.max_batch_size > 0
        declared = {spec.name: spec for spec in self._signature.inputs}
        for value in model.graph.input:
            if value.name in self._initializers or value.name not in declared:
                continue
            spec = declared[value.name]
            given = shapes.get(value.name, spec.reshape if spec.reshape is not None else spec.dims)
            dims = (num_rows, *given) if has_rows else tuple(given)
            field = value.type.tensor_type.shape
            if len(field.dim) != len(dims) or any(
                dim.HasField("dim_value") and dim.dim_value != size for dim, size in zip(field.dim, dims, strict=True)
            ):
                wanted = [dim.dim_value or dim.dim_param or "?" for dim in field.dim]
                raise InvalidArgumentError(
                    f"{self._path}: input '{value.name}' has the shape {wanted}, which {list(dims)} does not fit"
                )
            for dim, size in zip(field.dim, dims, strict=True):
                dim.dim_value = size
        for value in [*model.graph.output, *model.graph.value_info]:
            value.type.tensor_type.ClearField("shape")  # what was true of any size is not enough
        inferred = shape_inference.infer_shapes(model, data_prop=True)
        return {
            value.name: (value.type.tensor_type.elem_type, _dims(value))
            for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output)
            if value.type.HasField("tensor_type")
        }


def _dims(value: Any) -> tuple[int, ...]:
    return tuple(max(dim.dim_value, 1) for dim in value.type.tensor_type.shape.dim)


def _tensor_bytes(tensor: Any) -> int:
    return _size(_type_name(tensor.data_type), tensor.dims)


def _type_name(data_type: int) -> str:
    return _TYPE_NAMES.get(data_type) or str(TensorProto.DataType.Name(data_type)).lower()


def _peak_bytes(
    graph: Any, sizes: Mapping[str, int], weights: Mapping[str, int], operations: Sequence[Operation]
) -> int:
    """Largest sum of tensors that are alive: from the node that makes one to the last that reads it."""
    last = {name: index for index, node in enumerate(graph.node) for name in node.input}
    kept = {value.name for value in graph.output}
    alive = sum(sizes.get(value.name, 0) for value in graph.input if value.name not in weights)
    peak = alive
    views: dict[str, str] = {}  # outputs that are the memory of an input
    for index, (node, operation) in enumerate(zip(graph.node, operations, strict=True)):
        if operation.family == "view" and node.input:
            views[node.output[0]] = views.get(node.input[0], node.input[0])
            origin = views[node.output[0]]
            last[origin] = max(last.get(origin, -1), last.get(node.output[0], -1))
            if node.output[0] in kept:
                kept.add(origin)
            continue
        alive += sum(sizes.get(name, 0) for name in node.output if name)
        peak = max(peak, alive)
        for name in dict.fromkeys(filter(None, node.input)):
            origin = views.get(name, name)
            if last.get(origin) == index and origin not in weights and origin not in kept:
                alive -= sizes.get(origin, 0)
    return peak
