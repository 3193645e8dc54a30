"""An ensemble that streams: it is combined anew for each response of a step, or its steps' responses are merged."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from weft_common.errors import WeftError
from weft_router.kinds.ensemble.run import AllAtOnce
from weft_router.reporting.path import NodeRecord
from weft_router.steps import NodeResponses, Run, close_streams, responses_of
from weft_router.tasks.arrivals import Arrivals

#: Response parameter: the step whose response it is, of an ensemble that merges.
STEP_PARAMETER = "graph_step"


class StreamedEnsemble(AllAtOnce):
    """Of a race the step whose first response comes first; else all answers, with each response of what streams.

    Each step has a frame and a request of its own.
    """

    async def run(self, run: Run) -> None:
        """As ``Node.run``."""
        slots = [binding.slot for binding in self.plan.outputs]
        await NodeResponses(self.responses(run), slots).open(run)

    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        """As ``Node.responses``."""
        forks = [run.fork() for _ in self._steps]
        try:
            order = await self._answered(run, forks)
            await close_streams(fork for index, fork in enumerate(forks) if index not in order)
            members = forks.copy()
            leading = next((index for index in order if forks[index].request.stream is not None), None)
            if leading is None:
                await self._combine(run, members, order)
                yield run
                return
            num_steps, position = len(run.record.steps), 0
            async with contextlib.aclosing(responses_of(forks[leading])) as responses:
                async for response in responses:
                    members[leading] = response
                    own = replace(run.request, parts=response.request.parts)
                    record = NodeRecord("") if position else run.record
                    combined = Run(run.frame.copy(), own, run.deadline_ns, response.context, record)
                    try:
                        await self._combine(combined, members, order)
                    except WeftError:
                        if position:
                            run.record.steps[num_steps:] = record.steps
                        raise
                    yield combined
                    position += 1
        finally:
            await close_streams(forks)

    async def _answered(self, run: Run, members: Sequence[Run]) -> list[int]:
        """Indexes of the steps that have answered, in that order; of a race one of them."""
        answered = await self._race(members, self._speaks) if self._is_race else await self._quorum(members)
        if self._is_race and not answered:  # a stream that ends without a response is an answer if there is no other
            answered = [i for i, member in enumerate(members) if member.request.stream is not None][:1]
        if len(answered) < self._needed:
            raise self._out_of_reach(run.record)
        return answered

    async def _speaks(self, index: int, run: Run) -> bool:
        """Whether a step has answered with a response."""
        has_answered = await self._steps[index].run(run)
        stream = run.request.stream
        return has_answered and (stream is None or stream.num_responses > 0)

    async def _combine(self, run: Run, members: Sequence[Run], order: Sequence[int]) -> None:
        """The outputs are in the frame of ``run``, its request has what the steps collected."""
        request = run.request
        request.response_parameters, request.captured = {**request.response_parameters}, {**request.captured}
        for index, (step, member) in enumerate(zip(self._steps, members, strict=True)):
            if index in order:
                request.merge(member.request)
                for binding in step.plan.outputs:
                    run.frame[binding.slot] = member.frame[binding.slot]
            elif not self._is_race:
                step.fill_defaults(run.frame)
        await self._finish(run, order)


class MergedEnsemble(AllAtOnce):
    """Gives each response of each step as it arrives; that of a step that does not stream is one.

    A failing HARD step ends it, after the responses that came before. A SOFT step that fails has no more responses; if
    none answers, the ensemble fails.
    """

    async def run(self, run: Run) -> None:
        """As ``Node.run``."""
        slots = [binding.slot for binding in self.plan.outputs]
        await NodeResponses(self.responses(run), slots).open(run)

    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        """As ``Node.responses``."""
        answered: set[int] = set()
        arrivals = Arrivals(self._responses_of(index, run.fork(), answered) for index in range(len(self._steps)))
        others = _Others(arrivals)
        try:
            while (arrived := await arrivals.next()) is not None:
                index, response = arrived
                others.num_responses += 1
                yield await self._response(run, index, response, others)
            if not answered:
                raise self._out_of_reach(run.record)
        finally:
            await arrivals.close()

    async def _responses_of(self, index: int, run: Run, answered: set[int]) -> AsyncGenerator[tuple[int, Run], None]:
        """The responses of a step, with its index."""
        try:
            if not await self._steps[index].run(run):
                return
            answered.add(index)
            async with contextlib.aclosing(responses_of(run)) as responses:
                async for response in responses:
                    yield index, response
        finally:
            await close_streams((run,))

    async def _response(self, run: Run, index: int, response: Run, others: "_Others") -> Run:
        """A response of a step as one of the ensemble."""
        step, given = self._steps[index].plan, response.request
        inner = given.response_parameters.get(STEP_PARAMETER)
        name = step.name if inner is None else f"{step.name}/{inner}"
        request = replace(
            run.request,
            response_parameters={
                **run.request.response_parameters,
                **given.response_parameters,
                STEP_PARAMETER: name,
            },
            captured=run.request.captured | given.captured,
            parts=((others, others.num_responses), *given.parts),
        )
        merged = Run(run.frame.copy(), request, run.deadline_ns, response.context, run.record)
        for binding in step.outputs:
            merged.frame[binding.slot] = response.frame[binding.slot]
        await self._finish(merged, [index])
        return merged


class _Others:
    """As a part of a response: the steps whose response it is not.

    Attributes:
        num_responses: Of all steps so far.
    """

    def __init__(self, arrivals: Arrivals[tuple[int, Run]]) -> None:
        self.num_responses = 0
        self._arrivals = arrivals

    @property
    def has_ended(self) -> bool:
        """Whether it is known that all of them have ended."""
        return self._arrivals.has_one_left

    async def settle(self, timeout_s: float) -> None:
        """They are not waited for: a response is not held back for those of another step."""
