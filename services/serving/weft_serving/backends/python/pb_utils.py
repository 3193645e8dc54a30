"""The module that a ``model.py`` imports as ``triton_python_backend_utils``.

Names and behaviour are those of Triton Inference Server's Python backend, so that a model runs unmodified. What this
version does not offer (calls of other models, decoupled responses, custom metrics) raises an error that says so.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from weft_common.errors import WeftError
from weft_common.logs import get_logger
from weft_common.tensors import DATATYPE_BY_NUMPY, NUMPY_BY_DATATYPE, Array, encode_bytes, split_bytes
from weft_serving.backends.python.messages import (
    DATATYPES,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    InferenceRequest,
    InferenceResponse,
    Tensor,
    TritonError,
    TritonModelException,
)
from weft_serving.backends.python.model_config import ModelConfig

__all__ = [
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "Logger",
    "ModelConfig",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}": bool if name == "BOOL" else NUMPY_BY_DATATYPE[name].type
    for name in DATATYPES[1:]
}

_log = get_logger("weft.python")


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"triton_python_backend_utils.{name} is not supported by this version")


class Logger:
    """Writes to the server's log."""

    INFO, WARNING, ERROR, VERBOSE = range(4)

    class LogLevel:
        """Levels of ``Logger.log``."""

        INFO, WARNING, ERROR, VERBOSE = range(4)

    @staticmethod
    def log(message: str, level: int = INFO) -> None:
        """Write ``message`` at one of the levels."""
        (_log.info, _log.warning, _log.error, _log.debug)[level]("%s", message)

    @staticmethod
    def log_info(message: str) -> None:
        """Write at level info."""
        _log.info("%s", message)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write at level warning."""
        _log.warning("%s", message)

    @staticmethod
    def log_error(message: str) -> None:
        """Write at level error."""
        _log.error("%s", message)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write at level debug."""
        _log.debug("%s", message)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input ``name`` of a request; None if it has none."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output ``name`` of a response; None if it has none."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What the configuration says of the input ``name``; None if it does not declare it."""
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What the configuration says of the output ``name``; None if it does not declare it."""
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the configuration asks for decoupled responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """Numpy type of a type name such as ``TYPE_FP32``."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[Any]:
    """Numpy type of a type number."""
    return NUMPY_BY_DATATYPE[DATATYPES[data_type]].type


def numpy_to_triton_type(data_type: Any) -> int:
    """Type number of a numpy type or dtype."""
    dtype = np.dtype(data_type)
    return DATATYPES.index("BYTES" if dtype.kind == "S" else DATATYPE_BY_NUMPY[dtype])


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """Strings in wire form: before each its length in 4 bytes, little-endian. None without elements."""
    return encode_bytes(input_tensor.ravel().tolist()) if input_tensor.size else None


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The strings of a tensor in wire form, as a one-dimensional object array of ``bytes``."""
    try:
        return np.array(split_bytes(encoded_tensor), np.object_)
    except WeftError as error:
        raise TritonModelException(str(error)) from None
