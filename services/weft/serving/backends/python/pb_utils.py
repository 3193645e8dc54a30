"""The module that a ``model.py`` imports as ``triton_python_backend_utils``.

Names and behaviour are those of Triton Inference Server's Python backend, so that a model runs unmodified. What this
version does not offer (tensors in GPU memory) raises an error that says so.

Each loaded model has a module of its own, made by ``loader.utils_of``, which knows the model.
"""
# ruff: noqa: F401  # a model.py takes what is imported here too

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from weft.base.errors import WeftError
from weft.base.observing.logs import get_logger
from weft.base.tensors import DATATYPE_BY_NUMPY, NUMPY_BY_DATATYPE, Array, encode_bytes, split_bytes
from weft.serving.backends.base import MetricSink
from weft.serving.backends.custom_metrics import KINDS, check_action
from weft.serving.backends.python.requests import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
)
from weft.serving.backends.python.responses import (
    DATATYPES,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
    Tensor,
    TritonError,
    TritonModelException,
)

# Fields of 64 bits: protobuf's JSON form writes them as strings, Triton Inference Server as numbers.
INTEGER_FIELDS = frozenset(
    {
        "default_priority_level", "default_timeout_microseconds", "device_id", "dim", "dims",
        "max_queue_delay_microseconds", "max_sequence_idle_microseconds", "model_version",
        "priority_levels", "shape", "versions",
    }
)  # fmt: skip


def for_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``config`` as a ``model.py`` expects it: 64-bit integers are numbers, the main fields are there."""
    completed: dict[str, Any] = {"name": "", "max_batch_size": 0, "input": [], "output": [], "parameters": {}}
    return completed | {key: _numbered(key, value) for key, value in config.items()}


def _numbered(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _numbered(name, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_numbered(key, item) for item in value]
    return int(value) if key in INTEGER_FIELDS and isinstance(value, str) else copy.copy(value)


class ModelConfig:
    """Argument and result of ``auto_complete_config``; ValueError where the configuration file contradicts."""

    def __init__(self, model_config: str) -> None:
        self._config = for_model(json.loads(model_config))

    def as_dict(self) -> dict[str, Any]:
        """The configuration with what has been added so far."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch size; it must not be less than the file's."""
        if self._config["max_batch_size"] > max_batch_size:
            raise self._fault(
                f"max_batch_size is {self._config['max_batch_size']} in the configuration, but the model allows "
                f"{max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching, unless the file has settings for it."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise self._fault(f"the configuration has {other}, but the model asks for dynamic_batching")
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:  # models may pass it by this name
        """Declare an input: ``name``, ``data_type``, ``dims`` and maybe ``optional``."""
        self._add("input", input, ("optional",))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Declare an output: ``name``, ``data_type`` and ``dims``."""
        self._add("output", output, ())

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set ``decoupled``: whether the model sends any number of responses to a request."""
        if unknown := set(transaction_policy_dict) - {"decoupled"}:
            raise self._fault(f"the transaction policy has no property {sorted(unknown)}; 'decoupled' is the only one")
        policy = self._config.setdefault("model_transaction_policy", {})
        for key, value in transaction_policy_dict.items():
            if policy.setdefault(key, value) != value:
                raise self._fault(f"{key} is {policy[key]} in the configuration, but the model sets {value}")

    def _add(self, kind: str, tensor: Mapping[str, Any], optional: tuple[str, ...]) -> None:
        required = ("name", "data_type", "dims")
        missing = [key for key in required if key not in tensor]
        unknown = sorted(set(tensor) - {*required, *optional})
        if missing or unknown:
            raise self._fault(f"{kind} {dict(tensor)} lacks {missing} and has unknown properties {unknown}")
        for declared in self._config[kind]:
            if declared["name"] == tensor["name"]:
                self._complete(kind, declared, tensor)
                return
        self._config[kind].append(dict(tensor))

    def _complete(self, kind: str, declared: dict[str, Any], tensor: Mapping[str, Any]) -> None:
        for key, value in tensor.items():
            if declared.get(key) not in (None, [], "TYPE_INVALID", value):
                raise self._fault(
                    f"{kind} '{tensor['name']}' has {key} {declared[key]} in the configuration, but the model says "
                    f"{value}"
                )
            declared[key] = value

    def _fault(self, text: str) -> ValueError:
        return ValueError(f"model '{self._config['name']}': {text}")


TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU = 0, 1

TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}": bool if name == "BOOL" else NUMPY_BY_DATATYPE[name].type
    for name in NUMPY_BY_DATATYPE
}

