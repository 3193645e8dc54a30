"""What the methods for ONNX files share: reading, questions about the graph, writing."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from weft_common.errors import InvalidArgumentError
from weft_optimize.methods.method import SourceModel

#: Operators that multiply by a constant matrix or kernel: what is worth quantising.
WEIGHTED_OPS = frozenset({"Conv", "Gemm", "MatMul"})
#: Largest file that protobuf writes; beyond it the weights go into a file beside the model.
_MAX_FILE_BYTES = 2**31 - 2**20
_QUANTIZED_OPS = frozenset(
    {"DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "MatMulNBits", "QAttention", "QLinearConv"}
    | {"QLinearMatMul", "QuantizeLinear", "ConvInteger", "DynamicQuantizeMatMul"}
)


def read_model(source: SourceModel) -> Any:
    """The file as a ``ModelProto`` with its weights.

    Raises:
        InvalidArgumentError: It is no ONNX file.
    """
    try:
        return onnx.load(source.file)
    except (DecodeError, OSError, ValueError) as error:
        raise InvalidArgumentError(f"{source.file} cannot be read as an ONNX model: {error}") from error


def weighted_nodes(model: Any, kinds: Collection[str] = WEIGHTED_OPS) -> Iterator[Any]:
    """Nodes of the main graph that multiply by a constant of at least two dimensions."""
    matrices = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) > 1}
    return (
        node for node in model.graph.node if node.op_type in kinds and len(node.input) > 1 and node.input[1] in matrices
    )


def why_not_quantizable(source: SourceModel, kinds: Collection[str] = WEIGHTED_OPS) -> str:
    """Why no weights of ``source`` can be quantised; empty if some can. Raises InvalidArgumentError."""
    if source.file.suffix != ".onnx":
        return f"{source.file.name} is not an ONNX file"
    model = read_model(source)
    quantized = sorted({node.op_type for node in model.graph.node} & _QUANTIZED_OPS)
    if quantized:
        return f"it is quantised already: it has {', '.join(quantized)}"
    if next(weighted_nodes(model, kinds), None) is None:
        return f"no {' or '.join(sorted(kinds))} has a constant weight"
    return ""


def save_model(model: Any, path: Path) -> None:
    """Write a ``ModelProto``; weights beyond the 2 GiB of one file go to ``<name>.data`` beside it."""
    if model.ByteSize() < _MAX_FILE_BYTES:
        onnx.save(model, path)
    else:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
