"""Runs the step of a collector and puts its stream together to pieces."""

import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from weft.base.errors import UnknownError, WeftError
from weft.language.description import counted, given, offered, shadow_flows, slot_name
from weft.language.path_form import PathForm
from weft.language.plan import Description, End, Flow, Frame
from weft.router.operators.alternatives import only_branch
from weft.router.operators.collector.pieces import NOTHING, CollectorSettings, Pieces
from weft.router.steps.node import Node, NodeParts, OperatorPlan, StreamingNode
from weft.router.steps.responses import close_streams, responses_of, with_own_request
from weft.router.steps.run import ResponsePart, Run


@dataclass(frozen=True, slots=True)
class CollectorPlan(OperatorPlan):
    """A collector."""

    kind: ClassVar[str] = "collector"
    path_form: ClassVar[PathForm] = PathForm.of("+(", ")", only_branch)

    settings: CollectorSettings = NOTHING

    @property
    @override
    def streams(self) -> bool:
        """Sentences are several also of a step that gives one response."""
        has_several = self.settings.text >= 0 or any(step.streams for step in self.steps)
        return has_several and not self.settings.is_whole

    @override
    def node(self, parts: NodeParts) -> Node:
        return (CollectorNode if self.streams else WholeNode)(self, parts)

    @override
    def describe(self) -> Description:
        settings = self.settings
        if settings.text >= 0:
            title = f"each sentence of {slot_name(self, settings.text)}"
        else:
            title = f"{counted(settings.count, 'response')} at a time" if settings.count else "the whole stream"
        joined = ", ".join(slot_name(self, slot) for slot, _ in settings.joins)
        notes = (f"joins {joined}", f"up to {settings.max_bytes} bytes")
        flows = [Flow(None, i, tensors=given(step)) for i, step in enumerate(self.steps)]
        flows += [Flow(i, None, tensors=offered(step), gives=True) for i, step in enumerate(self.steps)]
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows),
            entry=End("inputs", is_plain=True),
            exit=End(title, notes),
            flows=(*flows, *shadow_flows(self)),
        )


class CollectorNode(StreamingNode):
    """Runs its step once and gives the pieces of its stream, in order; the step is read on when a piece was taken."""

    is_sampled = True

    def __init__(self, plan: CollectorPlan, parts: NodeParts) -> None:
        super().__init__(plan)
        (self._step,) = parts.steps
        self._settings = plan.settings
        self._error_context = parts.error_context

    @override
    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        own, pieces = with_own_request(run, run.frame.copy()), Pieces(self._settings)
        own.request.is_collected = False
        part, latest = _PieceCount(pieces), own
        try:
            await self._step.run(own)
            async with contextlib.aclosing(responses_of(own)) as responses:
                async for response in responses:
                    latest = response
                    for frame in self._add(pieces, response.frame):
                        yield part.run_of(response, frame)
            if (rest := pieces.rest()) is not None:
                yield part.run_of(latest, rest)
        finally:
            await close_streams((own,))

    def _add(self, pieces: Pieces, frame: Frame) -> Iterator[Frame]:
        try:
            yield from pieces.add(frame)
        except WeftError as error:
            raise self._error_context.wrap(error, self.plan.path) from error


class WholeNode(CollectorNode):
    """Gives one response, the whole of its step's stream."""

    @override
    async def run(self, run: Run) -> None:
        latest: Run | None = None
        async with contextlib.aclosing(self.responses(run)) as responses:
            async for response in responses:
                latest = response
        if latest is None:
            error = UnknownError(f"step '{self._step.plan.name}' gave no response")
            raise self._error_context.wrap(error, self.plan.path)
        for _, slot in self.plan.outputs:
            run.frame[slot] = latest.frame[slot]
        run.request.merge(latest.request)


class _PieceCount(ResponsePart):
    """Part of each piece: tells whether a further one is begun."""

    def __init__(self, pieces: Pieces) -> None:
        self.num_responses = 0
        self._pieces = pieces

    def run_of(self, response: Run, frame: Frame) -> Run:
        """The run of the next piece, which ends with ``response``."""
        self.num_responses += 1
        request = replace(response.request, parts=((self, self.num_responses), *response.request.parts))
        return Run(frame, request, response.deadline_ns, response.context, response.record)

    @property
    @override
    def has_ended(self) -> bool:
        return not self._pieces.is_pending

    @override
    async def settle(self, timeout_s: float) -> None:
        pass
