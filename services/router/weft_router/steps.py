"""One step of a running graph: a call of a model, or a node in the step's place."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft_common import telemetry
from weft_common.core import CallContext, InferCall, ParameterValue, RequestedOutput
from weft_common.errors import InternalError, WeftError
from weft_common.logs import get_logger
from weft_common.tensors import WireTensor
from weft_router.adaption import fitted_input, full_rank, restored_outputs
from weft_router.answers import misfit
from weft_router.graph.plan import CallPlan, Frame, NodeKind, NodePlan, RequestScope, StepPlan
from weft_router.report import NodeRun, StepRun
from weft_router.spans import call_attributes, step_attributes, step_span
from weft_router.targets import Target

if TYPE_CHECKING:
    from opentelemetry.context import Context

_BRANCHING = (NodeKind.SWITCH, NodeKind.SPLITTER)

_log = get_logger("weft.router")


@dataclass(slots=True)
class GraphRequest:
    """One request on its way through a graph.

    Attributes:
        scope: What conditions see of it.
        headers: The client's metadata that every step receives.
        is_traced: Whether spans are recorded.
        response_parameters: Of all steps so far; the later step wins.
    """

    scope: RequestScope
    headers: Mapping[str, str]
    is_traced: bool = False
    response_parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """The graph, for error messages.

    Attributes:
        prefix: ``"sentiment/1: "``, or ``"in ensemble 'sentiment', "`` where Triton's texts are kept.
        is_batching: Whether tensors of the graph have a batch dimension.
    """

    prefix: str
    is_batching: bool

    def place(self, error: WeftError, where: str) -> WeftError:
        """The same error, its message telling where in the graph it happened."""
        placed = error.with_message(f"{self.prefix}{where}: {error.message}")
        if isinstance(placed, InternalError):
            _log.error("%s", placed.message, extra={"error_id": placed.error_id})
        return placed


class Node(ABC):
    """A node that can run.

    Attributes:
        plan: What it was made of.
    """

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.timeout_ns = plan.timeout_ms * 1_000_000

    @abstractmethod
    async def run(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, parent: "Context | None", run: NodeRun
    ) -> None:
        """The node's outputs are in ``frame``.

        Args:
            frame: The node's own, its inputs filled in.
            request: The request that runs.
            deadline_ns: On ``time.monotonic_ns``; None without deadline.
            parent: Trace context of the spans made here.
            run: Receives the steps as they start.

        Raises:
            WeftError: A step failed, no branch matches, or answers cannot be combined; the message says where.

        No task is left when it returns, raises or is cancelled.
        """


class Step(ABC):
    """A step that can run.

    Args:
        plan: What it is made of.
        origin: The graph, for messages.
    """

    kind = telemetry.INTERNAL

    def __init__(self, plan: StepPlan, origin: Origin) -> None:
        self.plan = plan
        self.origin = origin
        self.timeout_ns = plan.timeout_ms * 1_000_000
        self.span_attributes = step_attributes(plan.name, plan.path)

    async def run(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, parent: "Context | None", run: NodeRun
    ) -> None:
        """The step's outputs are in ``frame``; arguments, errors and cancellation as in ``Node.run``."""
        record = self._record(time.monotonic_ns())
        run.steps.append(record)
        if self.timeout_ns:
            deadline_ns = earlier(deadline_ns, record.start_ns + self.timeout_ns)
        if request.is_traced:
            await self._run_traced(frame, request, deadline_ns, parent, record)
        else:
            await self._run(frame, request, deadline_ns, parent, record)

    async def _run_traced(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, parent: "Context | None", record: StepRun
    ) -> None:
        with step_span(self.plan.path, self.kind, self.span_attributes, parent) as (span, context):
            try:
                await self._run(frame, request, deadline_ns, context, record)
            finally:
                if record.node is not None and record.node.steps and record.node.kind in _BRANCHING:
                    span.set_attribute("weft.branch", record.node.steps[0].name)

    async def _run(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, context: "Context | None", record: StepRun
    ) -> None:
        try:
            await self._act(frame, request, deadline_ns, context, record)
            record.status = "OK"
        except WeftError as error:
            record.status = error.code
            raise
        except Exception:
            record.status = "INTERNAL"
            raise
        finally:
            record.end_ns = time.monotonic_ns()

    @abstractmethod
    def _record(self, start_ns: int) -> StepRun: ...

    @abstractmethod
    async def _act(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, context: "Context | None", record: StepRun
    ) -> None: ...


