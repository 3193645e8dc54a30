"""Cost of an ONNX model: its graph as ONNX Runtime would run it, walked with shape inference. Nothing is executed."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from onnx import TensorProto, helper, shape_inference

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.capacity.costs.onnx_operations import fused_dims, operation_of
from weft.capacity.costs.operation import BatchCost, Operation, Weights

_ITEM_BYTES = {
    number: helper.tensor_dtype_to_np_dtype(number).itemsize
    for number in TensorProto.DataType.values()
    if number not in (TensorProto.UNDEFINED, TensorProto.STRING)
}
_FOUR_BITS = {TensorProto.INT4, TensorProto.UINT4}
_ONNX_DTYPES = {
    "BOOL": TensorProto.BOOL, "UINT8": TensorProto.UINT8, "INT8": TensorProto.INT8, "UINT16": TensorProto.UINT16,
    "INT16": TensorProto.INT16, "UINT32": TensorProto.UINT32, "INT32": TensorProto.INT32, "UINT64": TensorProto.UINT64,
    "INT64": TensorProto.INT64, "FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}  # fmt: skip
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
        by_type: Counter[str] = Counter()
        for tensor in self._initializers.values():
            by_type[_type_name(tensor.data_type)] += _tensor_bytes(tensor.data_type, tensor.dims)
        held = {tensor.name: tensor for tensor in graph.initializer}
        packed = 0
        for node in graph.node:
            if node.op_type in _PACKED and len(node.input) > 1 and (tensor := held.get(node.input[1])) is not None:
                packed += _tensor_bytes(tensor.data_type, tensor.dims)
        return Weights(sum(by_type.values()), packed, dict(by_type))

    def batch(self, num_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> BatchCost:
        """See ``CostModel``."""
        tensors = self._tensors(num_rows, shapes)
        graph = self._optimized.graph
        weights = {tensor.name: _tensor_bytes(tensor.data_type, tensor.dims) for tensor in graph.initializer}
        dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        types = {tensor.name: _type_name(tensor.data_type) for tensor in graph.initializer}
        for name, (data_type, shape) in tensors.items():
            dims.setdefault(name, shape)
            types.setdefault(name, _type_name(data_type))
        for node in graph.node:  # fused nodes of the runtime, and the names that it makes
            for name in node.output:
                if name not in dims:
                    dims[name] = fused_dims(node, dims)
                types.setdefault(name, types.get(node.input[0], "fp32") if node.input else "fp32")
        sizes = {name: _size(types[name], shape) for name, shape in dims.items()}
        operations = tuple(operation_of(node, dims, types, weights) for node in graph.node)
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


def _tensor_bytes(data_type: int, dims: Sequence[int]) -> int:
    if data_type in _FOUR_BITS:
        return math.ceil(math.prod(dims) / 2)
    return int(math.prod(dims) * _ITEM_BYTES.get(data_type, 4))


def _type_name(data_type: int) -> str:
    return {
        TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16", TensorProto.INT8: "int8",
        TensorProto.UINT8: "int8", TensorProto.INT64: "int64", TensorProto.INT32: "int32", TensorProto.DOUBLE: "fp64",
        TensorProto.BOOL: "bool", TensorProto.INT4: "int4", TensorProto.UINT4: "int4",
    }.get(data_type, "other")  # fmt: skip


_TYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int64": 8, "int32": 4, "fp64": 8, "bool": 1, "int4": 0.5}


def _size(kind: str, dims: Sequence[int]) -> int:
    return math.ceil(math.prod(dims) * _TYPE_BYTES.get(kind, 4))


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
        for name in _distinct(node.input):
            origin = views.get(name, name)
            if last.get(origin) == index and origin not in weights and origin not in kept:
                alive -= sizes.get(origin, 0)
    return peak


def _distinct(names: Sequence[str]) -> Iterator[str]:
    return iter(dict.fromkeys(name for name in names if name))


def onnx_dtype(datatype: str) -> int:
    """``TensorProto`` type of a V2 datatype."""
    return int(_ONNX_DTYPES[datatype])
