"""Reader of GGUF files: metadata, and the bytes of each tensor.

The package ``gguf`` reads them too; a length that lies (2^60 strings) makes it loop without an end, so that it is what
tests write files with, and this is what reads files of strangers.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from weft.base.errors import InvalidArgumentError, NotFoundError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
#: Format of struct for each type of number.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
#: Types of tensors of plain numbers.
PLAIN_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
_SAFETENSORS = "*.safetensors"


class GgufTensor(NamedTuple):
    """Where a tensor is.

    Attributes:
        shape: Slowest dimension first, as in torch.
        type_id: Type of its blocks; see ``blocks``.
        offset: First byte within the file.
    """

    shape: tuple[int, ...]
    type_id: int
    offset: int


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no safetensors files; None where it has, or no GGUF file either.

    Raises:
        InvalidArgumentError: There are several.
    """
    files = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    if not files or any(folder.glob(_SAFETENSORS)):
        return None
    if len(files) > 1:
        raise InvalidArgumentError(
            f"{folder} must have one .gguf file, got {len(files)}: {files[0].name}, {files[1].name}; leave one there, "
            f"or join the parts of a model with llama-gguf-split --merge"
        )
    return files[0]


class GgufFile:
    """An open file. Created by ``open``.

    Attributes:
        name: Of the file, for errors.
        metadata: Values by key; arrays of numbers as numpy's, of strings as lists.
        tensors: Tensors by name.
    """

    def __init__(self, name: str, data: mmap.mmap | bytes) -> None:
        self.name = name
        self._data = data
        self._at = 0
        try:
            self.metadata, self.tensors = self._parsed()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise self._torn(str(error)) from error

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Read the metadata; leaving the ``with`` block closes the file.

        Raises:
            NotFoundError: There is no such file.
            InvalidArgumentError: It is no GGUF file, or it is truncated.
        """
        with ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("rb"))
                data = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except FileNotFoundError as error:
                raise NotFoundError(f"no file {path}") from error
            except ValueError as error:  # mmap's for an empty file
                raise InvalidArgumentError(f"{path} must be a GGUF file, got an empty one; fetch it again") from error
            yield cls(path.name, data)

    def read(self, tensor: GgufTensor, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A copy of the first ``num_bytes`` of the tensor, which ``check_size`` has passed."""
        return np.frombuffer(self._data, np.uint8, num_bytes, tensor.offset).copy()

    def check_size(self, name: str, num_bytes: int) -> None:
        """Raise InvalidArgumentError unless the file has ``num_bytes`` of the tensor."""
        if self.tensors[name].offset + num_bytes > len(self._data):
            raise self._torn(f"'{name}' ends at byte {self.tensors[name].offset + num_bytes}")

    def _parsed(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        magic = self._take(4)
        (version,) = self._unpack("<I")
        if magic != _MAGIC or version not in _VERSIONS:
            allowed = " or ".join(map(str, _VERSIONS))
            raise InvalidArgumentError(
                f"{self.name} must be a GGUF file of version {allowed}, got {magic!r} of version {version}; convert "
                f"the model again"
            )
        num_tensors, num_values = self._unpack("<QQ")
        metadata = {}
        for _ in range(num_values):
            key = self._text()
            (type_id,) = self._unpack("<I")
            metadata[key] = self._value(type_id)
        found = {}
        for _ in range(num_tensors):
            name = self._text()
            (num_dims,) = self._unpack("<I")
            if num_dims > _MAX_DIMS:
                raise self._torn(f"'{name}' has {num_dims} dimensions")
            dims = self._unpack(f"<{num_dims}Q")
            type_id, offset = self._unpack("<IQ")
            if prod(dims) > len(self._data) * 8:
                raise self._torn(f"'{name}' has {prod(dims)} elements")
            found[name] = GgufTensor(tuple(reversed(dims)), type_id, offset)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self._torn(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in found.items()}
        return metadata, tensors

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._text()
        if type_id in _NUMBERS:
            return self._unpack("<" + _NUMBERS[type_id])[0]
        if type_id != _ARRAY:
            raise self._torn(f"a value has type {type_id}")
        item, count = self._unpack("<IQ")
        if item == _STRING:
            return [self._text() for _ in range(count)]
        if item not in _NUMBERS:
            raise self._torn(f"an array has items of type {item}")
        dtype = np.dtype(_NUMBERS[item]).newbyteorder("<")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _text(self) -> str:
        (length,) = self._unpack("<Q")
        return self._take(length).decode()

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise self._torn(f"{num_bytes} bytes are announced at byte {self._at}")
        taken = bytes(self._data[self._at : end])
        self._at = end
        return taken

    def _torn(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self.name} ({len(self._data)} bytes) is torn or no GGUF file: {what}; fetch it again"
        )
