"""A target's model called by its own name: traced, checked, reported and named in errors as a step of a graph is.

Its answer is held against its configuration, but for the number of rows, which is the model's affair. Metadata, which
are all that some servers have, do not say which dimension is that of the batch, and are often vague: there the client
gets what the target sent.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from opentelemetry.trace import Span
from typing_extensions import override

from weft.base.classification import PARAMETER
from weft.base.core import CallContext, InferCall, InferResult, Parameters
from weft.base.errors import InternalError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.base.validation import scheduling_parameters
from weft.router.admission.concurrency_limit import ConcurrencyLimit
from weft.router.admission.controller import AdmissionController
from weft.router.reporting.path import PATH_HEADER, TRACE_PARAMETER, NodeRecord, StepRecord, path_text, trace_text
from weft.router.reporting.spans import call_attributes, end_span, start_step_span, step_attributes
from weft.router.repository.config import config_of_signature
from weft.router.requests import forwarded_headers
from weft.router.serving.served import Inference, Served
from weft.router.target import Target, TargetModel
from weft.router.tensors import check_outputs, rows_of
from weft_protos.model_config_pb2 import ModelConfig

#: Paths of models that are kept, each a model's name.
_MAX_PATHS = 1024

_log = get_logger("weft.router")


class ModelInference:
    """One answer of a model, as it is.

    The path, which is the model's name, is added to ``context.trailing_metadata``, also when the call fails. With the
    parameter ``graph_trace`` the answer has the time that the call took.

    Args:
        target: Serves the model.
        call: Sent as it is.

    Attributes:
        work: Calls the model; await it once, and give its result to ``answer``. Cancelling it cancels the call.
        num_responses: Of a decoupled model, so far.
    """

    __slots__ = ("_call", "_model", "_span", "_start_ns", "_target", "context", "num_responses", "work")

    def __init__(self, target: Target, model: TargetModel, call: InferCall, context: CallContext) -> None:
        name, version = call.model_name, model.signature.version
        self._target, self._model, self._call = target, model, call
        call.num_rows = max(rows_of(call.inputs, is_batching=model.signature.max_batch_size > 0), 1)
        context.trailing_metadata.append((PATH_HEADER, _path_of(name)))
        self._start_ns, self.num_responses = time.monotonic_ns(), 0
        self._span: Span | None = None
        is_traced = telemetry.is_enabled()
        headers = forwarded_headers(context.headers, is_traced=is_traced)
        self.context = CallContext(
            context.deadline_ns, headers, trace_context=context.trace_context, priority=context.priority
        )
        if is_traced:
            attributes = step_attributes(name, name) | call_attributes(name, version, target)
            self._span = start_step_span(name, telemetry.CLIENT, attributes, context.trace_context)
            self.context.trace_context = telemetry.context_of(self._span, context.trace_context)
        self.work: Callable[[], Awaitable[InferResult]] = partial(target.infer, call, self.context)

    def answer(self, result: InferResult) -> InferResult:
        """The answer. Raises InternalError where it is not as the model declares."""
        self.check(result)
        self.add_trace(result)
        self.end()
        return result

    def check(self, result: InferResult) -> None:
        """Check the outputs against the model's signature, except those requested as classes.

        Raises:
            InternalError: An output is not; the message says what is wrong.
        """
        if self._model.config is None:
            return
        outputs = result.outputs
        if self._call.outputs:
            classes = {output.name for output in self._call.outputs if PARAMETER in output.parameters}
            outputs = {name: tensor for name, tensor in outputs.items() if name not in classes}
        check_outputs(outputs, self._model.signature)

    def add_trace(self, result: InferResult) -> None:
        """Add the time that the call took to the last result, if the client requested it."""
        if self._call.parameters and self._call.parameters.get(TRACE_PARAMETER) is True:
            result.parameters = {**result.parameters, TRACE_PARAMETER: self._trace()}

    def end(self) -> None:
        """The call has ended well."""
        if self._span is not None:
            end_span(self._span, None)

    def fail(self, error: BaseException) -> None:
        """The call has failed. Raises the error of a target with the name of the model in its message."""
        if isinstance(error, WeftError):
            raise self._placed(error) from error
        if self._span is not None:
            end_span(self._span, error)

    def _trace(self) -> str:
        name, version = self._call.model_name, self._model.signature.version
        record = StepRecord(name, name, self._start_ns, target=self._target.name, model=name, version=version)
        record.status, record.end_ns, record.responses = "OK", time.monotonic_ns(), self.num_responses
        return trace_text(NodeRecord(name, steps=[record]), self._start_ns)

    def _placed(self, error: WeftError) -> WeftError:
        placed = error.with_message(f"{self._call.model_name}@{self._model.signature.version}: {error.message}")
        if isinstance(placed, InternalError):
            _log.error("%s", placed.message, extra={"error_id": placed.error_id})
        if self._span is not None:
            end_span(self._span, placed)
        return placed


async def stream_model(
    target: Target, model: TargetModel, call: InferCall, context: CallContext
) -> AsyncGenerator[InferResult, None]:
    """The responses of a decoupled model as they are; arguments, errors and path are those of ``ModelInference``.

    Each may have any number of rows. The trace comes with the last response, which is then not null.
    """
    inference = ModelInference(target, model, call, context)
    try:
        async with contextlib.aclosing(target.stream_infer(call, inference.context)) as results:
            async for result in results:
                inference.check(result)
                inference.num_responses += not result.is_null
                if result.is_final:
                    inference.add_trace(result)
                    result.is_null = result.is_null and not result.parameters
                yield result
        inference.end()
    except BaseException as error:
        inference.fail(error)
        raise


@lru_cache(maxsize=_MAX_PATHS)
def _path_of(name: str) -> str:
    """The path of a request that calls a model by its name."""
    return path_text(NodeRecord(name))


@dataclass(slots=True, eq=False)
class ServedTargetModel(Served):
    """A model of a target, ready or not."""

    target: Target
    model: TargetModel

    @property
    @override
    def is_decoupled(self) -> bool:
        return self.model.signature.is_decoupled

    @property
    @override
    def can_answer_once(self) -> bool:
        signature = self.model.signature
        return not signature.is_decoupled or signature.can_collect

    @property
    @override
    def is_ready(self) -> bool:
        return self.model.is_ready

    @property
    @override
    def version(self) -> str:
        return self.model.signature.version

    @override
    def signature(self) -> ModelSignature:
        return self.model.signature

    @override
    def config(self) -> ModelConfig:
        model = self.model
        return model.config if model.config is not None else config_of_signature(model.signature)

    @override
    def scheduling(self, parameters: Parameters) -> tuple[int, int]:
        """What they mean beyond admission is for the model's own server to say."""
        return scheduling_parameters(parameters)[0], 0

    @override
    def limit(self, admission: AdmissionController) -> ConcurrencyLimit:
        signature = self.model.signature
        return admission.limit("model", signature.name, is_stream=signature.is_decoupled)

    @override
    def begin(self, call: InferCall, context: CallContext) -> Inference:
        if call.model_version:
            call.model_version = self.model.signature.version  # "01" is 1
        return ModelInference(self.target, self.model, call, context)

    @override
    def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        if call.model_version:
            call.model_version = self.model.signature.version
        return stream_model(self.target, self.model, call, context)

    @override
    def count_refusal(self, error: BaseException, context: CallContext) -> None:
        """Nothing is counted: the calls of a model are, where they are made."""
