"""A node in the place of a call."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weft_common.errors import WeftError
from weft_common.tensors import WireTensor
from weft_router.admission import InflightLimit
from weft_router.graph.plan import Frame, StepPlan
from weft_router.reporting.path import NodeRun, StepRun
from weft_router.steps.base import Action, ErrorContext, GraphRequest, Node, earlier

if TYPE_CHECKING:
    from opentelemetry.context import Context


class NodeAction(Action):
    """Runs a node in a frame of its own; its outputs are handed on when it has ended well.

    Args:
        plan: The step that runs the node.
        node: Runs in the step's place.
        error_context: The graph, for messages.
        clock_ns: What deadlines are measured on.
        admission: Of the node; None where ``max_inflight`` is 0.
        is_tentative: A failure does not end the request, so what steps inside collected is dropped with it.
    """

    def __init__(
        self,
        plan: StepPlan,
        node: Node,
        error_context: ErrorContext,
        clock_ns: Callable[[], int],
        *,
        admission: InflightLimit | None = None,
        is_tentative: bool = False,
    ) -> None:
        super().__init__(plan.path)
        self._node = node
        self._error_context = error_context
        self._clock_ns = clock_ns
        self._admission = admission
        self._is_tentative = is_tentative
        self._timeout_ns = node.timeout_ns
        inner_inputs = dict(node.plan.inputs)
        inner_outputs = dict(node.plan.outputs)
        self._path = plan.path
        self._inner_outputs = inner_outputs
        self._inputs = [(outer, inner_inputs[name]) for name, outer in plan.inputs]
        self._outputs = [(inner_outputs[name], outer) for name, outer in plan.outputs]

    async def act(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, context: "Context | None", record: StepRun
    ) -> None:
        """As ``Action.act``; every run has a frame of its own."""
        plan = self._node.plan
        run = record.node = NodeRun(plan.name, plan.kind)
        inner: Frame = [None] * plan.num_slots
        for outer_slot, slot in self._inputs:
            inner[slot] = frame[outer_slot]
        if self._timeout_ns:
            deadline_ns = earlier(deadline_ns, self._clock_ns() + self._timeout_ns)
        own = request.fork() if self._is_tentative else request
        if self._admission is None:
            await self._node.run(inner, own, deadline_ns, context, run)
        else:
            await self._run_admitted(self._admission, inner, own, deadline_ns, context, run)
        if own is not request:
            request.merge(own)
        for slot, outer_slot in self._outputs:
            frame[outer_slot] = inner[slot]
        if request.captures is not None:
            self._capture(request.captures.get(self._path, ()), inner, request.captured)

    def _capture(self, names: Sequence[str], inner: Frame, captured: dict[str, WireTensor]) -> None:
        """Put outputs aside that the client asked for by the step's path."""
        for name in names:
            tensor = inner[self._inner_outputs[name]]
            if tensor is not None:
                captured[f"{self._path}/{name}"] = tensor

    async def _run_admitted(
        self,
        admission: InflightLimit,
        inner: Frame,
        request: GraphRequest,
        deadline_ns: int | None,
        context: "Context | None",
        run: NodeRun,
    ) -> None:
        start_ns = self._clock_ns()
        try:
            admission.enter()
        except WeftError as error:
            raise self._error_context.wrap(error, self.where) from error
        try:
            await self._node.run(inner, request, deadline_ns, context, run)
        finally:
            admission.leave(self._clock_ns() - start_ns)
