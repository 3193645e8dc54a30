"""One request of a graph from arrival to answer: checked, run, counted."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator

from weft_common.classification import PARAMETER, check_classification, classified
from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import InvalidArgumentError, UnavailableError, UnsupportedError, WeftError
from weft_common.statistics import failure_reason
from weft_common.validation import scheduling_parameters, validate
from weft_router.reporting.counters import count_answer
from weft_router.repository.serving import ServingGraph
from weft_router.repository.versions import GraphVersion

#: Of requested outputs. ``binary_data`` says how JSON carries a tensor; gRPC always carries bytes.
_KNOWN_PARAMETERS = frozenset({"binary_data", PARAMETER})


async def infer(graph: GraphVersion, call: InferCall, context: CallContext) -> InferResult:
    """The graph's answer, of a decoupled one that can collect all that it says; it is counted.

    An answer that was in the graph's cache counts in ``success`` and ``cache_hit``, and not as an execution.

    Raises:
        UnavailableError: The graph is not loaded.
        WeftError: As validation or a step raised it.
    """
    with _counted(graph, context) as serving:
        num_rows = _checked(serving, call)
        start_ns = time.monotonic_ns()
        if serving.plan.signature.is_decoupled:
            result, is_cached = await serving.executor.collected(call, context), False
        else:
            result, is_cached = await serving.executor.answer(call, context)
        result = await classified(result, call.outputs, serving.plan.signature)
        end_ns = time.monotonic_ns()
    _count(graph, call, context, num_rows, start_ns, end_ns, is_cached=is_cached)
    if serving.plan.cache is not None and not is_cached:
        graph.statistics.cache_miss.add(0)
    return result


async def stream_infer(graph: GraphVersion, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
    """The responses of a decoupled graph, as ``GraphExecutor.stream`` gives them; all of them count as one request.

    Raises:
        WeftError: As ``infer``, also after some responses.
    """
    with _counted(graph, context) as serving:
        num_rows = _checked(serving, call)
        start_ns = time.monotonic_ns()
        async with contextlib.aclosing(serving.executor.stream(call, context)) as results:
            async for result in results:
                yield await classified(result, call.outputs, serving.plan.signature)
        end_ns = time.monotonic_ns()
    _count(graph, call, context, num_rows, start_ns, end_ns)


def serving_of(graph: GraphVersion) -> ServingGraph:
    """What answers for a graph. Raises UnavailableError when it is not loaded."""
    if graph.serving is None:
        raise UnavailableError(f"{graph.label} is not at ready state: {graph.reason or 'not loaded'}")
    return graph.serving


@contextlib.contextmanager
def _counted(graph: GraphVersion, context: CallContext) -> Iterator[ServingGraph]:
    """What answers for the graph; if the request fails it is counted as failed."""
    counters = graph.statistics
    try:
        yield serving_of(graph)
    except BaseException as error:
        reason = "BACKEND"
        if isinstance(error, WeftError):
            reason = failure_reason(error.code)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            reason = "CANCELED"
        counters.record_failure(reason, time.monotonic_ns() - context.arrival_ns)
        raise


def _checked(serving: ServingGraph, call: InferCall) -> int:
    """Number of rows of a call that fits the graph."""
    signature = serving.plan.signature
    try:
        own_outputs = serving.executor.intermediates.own_outputs(call.outputs, signature.name)
    except InvalidArgumentError as error:
        raise error.with_message(f"[request id: {call.request_id or '<id_unknown>'}] {error.message}") from None
    num_rows = validate(
        call if own_outputs is call.outputs else dataclasses.replace(call, outputs=own_outputs), signature
    )
    scheduling_parameters(call.parameters)  # they were used at the admission, if they make sense
    check_classification(call.outputs)
    for output in call.outputs:
        unknown = output.parameters.keys() - _KNOWN_PARAMETERS
        if unknown:
            raise UnsupportedError(
                f"parameters {sorted(unknown)} of output '{output.name}' are not supported for graphs by "
                "this version; ask the model of the step for them"
            )
    return num_rows


def _count(
    graph: GraphVersion,
    call: InferCall,
    context: CallContext,
    num_rows: int,
    start_ns: int,
    end_ns: int,
    *,
    is_cached: bool = False,
) -> None:
    count_answer(
        graph.statistics,
        call,
        context,
        num_rows=num_rows,
        arrival_ns=context.arrival_ns,
        start_ns=start_ns,
        end_ns=end_ns,
        is_cached=is_cached,
    )
