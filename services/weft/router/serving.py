"""The two ways to answer a request: by a graph, or by a target's model called by its name.

A model's call is traced, checked, counted and named in errors like a step of a graph. Its answer is checked against its
configuration, except for the number of rows. Servers that offer only metadata do not say which dimension is the batch:
their answers are passed on unchecked.
"""

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

from opentelemetry.trace import Span

from weft.base.classification import PARAMETER, check_classification, classified
from weft.base.core import CallContext, InferCall, InferResult, Parameters
from weft.base.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
)
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.base.validation import scheduling_parameters, validate
from weft.router.admission.concurrency_limit import ConcurrencyLimit
from weft.router.admission.controller import AdmissionController
from weft.router.reporting.counters import count_answer
from weft.router.reporting.path import PATH_HEADER, TRACE_PARAMETER, NodeRecord, StepRecord, path_text, trace_text
from weft.router.reporting.spans import call_attributes, end_span, start_step_span, step_attributes
from weft.router.repository.config import config_of_signature
from weft.router.repository.serving import ServingGraph
from weft.router.repository.table import GraphTable, GraphVersion
from weft.router.requests import forwarded_headers
from weft.router.target import Target, TargetModel
from weft.router.tensors import check_outputs, rows_of
from weft_protos.model_config_pb2 import ModelConfig

#: Of requested outputs. ``binary_data`` says how JSON carries a tensor; gRPC always carries bytes.
_KNOWN_PARAMETERS = frozenset({"binary_data", PARAMETER})
#: Paths of models that are kept, each a model's name.
_MAX_PATHS = 1024

_log = get_logger("weft.router")


class GraphInference:
    """One answer of a graph; if it is decoupled, all its responses collected into one.

    Await ``work`` once and pass its result to ``answer``; if either raises, call ``fail``.

    An answer from the graph's cache counts in ``success`` and ``cache_hit``, not as an execution.

    Raises:
        UnavailableError: The graph is not loaded; this and the following are counted.
        WeftError: The call does not fit the graph.
    """

    __slots__ = ("_call", "_context", "_execution", "_graph", "_result", "_serving", "work")

    def __init__(self, graph: GraphVersion, call: InferCall, context: CallContext) -> None:
        self._graph, self._call, self._context = graph, call, context
        self._result: InferResult | None = None
        try:
            self._serving = serving = graph.serving or serving_of(graph)
            _validate(serving, call)
            is_collected = serving.plan.signature.is_decoupled
            self._execution = serving.executor.begin(call, context, is_collected=is_collected)
        except Exception as error:
            count_failure(graph, error, context)
            raise
        self.work: Callable[[], Awaitable[Any]] = self._execution.work
        if call.outputs:
            self.work = self._classified

    def answer(self, _: object = None) -> InferResult:
        """Count and return the answer."""
        graph, call, execution, executor = self._graph, self._call, self._execution, self._serving.executor
        result = self._result or executor.result(execution, call)
        executor.end(execution, self._context)
        times = self._context.arrival_ns, execution.start_ns
        count_answer(graph.statistics, call, self._context, *times, is_cached=execution.is_cached)
        if self._serving.plan.cache is not None and not execution.is_cached:
            graph.statistics.cache_miss.add(0)
        return result

    def fail(self, error: BaseException) -> None:
        """Count the failed request."""
        self._serving.executor.end(self._execution, self._context, error)
        count_failure(self._graph, error, self._context)

    async def _classified(self) -> None:
        await self._execution.work()
        result = self._serving.executor.result(self._execution, self._call)
        self._result = await classified(result, self._call.outputs, self._serving.plan.signature)


def serving_of(graph: GraphVersion) -> ServingGraph:
    """The serving graph of a version.

    Raises:
        FailedPreconditionError: It no longer fits a model that it calls.
        UnavailableError: It is not loaded.
    """
    if graph.serving is None and graph.misfit:
        raise FailedPreconditionError(
            f"{graph.label} does not serve: {graph.misfit}; it serves again when the graph or the model is changed so "
            "that they fit"
        )
    if graph.serving is None:
        raise UnavailableError(f"{graph.label} is not at ready state: {graph.reason or 'not loaded'}")
    return graph.serving


