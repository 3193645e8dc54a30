"""The module that a ``model.py`` imports as ``triton_python_backend_utils``.

Names and behaviour are those of Triton Inference Server's Python backend, so that a model runs unmodified. What this
version does not offer (tensors in GPU memory) raises an error that says so.

Each loaded model has a module of its own, made by ``utils_of``, which knows the model.
"""
# ruff: noqa: F401  # a model.py takes what is imported here too

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from weft.base.core import ParameterValue
from weft.base.errors import WeftError
from weft.base.observing.logs import get_logger
from weft.base.tensors import DATATYPE_BY_NUMPY, NUMPY_BY_DATATYPE, Array, encode_bytes, split_bytes
from weft.serving.backends.base import MetricSink, ModelCaller, RepositoryControl
from weft.serving.backends.custom_metrics import KINDS, check_action
from weft.serving.backends.python.model_config import ModelConfig
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
    inline_refusal,
)

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


def utils_of(
    directory: Path,
    caller: ModelCaller | None = None,
    origin: str = "",
    model: str = "",
    metrics: MetricSink | None = None,
    control: RepositoryControl | None = None,
) -> ModuleType:
    """The module as one loaded model, of the version folder ``directory``, imports it."""
    module = ModuleType("triton_python_backend_utils", __doc__)
    own = {
        "InferenceRequest": type("InferenceRequest", (InferenceRequest,), {"_caller": caller, "_origin": origin}),
        "MetricFamily": type("MetricFamily", (MetricFamily,), {"_sink": metrics, "_owner": origin}),
        "Logger": type("Logger", (Logger,), {"model": model}),
        "get_model_dir": lambda: str(directory),
        **({} if control is None else model_loading(control, model)),
    }
    vars(module).update({key: value for key, value in globals().items() if not key.startswith("_")} | own)
    vars(module)["__getattr__"] = __getattr__
    return module


def get_model_dir() -> NoReturn:
    """Raise: only a model has a folder."""
    raise TritonModelException("get_model_dir is for a model.py: no model is loaded here")


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model. Raises TritonModelException, also where model control is off.

    Args:
        model_name: Not of this model, nor of one that loads it.
        config: A configuration in JSON, in place of the model's ``config.pbtxt``.
        files: Not supported: put the files into the repository.
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

    They exist until every instance that made them is unloaded.

    Args:
        description: Help text; that of the first family of this name.
        kind: ``MetricFamily.COUNTER``, ``GAUGE`` or ``HISTOGRAM``.

    Raises:
        TritonModelException: The name is invalid, or that of a family of another kind.
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


def model_loading(control: RepositoryControl, model: str) -> dict[str, Callable[..., Any]]:
    """The functions by name, for the model ``model``."""

    def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        _done(control.load(model, model_name, {**({"config": config} if config else {}), **(files or {})}))

    def unload_model(model_name: str, unload_dependents: bool = False) -> None:
        _done(control.unload(model, model_name, unload_dependents=unload_dependents))

    def is_model_ready(model_name: str, model_version: str = "") -> bool:
        return _done(control.is_ready(model_name, model_version))

    return {"load_model": load_model, "unload_model": unload_model, "is_model_ready": is_model_ready}


class InlineControl:
    """The ``RepositoryControl`` of a model that executes on the event loop: it loads nothing."""

    def load(self, asker: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> "Future[None]":
        """Raise TritonModelException."""
        raise inline_refusal(f"cannot load model '{name}'")

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> "Future[None]":
        """Raise TritonModelException."""
        raise inline_refusal(f"cannot unload model '{name}'")

    def is_ready(self, name: str, version: str) -> "Future[bool]":
        """Raise TritonModelException."""
        raise inline_refusal(f"cannot ask for model '{name}'")


def _done(future: "Future[_ResultT]") -> _ResultT:
    try:
        return future.result()
    except WeftError as error:
        raise TritonModelException(error.message) from None
    except CancelledError:
        raise TritonModelException("the service is stopping; it loads and unloads no models") from None
