"""Reads inputs, outputs and initializers of an ONNX file without its weights, and without any package for it.

An ONNX file is a protobuf message ``ModelProto``. Its fields are walked in a memory map, which passes weights over.

Source:
    https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from weft.backends.contract import FileTensor

#: V2 datatypes by the numbers of ``TensorProto.DataType``.
_DATATYPES = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 8: "BYTES", 9: "BOOL",
    10: "FP16", 11: "FP64", 12: "UINT32", 13: "UINT64", 16: "BF16",
}  # fmt: skip
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
#: Fields of ModelProto, GraphProto, TensorProto and ValueInfoProto.
_IR_VERSION, _GRAPH = 1, 7
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA = 1, 2, 8, 13
#: Of files of this version and later, an initializer that is an input too is its default.
_IR_OF_DEFAULTS = 4
#: Initializers up to this size stay in the skeleton: shapes may depend on them.
_MAX_KEPT_BYTES = 4096

#: A field's number and wire type, its value (a varint, or where its bytes are), and where the whole field is.
_Field: TypeAlias = tuple[int, int, int | slice, slice]


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
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as data:
            return _Reader(data, path.parent).read()


class _Reader:
    def __init__(self, data: memoryview, folder: Path) -> None:
        self._data = data
        self._folder = folder
        self._fault = ""

    def read(self) -> OnnxFile:
        model = list(self._fields(slice(0, len(self._data))))
        graphs = [value for number, _, value, _ in model if number == _GRAPH]
        if len(graphs) != 1:
            raise ValueError("it is not an ONNX model: it has no graph")
        ir_version = next((value for number, _, value, _ in model if number == _IR_VERSION), 0)
        kept: list[bytes] = []
        found: dict[int, list[FileTensor]] = {_INPUT: [], _OUTPUT: [], _INITIALIZER: []}
        left_out: dict[str, bytes] = {}
        for number, _, value, whole in self._fields(graphs[0]):
            if number == _INITIALIZER and isinstance(value, slice):
                tensor, is_external = self._initializer(value)
                found[number].append(tensor)
                if is_external or whole.stop - whole.start > _MAX_KEPT_BYTES:
                    left_out[tensor.name] = self._value_info(value)
                    continue
            elif number in (_INPUT, _OUTPUT):
                found[number].append(self._tensor(value))
            kept.append(bytes(self._data[whole]))
        names = {tensor.name for tensor in found[_INITIALIZER]}
        declared = {tensor.name for tensor in found[_INPUT]}
        kept += [_message(_INPUT, info) for name, info in left_out.items() if name not in declared]
        graph = _message(_GRAPH, b"".join(kept))
        others = (bytes(self._data[whole]) for number, _, _, whole in model if number != _GRAPH)
        has_defaults = isinstance(ir_version, int) and ir_version >= _IR_OF_DEFAULTS
        return OnnxFile(
            [tensor for tensor in found[_INPUT] if tensor.name not in names],
            [tensor for tensor in found[_INPUT] if tensor.name in names] if has_defaults else [],
            found[_OUTPUT],
            b"".join((*others, graph)),
            frozenset(left_out),
            self._fault,
        )

    def _fields(self, where: int | slice) -> Iterator[_Field]:
        """The fields of a message."""
        if not isinstance(where, slice):
            raise ValueError("it is not an ONNX model: a message is expected where a number is")
        position = where.start
        while position < where.stop:
            start = position
            key, position = self._varint(position)
            value: int | slice
            if key & 7 == _VARINT:
                value, position = self._varint(position)
            else:
                sizes = {_FIXED64: 8, _FIXED32: 4}
                if key & 7 == _LENGTH:
                    size, position = self._varint(position)
                elif key & 7 in sizes:
                    size = sizes[key & 7]
                else:
                    raise ValueError(f"it is not an ONNX model: byte {start} begins no field")
                value = slice(position, position + size)
                position = value.stop
            if position > where.stop:
                raise ValueError(f"it is truncated: a field at byte {start} goes on to byte {position}")
            yield key >> 3, key & 7, value, slice(start, position)

    def _varint(self, position: int) -> tuple[int, int]:
        number = shift = 0
        while position < len(self._data) and shift < 70:
            byte = self._data[position]
            number |= (byte & 127) << shift
            position, shift = position + 1, shift + 7
            if byte < 128:
                return number, position
        raise ValueError(f"it is truncated, or not an ONNX model: no number ends at byte {position}")

    def _find(self, where: int | slice, *path: int) -> int | slice | None:
        """The value of the last field at a path of field numbers."""
        for wanted in path:
            found = [value for number, _, value, _ in self._fields(where) if number == wanted]
            if not found:
                return None
            where = found[-1]
        return where

    def _text(self, where: int | slice | None) -> str:
        return bytes(self._data[where]).decode(errors="replace") if isinstance(where, slice) else ""

    def _tensor(self, info: int | slice) -> FileTensor:
        """A ``ValueInfoProto``: name = 1, type = 2, in which tensor_type = 1 has elem_type = 1 and shape = 2."""
        name, kind = self._text(self._find(info, 1)), self._find(info, 2, 1, 1)
        shape = self._find(info, 2, 1, 2)
        dims: tuple[int, ...] | None = None
        if shape is not None:
            sizes = [self._find(dim, 1) for number, _, dim, _ in self._fields(shape) if number == 1]
            dims = tuple(size if isinstance(size, int) and size < 1 << 63 else -1 for size in sizes)
        datatype = _DATATYPES.get(kind, f"of ONNX's type {kind}") if isinstance(kind, int) and kind else ""
        return FileTensor(name, datatype, dims or None)

    def _initializer(self, where: slice) -> tuple[FileTensor, bool]:
        """Name of a ``TensorProto``, and whether its data is in another file, which must be there."""
        name, entries = "", {}
        for number, _, value, _ in self._fields(where):
            if number == _NAME:
                name = self._text(value)
            elif number == _EXTERNAL_DATA:
                entries[self._text(self._find(value, 1))] = self._text(self._find(value, 2))
        if entries and not self._fault:
            path = self._folder / entries.get("location", "")
            needed = sum(int(text) for text in map(entries.get, ("offset", "length")) if text and text.isdecimal())
            if not path.resolve().is_relative_to(self._folder.resolve()):
                self._fault = f"{path}, with the values of '{name}', is outside of {self._folder}; put it there"
            elif not path.is_file():
                self._fault = f"there is no {path}, which has the values of '{name}'; put it beside the model file"
            elif path.stat().st_size < needed:
                self._fault = f"{path} is too short for the values of '{name}'; fetch it again"
        return FileTensor(name, "", None), bool(entries)

    def _value_info(self, where: slice) -> bytes:
        """The ``ValueInfoProto`` of a ``TensorProto``."""
        dims: list[int] = []
        name, data_type = b"", 0
        for number, wire_type, value, _ in self._fields(where):
            if number == _DIMS and isinstance(value, int):
                dims.append(value)
            elif number == _DIMS and wire_type == _LENGTH and isinstance(value, slice):  # packed
                position = value.start
                while position < value.stop:
                    size, position = self._varint(position)
                    dims.append(size)
            elif number == _DATA_TYPE and isinstance(value, int):
                data_type = value
            elif number == _NAME and isinstance(value, slice):
                name = bytes(self._data[value])
        shape = b"".join(_message(1, b"\x08" + _encoded(dim)) for dim in dims)
        tensor_type = b"\x08" + _encoded(data_type) + _message(2, shape)
        return _message(1, name) + _message(2, _message(1, tensor_type))


def _message(number: int, content: bytes) -> bytes:
    return _encoded(number << 3 | _LENGTH) + _encoded(len(content)) + content


def _encoded(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes((*parts, number))