def count_failure(graph: GraphVersion, error: BaseException, context: CallContext) -> None:
    """Count a failed request of a graph."""
    graph.statistics.record_failure(error, time.monotonic_ns() - context.arrival_ns)


def _validate(serving: ServingGraph, call: InferCall) -> None:
    """Check the call against the graph, and count its rows. Raises WeftError."""
    signature = serving.plan.signature
    if not call.outputs:
        call.num_rows = validate(call, signature)
        return
    try:
        own_outputs = serving.executor.intermediates.own_outputs(call.outputs, signature.name)
    except InvalidArgumentError as error:
        raise error.with_message(f"[request id: {call.request_id or '<id_unknown>'}] {error.message}") from None
    call.num_rows = validate(dataclasses.replace(call, outputs=own_outputs), signature)
    check_classification(call.outputs)
    for output in call.outputs:
        unknown = output.parameters.keys() - _KNOWN_PARAMETERS
        if unknown:
            raise UnsupportedError(
                f"parameters {sorted(unknown)} of output '{output.name}' are not supported for graphs by "
                "this version; ask the model of the step for them"
            )


@dataclass(slots=True, eq=False)
class ServedGraph:
    """A version of a graph, loaded or not."""

    graph: GraphVersion
    table: GraphTable

    @property
    def is_decoupled(self) -> bool:
        """Whether a request has any number of responses; False of a graph that is not loaded."""
        serving = self.graph.serving
        return serving is not None and serving.plan.signature.is_decoupled

    @property
    def can_answer_once(self) -> bool:
        """Whether a request may ask for one response; True of a graph that is not loaded."""
        serving = self.graph.serving
        return serving is None or not serving.plan.signature.is_decoupled or serving.plan.signature.can_collect

    @property
    def is_ready(self) -> bool:
        """Whether it and all models that it needs are ready."""
        return not self.table.why_not_ready(self.graph)

    @property
    def version(self) -> str:
        """Numeric, as a string."""
        return self.graph.file.version

    def signature(self) -> ModelSignature:
        """Names, types and shapes. Raises UnavailableError for a graph that is not loaded."""
        return serving_of(self.graph).plan.signature

    def config(self) -> ModelConfig:
        """Its configuration. Raises as ``signature``."""
        return self.table.config(serving_of(self.graph))

    def scheduling(self, parameters: Parameters) -> tuple[int, int]:
        """``priority`` and ``timeout`` (us) of a request, 0 for none. Raises InvalidArgumentError."""
        return scheduling_parameters(parameters)

    def limit(self, admission: AdmissionController) -> ConcurrencyLimit:
        """Its in-flight limit, with the current value of its policy. Raises like ``signature``."""
        graph = self.graph
        plan = (graph.serving or serving_of(graph)).plan
        return admission.limit("graph", graph.file.name, plan.max_inflight, is_stream=plan.signature.is_decoupled)

    def begin(self, call: InferCall, context: CallContext) -> GraphInference:
        """Begin a request for one response. Raises WeftError."""
        return GraphInference(self.graph, call, context)

    async def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """Yield the responses of ``GraphExecutor.stream``; all of them count as one request."""
        graph = self.graph
        try:
            serving = serving_of(graph)
            _validate(serving, call)
            start_ns = time.monotonic_ns()
            async with contextlib.aclosing(serving.executor.stream(call, context)) as results:
                async for result in results:
                    yield await classified(result, call.outputs, serving.plan.signature)
        except BaseException as error:
            count_failure(graph, error, context)
            raise
        count_answer(graph.statistics, call, context, context.arrival_ns, start_ns)

    def count_refusal(self, error: BaseException, context: CallContext) -> None:
        """Count a request that was refused."""
        count_failure(self.graph, error, context)


