"""Requests, responses, tensors and errors, as a ``model.py`` sees them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from weft_common.core import ParameterValue
from weft_common.errors import InvalidArgumentError
from weft_common.tensors import Array, datatype_of
from weft_serving.request import InferenceRequest as ServedRequest

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2

# Position = number of the type in Triton Inference Server; it has no name for 0.
DATATYPES = (
    "", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BYTES", "BF16",
)  # fmt: skip

# Request parameters that have methods of their own, or none: C++ clients send the last with every request.
_SERVER_PARAMETERS = frozenset(
    {
        "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "triton_enable_empty_final_response",
    }
)  # fmt: skip


class TritonModelException(Exception):  # noqa: N818  # the name that models raise and catch
    """An error inside a model, or a wrong use of this module."""

    def __init__(self, msg: str = "") -> None:
        super().__init__(msg)

    def message(self) -> str:
        """The text."""
        return str(self)


class TritonError:
    """The error of one response.

    Args:
        message: For the client.
        code: One of the class's codes.
    """

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = str(message), code

    def message(self) -> str:
        """Text for the client."""
        return self._message

    def code(self) -> int:
        """One of the class's codes."""
        return self._code

    def __str__(self) -> str:
        return self._message


class Tensor:
    """A named array in host memory.

    Args:
        name: Input or output name.
        numpy_array: Data; strings as an object array of ``bytes`` or ``str``.

    Raises:
        TritonModelException: ``numpy_array`` is no array, or has a dtype that the protocol does not know.
    """

    def __init__(self, name: str, numpy_array: Array) -> None:
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
        return _writable(self._array).__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """A tensor that shares the memory of ``tensor``: a DLPack capsule, or an object with ``__dlpack__``."""
        try:
            return Tensor(name, np.from_dlpack(tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)))
        except (BufferError, RuntimeError, TypeError) as error:
            raise TritonModelException(f"tensor '{name}' must be in host memory: {error}") from error

    def __dlpack__(self, **options: Any) -> Any:
        return _writable(self._array).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class _Capsule:
    """A bare DLPack capsule, which says nothing of its device, as an object that numpy accepts."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class InferenceRequest:
    """One request, as ``execute`` gets it.

    Models may not make one in this version: calls of other models are not supported.
    """

    def __init__(self, *_args: object, **_options: object) -> None:
        raise TritonModelException(
            "calling other models from a model.py (BLS) is not supported by this version; put both models into a graph"
        )

    @classmethod
    def wrap(cls, served: ServedRequest) -> "InferenceRequest":
        """The view of a request of the server that a model gets."""
        request = cls.__new__(cls)
        request._served = served  # the constructor is closed to models
        request._tensors = None
        return request

    _served: ServedRequest
    _tensors: list[Tensor] | None

    def inputs(self) -> list[Tensor]:
        """Inputs in the order sent. The arrays are writable and belong to the model."""
        if self._tensors is None:
            self._tensors = [Tensor(name, _writable(self._served.array(name))) for name in self._served.call.inputs]
        return self._tensors

    def request_id(self) -> str:
        """The client's id, or ""."""
        return self._served.call.request_id

    def correlation_id(self) -> ParameterValue:
        """Request parameter ``sequence_id``, or 0."""
        return self._served.call.parameters.get("sequence_id", 0)

    def flags(self) -> int:
        """Sequence flags, from the request parameters ``sequence_start`` and ``sequence_end``."""
        parameters = self._served.call.parameters
        start = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if parameters.get("sequence_start") else 0
        return start | (TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if parameters.get("sequence_end") else 0)

    def requested_output_names(self) -> list[str]:
        """Outputs that the client asked for, in its order; empty means all."""
        return [output.name for output in self._served.call.outputs]

    def model_name(self) -> str:
        """The model."""
        return self._served.call.model_name

    def model_version(self) -> str:
        """The version as the client sent it; "" is the newest."""
        return self._served.call.model_version

    def parameters(self) -> str:
        """Request parameters as a JSON object, without those that the server itself reads."""
        parameters = self._served.call.parameters
        return json.dumps({key: value for key, value in parameters.items() if key not in _SERVER_PARAMETERS})

    def timeout(self) -> ParameterValue:
        """Request parameter ``timeout`` in microseconds; 0 means none."""
        return self._served.call.parameters.get("timeout", 0)

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        return self._served.is_cancelled

    def get_response_sender(self) -> NoReturn:
        """Raise: decoupled models are not supported by this version."""
        raise TritonModelException("decoupled responses are not supported by this version; return them from execute")


def _writable(array: Array) -> Array:
    """Models may compute in place; the server's arrays are read-only views of the message."""
    return array if array.flags.writeable else array.copy()


class InferenceResponse:
    """The answer to one request.

    Args:
        output_tensors: Outputs in any order; ignored if there is an error.
        error: Fails the request.
        parameters: Response parameters: bool, int, float or str by name.

    Raises:
        TritonModelException: A parameter is none of these.
    """

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        self._output_tensors, self._error, self._parameters = list(output_tensors), error, dict(parameters or {})
        for key, value in self._parameters.items():
            is_whole = isinstance(value, int) and -(2**63) <= value < 2**64
            if not isinstance(key, str) or not (is_whole or isinstance(value, float | str)):
                raise TritonModelException(
                    f"response parameters must be bool, 64-bit int, float or str by name, got {key!r}: {value!r}"
                )

    def output_tensors(self) -> list[Tensor]:
        """Outputs as given."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Whether the request fails."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if any."""
        return self._error

    def parameters(self) -> str:
        """Response parameters as a JSON object."""
        return json.dumps(self._parameters)
