"""Tensors of a ``model.py``."""

import ctypes
from typing import Any

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import NUMPY_BY_DATATYPE, Array, datatype_of
from weft.serving.backends.python.errors import TritonModelException

# Position = number of the type in Triton Inference Server; it has no name for 0.
DATATYPES = (
    "", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BYTES", "BF16",
)  # fmt: skip
#: ``DLDataTypeCode`` of DLPack. numpy exchanges no bfloat16, which here passes it as integers of its size.
_UINT, _BFLOAT = 1, 4
#: Of ``DLTensor.dtype.code``: behind a pointer, a device of two int32 and the number of dimensions.
_TYPE_CODE_OFFSET = ctypes.sizeof(ctypes.c_void_p) + 12
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes, _pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


class Tensor:
    """A named array in host memory; strings are an object array of ``bytes`` or ``str``.

    Raises TritonModelException if the name is empty, or ``numpy_array`` is no array or of a dtype that the protocol
    lacks.
    """

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(f"tensor '{name}' needs a numpy array, got {type(numpy_array).__name__}")
        try:
            self.datatype = datatype_of(numpy_array)
        except InvalidArgumentError as error:
            raise TritonModelException(f"tensor '{name}': {error.message}") from None
        self._name, self._array = name, numpy_array

    def name(self) -> str:
        """Input or output name."""
        return self._name

    def as_numpy(self) -> Array:
        """The array itself, not a copy."""
        return self._array

    def triton_dtype(self) -> int:
        """Number of the datatype, as ``numpy_to_triton_type`` gives it."""
        return DATATYPES.index(self.datatype)

    def shape(self) -> list[int]:
        """Dimensions, the batch dimension included."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """True: tensors are in host memory in this version."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule, for example for ``torch.from_dlpack``; shares the memory, unless that is read-only."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """A tensor that shares the memory of ``tensor``: a DLPack capsule, or an object with ``__dlpack__``."""
        try:
            is_bare = not hasattr(tensor, "__dlpack__")
            capsule = tensor if is_bare else tensor.__dlpack__()
            type_code = _type_code(capsule)
            if type_code.value == _BFLOAT:
                type_code.value = _UINT
                return Tensor(name, np.from_dlpack(_Capsule(capsule)).view(NUMPY_BY_DATATYPE["BF16"]))
            return Tensor(name, np.from_dlpack(_Capsule(capsule) if is_bare else tensor))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"tensor '{name}' must be in host memory: {error}") from error

    def __dlpack__(self, **options: Any) -> Any:
        array = writable(self._array)
        if self.datatype != "BF16":
            return array.__dlpack__(**options)
        capsule = array.view(np.uint16).__dlpack__()
        _type_code(capsule).value = _BFLOAT
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU


def _type_code(capsule: Any) -> ctypes.c_uint8:
    """The type code in a DLPack capsule, to be read and written. Raises ValueError for something else."""
    return ctypes.c_uint8.from_address(_pointer_of(capsule, b"dltensor") + _TYPE_CODE_OFFSET)


class _Capsule:
    """Wraps a bare DLPack capsule, which names no device, for numpy."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def writable(array: Array) -> Array:
    """The array, or a copy: models may compute in place, and the server's arrays are read-only views of a message."""
    return array if array.flags.writeable else array.copy()
