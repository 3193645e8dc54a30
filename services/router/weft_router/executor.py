"""Runs a compiled graph: everything that can be known before a request is worked out once, when the graph is loaded."""

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import NamedTuple

from weft_common.core import CallContext, InferCall, InferResult, Parameters, ParameterValue
from weft_common.errors import InternalError, UnsupportedError, WeftError
from weft_common.observing import telemetry
from weft_common.tensors import WireTensor
from weft_common.validation import scheduling_parameters
from weft_router.admission import InflightLimit
from weft_router.assembly import Assembly
from weft_router.bandits.memory import settle
from weft_router.graph.plan import Frame, GraphPlan
from weft_router.policies.cache import CachePlan
from weft_router.reporting.headers import forwarded_headers
from weft_router.reporting.path import PATH_HEADER, TRACE_PARAMETER, NodeRecord, path_text, trace_text
from weft_router.requests.cached_answers import GraphAnswers
from weft_router.requests.routes import ROUTE_HEADER, Routes
from weft_router.requests.selection import Selection, Selections
from weft_router.runtime import Runtime
from weft_router.scope import RequestScope
from weft_router.steps import GraphRequest, Run, earlier


class _Execution(NamedTuple):
    """One request.

    Attributes:
        start_ns: On the runtime's clock.
        selection: What it asks for.
        run: Of the root; the deadline of the graph is worked in.
    """

    start_ns: int
    selection: Selection
    run: Run