class CallStep(Step):
    """Calls a model; tensors go from answer to call as they are.

    Args:
        plan: What it is made of.
        action: The call.
        target: Answers it.
        origin: The graph, for messages.
    """

    kind = telemetry.CLIENT

    def __init__(self, plan: StepPlan, action: CallPlan, target: Target, origin: Origin) -> None:
        super().__init__(plan, origin)
        self._target = target
        self._signature = signature = action.signature
        self._model = action.model_name
        self._version = action.model_version
        self._shown_version = action.model_version or signature.version
        is_batching = signature.max_batch_size > 0
        ranks = {spec.name: full_rank(spec, is_batching=is_batching) for spec in signature.inputs}
        self._inputs = [(name, slot, ranks.get(name)) for name, slot in plan.inputs]
        declared = {spec.name: spec for spec in signature.outputs}
        self._outputs = [(name, slot, declared[name]) for name, slot in plan.outputs]
        self._requested = tuple(RequestedOutput(binding.name, {}) for binding in plan.outputs)
        self._is_batching = is_batching
        self._restores = is_batching != origin.is_batching
        self._where = f"{plan.path} -> {self._model}@{self._shown_version}"
        self.span_attributes |= call_attributes(self._model, self._shown_version, target)

    def _record(self, start_ns: int) -> StepRun:
        return StepRun(
            self.plan.name,
            self.plan.path,
            start_ns,
            target=self._target.name,
            model=self._model,
            version=self._shown_version,
        )

    async def _act(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, context: "Context | None", record: StepRun
    ) -> None:
        try:
            inputs, is_fitted = self._gather(frame)
            scope = request.scope
            result = await self._target.infer(
                InferCall(self._model, self._version, scope.request_id, scope.parameters, inputs, self._requested),
                CallContext(deadline_ns, request.headers, [], context, record.start_ns),
            )
            self._store(result.outputs, frame, is_fitted=is_fitted)
        except WeftError as error:
            raise self.origin.place(error, self._where) from error
        if result.model_version:
            record.version = result.model_version
        if result.parameters:
            request.response_parameters.update(result.parameters)

    def _gather(self, frame: Frame) -> tuple[dict[str, WireTensor], bool]:
        """The call's inputs, and whether the batch dimension of one had to be added or taken away."""
        inputs: dict[str, WireTensor] = {}
        is_fitted = False
        for name, slot, rank in self._inputs:
            tensor = frame[slot]
            if tensor is None:
                continue
            if rank is not None and len(tensor.shape) != rank:
                tensor = fitted_input(tensor, rank, self._signature, name)
                is_fitted = True
            inputs[name] = tensor
        return inputs, is_fitted

    def _store(self, outputs: dict[str, WireTensor], frame: Frame, *, is_fitted: bool) -> None:
        """Check the answer against what the model declares, and put it into the frame."""
        restored = restored_outputs(outputs, self._signature) if is_fitted and self._restores else outputs
        for name, slot, spec in self._outputs:
            tensor = outputs.get(name)
            if tensor is None:
                raise InternalError(
                    f"output '{name}' of step '{self.plan.name}' is missing in the answer, which has "
                    f"{', '.join(outputs) or 'no output'}; model '{self._model}' declares it"
                )
            if fault := misfit(tensor, spec, has_batch=self._is_batching):
                raise InternalError(f"output '{name}' of model '{self._model}' is not as it declares: {fault}")
            frame[slot] = restored[name]


class NodeStep(Step):
    """Runs a node in a frame of its own.

    Args:
        plan: What it is made of.
        node: Runs in the step's place.
        origin: The graph, for messages.
    """

    def __init__(self, plan: StepPlan, node: Node, origin: Origin) -> None:
        super().__init__(plan, origin)
        self._node = node
        inner_inputs = dict(node.plan.inputs)
        inner_outputs = dict(node.plan.outputs)
        self._inputs = [(outer, inner_inputs[name]) for name, outer in plan.inputs]
        self._outputs = [(inner_outputs[name], outer) for name, outer in plan.outputs]
        if node.timeout_ns:
            self.timeout_ns = min(self.timeout_ns or node.timeout_ns, node.timeout_ns)

    def _record(self, start_ns: int) -> StepRun:
        return StepRun(self.plan.name, self.plan.path, start_ns)

    async def _act(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, context: "Context | None", record: StepRun
    ) -> None:
        run = record.node = NodeRun(self._node.plan.name, self._node.plan.kind)
        inner: Frame = [None] * self._node.plan.num_slots
        for outer_slot, slot in self._inputs:
            inner[slot] = frame[outer_slot]
        await self._node.run(inner, request, deadline_ns, context, run)
        for slot, outer_slot in self._outputs:
            frame[outer_slot] = inner[slot]


def earlier(deadline_ns: int | None, limit_ns: int) -> int:
    """The earlier of a deadline, which may be absent, and a limit."""
    return limit_ns if deadline_ns is None or limit_ns < deadline_ns else deadline_ns
