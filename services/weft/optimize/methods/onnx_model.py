"""Shared by the methods for ONNX files: reading, graph queries, calibration runs, writing."""

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from weft.base.errors import InvalidArgumentError
from weft.optimize.methods.method import Built, Inputs, OptimizationMethod, SourceModel

Floats = NDArray[np.float32]

#: Operators that multiply by a constant matrix or kernel: what is worth quantising.
WEIGHTED_OPS = frozenset({"Conv", "Gemm", "MatMul"})
#: Domain of ONNX Runtime's own operators.
MICROSOFT = "com.microsoft"
#: Largest file that protobuf writes; beyond it the weights go into a file beside the model.
_MAX_FILE_BYTES = 2**31 - 2**20
_QUANTIZED_OPS = frozenset(
    {"ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger"}
    | {"MatMulIntegerToFloat", "MatMulNBits", "QAttention", "QLinearConv", "QLinearMatMul", "QuantizeLinear"}
)
_ERRORS_ONLY = 3
_TINY = 1e-12


def onnx_method(
    name: str,
    why_not: Callable[[Any, SourceModel], str],
    rewrite: Callable[[Any, SourceModel, Sequence[Inputs]], tuple[Any, str]],
) -> OptimizationMethod:
    """Make a method that rewrites an ONNX model.

    Args:
        why_not: Why it cannot apply to this ``ModelProto``, or gains nothing there; "" if it may.
        rewrite: Returns the candidate, possibly the given ``ModelProto``, changed, and a summary in one line.
    """

    def unsuitable(source: SourceModel) -> str:
        if source.file.suffix != ".onnx":
            return f"{source.file.name} is not an ONNX file"
        return why_not(read_model(source), source)

    def build(source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        model, notes = rewrite(read_model(source), source, calibration)
        save_model(model, folder / source.file.name)
        return Built({}, notes)

    return OptimizationMethod(name, unsuitable, build)


def read_model(source: SourceModel) -> Any:
    """Read a ``ModelProto`` with its weights, constants as initializers, and a name for each node.

    Raises:
        InvalidArgumentError: It is not an ONNX file.
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


def save_model(model: Any, path: Path) -> None:
    """Write a ``ModelProto``; weights beyond the 2 GiB of one file go to ``<name>.data`` beside it."""
    if model.ByteSize() < _MAX_FILE_BYTES:
        onnx.save(model, path)
    else:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")


def copied(model: Any) -> Any:
    """A copy of a ``ModelProto``."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def add_constant(model: Any, name: str, value: Any) -> str:
    """Add an initializer; returns its name."""
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(np.shape(value)), name))
    return name


