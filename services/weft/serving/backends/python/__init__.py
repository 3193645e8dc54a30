"""The backend ``python``: runs a ``model.py`` on the instance's thread, or in a process of its own."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from weft.base.errors import InternalError, InvalidArgumentError
from weft.base.observing import telemetry
from weft.base.repository.layout import existing_file
from weft.serving.backends.base import Backend, Batch, ModelContext
from weft.serving.backends.loading import model_file
from weft.serving.backends.python.loader import COMPLETER, check_source
from weft.serving.backends.python.process import ModelProcess
from weft.serving.backends.python.runner import FILENAME, PythonModelRunner
from weft.serving.backends.python.service_end import ENVIRONMENT, complete_in_process, interpreter_of
from weft.serving.request.request import Outcome

#: How long a model's Python code may keep other threads, the event loop among them, from the interpreter, in seconds.
#: Beside a model that computes, an identity answered in 12 ms (p50, p99 32 ms) with Python's own 5 ms, and in 2.4 ms
#: (p99 5.2 ms) with this; the computing model lost a tenth of its rate. An ONNX identity at full load pays a tenth more
#: CPU, so that services without a Python model keep the 5 ms. 2 cores, CPython 3.11.
SWITCH_INTERVAL_S = 0.0005
#: Parameter: batches that one instance executes at once whose ``execute`` is a coroutine.
LIMIT = "MAX_CONCURRENT_EXECUTIONS"
DEFAULT_LIMIT, MAX_LIMIT = 16, 1024


def _auto_complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The configuration as ``auto_complete_config`` of the model completes it; unchanged without that function.

    It runs in a process of its own.
    """
    path = existing_file(directory, config.get("default_model_filename") or FILENAME)
    if config.get("input") and config.get("output") and COMPLETER.encode() not in path.read_bytes():
        return config
    given = config.get("parameters", {}).get(ENVIRONMENT, {}).get("string_value", "")
    return complete_in_process(config, path, interpreter_of(given, directory.parent))


def _reserve_spans(batch: Batch) -> None:
    """So that what the model records, and the calls that it makes, are within the span of its execution."""
    for request in batch.requests:
        request.span = telemetry.reserve(request.context.trace_context)


class PythonBackend(Backend):
    """Runs the class ``TritonPythonModel`` of ``model.py`` in the version folder.

    Parameters of the configuration are the model's own, but for ``MAX_CONCURRENT_EXECUTIONS``, ``EXECUTION_ENV_PATH``
    and ``EXECUTION``: with ``process``, the default, each
    instance runs the model in a process of its own, which is started again when it dies; with ``thread`` on a thread of
    the service, which ends with a model that crashes; with ``inline`` on the event loop, for a model that computes a
    few microseconds and calls nobody.
    A response with an error fails its request with the status of the error's code. What ``execute`` raises fails every
    request of the batch with INTERNAL, a ``TritonModelException`` with its text; so does a wrong number of responses.
    When a process dies, its requests fail with UNAVAILABLE.
    """

    auto_complete = staticmethod(_auto_complete)  # type: ignore[assignment]  # mypy takes the base's for a method
    completes_always = True
    may_lack = ("input", "output")
    checks_outputs = False
    can_stream = True
    can_reschedule = True
    execution_modes = ("process", "thread", "inline")

    _runner: PythonModelRunner | None = None
    _process: ModelProcess | None = None

    @override
    @classmethod
    def is_remote(cls, model: ModelContext) -> bool:
        return model.parameters.get("EXECUTION") == "process"

    def check(self) -> None:
        """Check the parameters, and what the text of the model tells."""
        self._read_parameters()
        check_source(model_file(self.model, FILENAME), checks_imports=ENVIRONMENT not in self.model.parameters)

    def _read_parameters(self) -> None:
        parameters, directory = self.model.parameters, self.model.directory
        given = parameters.get(ENVIRONMENT, "")
        if self.is_remote(self.model):
            limit = parameters.get(LIMIT, str(DEFAULT_LIMIT))
            if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LIMIT:
                raise self._fault(LIMIT, f"parameter '{LIMIT}' must be between 1 and {MAX_LIMIT}, got '{limit}'")
            self._limit = int(limit)
            try:
                self._interpreter = interpreter_of(given, directory.parent)
            except InvalidArgumentError as error:
                raise self._fault(ENVIRONMENT, error.message) from None
        elif given:
            fault = (
                f"parameter '{ENVIRONMENT}' needs a process of the model's own; remove it, or the parameter EXECUTION"
            )
            raise self._fault(ENVIRONMENT, fault)

    async def open(self) -> None:
        """Start a process, which imports the model and calls its ``initialize``."""
        await asyncio.to_thread(self._read_parameters)
        self._process = ModelProcess(self.model, self.instance, self._interpreter, self.on_lost)
        await self._process.load()
        self.num_at_once = self._limit if self._process.can_overlap else 1

    @override
    def start(self, batch: Batch, on_end: Callable[[list[Outcome] | None], None]) -> None:
        if batch.requests[0].context.trace_context is not None:
            _reserve_spans(batch)
        if self._process is not None:
            self._process.start(batch, on_end)

    async def shut(self) -> None:
        """Have the process call ``finalize``, and end it."""
        if self._process is not None:
            await self._process.close()

    def load(self) -> None:
        """Import the model and call its ``initialize``."""
        self._read_parameters()
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))
        self._runner = PythonModelRunner(self.model, self.instance)
        self._runner.load()

    def execute(self, batch: Batch) -> list[Outcome]:
        """Execute the whole batch in the model."""
        if self._runner is None:
            raise InternalError(f"model '{self.model.signature.name}' is not loaded")
        if batch.requests[0].context.trace_context is not None:
            _reserve_spans(batch)
        return self._runner.execute(batch)

    def _fault(self, parameter: str, text: str) -> InvalidArgumentError:
        return self.model.error(f"parameters[{parameter}].string_value", text)

    def why_lost(self) -> str:
        """How the process ended; "" while it runs, or without one."""
        return "" if self._process is None else self._process.exit_text

    def abort(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Call ``finalize`` of the model and remove its modules."""
        if self._runner is not None:
            self._runner.close()