_log = get_logger("weft.python")
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
_ResultT = TypeVar("_ResultT")


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"triton_python_backend_utils.{name} is not supported by this version")


def get_model_dir() -> NoReturn:
    """Raise: only a model has a folder."""
    raise TritonModelException("get_model_dir is for a model.py: no model is loaded here")


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model. Raises TritonModelException, also where model control is off.

    Args:
        model_name: Not of this model, nor of one that loads it.
        config: A configuration in JSON, in place of the model's ``config.pbtxt``.
        files: By ``file:PATH``, in place of the model's folder, where the service allows it (``--allow-load-files``).
    """
    raise _no_service()


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model. Raises as ``load_model``. A model that unloads itself is not awaited."""
    raise _no_service()


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether the version ("" = any) of the model serves."""
    raise _no_service()


def _no_service() -> TritonModelException:
    return TritonModelException("models are loaded and unloaded by a model.py that a service runs, from initialize on")


class MemoryType:
    """Kinds of memory."""

    TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU = range(2)


class PreferredMemory:
    """Preferred memory of the outputs of a nested call; without effect: they are in host memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type, self.preferred_device_id = preferred_memory_type, preferred_device_id


class Logger:
    """Writes to the server's log; the lines of a model have its name."""

    INFO, WARNING, ERROR, VERBOSE = range(4)
    model = ""

    class LogLevel:
        """Levels of ``Logger.log``."""

        INFO, WARNING, ERROR, VERBOSE = range(4)

    @classmethod
    def log(cls, message: str, level: int = INFO) -> None:
        """Write ``message`` at one of the levels."""
        _log.log(_LEVELS[level], "%s", message, extra={"model": cls.model})

    @classmethod
    def log_info(cls, message: str) -> None:
        """Write at level info."""
        cls.log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        """Write at level warning."""
        cls.log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        """Write at level error."""
        cls.log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Write at level debug."""
        cls.log(message, cls.VERBOSE)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input ``name`` of a request; None if it has none."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output ``name`` of a response; None if it has none."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The configuration of the input ``name``; None if it is not declared."""
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The configuration of the output ``name``; None if it is not declared."""
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


class MetricFamily:
    """Metrics of one name; models, instances and loads share equal families and metrics.

    They exist until every instance that made them is unloaded. The help text is that of the first family of the name.
    Raises TritonModelException if the name is invalid, or that of a family of another kind.
    """

    COUNTER, GAUGE, HISTOGRAM = KINDS

    _sink: ClassVar[MetricSink | None] = None
    _owner: ClassVar[str] = ""

    def __init__(self, name: str, description: str, kind: str) -> None:
        if self._sink is None:
            raise TritonModelException("metrics are for a model.py: no service runs this model")
        if kind not in KINDS:
            raise TritonModelException(f"kind must be MetricFamily.COUNTER, GAUGE or HISTOGRAM, got {kind!r}")
        self._name, self._kind = str(name), kind
        _tried(self._sink.add_family, self._owner, self._name, str(description), kind)

    def Metric(  # noqa: N802  # the name that models call
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> "Metric":
        """The metric with these labels.

        Args:
            labels: Strings by name.
            buckets: Upper bounds of a histogram's buckets, rising; required there, an error elsewhere.

        Raises:
            TritonModelException: Labels or buckets are invalid.
        """
        sink = self._sink
        if sink is None:
            raise TritonModelException("metrics are for a model.py: no service runs this model")
        key = _tried(sink.add_metric, self._owner, self._name, dict(labels or {}), buckets)
        return Metric(sink, self._name, self._kind, key)


class Metric:
    """One counter, gauge or histogram; made by ``MetricFamily.Metric``. May be used from any thread."""

    def __init__(self, sink: MetricSink, name: str, kind: str, labels: Any) -> None:
        self._sink, self._name, self._kind, self._labels = sink, name, kind, labels

    def increment(self, value: float) -> None:
        """Add ``value`` to a counter or gauge; a gauge may shrink. Raises TritonModelException."""
        self._record("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge. Raises TritonModelException."""
        self._record("set", value)

    def observe(self, value: float) -> None:
        """Add ``value`` to a histogram. Raises TritonModelException."""
        self._record("observe", value)

    def value(self) -> float:
        """Of a counter or gauge, of all instances together. Raises TritonModelException for a histogram."""
        return _tried(self._sink.value, self._name, self._labels)

    def _record(self, action: str, value: float) -> None:
        number = float(value)
        _tried(check_action, self._kind, action, number)
        self._sink.record(self._name, self._labels, action, number)


def _tried(function: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
    try:
        return function(*arguments)
    except WeftError as error:
        raise TritonModelException(error.message) from None
