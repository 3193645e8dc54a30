"""Actions of steps: the base classes, the wrappers for limits and attempts, errors and defaults."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from typing_extensions import override

from weft.base.errors import DeadlineExceededError, InternalError, InvalidArgumentError, RemoteError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.base.tensors import WireTensor
from weft.language.plan import Condition, Frame, NodePlan, PolicyPlan, StepPlan
from weft.router.admission.concurrency_limit import InflightLimit
from weft.router.reporting.counters import StepCounters
from weft.router.reporting.path import NodeRecord, StepRecord
from weft.router.reporting.spans import Attributes, end_span, start_step_span, step_attributes
from weft.router.runtime import Runtime
from weft.router.steps.responses import StepStream, stream_of
from weft.router.steps.run import Run

_NS_PER_MS = 1_000_000

_log = get_logger("weft.router")


class ConditionFailedError(InvalidArgumentError):
    """A condition of a step cannot be evaluated; fails the request whatever the step's policies are."""


@dataclass(frozen=True, slots=True)
class ErrorContext:
    """Places errors in a graph: adds its name and the step to messages.

    Attributes:
        prefix: ``"sentiment/1: "``, or ``"in ensemble 'sentiment', "`` for ensembles of Triton Inference Server.
        begins_with_text: Whether the place of a step comes last, as clients of those know its text.
        is_batching: Whether tensors of the graph have a batch dimension.
    """

    prefix: str
    is_batching: bool
    graph: str = ""
    version: str = ""
    begins_with_text: bool = False

    def wrap(self, error: WeftError, where: str) -> WeftError:
        """Add its place in the graph to the error's message."""
        text = f"{error.message}; at {where}" if self.begins_with_text else f"{where}: {error.message}"
        placed = error.with_message(f"{self.prefix}{text}")
        placed.is_refused = placed.is_refused and isinstance(placed, RemoteError)  # a graph that has run was begun
        if isinstance(placed, InternalError):
            _log.error("%s", placed.message, extra={"error_id": placed.error_id})
        return placed

    def holds(self, test: Condition, run: Run, where: str) -> bool:
        """Evaluate a test. Raises ConditionFailedError placed at ``where``."""
        try:
            return test.evaluate(run.frame, run.request.scope) is True
        except InvalidArgumentError as error:
            raise self.failed(error, where) from error

    def text(self, condition: Condition, run: Run, where: str) -> str:
        """Evaluate a condition to text; errors as of ``holds``."""
        try:
            return str(condition.evaluate(run.frame, run.request.scope))
        except InvalidArgumentError as error:
            raise self.failed(error, where) from error

    def failed(self, error: InvalidArgumentError, where: str) -> ConditionFailedError:
        """Make the error of a condition, placed at ``where``."""
        return ConditionFailedError(f"{self.prefix}{where}: {error.message}")


class Defaults:
    """Writes the default outputs of a step to frames, if its answer, or some outputs of it, are missing."""

    def __init__(self, plan: StepPlan, node: NodePlan) -> None:
        self._absent = {slot for _, slot in plan.outputs} | {slot for slot, _, _ in plan.defaults}
        if plan.ok_slot >= 0:
            self._absent.add(plan.ok_slot)
        self._defaults = plan.defaults
        specs = node.specs
        self._inputs = [(slot, len(specs[slot].dims) + 1 if slot in specs else 0) for slot in node.counting_slots]

    def fill(self, frame: Frame) -> None:
        """Set the step's outputs to their defaults, or to absent, and its ok slot to absent."""
        for slot in self._absent:
            frame[slot] = None
        self.complete(frame)

    def complete(self, frame: Frame) -> None:
        """Set the outputs missing from the step's answer to their defaults."""
        for slot, tensor, is_batched in self._defaults:
            if frame[slot] is None:
                num_rows = self._num_rows(frame) if is_batched else 1
                frame[slot] = repeated(tensor, num_rows)

    def _num_rows(self, frame: Frame) -> int:
        for slot, rank in self._inputs:
            tensor = frame[slot]
            if tensor is not None and tensor.shape and rank in (0, len(tensor.shape)):
                return tensor.shape[0]
        return 1


def repeated(row: WireTensor, num_rows: int) -> WireTensor:
    """A tensor of so many equal rows, of one with a leading dimension of 1."""
    if num_rows == 1:
        return row
    return WireTensor(row.datatype, (num_rows, *row.shape[1:]), row.data * num_rows)


