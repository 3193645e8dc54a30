"""Runs a compiled graph; everything that does not depend on the request is computed at load."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from weft.base.core import TIMES_HEADER, CallContext, InferCall, InferResult
from weft.base.errors import InternalError, UnsupportedError, WeftError
from weft.base.observing import telemetry
from weft.base.tensors import WireTensor
from weft.language.plan import CallPlan, Frame, GraphPlan, NodePlan, StepPlan
from weft.language.request_scope import RequestScope
from weft.router.admission.concurrency_limit import InflightLimit
from weft.router.bandits.store import settle
from weft.router.policies.cache import CachePlan
from weft.router.reporting.counters import StepCounters
from weft.router.reporting.path import (
    INCOMPLETE_PARAMETER,
    PATH_HEADER,
    TRACE_PARAMETER,
    NodeRecord,
    path_text,
    trace_text,
)
from weft.router.requests import ROUTE_HEADER, GraphAnswers, Routes, Selection, Selections, forwarded_headers
from weft.router.runtime import Runtime
from weft.router.steps.action import Action, Attempt, Defaults, ErrorContext, Limited, PolicyParts, StepPolicyPlan
from weft.router.steps.call import CallAction, StreamAction
from weft.router.steps.mirror import Mirror
from weft.router.steps.node import Node, NodeAction, NodeParts, OperatorPlan, ShadowedNode, reshape_slots
from weft.router.steps.responses import StreamParts
from weft.router.steps.run import GraphRequest, Run, earlier
from weft.router.steps.step import ShadowStep, Step

#: How long a response of a stream is held back to learn whether it is the last, in seconds: models tell the end right
#: behind their last response, and a client that does not ask for empty responses learns it by a flag of that one.
_LAST_GRACE_S = 0.002


@dataclass(slots=True)
class Execution:
    """One request of a graph, from ``GraphExecutor.begin`` to ``end``.

    Attributes:
        outputs: The outputs, if they are not in the frame of ``run``.
        is_cached: Whether the answer came from the graph's cache, or from the run of an equal request.
    """

    start_ns: int
    selection: Selection
    run: Run
    work: Callable[[], Awaitable[None]]
    outputs: dict[str, WireTensor] | None = None
    is_cached: bool = False


class GraphExecutor:
    """A graph ready to run, shared by all requests."""

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
            self._admission = runtime.inflight_limit(subject, plan.root.max_inflight)

    async def execute(self, call: InferCall, context: CallContext) -> InferResult:
        """Answer a valid call.

        The path is added to ``context.trailing_metadata``, also if the request fails or is cancelled. An output without
        a value is left out: it repeats an absent optional input, or belongs to a step that did not run.

        Cancelling the awaiting task cancels every call in flight; no task is left.
        """
        execution = self.begin(call, context)
        try:
            await execution.work()
            return self.result(execution, call)
        finally:
            self.end(execution, context)

    def begin(self, call: InferCall, context: CallContext, *, is_collected: bool = False) -> Execution:
        """Begin a valid call; ``end`` must follow.

        Args:
            is_collected: For a decoupled graph: collect all responses of each decoupled model, and of the graph, into
                one.

        Raises:
            InvalidArgumentError: A parameter or header that controls the run is malformed.
            ResourceExhaustedError: The root's ``max_inflight`` is reached.
        """
        runtime = self._runtime
        start_ns = runtime.clock_ns()
        selection = self._selections.all if not call.outputs else self._selections.of(call.outputs)
        run = self._run(call, context, start_ns, selection)
        if is_collected:
            run.request.is_collected = True
        execution = Execution(start_ns, selection, run, partial(selection.node.run, run))
        if is_collected:
            execution.work = partial(self._collect, execution)
        elif self._answers is not None:
            execution.work = partial(self._answer_from_cache, execution, self._answers)
        if self._admission is not None:
            try:
                self._admission.enter()
            except WeftError as error:
                raise self._error_context.wrap(error, self.plan.root.path) from error
        return execution

    def result(self, execution: Execution, call: InferCall) -> InferResult:
        """Build the answer, after ``work``."""
        run, signature = execution.run, self.plan.signature
        outputs = execution.selection.outputs(run) if execution.outputs is None else execution.outputs
        parameters = run.request.response_parameters
        if call.parameters and call.parameters.get(TRACE_PARAMETER) is True:
            parameters[TRACE_PARAMETER] = trace_text(run.record, execution.start_ns)
        if run.request.broken:
            parameters[INCOMPLETE_PARAMETER] = "; ".join(run.request.broken)
        return InferResult(signature.name, signature.version, call.request_id, parameters, outputs)

    def end(self, execution: Execution, context: CallContext, error: BaseException | None = None) -> None:
        """End a request, failed with ``error`` or not; add its path to the trailing metadata."""
        runtime, record = self._runtime, execution.run.record
        if self._admission is not None:
            self._admission.leave(runtime.clock_ns() - execution.start_ns)
        usual_path = execution.selection.usual_path
        path = path_text(record) if usual_path is None else usual_path.text_of(record)
        context.trailing_metadata.append((PATH_HEADER, path))
        if runtime.on_end is not None:
            runtime.on_end(self.plan, execution.run, path, execution.start_ns, error)
        if pulls := execution.run.request.pulls:
            settle(pulls, record)
        for callback in execution.run.request.on_end:
            callback()

    async def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """Yield the responses of a decoupled graph to a valid call as they are made; the last is final.

        The final one is empty if the end came after the response before it, unless the client asked for a trace, which
        the last response carries along with the path. Its parameter ``graph_incomplete`` names soft steps whose stream
        broke off.

        Closing the generator, or cancelling the task that awaits it, cancels every call in flight; no task is left.
        """
        name, version = self.plan.signature.name, self.plan.signature.version
        is_traced, is_over = call.parameters.get(TRACE_PARAMETER) is True, False
        execution, failure = self.begin(call, context), None
        try:
            async with contextlib.aclosing(self._responses(execution)) as responses:
                async for response in responses:
                    is_over = not is_traced and await response.request.is_last(_LAST_GRACE_S)
                    result = InferResult(name, version, call.request_id, response.request.response_parameters)
                    result.outputs = execution.selection.outputs(response)
                    if is_over and (broken := response.request.broken):
                        result.parameters = {**result.parameters, INCOMPLETE_PARAMETER: "; ".join(broken)}
                    result.is_final, result.is_unordered = is_over, True
                    yield result
        except BaseException as error:
            failure = error
            raise
        finally:
            self.end(execution, context, failure)
        if is_over:
            return
        execution.run.request.response_parameters, execution.outputs = {}, {}
        last = self.result(execution, call)
        last.is_null = not last.parameters
        yield last

    def _responses(self, execution: Execution) -> AsyncGenerator[Run, None]:
        if not self.plan.signature.is_decoupled:
            raise UnsupportedError(f"graph '{self.plan.signature.name}' is not decoupled")
        return execution.selection.node.responses(execution.run)

    async def _collect(self, execution: Execution) -> None:
        async with contextlib.aclosing(self._responses(execution)) as responses:
            answers = [(execution.selection.outputs(one), one.request) async for one in responses]
        if not answers:
            raise InternalError(f"graph '{self.plan.signature.name}' gave no response")
        execution.outputs, request = answers[0]
        execution.run.request.response_parameters = request.response_parameters

    async def _answer_from_cache(self, execution: Execution, answers: GraphAnswers) -> None:
        if execution.run.request.is_in_sequence:  # models may remember requests, so each is run
            await execution.selection.node.run(execution.run)
        else:
            execution.outputs, execution.is_cached = await answers.outputs(execution.run, execution.selection)

    def _run(self, call: InferCall, context: CallContext, start_ns: int, selection: Selection) -> Run:
        root, deadline_ns = self.plan.root, context.deadline_ns
        if self._timeout_ns:
            deadline_ns = earlier(deadline_ns, start_ns + self._timeout_ns)
        scope = RequestScope(call.parameters, context.headers, call.request_id, context.priority, deadline_ns)
        scope.clock_ns = self._runtime.clock_ns
        is_traced = telemetry.is_enabled()
        headers = forwarded_headers(context.headers, is_traced=is_traced)
        is_watched = self._runtime.on_end is not None and self._runtime.takes_times(start_ns)
        if is_watched or call.parameters.get(TRACE_PARAMETER) is True:
            headers[TIMES_HEADER] = "1"
        request = GraphRequest(scope, headers, context, is_traced, captures=selection.captures)
        if self._runtime.is_pinning_allowed and ROUTE_HEADER in headers:
            request.pins = self._routes.parse(headers.pop(ROUTE_HEADER))
        frame: Frame = [None] * root.num_slots
        for name, slot in root.inputs:
            frame[slot] = call.inputs.get(name)
        if root.reshaped_inputs:
            reshape_slots(frame, root.reshaped_inputs)
        return Run(frame, request, deadline_ns, context.trace_context, NodeRecord(root.name, root.path_form))


class Assembly:
    """Builds the executable nodes and steps of one graph."""

    def __init__(self, plan: GraphPlan, runtime: Runtime) -> None:
        name, version = plan.signature.name, plan.signature.version
        self._runtime = runtime
        self.error_context = ErrorContext(
            prefix=plan.error_prefix,
            begins_with_text=plan.dialect.error_begins_with_text,
            is_batching=plan.signature.max_batch_size > 0,
            graph=name,
            version=version,
        )
        #: Where the tensors of a node, or those of its steps, differ from the graph's in having a batch dimension.
        self._other_context = replace(self.error_context, is_batching=not self.error_context.is_batching)
        #: By nested graph and node: every use of a node counts against the same ``max_inflight``.
        self._limits: dict[tuple[str, str], InflightLimit] = {}

    def node(self, plan: NodePlan, graph: str = "") -> Node:
        """Build the executable node of a NodePlan, with all its steps."""
        graph = plan.graph or graph
        steps = tuple(self.step(step, plan, graph) for step in plan.steps)
        customs = tuple(self.step(step, plan, graph) for step in plan.customs)
        node = cast("OperatorPlan", plan).node(NodeParts(steps, customs, self._context(plan.is_batched), self._runtime))
        shadows = [self.step(step, plan, graph) for step in plan.shadows]
        return ShadowedNode(node, shadows) if shadows else node

    def step(self, plan: StepPlan, node: NodePlan, graph: str = "", *, stands_in: bool = False) -> Step:
        """Build the executable step of a StepPlan: action, policies, then guards (when, fallback, limits)."""
        runtime, context = self._runtime, self._context(node.batches_steps)
        if plan.action.streams:
            plan = replace(plan, policies=tuple(policy for policy in plan.policies if policy.allows_streams))
        counters = runtime.step_counters.of(self.error_context.graph, self.error_context.version, plan.path)
        action = self._action(plan, node, graph, context, counters)
        if plan.policies or plan.fallback:
            action = Attempt(action, plan.name, plan.path)
        for policy in reversed(plan.policies):
            action = cast("StepPolicyPlan", policy).wrap(action, PolicyParts(plan, context, runtime, counters))
        min_remaining_ms = 0 if "min_remaining_ms" in node.watches and not stands_in else plan.min_remaining_ms
        timeout_ms = plan.timeout_ms
        if plan.max_inflight or min_remaining_ms:
            inflight = runtime.inflight_limit(f"step '{plan.path}'", plan.max_inflight) if plan.max_inflight else None
            action = Limited(action, context, runtime.clock_ns, inflight, min_remaining_ms, timeout_ms)
            timeout_ms = 0
        is_watched = "when" in node.watches and (plan.shadow is None or node.runs_shadows)
        step = Step(
            plan,
            action,
            context,
            runtime.clock_ns,
            counters,
            Defaults(plan, node),
            when=None if is_watched else plan.when,
            timeout_ms=timeout_ms,
            fallbacks=[self.step(fallback, node, graph, stands_in=True) for fallback in _fallbacks(plan)],
        )
        if plan.shadow is None:
            return step
        mirror = Mirror(plan, node, self.error_context.graph, runtime, counters) if plan.shadow.compared else None
        return ShadowStep(step, plan.shadow, runtime, counters, mirror)

    def _action(
        self, plan: StepPlan, node: NodePlan, graph: str, context: ErrorContext, counters: StepCounters
    ) -> Action:
        runtime, inner = self._runtime, plan.action
        parts = StreamParts(counters, runtime.clock_ns, plan.is_soft)
        if isinstance(inner, CallPlan):
            target = runtime.target_of(plan.path, inner) if runtime.target_of else runtime.targets[inner.target]
            kind = StreamAction if inner.signature.is_decoupled else CallAction
            return kind(plan, inner, target, context, node, parts)
        is_tentative = bool(plan.fallback or plan.is_soft or any(one.repeats_failures for one in plan.policies))
        action = NodeAction(plan, self.node(inner, graph), context, node, parts, is_tentative=is_tentative)
        if not inner.max_inflight:
            return action
        key = (inner.graph or graph, inner.name)
        if key not in self._limits:
            self._limits[key] = runtime.inflight_limit(f"node '{inner.name}'", inner.max_inflight)
        shown = None if inner.streams else inner
        return Limited(action, context, runtime.clock_ns, self._limits[key], node=shown)

    def _context(self, is_batched: bool | None) -> ErrorContext:
        is_same = is_batched is None or is_batched == self.error_context.is_batching
        return self.error_context if is_same else self._other_context


def _fallbacks(plan: StepPlan) -> Iterator[StepPlan]:
    fallback = plan.fallback
    while fallback is not None:
        yield replace(fallback, fallback=None, defaults=plan.defaults)
        fallback = fallback.fallback
