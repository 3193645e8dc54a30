"""The four kinds of node: what runs when, and which answer counts."""

import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from weft_common.errors import InternalError, InvalidArgumentError, WeftError
from weft_common.tensors import WireTensor
from weft_router.combine import average, concat, vote
from weft_router.fork import Fork, Race
from weft_router.graph.plan import CombineMethod, CombinePlan, Frame, NodePlan
from weft_router.pruning import live_steps, pruned
from weft_router.report import NodeRun
from weft_router.splitter import WeightedChoice
from weft_router.steps import GraphRequest, Node, Origin, Step

if TYPE_CHECKING:
    from opentelemetry.context import Context

    _RunArguments = tuple[Frame, GraphRequest, int | None, Context | None, NodeRun]

#: A client may send a value of megabytes; no more of it goes into a message.
_MAX_SHOWN_CHARS = 100


class SequenceNode(Node):
    """Starts each step as soon as the steps that it reads from have ended.

    A lone ready step is awaited where it is; tasks are made only where several are ready at once. The first failure
    cancels the others.
    """

    def __init__(self, plan: NodePlan, steps: Sequence[Step]) -> None:
        super().__init__(plan)
        self._steps = tuple(steps)
        self._consumers = tuple(step.consumers for step in plan.steps)
        self._num_dependencies = [step.num_dependencies for step in plan.steps]
        self._first = [index for index, count in enumerate(self._num_dependencies) if count == 0]

    async def run(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, parent: "Context | None", run: NodeRun
    ) -> None:
        """As ``Node.run``."""
        steps = self._steps
        pending = self._num_dependencies.copy()
        ready = self._first
        while len(ready) == 1:
            index = ready[0]
            await steps[index].run(frame, request, deadline_ns, parent, run)
            ready = self._released_by(index, pending)
        if not ready:
            return
        fork = Fork()
        for index in ready:
            fork.start(self._follow(index, fork, pending, (frame, request, deadline_ns, parent, run)))
        await fork.join()

    async def _follow(self, index: int, fork: Fork, pending: list[int], arguments: "_RunArguments") -> int:
        """Run a step, then the first that it releases, and so on; the others that it releases get tasks."""
        while True:
            await self._steps[index].run(*arguments)
            released = self._released_by(index, pending)
            if not released:
                return 0
            for other in released[1:]:
                fork.start(self._follow(other, fork, pending, arguments))
            index = released[0]

    def for_outputs(self, wanted: Collection[str]) -> "SequenceNode":
        """The same sequence without the steps that only feed other outputs; itself where there are none."""
        live = live_steps(self.plan, wanted)
        if len(live) == len(self._steps):
            return self
        return SequenceNode(pruned(self.plan, live), [self._steps[index] for index in live])

    def _released_by(self, index: int, pending: list[int]) -> list[int]:
        """Steps that waited for nothing but step ``index``."""
        released = []
        for consumer in self._consumers[index]:
            pending[consumer] -= 1
            if pending[consumer] == 0:
                released.append(consumer)
        return released


class SwitchNode(Node):
    """Runs the first step, in declared order, whose case or test holds.

    Args:
        plan: What it is made of.
        steps: The branches.
        origin: The graph, for messages.
    """

    def __init__(self, plan: NodePlan, steps: Sequence[Step], origin: Origin) -> None:
        super().__init__(plan)
        self._steps = tuple(steps)
        self._origin = origin

    async def run(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, parent: "Context | None", run: NodeRun
    ) -> None:
        """As ``Node.run``."""
        try:
            step = self._choose(frame, request)
        except WeftError as error:
            raise self._origin.place(error, self.plan.path) from error
        await step.run(frame, request, deadline_ns, parent, run)

    def _choose(self, frame: Frame, request: GraphRequest) -> Step:
        on = self.plan.on
        value = None if on is None else case_text(on.evaluate(frame, request.scope))
        otherwise: Step | None = None
        for step in self._steps:
            branch = step.plan
            if branch.is_otherwise:
                otherwise = otherwise or step
            elif branch.when is not None:
                verdict = branch.when.evaluate(frame, request.scope)
                if verdict is True:
                    return step
                if verdict is not False:
                    raise InvalidArgumentError(
                        f"'when' of branch '{branch.name}' must be true or false, got {verdict!r} from "
                        f"{branch.when.source!r}"
                    )
            elif value is not None and value in branch.cases:
                return step
        if otherwise is not None:
            return otherwise
        shown = repr(value if value is None or len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "...")
        tried = f"value {shown} of {on.source!r} is no case" if on is not None else "no 'when' holds"
        raise InvalidArgumentError(
            f"no branch of switch '{self.plan.name}' matches: {tried}; branches are "
            f"{', '.join(repr(step.plan.name) for step in self._steps)}, and there is no 'otherwise'"
        )