class ModelInference:
    """One answer of a model.

    The path, which is the model's name, is added to ``context.trailing_metadata``, also if the call fails. With the
    parameter ``graph_trace`` the answer has the time that the call took.

    Attributes:
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
            context.deadline_ns,
            headers,
            trace_context=context.trace_context,
            priority=context.priority,
            root=context,
        )
        if is_traced:
            attributes = step_attributes(name, name) | call_attributes(name, version, target)
            self._span = start_step_span(name, telemetry.CLIENT, attributes, context.trace_context)
            self.context.trace_context = telemetry.context_of(self._span, context.trace_context)
        self.work: Callable[[], Awaitable[InferResult]] = partial(target.infer, call, self.context)

    def answer(self, result: InferResult) -> InferResult:
        """Check and return the answer. Raises InternalError if it contradicts the model's configuration."""
        self.check(result)
        self.add_trace(result)
        self.end()
        return result

    def check(self, result: InferResult) -> None:
        """Check the outputs, except those requested as classes, against the model's signature. Raises InternalError."""
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
            name, version = self._call.model_name, self._model.signature.version
            record = StepRecord(name, name, self._start_ns, target=self._target.name, model=name, version=version)
            record.status, record.end_ns, record.responses = "OK", time.monotonic_ns(), self.num_responses
            trace = trace_text(NodeRecord(name, steps=[record]), self._start_ns)
            result.parameters = {**result.parameters, TRACE_PARAMETER: trace}

    def end(self) -> None:
        """Note the successful end of the call."""
        if self._span is not None:
            end_span(self._span, None)

    def fail(self, error: BaseException) -> None:
        """Note the failure of the call, whose message is the model's own, as from its server."""
        if isinstance(error, InternalError):
            model = f"{self._call.model_name}@{self._model.signature.version}"
            _log.error("%s: %s", model, error.message, extra={"error_id": error.error_id})
        if self._span is not None:
            end_span(self._span, error)


@lru_cache(maxsize=_MAX_PATHS)
def _path_of(name: str) -> str:
    return path_text(NodeRecord(name))


@dataclass(slots=True, eq=False)
class ServedTargetModel:
    """A model of a target, ready or not."""

    target: Target
    model: TargetModel

    @property
    def is_decoupled(self) -> bool:
        """Whether a request has any number of responses."""
        return self.model.signature.is_decoupled

    @property
    def can_answer_once(self) -> bool:
        """Whether a request may ask for one response."""
        signature = self.model.signature
        return not signature.is_decoupled or signature.can_collect

    @property
    def is_ready(self) -> bool:
        """Whether it can answer."""
        return self.model.is_ready

    @property
    def version(self) -> str:
        """Numeric, as a string."""
        return self.model.signature.version

    def signature(self) -> ModelSignature:
        """Names, types and shapes."""
        return self.model.signature

    def config(self) -> ModelConfig:
        """Its configuration."""
        model = self.model
        return model.config if model.config is not None else config_of_signature(model.signature)

    def scheduling(self, parameters: Parameters) -> tuple[int, int]:
        """Priority and timeout for admission; the model's own server interprets them further."""
        return scheduling_parameters(parameters)[0], 0

    def limit(self, admission: AdmissionController) -> ConcurrencyLimit:
        """Its limit of requests in flight."""
        signature = self.model.signature
        return admission.limit("model", signature.name, is_stream=signature.is_decoupled)

    def begin(self, call: InferCall, context: CallContext) -> ModelInference:
        """Begin a request for one response. Raises WeftError."""
        if call.model_version:
            call.model_version = self.model.signature.version  # "01" is 1
        return ModelInference(self.target, self.model, call, context)

    async def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """Yield the responses unchanged, with any number of rows; the last, which is not empty, carries the trace."""
        inference = self.begin(call, context)
        try:
            async with contextlib.aclosing(self.target.stream_infer(call, inference.context)) as results:
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

    def count_refusal(self, error: BaseException, context: CallContext) -> None:
        """Do nothing: calls of a model are counted where they are made."""


#: What the router serves by a name.
Served: TypeAlias = ServedGraph | ServedTargetModel
