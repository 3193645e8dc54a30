"""What the methods for ONNX files share: reading, questions about the graph, writing."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import helper

from weft.base.errors import InvalidArgumentError
from weft.optimize.methods.method import SourceModel
from weft_protos.model_config_pb2 import ModelInstanceGroup

#: Operators that multiply by a constant matrix or kernel: what is worth quantising.
WEIGHTED_OPS = frozenset({"Conv", "Gemm", "MatMul"})
#: Domain of ONNX Runtime's own operators.
MICROSOFT = "com.microsoft"
#: Largest file that protobuf writes; beyond it the weights go into a file beside the model.
MAX_FILE_BYTES = 2**31 - 2**20

_QUANTIZED_OPS = frozenset(
    {"ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger"}
    | {"MatMulIntegerToFloat", "MatMulNBits", "QAttention", "QLinearConv", "QLinearMatMul", "QuantizeLinear"}
)


def read_model(source: SourceModel) -> Any:
    """The file as a ``ModelProto``: with its weights, constants as initializers, and a name for each node.

    Raises:
        InvalidArgumentError: It is no ONNX file.
    """
    try:
        model = onnx.load(source.file)
    except (DecodeError, OSError, ValueError) as error:
        raise InvalidArgumentError(f"{source.file} cannot be read as an ONNX model: {error}") from error
    if not model.graph.node:
        raise InvalidArgumentError(f"{source.file} is not an ONNX model with nodes")
    kept: list[Any] = []
    used = {node.name for node in model.graph.node}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
            continue
        if not node.name:
            node.name = next(
                name for name in (f"{node.op_type}.{number}" for number in range(len(kept), 2**31)) if name not in used
            )
            used.add(node.name)
        kept.append(node)
    replace_nodes(model, kept)
    return model


def replace_nodes(model: Any, nodes: Collection[Any]) -> None:
    """Give the main graph other nodes, and drop the initializers that none of them reads."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    read = set(_names_read(model.graph))
    unread = [tensor for tensor in model.graph.initializer if tensor.name not in read]
    for tensor in unread:
        model.graph.initializer.remove(tensor)


def _names_read(graph: Any) -> Iterator[str]:
    """Names that nodes read, also those of subgraphs, and outputs."""
    yield from (output.name for output in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for subgraph in (*attribute.graphs, attribute.g):
                yield from _names_read(subgraph)


def readers(model: Any) -> dict[str, int]:
    """How often each value of the main graph is read."""
    counts: dict[str, int] = {}
    for name in _names_read(model.graph):
        counts[name] = counts.get(name, 0) + 1
    return counts


def weighted_nodes(model: Any, kinds: Collection[str] = WEIGHTED_OPS) -> list[Any]:
    """Nodes of the main graph that multiply by a constant of FP32 with at least two dimensions."""
    weights = {
        tensor.name
        for tensor in model.graph.initializer
        if len(tensor.dims) > 1 and tensor.data_type == onnx.TensorProto.FLOAT
    }
    return [
        node for node in model.graph.node if node.op_type in kinds and len(node.input) > 1 and node.input[1] in weights
    ]


def why_not_onnx(source: SourceModel) -> str:
    """Empty if the model is an ONNX file."""
    return "" if source.file.suffix == ".onnx" else f"{source.file.name} is not an ONNX file"


def why_not_quantizable(source: SourceModel, kinds: Collection[str] = WEIGHTED_OPS) -> str:
    """Why no weights of ``source`` can be quantised; empty if some can. Raises InvalidArgumentError."""
    if why := why_not_onnx(source):
        return why
    model = read_model(source)
    quantized = sorted({node.op_type for node in model.graph.node} & _QUANTIZED_OPS)
    if quantized:
        return f"it is quantised already: it has {', '.join(quantized)}"
    if not weighted_nodes(model, kinds):
        return f"no {' or '.join(sorted(kinds))} has a constant weight of FP32"
    return ""


def has_gpu_instances(source: SourceModel) -> bool:
    """Whether ``instance_group`` asks for a GPU."""
    return any(group.kind == ModelInstanceGroup.KIND_GPU for group in source.config.instance_group)


def keep_layer_norms(model: Any) -> None:
    """Keep ONNX Runtime from fusing a residual Add with the LayerNormalization that follows.

    On CPUs its SkipLayerNormalization takes 16.0 ms where Add and LayerNormalization take 3.1 (12 of them, 16 x 32
    tokens, 384 wide, one thread with AVX-512, ONNX Runtime 1.31). Sum is the same operator under a name that it does
    not fuse.
    """
    normalized = {node.input[0] for node in model.graph.node if node.op_type == "LayerNormalization"}
    for node in model.graph.node:
        if node.op_type == "Add" and node.output[0] in normalized:
            node.op_type = "Sum"


def import_microsoft(model: Any) -> None:
    """Let the model use ONNX Runtime's own operators."""
    if all(opset.domain != MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))


def save_model(model: Any, path: Path) -> None:
    """Write a ``ModelProto``; weights beyond the 2 GiB of one file go to ``<name>.data`` beside it."""
    if model.ByteSize() < MAX_FILE_BYTES:
        onnx.save(model, path)
    else:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
