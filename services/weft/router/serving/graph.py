"""A version of a graph: each request is validated, run, and counted."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from typing_extensions import override

from weft.base.classification import PARAMETER, check_classification, classified
from weft.base.core import CallContext, InferCall, InferResult, Parameters
from weft.base.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
    WeftError,
)
from weft.base.signature import ModelSignature
from weft.base.statistics import failure_reason
from weft.base.validation import scheduling_parameters, validate
from weft.router.admission.concurrency_limit import ConcurrencyLimit
from weft.router.admission.controller import AdmissionController
from weft.router.reporting.counters import count_answer
from weft.router.repository.serving import ServingGraph
from weft.router.repository.table import GraphTable, GraphVersion
from weft.router.serving.served import Inference, Served
from weft_protos.model_config_pb2 import ModelConfig

#: Of requested outputs. ``binary_data`` says how JSON carries a tensor; gRPC always carries bytes.
_KNOWN_PARAMETERS = frozenset({"binary_data", PARAMETER})


class GraphInference:
    """One answer of a graph; of a decoupled one that can collect, all its responses as one.

    An answer that was in the graph's cache counts in ``success`` and ``cache_hit``, and not as an execution.

    Args:
        graph: Answers, and counts.

    Raises:
        UnavailableError: The graph is not loaded; this and the following are counted.
        WeftError: The call does not fit the graph.

    Attributes:
        work: Runs the graph; await it once, then call ``answer``, or ``fail`` where either raises.
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
        self.work: Callable[[], Awaitable[object]] = self._execution.work
        if call.outputs:
            self.work = self._classified

    def answer(self, _: object = None) -> InferResult:
        """The answer; it is counted."""
        graph, call, execution, executor = self._graph, self._call, self._execution, self._serving.executor
        result = self._result or executor.result(execution, call)
        executor.end(execution, self._context)
        count_answer(
            graph.statistics,
            self._context,
            num_rows=call.num_rows,
            arrival_ns=self._context.arrival_ns,
            start_ns=execution.start_ns,
            end_ns=time.monotonic_ns(),
            is_cached=execution.is_cached,
        )
        if self._serving.plan.cache is not None and not execution.is_cached:
            graph.statistics.cache_miss.add(0)
        return result

    def fail(self, error: BaseException) -> None:
        """The request has failed; it is counted."""
        self._serving.executor.end(self._execution, self._context)
        count_failure(self._graph, error, self._context)

    async def _classified(self) -> None:
        """Run the graph, and turn outputs that were requested as classes into classes."""
        await self._execution.work()
        result = self._serving.executor.result(self._execution, self._call)
        self._result = await classified(result, self._call.outputs, self._serving.plan.signature)


async def stream_graph(graph: GraphVersion, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
    """The responses of a decoupled graph, as ``GraphExecutor.stream`` gives them; all of them count as one request.

    Raises:
        WeftError: As of ``GraphInference``, also after some responses.
    """
    try:
        serving = serving_of(graph)
        _validate(serving, call)
        start_ns = time.monotonic_ns()
        async with contextlib.aclosing(serving.executor.stream(call, context)) as results:
            async for result in results:
                yield await classified(result, call.outputs, serving.plan.signature)
        end_ns = time.monotonic_ns()
    except BaseException as error:
        count_failure(graph, error, context)
        raise
    count_answer(
        graph.statistics,
        context,
        num_rows=call.num_rows,
        arrival_ns=context.arrival_ns,
        start_ns=start_ns,
        end_ns=end_ns,
    )


def serving_of(graph: GraphVersion) -> ServingGraph:
    """What answers for a graph.

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
    """A request of the graph has failed."""
    reason = "BACKEND"
    if isinstance(error, WeftError):
        reason = failure_reason(error.code)
    elif isinstance(error, asyncio.CancelledError | GeneratorExit):
        reason = "CANCELED"
    graph.statistics.record_failure(reason, time.monotonic_ns() - context.arrival_ns)


def _validate(serving: ServingGraph, call: InferCall) -> None:
    """The call fits the graph, and its rows are counted. Raises WeftError."""
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
class ServedGraph(Served):
    """A version of a graph, loaded or not."""

    graph: GraphVersion
    table: GraphTable

    @property
    @override
    def is_decoupled(self) -> bool:
        serving = self.graph.serving
        return serving is not None and serving.plan.signature.is_decoupled

    @property
    @override
    def can_answer_once(self) -> bool:
        serving = self.graph.serving
        return serving is None or not serving.plan.signature.is_decoupled or serving.plan.signature.can_collect

    @property
    @override
    def is_ready(self) -> bool:
        return not self.table.why_not_ready(self.graph)

    @property
    @override
    def version(self) -> str:
        return self.graph.file.version

    @override
    def signature(self) -> ModelSignature:
        return serving_of(self.graph).plan.signature

    @override
    def config(self) -> ModelConfig:
        return self.table.config(serving_of(self.graph))

    @override
    def scheduling(self, parameters: Parameters) -> tuple[int, int]:
        return scheduling_parameters(parameters)

    @override
    def limit(self, admission: AdmissionController) -> ConcurrencyLimit:
        graph = self.graph
        plan = (graph.serving or serving_of(graph)).plan
        return admission.limit("graph", graph.file.name, plan.max_inflight, is_stream=plan.signature.is_decoupled)

    @override
    def begin(self, call: InferCall, context: CallContext) -> Inference:
        return GraphInference(self.graph, call, context)

    @override
    def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        return stream_graph(self.graph, call, context)

    @override
    def count_refusal(self, error: BaseException, context: CallContext) -> None:
        count_failure(self.graph, error, context)
