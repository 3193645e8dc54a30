"""Cost of an ONNX model: its graph, as ONNX Runtime would optimise it, walked with shape inference, not executed."""

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
#: Products whose constant matrix ONNX Runtime lays out anew on a CPU, and keeps beside the original.
_PACKED = {
    "MatMul", "Gemm", "FusedMatMul", "FusedGemm", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat",
}  # fmt: skip
_PRODUCTS = _PACKED | {"QLinearMatMul", "MatMulNBits", "QGemm", "MatMulFpQ4", "GemmFloat8"}
_CONVOLUTIONS = {"Conv", "FusedConv", "ConvInteger", "QLinearConv", "ConvTranspose", "NhwcConv", "NhwcFusedConv"}
#: Position of the second factor where it is not input 1.
_SECOND = {"QLinearMatMul": 3, "QGemm": 3, "QLinearConv": 3}
#: Operations for each element of a result.
_PER_ELEMENT = {"element": 1, "function": 10, "norm": 8, "softmax": 8, "reduce": 1}


class OnnxModel:
    """Cost of an ONNX file.

    Args:
        signature: Of the model: which inputs have a batch dimension.

    Raises:
        InvalidArgumentError: The file is not an ONNX model.
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

    @cached_property
    def weights(self) -> Weights:
        """Initializers of the file, and the copies that the runtime packs."""
        held = {tensor.name: _tensor_bytes(tensor) for tensor in self._optimized.initializer}
        packed = sum(
            held.get(node.input[1], 0)
            for node in self._optimized.node
            if node.op_type in _PACKED and len(node.input) > 1
        )
        return Weights(sum(map(_tensor_bytes, self._model.graph.initializer)), packed)

    def batch(self, num_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> BatchCost:
        """See ``CostModel``."""
        graph = _SizedGraph(self._optimized, self._tensors(num_rows, shapes))
        inputs = [value.name for value in graph.proto.input if value.name not in graph.weights]
        outputs = [value.name for value in graph.proto.output]
        operations = tuple(map(graph.operation, graph.proto.node))
        input_bytes, output_bytes = (sum(map(graph.size, names)) for names in (inputs, outputs))
        peak_bytes = graph.peak_bytes(operations, input_bytes)
        return BatchCost(num_rows, operations, peak_bytes, input_bytes, output_bytes, len(inputs) + len(outputs))

    @cached_property
    def _optimized(self) -> Any:
        """The graph after the runtime's fusions; unchanged without ONNX Runtime."""
        try:
            import onnxruntime as ort  # noqa: PLC0415  # optional, and slow to import
        except ImportError:
            return self._model.graph
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        with TemporaryDirectory() as folder:
            options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
            try:
                ort.InferenceSession(str(self._path), options, providers=["CPUExecutionProvider"])
                return onnx.load(options.optimized_model_filepath).graph
            except Exception:  # what it cannot run here, a GPU might
                return self._model.graph

    def _tensors(self, num_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each tensor for inputs of these shapes."""
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        held = {tensor.name for tensor in model.graph.initializer}
        has_rows = self._signature.max_batch_size > 0
        declared = {spec.name: spec for spec in self._signature.inputs}
        for value in model.graph.input:
            if value.name in held or (spec := declared.get(value.name)) is None:
                continue
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
        inferred = shape_inference.infer_shapes(model, data_prop=True).graph
        found = {}
        for value in (*inferred.input, *inferred.value_info, *inferred.output):
            if value.type.HasField("tensor_type"):
                kind = value.type.tensor_type
                dims = tuple(max(dim.dim_value, 1) for dim in kind.shape.dim)
                found[value.name] = (_type_name(kind.elem_type), dims)
        return found


class _SizedGraph:
    """A graph whose tensors have types and shapes.

    Attributes:
        weights: Bytes of the tensors that are weights.
    """

    def __init__(self, proto: Any, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.proto = proto
        self.weights = {tensor.name: _tensor_bytes(tensor) for tensor in proto.initializer}
        own = {tensor.name: (_type_name(tensor.data_type), tuple(tensor.dims)) for tensor in proto.initializer}
        self._tensors = {**tensors, **own}
        for node in proto.node:  # fused nodes of the runtime, and the names that it makes
            for name in node.output:
                if name not in self._tensors:
                    self._tensors[name] = (self._type(node.input[0]) if node.input else "fp32", self._fused_dims(node))

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        kind, dims = self._tensors.get(name, ("", None))
        return 0 if dims is None else _size(kind, dims)

    def _type(self, name: str) -> str:
        return self._tensors[name][0] if name in self._tensors else "fp32"

    def _dims(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        return self._tensors[name][1] if name in self._tensors else default

    def _fused_dims(self, node: Any) -> tuple[int, ...]:
        """Result shape of a node that only the runtime defines: convolution or pooling, else its input's shape."""
        first = self._dims(node.input[0]) if node.input else ()
        ints = {attribute.name: list(attribute.ints) for attribute in node.attribute}
        if node.op_type in _CONVOLUTIONS:
            filters = self._dims(node.input[1])
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

    def operation(self, node: Any) -> Operation:
        """The operation of a node."""
        moved = sum(self.size(name) for name in (*node.input, *node.output) if name and name not in self.weights)
        read = sum(self.weights[name] for name in node.input if name in self.weights)
        at = _SECOND.get(node.op_type, 1)
        if len(node.input) > at and node.op_type in _PRODUCTS:
            return self._product(node, node.input[at], moved, read)
        if len(node.input) > at and node.op_type in _CONVOLUTIONS:
            filters = self._dims(node.input[at], (1, 1))  # [out, in / groups, height, width]
            output = self._dims(node.output[0], (1, 1))
            num_outputs = output[1] if len(output) > 1 else filters[0]
            shape = (output[0] * math.prod(output[2:]), math.prod(filters[1:]), num_outputs)
            kind = "int8" if self._type(node.input[at]) == "int8" else "fp32"
            return Operation("conv", 2.0 * math.prod(shape), read, moved, kind, shape)
        family = _FAMILY_OF.get(node.op_type, "element")
        if family == "gather":  # of a table it reads the rows that it needs
            return Operation(family, 0.0, 0, 2 * sum(self.size(name) for name in node.output if name))
        if family == "view":
            return Operation(family)
        results = (math.prod(self._dims(name)) for name in (*node.input[:1], *node.output) if name)
        return Operation(family, float(max(results, default=0) * _PER_ELEMENT.get(family, 0)), read, moved)

    def _product(self, node: Any, second: str, moved: int, read: int) -> Operation:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        first_dims, second_dims = self._dims(node.input[0]), self._dims(second)
        if node.op_type == "MatMulNBits":
            shape = (math.prod(first_dims[:-1]), int(attributes["K"]), int(attributes["N"]))
            return Operation("product", 2.0 * math.prod(shape), read, moved, "int8", shape)
        if not first_dims or not second_dims:
            return Operation("element", 0.0, read, moved)
        first_dims = first_dims if len(first_dims) > 1 else (1, *first_dims)
        second_dims = second_dims if len(second_dims) > 1 else (*second_dims, 1)
        num_inputs, num_outputs = second_dims[-2:][::-1] if attributes.get("transB") else second_dims[-2:]
        kind = kind if (kind := self._type(second)) in ("fp32", "fp16", "bf16", "int8") else "fp32"
        if second in self.weights and math.prod(second_dims[:-2]) == 1:
            shape = (max(math.prod(first_dims) // max(num_inputs, 1), 1), num_inputs, num_outputs)
            return Operation("product", 2.0 * math.prod(shape), read, moved, kind, shape)
        shape = (first_dims[-1] if attributes.get("transA") else first_dims[-2], num_inputs, num_outputs)
        count = max(math.prod(first_dims[:-2]), math.prod(second_dims[:-2]), 1)
        return Operation("matmul", 2.0 * count * math.prod(shape), read, moved, kind, shape)

    def peak_bytes(self, operations: Sequence[Operation], input_bytes: int) -> int:
        """Peak memory of tensors, each alive from the node that computes it to its last reader."""
        last = {name: index for index, node in enumerate(self.proto.node) for name in node.input}
        kept = {value.name for value in self.proto.output}
        alive = peak = input_bytes
        views: dict[str, str] = {}  # outputs that are the memory of an input
        for index, (node, operation) in enumerate(zip(self.proto.node, operations, strict=True)):
            if operation.family == "view" and node.input:
                origin = views[node.output[0]] = views.get(node.input[0], node.input[0])
                last[origin] = max(last.get(origin, -1), last.get(node.output[0], -1))
                if node.output[0] in kept:
                    kept.add(origin)
                continue
            alive += sum(self.size(name) for name in node.output if name)
            peak = max(peak, alive)
            for name in dict.fromkeys(filter(None, node.input)):
                origin = views.get(name, name)
                if last.get(origin) == index and origin not in self.weights and origin not in kept:
                    alive -= self.size(origin)
        return peak


def _size(kind: str, dims: Sequence[int]) -> int:
    return math.ceil(math.prod(dims) * _BYTES.get(kind, 4))


def _tensor_bytes(tensor: Any) -> int:
    return _size(_type_name(tensor.data_type), tensor.dims)


def _type_name(data_type: int) -> str:
    return _TYPE_NAMES.get(data_type) or str(TensorProto.DataType.Name(data_type)).lower()
