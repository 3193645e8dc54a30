"""Runs batches on a backend, also in the background, and encodes an outcome for each request."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from weft.base.core import InferResult
from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.observing.failures import disclose
from weft.base.observing.logs import get_logger
from weft.base.observing.telemetry import trace_id_of
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, Array, WireTensor, datatype_of, encode, fits, reshaped
from weft.serving.backends.base import Backend, Batch, TensorBackend
from weft.serving.request.request import (
    RESCHEDULED,
    STREAMED,
    EncodedResponse,
    InferenceRequest,
    Outcome,
    Response,
)

_LOG = get_logger("weft.serving")
_name = attrgetter("name")


@dataclass(slots=True)
class BatchExecution:
    """A batch that has run. Times are those of ``time.monotonic_ns`` and never decrease from field to field.

    Attributes:
        requests: Members that ran, in batch order, without those cancelled before.
        answers: One for each member; None for one that is executed again.
        num_rows: Sum of the members' batch sizes, and of the rows between them; 0 if no backend has run them.
        start_ns: The instance started the batch.
        infer_start_ns: Inputs were ready.
        infer_end_ns: The model had run.
        end_ns: Outputs were encoded.
    """

    requests: list[InferenceRequest]
    answers: list[InferResult | WeftError | None]
    num_rows: int
    start_ns: int
    infer_start_ns: int
    infer_end_ns: int
    end_ns: int

    @property
    def has_failed(self) -> bool:
        """Whether all members failed, and there was at least one."""
        return isinstance(self.answers[0], WeftError) and all(isinstance(other, WeftError) for other in self.answers)


class BatchRunner:
    """Executes batches of one instance, on its thread."""

    def __init__(self, signature: ModelSignature, instance: str, *, checks_outputs: bool = True) -> None:
        self._signature = signature
        self._instance = instance
        self._encoder = OutputEncoder(signature, is_checked=checks_outputs)

    def run(self, backend: Backend, requests: Sequence[InferenceRequest]) -> BatchExecution:
        """Execute the requests that are not cancelled, and encode their answers."""
        batch = Batch([request for request in requests if not request.is_cancelled])
        return self.conclude(batch, self._outcomes(backend, batch) if batch.requests else [])

    def conclude(self, batch: Batch, outcomes: Sequence[Outcome]) -> BatchExecution:
        """Encode the answers of a batch that was executed; one outcome for each request."""
        executed_ns = time.monotonic_ns()
        infer_start_ns, infer_end_ns = batch.infer_start_ns, batch.infer_end_ns
        if not batch.start_ns <= infer_start_ns <= infer_end_ns <= executed_ns:  # a backend that does not measure them
            infer_start_ns = min(max(infer_start_ns, batch.start_ns), executed_ns)
            infer_end_ns = min(max(infer_end_ns or executed_ns, infer_start_ns), executed_ns)
        answers = list(map(self._answer, batch.requests, outcomes))
        end_ns = time.monotonic_ns()
        return BatchExecution(
            list(batch.requests), answers, batch.num_rows, batch.start_ns, infer_start_ns, infer_end_ns, end_ns
        )

    def _outcomes(self, backend: Backend, batch: Batch) -> Sequence[Outcome]:
        error: WeftError
        is_last_try = len(batch.requests) == 1 or not backend.is_repeatable
        try:
            outcomes: Any = backend.execute(batch)
            if (type(outcomes) is list or isinstance(outcomes, Sequence)) and len(outcomes) == len(batch.requests):
                return outcomes
            got = len(outcomes) if isinstance(outcomes, Sequence) else type(outcomes).__name__
            error = InternalError(
                f"model '{self._signature.name}' answered a batch of {len(batch.requests)} requests with {got} "
                "outcomes; it must give one for each request, in order"
            )
            if is_last_try:
                self.log(error)
        except WeftError as raised:
            error = raised.with_message(raised.message)  # without the traceback, which holds the batch
            if is_last_try and isinstance(raised, InternalError):
                self.log(raised, raised)
        except BaseException as exception:
            error = InternalError(f"model '{self._signature.name}' failed to execute the request")
            if is_last_try:
                self.log(error, exception, trace_id=trace_id_of(batch.requests[0].context.trace_context))
        if not is_last_try:
            _LOG.warning("a batch of %d failed, each request runs alone: %s", len(batch.requests), error.message)
            return [outcome for request in batch.requests for outcome in self._outcomes(backend, Batch([request]))]
        # A copy for each member: an exception that is raised in several tasks mixes up their tracebacks.
        return [error.with_message(error.message) for _ in batch.requests]

    def _answer(self, request: InferenceRequest, outcome: Outcome) -> InferResult | WeftError | None:
        if isinstance(outcome, WeftError):
            return outcome
        if outcome is RESCHEDULED:
            return None
        if outcome is STREAMED:
            return InferResult(self._signature.name, self._signature.version, request.call.request_id, is_null=True)
        try:
            if type(outcome) is not EncodedResponse and not isinstance(outcome, Response):
                raise InternalError(
                    f"model '{self._signature.name}' answered a request with {type(outcome).__name__}; it must "
                    "be an InferenceResponse or a WeftError"
                )
            return self._encoder.encode(request, outcome)
        except InternalError as error:
            self.log(error)
            return error
        except Exception as exception:
            failure = InternalError(f"an output of model '{self._signature.name}' cannot be encoded")
            self.log(failure, exception)
            return failure

    def log(self, error: InternalError, cause: BaseException | None = None, **fields: str) -> None:
        """Log an error with its id, model and instance."""
        extra = {"error_id": error.error_id, "model": self._signature.name, "instance": self._instance, **fields}
        _LOG.error(error.message, exc_info=cause, extra=extra)
        if cause is not None:
            disclose(error, cause)


class BackgroundThread:
    """Executes batches whose computation runs only while a processor is idle.

    Other threads compute as if it were not there, also in the middle of its batch: ``SCHED_IDLE``, see sched(7), which
    every Linux process may choose for a thread but not undo. The rest of an execution, and ``report``, have a thread of
    normal priority, because that holds the GIL, for which others would wait as long as it waits for a processor.
    """

    def __init__(
        self, runner: BatchRunner, name: str, report: Callable[["BackgroundThread", BatchExecution], None]
    ) -> None:
        self.name = name
        self._runner = runner
        self._report = report
        self._usual = ThreadPoolExecutor(1, f"{name}_background")
        self._idle = ThreadPoolExecutor(1, f"{name}_idle")
        self._backend: TensorBackend | None = None

    def start(self, backend: TensorBackend) -> bool:
        """Start the threads; return whether this operating system supports a background thread."""
        try:
            self._idle.submit(lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))).result()
        except (AttributeError, OSError):  # no Linux, or one that forbids it
            self._idle.shutdown()
            return False
        self._backend = backend.in_background(lambda run: self._idle.submit(run).result())
        return True

    def execute(self, requests: Sequence[InferenceRequest]) -> None:
        """Run the requests as one batch after earlier ones."""
        self._usual.submit(self._run, requests)

    def close(self) -> None:
        """Wait until the earlier batches have run, and end the threads."""
        self._usual.shutdown()
        self._idle.shutdown()
        self._backend = None

    def _run(self, requests: Sequence[InferenceRequest]) -> None:
        if self._backend is not None:
            self._report(self, self._runner.run(self._backend, requests))


class OutputEncoder:
    """Encodes the responses of one model version as results, with the shapes that clients see."""

    def __init__(self, signature: ModelSignature, *, is_checked: bool = True) -> None:
        self._is_checked = is_checked
        self._model = signature.name
        self._version = signature.version
        self._specs = {spec.name: spec for spec in signature.outputs}
        self._has_batch = signature.max_batch_size > 0
        self._has_reshape = any(spec.reshape is not None for spec in signature.outputs)

    def encode(self, request: InferenceRequest, response: Response) -> InferResult:
        """Encode the requested outputs, or all. Raises InternalError for invalid ones, if they are checked."""
        call = request.call
        outputs: Mapping[str, Any] = response.outputs
        specs = self._specs
        encoded: dict[str, WireTensor] = {}
        if not outputs.keys() <= specs.keys():
            outputs = self._known(outputs)
        is_as_asked = not call.outputs or [*outputs] == [*map(_name, call.outputs)]
        if is_as_asked and type(response) is EncodedResponse and not self._has_reshape:
            return InferResult(self._model, self._version, call.request_id, response.parameters, dict(outputs))
        for name in map(_name, call.outputs) if call.outputs else outputs:
            array = outputs.get(name)
            if array is not None:
                encoded[name] = self._encode(specs[name], array, request.num_rows)
            elif self._is_checked and not specs[name].is_optional:
                raise InternalError(f"model '{self._model}' did not give output '{name}', which the request asked for")
        return InferResult(self._model, self._version, call.request_id, response.parameters, encoded)

    def _known(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(outputs.keys() - self._specs.keys())
        if self._is_checked:
            raise InternalError(
                f"model '{self._model}' gave unknown output '{unknown[0]}'; its configuration has "
                f"{', '.join(self._specs)}"
            )
        return {name: array for name, array in outputs.items() if name in self._specs}

    def _encode(self, spec: TensorSpec, array: Array | WireTensor, num_rows: int) -> WireTensor:
        if type(array) is WireTensor:
            return array if spec.reshape is None else self._reshaped(spec, array, num_rows)
        if not isinstance(array, np.ndarray):
            raise InternalError(
                f"model '{self._model}' gave output '{spec.name}' as {type(array).__name__}; it must be a numpy array"
            )
        has_datatype = array.dtype == NUMPY_BY_DATATYPE[spec.datatype]
        if not has_datatype and self._is_checked:
            self._check_datatype(spec, array)
        shape = array.shape
        dims = spec.dims if spec.reshape is None else spec.reshape
        expected = (num_rows, *dims) if self._has_batch else dims
        if shape != expected and not fits(shape, expected):
            if not self._is_checked:
                return encode(array)
            raise InternalError(
                f"model '{self._model}' gave output '{spec.name}' with shape {list(shape)} for {num_rows} rows; its "
                f"configuration says {list(expected)}"
            )
        if spec.datatype == "BYTES" or not has_datatype:
            tensor = encode(array)
        else:
            tensor = WireTensor(spec.datatype, shape, array.tobytes())
        return tensor if spec.reshape is None else tensor._replace(shape=reshaped(shape, dims, spec.dims))

    def _reshaped(self, spec: TensorSpec, tensor: WireTensor, num_rows: int) -> WireTensor:
        """What a model of another process has encoded, which is not checked, as clients see it."""
        dims = spec.dims if spec.reshape is None else spec.reshape
        expected = (num_rows, *dims) if self._has_batch else dims
        if not fits(tensor.shape, expected):
            return tensor
        return tensor._replace(shape=reshaped(tensor.shape, dims, spec.dims))

    def _check_datatype(self, spec: TensorSpec, array: Array) -> None:
        try:
            datatype = datatype_of(array)
        except InvalidArgumentError:
            datatype = str(array.dtype)
        if datatype != spec.datatype:
            raise InternalError(
                f"model '{self._model}' gave output '{spec.name}' with datatype {datatype}; its configuration says "
                f"{spec.datatype}"
            )