class GraphExecutor:
    """A graph ready to run, shared by all requests.

    Args:
        plan: The compiled graph.
        runtime: Shared with the other graphs of the router.

    Raises:
        KeyError: The plan names a target that the runtime does not have.

    Attributes:
        plan: As given.
        intermediates: What can be asked for beside the outputs.
    """

    def __init__(self, plan: GraphPlan, runtime: Runtime) -> None:
        self.plan = plan
        self._runtime = runtime
        assembly = Assembly(plan, runtime)
        self._selections = Selections(plan, assembly.node(plan.root))
        self.intermediates = self._selections.intermediates
        self._error_context = assembly.error_context
        self._routes = Routes(plan.root)
        cache = plan.cache
        self._answers = (
            GraphAnswers(plan, cache, assembly.error_context, runtime) if isinstance(cache, CachePlan) else None
        )
        limits_ms = [limit for limit in (plan.timeout_ms, plan.root.timeout_ms) if limit]
        self._timeout_ns = min(limits_ms, default=0) * 1_000_000
        self._admission: InflightLimit | None = None
        if plan.root.max_inflight:
            subject = f"node '{plan.root.name}'"
            self._admission = InflightLimit(subject, plan.root.max_inflight, "'max_inflight' of its policy")

    async def execute(self, call: InferCall, context: CallContext) -> InferResult:
        """The graph's answer to a valid call.

        The path is added to ``context.trailing_metadata``, also when the request fails or is cancelled. An output that
        has no value is left out: it repeats an optional input that is absent, or belongs to a step that did not run.

        Raises:
            WeftError: As a step, a condition or a combine raised it; the message says where in the graph.

        Cancelling the awaiting task cancels every call in flight; no task is left.
        """
        result, _ = await self.answer(call, context)
        return result

    async def answer(self, call: InferCall, context: CallContext) -> tuple[InferResult, bool]:
        """As ``execute``; and whether the answer was in the graph's cache, or on its way to somebody else."""
        execution = self._begun(call, context)
        run, selection, is_cached = execution.run, execution.selection, False
        with self._reported(execution, context):
            if self._answers is None:
                await selection.node.run(run)
                outputs = selection.outputs(run)
            else:
                outputs, is_cached = await self._answers.outputs(run, selection)
        parameters = run.request.response_parameters | self._trace(call, execution)
        return self._result(call, parameters, outputs), is_cached

    async def collected(self, call: InferCall, context: CallContext) -> InferResult:
        """The one answer of a decoupled graph that can collect: each decoupled model gives all its responses as one.

        Otherwise as ``execute``.
        """
        execution = self._begun(call, context)
        execution.run.request.is_collected = True
        async with contextlib.aclosing(self._responses(call, execution, context)) as results:
            answers = [result async for result in results]
        if not answers:
            raise InternalError(f"graph '{self.plan.signature.name}' gave no response")
        answers[0].parameters = {**answers[0].parameters, **self._trace(call, execution)}
        return answers[0]

    async def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The responses of a decoupled graph to a valid call, as they are made; the last is null.

        Path and trace are there with the last. With a trace it is not null, as the client asked for what it carries.

        Raises:
            WeftError: As ``execute``, after the responses that were made before.

        Closing the generator, or cancelling the task that awaits it, cancels every call in flight; no task is left.
        """
        execution = self._begun(call, context)
        async with contextlib.aclosing(self._responses(call, execution, context)) as results:
            async for result in results:
                result.is_final = False
                yield result
        last = self._result(call, self._trace(call, execution), {})
        last.is_null = not last.parameters
        yield last

    async def _responses(
        self, call: InferCall, execution: _Execution, context: CallContext
    ) -> AsyncGenerator[InferResult, None]:
        """The responses of a decoupled graph, each with the parameters of its steps."""
        stages = execution.selection.stages
        if stages is None:
            raise UnsupportedError(f"graph '{self.plan.signature.name}' is not decoupled")
        with self._reported(execution, context):
            async with contextlib.aclosing(stages.responses(execution.run)) as responses:
                async for response in responses:
                    outputs = execution.selection.outputs(response)
                    yield self._result(call, response.request.response_parameters, outputs)

    def _begun(self, call: InferCall, context: CallContext) -> _Execution:
        """A request with all that is known before the first step. Raises InvalidArgumentError."""
        start_ns = self._runtime.clock_ns()
        root = self.plan.root
        selection = self._selections.of(call.outputs)
        deadline_ns = context.deadline_ns
        if self._timeout_ns:
            deadline_ns = earlier(deadline_ns, start_ns + self._timeout_ns)
        is_traced = telemetry.is_enabled()
        priority, _ = scheduling_parameters(call.parameters)
        scope = RequestScope(call.parameters, context.headers, call.request_id, priority, deadline_ns)
        headers = forwarded_headers(context.headers, is_traced=is_traced)
        request = GraphRequest(scope, headers, is_traced, captures=selection.captures)
        if self._runtime.is_pinning_allowed and ROUTE_HEADER in headers:
            request.pins = self._routes.parse(headers.pop(ROUTE_HEADER))
        frame: Frame = [None] * root.num_slots
        inputs = call.inputs
        for name, slot in root.inputs:
            frame[slot] = inputs.get(name)
        run = Run(frame, request, deadline_ns, context.trace_context, NodeRecord(root.name, root.path_form))
        return _Execution(start_ns, selection, run)

    @contextlib.contextmanager
    def _reported(self, execution: _Execution, context: CallContext) -> Iterator[None]:
        """The request is in work; in the end its path is in the trailing metadata."""
        runtime, admission = self._runtime, self._admission
        if admission is not None:
            try:
                admission.enter()
            except WeftError as error:
                raise self._error_context.wrap(error, self.plan.root.path) from error
        runtime.retry_budget.enter()
        try:
            yield
        finally:
            runtime.retry_budget.leave()
            if admission is not None:
                admission.leave(runtime.clock_ns() - execution.start_ns)
            context.trailing_metadata.append((PATH_HEADER, path_text(execution.run.record)))
            if pulls := execution.run.request.pulls:
                settle(pulls, execution.run.record)

    def _trace(self, call: InferCall, execution: _Execution) -> dict[str, ParameterValue]:
        """The parameter with the trace, if the client asked for it."""
        if not call.parameters or call.parameters.get(TRACE_PARAMETER) is not True:
            return {}
        return {TRACE_PARAMETER: trace_text(execution.run.record, execution.start_ns)}

    def _result(self, call: InferCall, parameters: Parameters, outputs: dict[str, WireTensor]) -> InferResult:
        signature = self.plan.signature
        return InferResult(signature.name, signature.version, call.request_id, parameters, outputs)
