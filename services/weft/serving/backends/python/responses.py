"""Responses of a model, and their senders."""

import ctypes
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weft.base.core import ParameterValue
from weft.base.errors import ERROR_BY_CODE, InternalError, InvalidArgumentError, WeftError
from weft.base.tensors import NUMPY_BY_DATATYPE, Array, datatype_of


class TritonModelException(Exception):  # noqa: N818  # the name that models raise and catch
    """An error inside a model, or a wrong use of this module."""

    def __init__(self, msg: str = "") -> None:
        super().__init__(msg)

    def message(self) -> str:
        """The text."""
        return str(self)


class TritonError:
    """The error of one response, with one of the class's codes."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = str(message), code
        self._cause: WeftError | None = None

    def message(self) -> str:
        """Text for the client."""
        return self._message

    def code(self) -> int:
        """One of the class's codes."""
        return self._code

    def __str__(self) -> str:
        return self._message

    @classmethod
    def of(cls, cause: WeftError) -> "TritonError":
        """The error of a call of another model; a model that answers with it passes on ``cause`` unchanged."""
        error = cls(cause.message, _CODE_BY_STATUS.get(cause.code, cls.UNAVAILABLE))
        error._cause = cause
        return error


_STATUS_BY_CODE = {
    TritonError.UNKNOWN: "UNKNOWN",
    TritonError.NOT_FOUND: "NOT_FOUND",
    TritonError.INVALID_ARG: "INVALID_ARGUMENT",
    TritonError.UNAVAILABLE: "UNAVAILABLE",
    TritonError.UNSUPPORTED: "UNIMPLEMENTED",
    TritonError.ALREADY_EXISTS: "ALREADY_EXISTS",
    TritonError.CANCELLED: "CANCELLED",
}
_CODE_BY_STATUS = {status: code for code, status in _STATUS_BY_CODE.items()} | {"INTERNAL": TritonError.INTERNAL}


def weft_error(error: object) -> WeftError:
    """The error of a response, with the status of its code; INTERNAL for an unknown code, or for a bare text."""
    if isinstance(error, TritonError) and error._cause is not None:
        return error._cause
    message = error.message() if isinstance(error, TritonError | TritonModelException) else str(error)
    code = error.code() if isinstance(error, TritonError) else TritonError.INTERNAL
    error_class = ERROR_BY_CODE.get(_STATUS_BY_CODE.get(code, ""), InternalError)
    return error_class(message)


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


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class InferenceResponse:
    """The answer to one request: outputs, or an ``error``, and parameters: bool, int, float or str by name."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        self._output_tensors, self._error, self._parameters = list(output_tensors), error, dict(parameters or {})
        if self._parameters:
            check_parameters(self._parameters, "response")

    def output_tensors(self) -> list[Tensor]:
        """Outputs as given."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Whether the request fails."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if any."""
        return self._error

    def contents(self) -> tuple[dict[str, Array], dict[str, ParameterValue]]:
        """Outputs and parameters as the server sends them; not for models."""
        outputs = {tensor.name(): tensor.as_numpy() for tensor in self.output_tensors()}
        return outputs, json.loads(self.parameters()) if self._parameters else {}

    def parameters(self) -> str:
        """Response parameters as a JSON object."""
        return json.dumps(self._parameters)


def check_parameters(parameters: Mapping[str, object], what: str) -> None:
    """Raise TritonModelException for a parameter of ``what`` that the protocol cannot carry."""
    for key, value in parameters.items():
        is_whole = isinstance(value, int) and -(2**63) <= value < 2**64
        if not isinstance(key, str) or not (is_whole or isinstance(value, float | str)):
            raise TritonModelException(
                f"{what} parameters must be bool, 64-bit int, float or str by name, got {key!r}: {value!r}"
            )


class OutputStream:
    """The output stream of one request, shared by the request and its senders.

    When the model has dropped them all without a last response, the request fails: nothing can answer it any more.
    ``fail`` is called on any thread, and never waits.
    """

    def __init__(
        self, send: Callable[[InferenceResponse | None, bool], None], fail: Callable[[WeftError], None]
    ) -> None:
        self._send = send
        self._fail = fail
        self.is_closed = False

    def send(self, response: InferenceResponse | None, is_final: bool) -> None:
        """Send a response; waits while too many are unread. Raises TritonModelException after the last one."""
        if self.is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        self._send(response, is_final)
        self.is_closed = is_final

    def fail(self, error: WeftError) -> None:
        """Fail the request, unless its last response was sent."""
        if not self.is_closed:
            self.is_closed = True
            self._fail(error)

    def __del__(self) -> None:
        if not self.is_closed:
            self._fail(InternalError("the model dropped the request without a last response"))


class Reply:
    """The response to a request of a model that is not decoupled, sent instead of returned."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._response: InferenceResponse | None = None
        self._error: WeftError | None = None

    def outlet(self) -> OutputStream:
        """Takes the response."""
        return OutputStream(self._take, self._fail)

    @property
    def has_ended(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._ended.is_set()

    @property
    def answer(self) -> InferenceResponse | None:
        """The response, once it was sent as the last: nothing that the model does later takes it back."""
        return self._response if self._ended.is_set() and self._error is None else None

    def wait_until_ended(self) -> None:
        """Wait for the response, or for the error that there is none."""
        self._ended.wait()

    def wait(self) -> InferenceResponse:
        """Wait for the response. Raises a WeftError where there is none."""
        self._ended.wait()
        if self._response is None:
            raise self._error or InternalError("the model sent no response")
        return self._response

    def _take(self, response: InferenceResponse | None, is_final: bool) -> None:
        if response is not None:
            if self._response is not None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            self._response = response
        elif self._response is None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )
        if is_final:
            self._ended.set()

    def _fail(self, error: WeftError) -> None:
        self._error = error
        self._ended.set()


class InferenceResponseSender:
    """Sends the responses to one request, also after ``execute`` has returned; may be used from any thread."""

    def __init__(self, outlet: OutputStream, is_cancelled: Callable[[], bool]) -> None:
        self._outlet = outlet
        self._is_cancelled = is_cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; ``flags`` is TRITONSERVER_RESPONSE_COMPLETE_FINAL with or after the last, which may be None.

        The call waits while 16 responses, or 16 MiB of them, have not been read by the client. When the client has
        left, it returns at once and drops the response. Others may follow a response with an error. Raises
        TritonModelException after the last response, and for a wrong argument.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response. Unsupported flag provided: {flags}; use 0 or "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(f"send takes an InferenceResponse, got {type(response).__name__}")
        self._outlet.send(response, bool(flags))

    def is_cancelled(self) -> bool:
        """Whether the client has left, or the deadline has passed."""
        return self._is_cancelled()