class Action(ABC):
    """The work of a step: a call, a node, or a wrapper around another action.

    Attributes:
        target, model, version: Of a call, for reports; else "".
    """

    kind = telemetry.INTERNAL

    def __init__(
        self, where: str, target: str = "", model: str = "", version: str = "", attributes: Attributes | None = None
    ) -> None:
        self.where = where
        self.target = target
        self.model = model
        self.version = version
        self.span_attributes: Attributes = attributes or {}

    @abstractmethod
    async def act(self, run: Run, record: StepRecord) -> None:
        """Write the step's outputs to the frame, response parameters to the request, and the rest to ``record``.

        ``run`` belongs to the node around the step; its deadline includes the step's timeout. If the action streams,
        the first response is written and the request holds the open stream, which the caller must close unless this
        raises. Raises WeftError, which says where in the graph. Cancelling the awaiting task cancels every call; no
        task is left.
        """


class PolicyParts(NamedTuple):
    """Objects that a policy needs to wrap an action, besides its plan."""

    step: StepPlan
    error_context: ErrorContext
    runtime: Runtime
    counters: StepCounters


class StepPolicyPlan(PolicyPlan):
    """The plan of a policy of ``weft.router.policies`` for one step."""

    __slots__ = ()

    @abstractmethod
    def wrap(self, action: Action, parts: PolicyParts) -> Action:
        """Wrap this policy around an action; called once, at load."""


class PolicyAction(Action):
    """An action that wraps another and decides when and how often it runs."""

    def __init__(self, action: Action) -> None:
        super().__init__(action.where, action.target, action.model, action.version, action.span_attributes)
        self._action = action


class Attempt(PolicyAction):
    """Runs the action as one attempt of several: counts it and gives it a span of its own."""

    def __init__(self, action: Action, name: str, path: str) -> None:
        super().__init__(action)
        self._path = path
        self._attributes = step_attributes(name, path) | action.span_attributes

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        record.attempts += 1
        if record.tried is None:
            record.tried = []
        if not run.request.is_traced:
            await self._action.act(run, record)
            return
        attributes = self._attributes | {"weft.attempt": record.attempts}
        span = start_step_span(f"{self._path} attempt", self._action.kind, attributes, run.context)
        try:
            await self._action.act(run.under(telemetry.context_of(span, run.context)), record)
        except BaseException as error:
            end_span(span, error)
            raise
        stream = stream_of(record, run)
        if stream is None:
            end_span(span)
        else:
            stream.when_over(partial(end_span, span))


class Limited(PolicyAction):
    """Runs the action within the limits of a step or node.

    Args:
        inflight: Limits concurrent runs, a stream as long as it is open; None: no limit.
        min_remaining_ms: Fail without acting if less time is left; 0: no limit.
        node: The limited node, if a refused node shall appear in the path.
    """

    def __init__(
        self,
        action: Action,
        error_context: ErrorContext,
        clock_ns: Callable[[], int],
        inflight: InflightLimit | None,
        min_remaining_ms: int = 0,
        timeout_ms: int = 0,
        node: NodePlan | None = None,
    ) -> None:
        super().__init__(action)
        self.kind = action.kind
        self._node = node
        self._error_context = error_context
        self._clock_ns = clock_ns
        self._inflight = inflight
        self._min_remaining_ms = min_remaining_ms
        self._timeout_ns = timeout_ms * _NS_PER_MS

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        start_ns, inflight = self._clock_ns(), self._inflight
        if inflight is not None:
            try:
                inflight.enter()
            except WeftError as refusal:
                if self._node is not None:
                    record.node = NodeRecord(self._node.name, self._node.path_form)
                raise self._error_context.wrap(refusal, self.where) from refusal
        stream: StepStream | None = None
        try:
            if self._min_remaining_ms and run.deadline_ns is not None:
                left_ms, needed_ms = (run.deadline_ns - start_ns) / _NS_PER_MS, self._min_remaining_ms
                if left_ms < needed_ms:
                    error = DeadlineExceededError(
                        f"{max(left_ms, 0):.0f} ms are left, and 'min_remaining_ms' of the step asks for {needed_ms}; "
                        "it was not called"
                    )
                    raise self._error_context.wrap(error, self.where)
            if self._timeout_ns:
                run = run.until(start_ns + self._timeout_ns)
            await self._action.act(run, record)
            stream = stream_of(record, run)
        finally:
            if inflight is not None:
                if stream is None:
                    inflight.leave(self._clock_ns() - start_ns)
                else:
                    stream.when_over(lambda _: inflight.leave(self._clock_ns() - start_ns))
