"""Runs a ``TritonPythonModel``."""

import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

from weft_common.errors import ERROR_BY_CODE, InternalError, InvalidArgumentError, UnsupportedError, WeftError
from weft_common.logs import get_logger
from weft_serving.backends.base import Backend, Batch
from weft_serving.backends.loading import existing_file, model_file
from weft_serving.backends.python.loader import describe, load_module, unload_module
from weft_serving.backends.python.messages import (
    InferenceRequest,
    InferenceResponse,
    TritonError,
    TritonModelException,
)
from weft_serving.backends.python.model_config import ModelConfig, for_model
from weft_serving.request import InferenceResponse as Response
from weft_serving.request import Outcome

_FILENAME = "model.py"

#: How long a model's Python code may keep other threads, the event loop among them, from the interpreter, in seconds.
#: Beside a model that computes, an identity answered in 12 ms (p50, p99 32 ms) with Python's own 5 ms, and in 2.4 ms
#: (p99 5.2 ms) with this; the computing model lost a tenth of its rate. An ONNX identity at full load pays a tenth more
#: CPU, so that services without a Python model keep the 5 ms. 2 cores, CPython 3.11.
SWITCH_INTERVAL_S = 0.0005

_STATUS_BY_CODE = {
    TritonError.UNKNOWN: "UNKNOWN",
    TritonError.NOT_FOUND: "NOT_FOUND",
    TritonError.INVALID_ARG: "INVALID_ARGUMENT",
    TritonError.UNAVAILABLE: "UNAVAILABLE",
    TritonError.UNSUPPORTED: "UNIMPLEMENTED",
    TritonError.ALREADY_EXISTS: "ALREADY_EXISTS",
    TritonError.CANCELLED: "CANCELLED",
}

_log = get_logger("weft.python")


def _auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The configuration as ``auto_complete_config`` of the model completes it; unchanged without that function."""
    path = existing_file(directory, config.get("default_model_filename") or _FILENAME)
    module = load_module(path)
    try:
        complete = getattr(_model_class(module, path), "auto_complete_config", None)
        if complete is None:
            return config
        completed = complete(ModelConfig(json.dumps(config)))
        if not isinstance(completed, ModelConfig):
            raise InvalidArgumentError(
                f"{path}: auto_complete_config must return the pb_utils.ModelConfig, got {type(completed).__name__}"
            )
        return completed.as_dict()
    except WeftError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"auto_complete_config failed: {describe(error, directory.parent)}") from error
    finally:
        unload_module(module)


def _model_class(module: Any, path: Path) -> Any:
    model_class = getattr(module, "TritonPythonModel", None)
    if model_class is None:
        raise InvalidArgumentError(f"{path} has no class TritonPythonModel; a Python model must define it")
    return model_class


class PythonBackend(Backend):
    """Runs the class ``TritonPythonModel`` of ``model.py`` in the version folder, on the instance's thread.

    The model may define ``auto_complete_config``, ``initialize(args)`` and ``finalize()``, and must define
    ``execute(requests)``, which returns one ``pb_utils.InferenceResponse`` per request, in order. It imports
    ``triton_python_backend_utils``. Parameters of the configuration are the model's own.

    A response with an error fails its request with the status of the error's code. What ``execute`` raises fails every
    request of the batch with INTERNAL, and so does a wrong number of responses.

    Not supported by this version: decoupled models, coroutines, calls of other models, custom metrics, a process for
    each instance.
    """

    auto_complete = staticmethod(_auto_complete)  # type: ignore[assignment]  # mypy takes the base's for a method

    def load(self) -> None:
        """Import the model and call its ``initialize``."""
        signature = self.model.signature
        if signature.is_decoupled:
            raise UnsupportedError(f"model '{signature.name}': decoupled models are not supported by this version")
        if self.model.parameters.get("EXECUTION", "thread") != "thread":
            raise UnsupportedError(
                f"model '{signature.name}': parameter EXECUTION '{self.model.parameters['EXECUTION']}' is not "
                "supported by this version; every instance is a thread"
            )
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))
        path = model_file(self.model, _FILENAME)
        module = load_module(path)
        try:
            self._model = self._initialized(_model_class(module, path), path)
        except BaseException:
            unload_module(module)
            raise
        self._module = module

    def _initialized(self, model_class: Any, path: Path) -> Any:
        execute = getattr(model_class, "execute", None)
        if execute is None:
            raise InvalidArgumentError(f"{path}: TritonPythonModel has no method execute")
        if inspect.iscoroutinefunction(execute):
            raise UnsupportedError(f"{path}: a coroutine as execute is not supported by this version; use a plain def")
        signature = self.model.signature
        try:
            model = model_class()
            if hasattr(model, "initialize"):
                model.initialize(
                    {
                        "model_config": json.dumps(for_model(self.model.config)),
                        "model_instance_kind": self.instance.kind,
                        "model_instance_name": self.instance.name,
                        "model_instance_device_id": str(self.instance.device_id),
                        "model_repository": str(self.model.directory.parent),
                        "model_version": signature.version,
                        "model_name": signature.name,
                    }
                )
        except Exception as error:
            folder = self.model.directory.parent
            raise InvalidArgumentError(
                f"model '{signature.name}' failed to initialize: {describe(error, folder)}"
            ) from error
        return model

    def execute(self, batch: Batch) -> list[Outcome]:
        """Hand the whole batch to the model."""
        requests = [InferenceRequest.wrap(request) for request in batch.requests]
        batch.infer_start_ns = time.monotonic_ns()
        responses = self._model.execute(requests)
        batch.infer_end_ns = time.monotonic_ns()
        num_responses = len(responses) if isinstance(responses, list | tuple) else 0
        if num_responses != len(requests):
            raise InternalError(
                f"model '{self.model.signature.name}' returned {num_responses} responses for {len(requests)} requests; "
                "execute must return a list with one InferenceResponse per request"
            )
        return [self._outcome(response) for response in responses]

    def close(self) -> None:
        """Call ``finalize`` of the model, and forget its modules."""
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except Exception:
            _log.exception("finalize failed", extra={"model": self.model.signature.name})
        finally:
            unload_module(self._module)

    def _outcome(self, response: Any) -> Outcome:
        name = self.model.signature.name
        if not isinstance(response, InferenceResponse):
            outcome: Outcome = InternalError(
                f"model '{name}' returned {type(response).__name__} in place of an InferenceResponse"
            )
        elif (error := response.error()) is not None:
            outcome = _error(error)
        else:
            outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            return Response(outputs, json.loads(response.parameters()))
        if isinstance(outcome, InternalError):
            _log.error(outcome.message, extra={"error_id": outcome.error_id, "model": name})
        return outcome


def _error(error: Any) -> WeftError:
    """The error of a response, with the status of its code; INTERNAL for an unknown code, or for a bare text."""
    message = error.message() if isinstance(error, TritonError | TritonModelException) else str(error)
    code = error.code() if isinstance(error, TritonError) else TritonError.INTERNAL
    error_class = ERROR_BY_CODE.get(_STATUS_BY_CODE.get(code, ""), InternalError)
    return error_class(message)
