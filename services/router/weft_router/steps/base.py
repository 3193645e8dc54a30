"""What nodes and steps are to one another: a node runs steps, a step runs an action, an action may be a node again."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft_common.core import ParameterValue
from weft_common.errors import InternalError, InvalidArgumentError, RemoteError, WeftError
from weft_common.observing import telemetry
from weft_common.observing.logs import get_logger
from weft_common.tensors import WireTensor
from weft_router.graph.plan import Condition, Frame, NodePlan, RequestScope
from weft_router.reporting.path import NodeRun, StepRun
from weft_router.reporting.spans import Attributes

if TYPE_CHECKING:
    from opentelemetry.context import Context

    #: What a step is run with.
    RunArguments = tuple[Frame, "GraphRequest", int | None, Context | None, NodeRun]

_log = get_logger("weft.router")


@dataclass(slots=True)
class GraphRequest:
    """One request on its way through a graph.

    Attributes:
        scope: What conditions see of it.
        headers: The client's metadata that every step receives.
        is_traced: Whether spans are recorded.
        response_parameters: Of all steps so far; the later step wins.
        pins: Splitter -> the step that it must take; None where the request leaves that to chance.
        captures: Path of a step -> outputs of its target that the client asked for; None where it asked for none.
        captured: What was asked for, by ``<path>/<output>``.
        is_collected: Decoupled models are called for one response with everything.
    """

    scope: RequestScope
    headers: Mapping[str, str]
    is_traced: bool = False
    response_parameters: dict[str, ParameterValue] = field(default_factory=dict)
    pins: Mapping[str, str] | None = None
    captures: Mapping[str, tuple[str, ...]] | None = None
    captured: dict[str, WireTensor] = field(default_factory=dict)
    is_collected: bool = False

    @property
    def is_in_sequence(self) -> bool:
        """Whether it is one of a sequence, whose model remembers the requests before it."""
        return bool(self.scope.parameters.get("sequence_id"))

    def fork(self) -> "GraphRequest":
        """The same request for an attempt that may come to nothing: what it collects is its own until ``merge``."""
        return GraphRequest(
            self.scope,
            self.headers,
            self.is_traced,
            pins=self.pins,
            captures=self.captures,
            is_collected=self.is_collected,
        )

    def merge(self, attempt: "GraphRequest") -> None:
        """What a fork has collected belongs to this request."""
        self.response_parameters.update(attempt.response_parameters)
        self.captured.update(attempt.captured)


class ConditionFailedError(InvalidArgumentError):
    """A condition of a step cannot be evaluated; this fails the request, whatever the step's policies are."""


@dataclass(frozen=True, slots=True)
class ErrorContext:
    """The graph, for error messages and counters.

    Attributes:
        prefix: ``"sentiment/1: "``, or ``"in ensemble 'sentiment', "`` where Triton Inference Server's texts are kept.
        is_batching: Whether tensors of the graph have a batch dimension.
        graph, version: Its name and version.
    """

    prefix: str
    is_batching: bool
    graph: str = ""
    version: str = ""

    def wrap(self, error: WeftError, where: str) -> WeftError:
        """The same error, its message telling where in the graph it happened."""
        placed = error.with_message(f"{self.prefix}{where}: {error.message}")
        placed.is_refused = placed.is_refused and isinstance(placed, RemoteError)  # a graph that has run was begun
        if isinstance(placed, InternalError):
            _log.error("%s", placed.message, extra={"error_id": placed.error_id})
        return placed

    def holds(self, test: Condition, frame: Frame, scope: RequestScope, where: str) -> bool:
        """Whether a test holds. Raises ConditionFailedError, its message placed at ``where``."""
        try:
            return test.evaluate(frame, scope) is True
        except InvalidArgumentError as error:
            raise self.failed(error, where) from error

    def text(self, condition: Condition, frame: Frame, scope: RequestScope, where: str) -> str:
        """Text of a condition that is no test; errors as of ``holds``."""
        try:
            return str(condition.evaluate(frame, scope))
        except InvalidArgumentError as error:
            raise self.failed(error, where) from error

    def failed(self, error: InvalidArgumentError, where: str) -> ConditionFailedError:
        """The error of a condition, placed at ``where``."""
        return ConditionFailedError(f"{self.prefix}{where}: {error.message}")


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
            deadline_ns: On the runtime's clock; None without deadline. The node's own is worked in.
            parent: Trace context of the spans made here.
            run: Receives the steps as they start.

        Raises:
            WeftError: A step failed, no branch matches, or answers cannot be combined; the message says where.

        No task is left when it returns, raises or is cancelled.
        """


class Action(ABC):
    """What a step does: a call, a node, or a policy around another action.

    Attributes:
        kind: Of the span.
        target, model, version: Of a call, for reports; "" elsewhere.
        where: Path of the step, and model, for messages.
        span_attributes: What its span says beside the step's name and path.
    """

    kind = telemetry.INTERNAL

    def __init__(
        self, where: str, *, target: str = "", model: str = "", version: str = "", attributes: Attributes | None = None
    ) -> None:
        self.where = where
        self.target = target
        self.model = model
        self.version = version
        self.span_attributes: Attributes = attributes or {}

    @abstractmethod
    async def act(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, context: "Context | None", record: StepRun
    ) -> None:
        """The step's outputs are in ``frame``, and what the answer says beside is in ``request`` and ``record``.

        Args:
            frame: Of the node around the step; nothing but the step's output slots is written.
            request: The request that runs.
            deadline_ns: On the runtime's clock; the step's own timeout is worked in.
            context: Trace context of the spans made here.
            record: Of the step.

        Raises:
            WeftError: It failed; the message says where in the graph.

        Cancelling the awaiting task cancels every call in work; no task is left.
        """


class StepPolicy(Action):
    """An action that decides when and how often another one acts.

    Args:
        action: The other one.
    """

    def __init__(self, action: Action) -> None:
        super().__init__(
            action.where,
            target=action.target,
            model=action.model,
            version=action.version,
            attributes=action.span_attributes,
        )
        self._action = action


def earlier(deadline_ns: int | None, limit_ns: int) -> int:
    """The earlier of a deadline, which may be absent, and a limit."""
    return limit_ns if deadline_ns is None or limit_ns < deadline_ns else deadline_ns
