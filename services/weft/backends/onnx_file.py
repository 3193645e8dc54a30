"""Reads inputs, outputs and initializers of an ONNX file without its weights, and without any package for it.

An ONNX file is a protobuf message, whose fields are walked in a memory map, which passes weights over.

Source:
    https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from weft.backends.contract import FileTensor
from weft_protos.onnx_header_pb2 import OnnxGraph, OnnxModel, OnnxTensor, OnnxTensorType, OnnxType, OnnxValue

#: V2 datatypes by the numbers of ``TensorProto.DataType``.
_DATATYPES = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 8: "BYTES", 9: "BOOL",
    10: "FP16", 11: "FP64", 12: "UINT32", 13: "UINT64", 16: "BF16",
}  # fmt: skip
_VARINT, _LENGTH, _SIZES = 0, 2, {1: 8, 5: 4}  # wire types, two of them with their sizes in bytes
_GRAPH, _INITIALIZER, _INPUT, _OUTPUT = 7, 5, 11, 12
_IR_OF_DEFAULTS = 4
#: Initializers up to this size stay in the skeleton: shapes may depend on them.
_MAX_KEPT_BYTES = 4096


class OnnxFile(NamedTuple):
    """What a file says of itself.

    Attributes:
        inputs: Those that requests must have.
        defaults: Inputs with a default.
        outputs: Datatype "" and shape None where the file does not tell.
        skeleton: The file without the values of its large initializers, which are inputs in it.
        left_out: Names of these.
        fault: Why the file cannot be complete; "" if it may be.
    """

    inputs: list[FileTensor]
    defaults: list[FileTensor]
    outputs: list[FileTensor]
    skeleton: bytes
    left_out: frozenset[str]
    fault: str = ""


def read_onnx(path: Path) -> OnnxFile:
    """Read a file. Raises ValueError if it is not a whole ``ModelProto`` with a graph, and OSError."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(data, path.parent)
            except DecodeError as error:
                raise ValueError(f"it is not an ONNX model: {error}") from None


def _read(data: mmap.mmap, folder: Path) -> OnnxFile:
    model = list(_fields(data, slice(0, len(data))))
    graphs = [where for number, where, _ in model if number == _GRAPH]
    if len(graphs) != 1:
        raise ValueError("it is not an ONNX model: it has no graph")
    others = b"".join(data[whole] for number, _, whole in model if number != _GRAPH)
    kept: list[bytes] = []
    values: dict[int, list[FileTensor]] = {_INPUT: [], _OUTPUT: []}
    initializers: set[str] = set()
    left_out: dict[str, OnnxTensor] = {}
    fault = ""
    for number, where, whole in _fields(data, graphs[0]):
        if number == _INITIALIZER:
            small = (part for _, _, part in _fields(data, where) if part.stop - part.start < _MAX_KEPT_BYTES)
            tensor = OnnxTensor.FromString(b"".join(data[part] for part in small))
            initializers.add(tensor.name)
            fault = fault or _external_fault(tensor, folder)
            if tensor.external_data or whole.stop - whole.start > _MAX_KEPT_BYTES:
                left_out[tensor.name] = tensor
                continue
        elif number in values:
            values[number].append(_file_tensor(OnnxValue.FromString(data[where])))
        kept.append(data[whole])
    declared = {tensor.name for tensor in values[_INPUT]}
    added = [_value(tensor) for name, tensor in left_out.items() if name not in declared]
    graph = b"".join([*kept, OnnxGraph(input=added).SerializeToString()])
    has_defaults = OnnxModel.FromString(others).ir_version >= _IR_OF_DEFAULTS
    return OnnxFile(
        [tensor for tensor in values[_INPUT] if tensor.name not in initializers],
        [tensor for tensor in values[_INPUT] if tensor.name in initializers and has_defaults],
        values[_OUTPUT],
        others + OnnxModel(graph=graph).SerializeToString(),
        frozenset(left_out),
        fault,
    )


def _fields(data: mmap.mmap, where: slice) -> Iterator[tuple[int, slice, slice]]:
    """The fields of a message: number, where its contents are, and where it is as a whole."""
    position = where.start
    while position < where.stop:
        start = position
        key, position = _varint(data, position)
        if key & 7 == _VARINT:
            size = _varint(data, position)[1] - position
        elif key & 7 == _LENGTH:
            size, position = _varint(data, position)
        elif key & 7 in _SIZES:
            size = _SIZES[key & 7]
        else:
            raise ValueError(f"it is not an ONNX model: byte {start} begins no field")
        if position + size > where.stop:
            raise ValueError(f"it is truncated: a field at byte {start} goes on to byte {position + size}")
        yield key >> 3, slice(position, position + size), slice(start, position + size)
        position += size


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    number = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        number |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return number, position
    raise ValueError(f"it is truncated, or not an ONNX model: no number ends at byte {position}")


def _file_tensor(value: OnnxValue) -> FileTensor:
    kind = value.type.tensor_type
    sizes = tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else -1 for dim in kind.shape.dim)
    unknown = f"of ONNX's type {kind.elem_type}" if kind.elem_type else ""
    return FileTensor(value.name, _DATATYPES.get(kind.elem_type, unknown), sizes or None)


def _value(tensor: OnnxTensor) -> OnnxValue:
    kind = OnnxTensorType(elem_type=tensor.data_type)
    kind.shape.SetInParent()
    for size in tensor.dims:
        kind.shape.dim.add(dim_value=size)
    return OnnxValue(name=tensor.name, type=OnnxType(tensor_type=kind))


def _external_fault(tensor: OnnxTensor, folder: Path) -> str:
    """Why the file that has the values of an initializer, if they are not in the model's, cannot have them."""
    given = tensor.external_data
    if not given:
        return ""
    path = folder / given["location"]
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"{path}, with the values of '{tensor.name}', is outside of {folder}; put it there"
    if not path.is_file():
        return f"there is no {path}, which has the values of '{tensor.name}'; put it beside the model file"
    needed = sum(int(text) for text in (given["offset"], given["length"]) if text.isdecimal())
    if path.stat().st_size < needed:
        return f"{path} is too short for the values of '{tensor.name}'; fetch it again"
    return ""
