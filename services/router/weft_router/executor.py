"""Runs a compiled graph: everything that can be known before a request is worked out once, when the graph is loaded."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence

from weft_common import telemetry
from weft_common.core import CallContext, InferCall, InferResult, RequestedOutput
from weft_common.tensors import WireTensor
from weft_common.validation import scheduling_parameters
from weft_router.adaption import fitted_output, full_rank
from weft_router.graph.plan import CallPlan, Frame, GraphPlan, NodeKind, NodePlan, RequestScope, StepPlan
from weft_router.headers import forwarded_headers
from weft_router.nodes import EnsembleNode, SequenceNode, SplitterNode, SwitchNode
from weft_router.report import PATH_HEADER, TRACE_PARAMETER, NodeRun, path_text, trace_text
from weft_router.steps import CallStep, GraphRequest, Node, NodeStep, Origin, Step, earlier
from weft_router.targets import Target

#: Sets of requested outputs for which a graph keeps a root without the steps that they do not need.
MAX_PRUNED_ROOTS = 64


class GraphExecutor:
    """A graph ready to run, shared by all requests.

    Where the root is a sequence, steps that only feed outputs which a request leaves out are not run for it.

    Args:
        plan: The compiled graph.
        targets: By the names that the plan uses.
        generator: Draws of splitters without a key; seeded by the system when absent.

    Raises:
        KeyError: The plan names a target that is not in ``targets``.
    """

    def __init__(
        self, plan: GraphPlan, targets: Mapping[str, Target], *, generator: random.Random | None = None
    ) -> None:
        self.plan = plan
        name, version = plan.signature.name, plan.signature.version
        self._targets = targets
        self._generator = generator or random.Random()  # noqa: S311  # shares of traffic, not secrets
        self._origin = Origin(
            prefix=f"in ensemble '{name}', " if plan.is_ensemble else f"{name}/{version}: ",
            is_batching=plan.signature.max_batch_size > 0,
        )
        self._root = self._make_node(plan.root)
        ranks = {s.name: full_rank(s, is_batching=self._origin.is_batching) for s in plan.signature.outputs}
        self._outputs = {name: (slot, ranks.get(name)) for name, slot in plan.root.outputs}
        self._pruned_roots: dict[frozenset[str], Node] = {}
        limits_ms = [limit for limit in (plan.timeout_ms, plan.root.timeout_ms) if limit]
        self._timeout_ns = min(limits_ms, default=0) * 1_000_000

    async def execute(self, call: InferCall, context: CallContext) -> InferResult:
        """The graph's answer to a valid call.

        The path is added to ``context.trailing_metadata``, also when the request fails or is cancelled. An output that
        has no value, because it repeats an optional input that is absent, is left out.

        Raises:
            WeftError: As a step, a condition or a combine raised it; the message says where in the graph.

        Cancelling the awaiting task cancels every call in flight; no task is left.
        """
        start_ns = time.monotonic_ns()
        plan = self.plan
        root = plan.root
        deadline_ns = context.deadline_ns
        if self._timeout_ns:
            deadline_ns = earlier(deadline_ns, start_ns + self._timeout_ns)
        is_traced = telemetry.is_enabled()
        priority, _ = scheduling_parameters(call.parameters)
        scope = RequestScope(call.parameters, context.headers, call.request_id, priority, deadline_ns)
        request = GraphRequest(scope, forwarded_headers(context.headers, is_traced=is_traced), is_traced)
        frame: Frame = [None] * root.num_slots
        inputs = call.inputs
        for name, slot in root.inputs:
            frame[slot] = inputs.get(name)
        run = NodeRun(root.name, root.kind)
        try:
            await self._root_for(call.outputs).run(frame, request, deadline_ns, context.trace_context, run)
        finally:
            context.trailing_metadata.append((PATH_HEADER, path_text(run)))
        parameters = request.response_parameters
        if call.parameters and call.parameters.get(TRACE_PARAMETER) is True:
            parameters[TRACE_PARAMETER] = trace_text(run, start_ns)
        outputs: dict[str, WireTensor] = {}
        for name in [output.name for output in call.outputs] or self._outputs:
            slot, rank = self._outputs[name]
            tensor = frame[slot]
            if tensor is not None:
                outputs[name] = tensor if rank is None or len(tensor.shape) == rank else fitted_output(tensor, rank)
        return InferResult(plan.signature.name, plan.signature.version, call.request_id, parameters, outputs)

    def _root_for(self, requested: Sequence[RequestedOutput]) -> Node:
        """The root with the steps that the requested outputs need; none requested means all."""
        root = self._root
        if not requested or not isinstance(root, SequenceNode):
            return root
        wanted = frozenset(output.name for output in requested)
        found = self._pruned_roots.get(wanted)
        if found is None:
            if len(self._pruned_roots) >= MAX_PRUNED_ROOTS:
                return root
            found = self._pruned_roots[wanted] = root.for_outputs(wanted)
        return found

    def _make_node(self, plan: NodePlan) -> Node:
        steps = [self._make_step(step) for step in plan.steps]
        match plan.kind:
            case NodeKind.SEQUENCE:
                return SequenceNode(plan, steps)
            case NodeKind.SWITCH:
                return SwitchNode(plan, steps, self._origin)
            case NodeKind.SPLITTER:
                return SplitterNode(plan, steps, self._origin, self._generator)
            case NodeKind.ENSEMBLE:
                return EnsembleNode(plan, steps, self._origin)

    def _make_step(self, plan: StepPlan) -> Step:
        if isinstance(plan.action, CallPlan):
            return CallStep(plan, plan.action, self._targets[plan.action.target], self._origin)
        return NodeStep(plan, self._make_node(plan.action), self._origin)


def calls_of(node: NodePlan) -> Iterator[CallPlan]:
    """Every call that a node can make, nested nodes included, in declared order."""
    for step in node.steps:
        if isinstance(step.action, CallPlan):
            yield step.action
        else:
            yield from calls_of(step.action)


def nested_graphs_of(node: NodePlan) -> Iterator[str]:
    """Names of the graphs that were inlined into a node."""
    for step in node.steps:
        if isinstance(step.action, NodePlan):
            if step.action.graph:
                yield step.action.graph.rpartition("/")[0]
            yield from nested_graphs_of(step.action)
