"""A node that runs in a step's place."""

from collections.abc import Callable, Sequence

from weft.base.errors import InternalError, WeftError
from weft.base.tensors import WireTensor
from weft.language.plan import Frame, NodePlan, StepPlan
from weft.router.admission import InflightLimit
from weft.router.reporting.path import NodeRecord, StepRecord
from weft.router.steps.base import Action, ErrorContext, Node
from weft.router.steps.defaults import Defaults
from weft.router.steps.reshaping import reshape_slots
from weft.router.steps.run import GraphRequest, Run, earlier


class NodeAction(Action):
    """Runs a node in a frame of its own; its outputs are handed on when it has ended well.

    Args:
        plan: The step that runs the node.
        node: Runs in the step's place.
        error_context: The graph, for messages.
        clock_ns: What deadlines are measured on.
        around: The node around the step.
        admission: Of the node; None where ``max_inflight`` is 0.
        is_tentative: A failure does not end the request, so what steps inside collected is dropped with it.
    """

    def __init__(
        self,
        plan: StepPlan,
        node: Node,
        error_context: ErrorContext,
        clock_ns: Callable[[], int],
        around: NodePlan,
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
        self._defaults = Defaults(plan, around) if plan.defaults else None
        slots = dict(self._outputs)
        self._reshaped_inputs = node.plan.reshaped_inputs
        self._reshaped_outputs = [
            one._replace(slot=slots[one.slot]) for one in node.plan.reshaped_outputs if one.slot in slots
        ]
        self._checks_rows = plan.keeps_rows and not all(step.keeps_rows for step in node.plan.steps)

    async def act(self, run: Run, record: StepRecord) -> None:
        """As ``Action.act``; every run has a frame of its own."""
        request = run.request
        inner = self._inner(run, record, request.fork() if self._is_tentative else request)
        if self._admission is None:
            await self._node.run(inner)
        else:
            await self._run_admitted(self._admission, inner)
        if inner.request is not request:
            request.merge(inner.request)
        if self._checks_rows:
            self._check_rows(inner.frame)
        self.hand_on(inner, run, request.captured)

    def hand_on(self, inner: Run, run: Run, captured: dict[str, WireTensor]) -> None:
        """The node's outputs are in the frame around it, those that the client requested in ``captured`` as well."""
        frame, outer, captures = inner.frame, run.frame, run.request.captures
        for slot, outer_slot in self._outputs:
            outer[outer_slot] = frame[slot]
        if self._reshaped_outputs:
            reshape_slots(outer, self._reshaped_outputs)
        if self._defaults is not None:
            self._defaults.complete(outer)
        if captures is not None:
            self._capture(captures.get(self._path, ()), frame, captured)

    def _inner(self, run: Run, record: StepRecord, request: GraphRequest) -> Run:
        """The run of the node for ``request``, its inputs in a frame of its own."""
        plan, outer = self._node.plan, run.frame
        record.node = NodeRecord(plan.name, plan.path_form)
        frame: Frame = [None] * plan.num_slots
        for outer_slot, slot in self._inputs:
            frame[slot] = outer[outer_slot]
        if self._reshaped_inputs:
            reshape_slots(frame, self._reshaped_inputs)
        deadline_ns = run.deadline_ns
        if self._timeout_ns:
            deadline_ns = earlier(deadline_ns, self._clock_ns() + self._timeout_ns)
        return Run(frame, request, deadline_ns, run.context, record.node)

    def _check_rows(self, frame: Frame) -> None:
        """The node, an ensemble whose steps may change the batch size, has not changed it. Raises InternalError."""
        if not self._error_context.is_batching:
            return
        plan = self._node.plan
        rows = next((tensor.shape[0] for _, slot in plan.inputs if (tensor := frame[slot]) and tensor.shape), -1)
        for name, slot in plan.outputs:
            tensor = frame[slot]
            if rows >= 0 and tensor is not None and tensor.shape and tensor.shape[0] != rows:
                error = InternalError(
                    f"output '{name}' of ensemble '{plan.graph}' has batch size {tensor.shape[0]}, that of the request "
                    f"is {rows}; a step of a graph gives as many rows as it gets, alone an ensemble may change that"
                )
                raise self._error_context.wrap(error, self.where)

    def _capture(self, names: Sequence[str], frame: Frame, captured: dict[str, WireTensor]) -> None:
        """Keep outputs that the client requested by the step's path."""
        for name in names:
            tensor = frame[self._inner_outputs[name]]
            if tensor is not None:
                captured[f"{self._path}/{name}"] = tensor

    async def _run_admitted(self, admission: InflightLimit, run: Run) -> None:
        start_ns = self._clock_ns()
        try:
            admission.enter()
        except WeftError as error:
            raise self._error_context.wrap(error, self.where) from error
        try:
            await self._node.run(run)
        finally:
            admission.leave(self._clock_ns() - start_ns)