class SplitterNode(Node):
    """Runs one step, drawn by weight; the same key always draws the same step.

    Args:
        plan: What it is made of.
        steps: The steps to draw from.
        origin: The graph, for messages.
        generator: Draws where there is no key.
    """

    def __init__(self, plan: NodePlan, steps: Sequence[Step], origin: Origin, generator: random.Random) -> None:
        super().__init__(plan)
        self._steps = tuple(steps)
        self._origin = origin
        self._choice = WeightedChoice(
            [step.name for step in plan.steps], [step.weight for step in plan.steps], plan.salt, generator
        )

    async def run(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, parent: "Context | None", run: NodeRun
    ) -> None:
        """As ``Node.run``."""
        key = ""
        if self.plan.sticky_by is not None:
            try:
                key = case_text(self.plan.sticky_by.evaluate(frame, request.scope))
            except WeftError as error:
                raise self._origin.place(error, self.plan.path) from error
        index = self._choice.by_key(key) if key else self._choice.by_chance()
        await self._steps[index].run(frame, request, deadline_ns, parent, run)


class EnsembleNode(Node):
    """Runs all steps at once and makes one answer of theirs.

    If every output is combined by FIRST, the first step that succeeds answers and the others are cancelled; else the
    first failure cancels the others.

    Args:
        plan: What it is made of.
        steps: The members.
        origin: The graph, for messages.
    """

    def __init__(self, plan: NodePlan, steps: Sequence[Step], origin: Origin) -> None:
        super().__init__(plan)
        self._steps = tuple(steps)
        self._origin = origin
        self._is_race = bool(plan.combines) and all(c.method is CombineMethod.FIRST for c in plan.combines)
        self._weights = [step.weight for step in plan.steps]

    async def run(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, parent: "Context | None", run: NodeRun
    ) -> None:
        """As ``Node.run``."""
        finished: list[int] = []

        async def member(index: int) -> int:
            await self._steps[index].run(frame, request, deadline_ns, parent, run)
            finished.append(index)
            return index

        if len(self._steps) == 1:
            await member(0)
        else:
            fork = Race() if self._is_race else Fork()
            for index in range(len(self._steps)):
                fork.start(member(index))
            await fork.join()
        for combine in self.plan.combines:
            try:
                frame[combine.output] = self._combine(combine, frame, finished)
            except WeftError as error:
                raise self._origin.place(error, f"{self.plan.path}: {combine.method.value}") from error

    def _combine(self, combine: CombinePlan, frame: Frame, finished: Sequence[int]) -> WireTensor | None:
        sources = combine.sources
        if combine.method is CombineMethod.FIRST:
            slots = dict(sources)
            return next((tensor for i in finished if i in slots and (tensor := frame[slots[i]]) is not None), None)
        present = [(tensor, self._weights[i]) for i, slot in sources if (tensor := frame[slot]) is not None]
        if not present:
            raise InternalError("no step answered the tensor that is combined")
        tensors = [tensor for tensor, _ in present]
        weights = [weight for _, weight in present]
        match combine.method:
            case CombineMethod.VOTE:
                return vote(tensors, weights, is_weighted=combine.is_weighted, is_batching=self._origin.is_batching)
            case CombineMethod.AVERAGE:
                return average(tensors, weights, is_weighted=combine.is_weighted)
            case CombineMethod.CONCAT:
                return concat(tensors, combine.axis)
            case _:  # KEYED: the tensor is one step's own
                return tensors[0]


def case_text(value: object) -> str:
    """A condition's value as ``case`` compares it: true, false, 3, 2.5, text; "" for none."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