def replace_nodes(model: Any, nodes: Collection[Any]) -> None:
    """Replace the nodes of the main graph, and drop unread initializers."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    read = set(_names_read(model.graph))
    unread = [tensor for tensor in model.graph.initializer if tensor.name not in read]
    for tensor in unread:
        model.graph.initializer.remove(tensor)
    uses_microsoft = any(node.domain == MICROSOFT for node in copies)
    if uses_microsoft and all(opset.domain != MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))


def _names_read(graph: Any) -> Iterator[str]:
    """Names that nodes read, also those of subgraphs, and outputs."""
    yield from (output.name for output in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for subgraph in (*attribute.graphs, attribute.g):
                yield from _names_read(subgraph)


def readers(model: Any) -> dict[str, int]:
    """Number of readers of each value of the main graph."""
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


def why_not_quantizable(model: Any, kinds: Collection[str] = WEIGHTED_OPS) -> str:
    """Why no weights can be quantised; "" if some can."""
    if quantized := sorted({node.op_type for node in model.graph.node} & _QUANTIZED_OPS):
        return f"it is quantised already: it has {', '.join(quantized)}"
    if not weighted_nodes(model, kinds):
        return f"no {' or '.join(sorted(kinds))} has a constant weight of FP32"
    return ""


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


class ChannelRange(NamedTuple):
    """Least and greatest value of each channel, FP32 ``[channels]``."""

    low: Floats
    high: Floats

    def limits(self, divisor: Any = 1) -> tuple[float, float]:
        """Least and greatest value of all channels, each divided by its divisor; 0 is among them."""
        return min(0.0, float((self.low / divisor).min())), max(0.0, float((self.high / divisor).max()))


def open_session(model: Any) -> Any:
    """A session on the CPU for a ``ModelProto``. Raises InvalidArgumentError."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    try:
        if model.ByteSize() < _MAX_FILE_BYTES:
            return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        with tempfile.TemporaryDirectory(prefix="weft-optimize-") as folder:
            save_model(model, Path(folder) / "model.onnx")
            return onnxruntime.InferenceSession(Path(folder) / "model.onnx", options, ["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base of their own
        raise InvalidArgumentError(f"ONNX Runtime cannot load the model: {error}") from error


def _answers(session: Any, names: Sequence[str] | None, inputs: Inputs) -> list[NDArray[Any]]:
    try:
        values: list[NDArray[Any]] = session.run(names, dict(inputs))
    except Exception as error:  # same
        raise InvalidArgumentError(f"the model does not take the calibration data: {error}") from error
    return values


def observe(model: Any, names: Collection[str], calibration: Sequence[Inputs]) -> dict[str, ChannelRange]:
    """Ranges of FP32 values of the main graph, by their last dimension.

    Raises:
        InvalidArgumentError: There is no calibration data, the model does not take it, or values are not finite.
    """
    if not calibration:
        raise InvalidArgumentError("there is no calibration data; give at least one batch of the model's inputs")
    watched = copied(model)
    outputs = {output.name for output in model.graph.output}
    inputs = {node.name for node in model.graph.input}
    asked = [name for name in names if name not in inputs]
    for name in asked:
        if name not in outputs:
            watched.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session, found = open_session(watched), dict[str, ChannelRange]()
    for batch in calibration:
        values = dict(zip(asked, _answers(session, asked, batch), strict=True)) if asked else {}
        for name in names:
            value = values[name] if name in values else np.asarray(batch[name])
            rows = value.reshape(-1, value.shape[-1])
            if not len(rows):
                continue
            low, high = rows.min(axis=0), rows.max(axis=0)
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise InvalidArgumentError(f"'{name}' is not finite for some calibration data")
            before = found.get(name, ChannelRange(low, high))
            found[name] = ChannelRange(np.minimum(low, before.low), np.maximum(high, before.high))
    if missing := [name for name in names if name not in found]:
        raise InvalidArgumentError(f"no calibration batch has rows for '{missing[0]}'")
    return found


def some_rows(calibration: Sequence[Inputs], num_rows: int) -> Sequence[Inputs]:
    """The last batches that together have ``num_rows`` rows, or all."""
    found, count = 0, 0
    while found < len(calibration) and count < num_rows:
        found += 1
        count += max((len(value) for value in calibration[-found].values() if value.ndim), default=1)
    return calibration[-found:] if found else calibration


class ExpectedAnswers:
    """A model's answers to some batches, for measuring the deviation of other versions.

    Raises:
        InvalidArgumentError: The model does not accept the batches.
    """

    def __init__(self, model: Any, calibration: Sequence[Inputs]) -> None:
        self._calibration = calibration
        session = open_session(model)
        self._expected = [_answers(session, None, batch) for batch in calibration]

    def error(self, session: Any, calibration: Sequence[Inputs] | None = None) -> float:
        """Relative squared distance of a version's answers from the expected ones; the median over all rows.

        Rows are the last dimension of the floating-point outputs. A mean would be dominated by padding rows, which are
        meaningless and far off: in MiniLM 0.3 where the others are at 0.006.

        Args:
            session: The other version, see ``open_session``.
            calibration: The batches, if its inputs are not those of the model.
        """
        errors = [np.zeros(0)]
        for batch, expected in zip(calibration or self._calibration, self._expected, strict=True):
            for value, right in zip(_answers(session, None, batch), expected, strict=True):
                if right.dtype.kind == "f" and right.size:
                    width = right.shape[-1] if right.ndim > 1 else 1
                    distance = np.square(value - right, dtype=np.float64).reshape(-1, width).sum(axis=1)
                    size = np.square(right, dtype=np.float64).reshape(-1, width).sum(axis=1)
                    errors.append(distance / np.maximum(size, _TINY))
        rows = np.concatenate(errors)
        return float(np.median(rows)) if len(rows) else 0.0
