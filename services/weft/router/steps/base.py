"""Interfaces: a node runs steps, a step runs an action, an action may run a node again."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.base.errors import InternalError, InvalidArgumentError, RemoteError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.language.plan import Condition, NodePlan
from weft.router.reporting.path import StepRecord
from weft.router.reporting.spans import Attributes
from weft.router.steps.responses import close_streams, responses_of
from weft.router.steps.run import Run

if TYPE_CHECKING:
    from weft.router.steps.step import Step

_log = get_logger("weft.router")


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

    def holds(self, test: Condition, run: Run, where: str) -> bool:
        """Whether a test holds. Raises ConditionFailedError, its message placed at ``where``."""
        try:
            return test.evaluate(run.frame, run.request.scope) is True
        except InvalidArgumentError as error:
            raise self.failed(error, where) from error

    def text(self, condition: Condition, run: Run, where: str) -> str:
        """Text of a condition that is no test; errors as of ``holds``."""
        try:
            return str(condition.evaluate(run.frame, run.request.scope))
        except InvalidArgumentError as error:
            raise self.failed(error, where) from error

    def failed(self, error: InvalidArgumentError, where: str) -> ConditionFailedError:
        """The error of a condition, placed at ``where``."""
        return ConditionFailedError(f"{self.prefix}{where}: {error.message}")


class Node(ABC):
    """A node that can run.

    Attributes:
        plan: What it was made of.
        chain: Its steps in order, where each waits for the one before alone; None elsewhere.
    """

    chain: "tuple[Step, ...] | None" = None

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.timeout_ns = plan.timeout_ms * 1_000_000

    @abstractmethod
    async def run(self, run: Run) -> None:
        """Write the node's outputs into the frame of ``run``.

        Args:
            run: Of this node; its frame has the inputs.

        Raises:
            WeftError: A step failed, no branch matches, or answers cannot be combined; the message says where.

        Where it streams, its first response is written, and the request has the rest: close that unless this raises.

        No task is left when it returns, raises or is cancelled, but for those of the request's stream.
        """

    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        """The node's responses as they are made; of one that does not stream it is one.

        Each is a run: its frame has the outputs, its request what the steps collected.

        Args:
            run: Of this node. Its record shows each step once: as it ran for the first response, or for the one that
                failed.

        Raises:
            WeftError: As of ``run``, after the responses that were made before.

        Closing the generator, or cancelling the task that awaits it, cancels every call in work; no task is left.
        """
        try:
            await self.run(run)
            async with contextlib.aclosing(responses_of(run)) as responses:
                async for response in responses:
                    yield response
        finally:
            await close_streams((run,))


class PrunableNode(Node):
    """A node that can leave steps out whose outputs nothing reads."""

    @abstractmethod
    def only(self, live: Collection[int]) -> "PrunableNode":
        """The same node with the steps ``live``, ascending indexes, alone; itself where these are all."""


class Action(ABC):
    """What a step does: a call, a node, or a policy around another action.

    Attributes:
        kind: Of the span.
        target, model, version: Of a call, for reports; "" elsewhere.
        where: Path of the step, and model, for messages.
        span_attributes: Attributes of its span, in addition to the step's name and path.
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
    async def act(self, run: Run, record: StepRecord) -> None:
        """Write the step's outputs into the frame, response parameters into the request, and the rest into ``record``.

        Args:
            run: Of the node around the step, the step's own timeout worked in; of its frame nothing but the step's
                output slots is written.
            record: Of the step.

        Raises:
            WeftError: It failed; the message says where in the graph.

        Cancelling the awaiting task cancels every call in work; no task is left.
        """


class PolicyAction(Action):
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
