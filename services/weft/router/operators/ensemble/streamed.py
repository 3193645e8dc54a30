"""An ensemble that streams: it is combined anew for each response of a step, or its steps' responses are merged."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from typing_extensions import override

from weft.base.errors import WeftError
from weft.router.operators.ensemble.run import EnsembleNode
from weft.router.reporting.path import NodeRecord
from weft.router.steps import Run, StreamingNode, by_arrival, close_streams, of_part, responses_of

#: Response parameter: the step whose response it is, of an ensemble that merges.
STEP_PARAMETER = "graph_step"


class StreamedEnsemble(StreamingNode, EnsembleNode):
    """Of a race the step whose first response comes first; else all answers, with each response of what streams.

    Each step has a frame and a request of its own.
    """

    @override
    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
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
        answered = await self._race(members, self._responds) if self._is_race else await self._quorum(members)
        if self._is_race and not answered:  # a stream that ends without a response is an answer if there is no other
            answered = [i for i, member in enumerate(members) if member.request.stream is not None][:1]
        if len(answered) < self._needed:
            raise self._out_of_reach(run.record)
        return answered

    async def _responds(self, index: int, run: Run) -> bool:
        has_answered = await self._steps[index].run(run)
        stream = run.request.stream
        return has_answered and (stream is None or stream.num_responses > 0)

    async def _combine(self, run: Run, members: Sequence[Run], order: Sequence[int]) -> None:
        request = run.request
        request.response_parameters, request.captured = {**request.response_parameters}, {**request.captured}
        for index, (step, member) in enumerate(zip(self._steps, members, strict=True)):
            if index in order:
                request.merge(member.request)
                for binding in step.plan.outputs:
                    run.frame[binding.slot] = member.frame[binding.slot]
            elif not self._is_race:
                step.defaults.fill(run.frame)
        await self._finish(run, order)


class MergedEnsemble(StreamingNode, EnsembleNode):
    """Gives each response of each step as it arrives; that of a step that does not stream is one.

    A failing HARD step ends it, after the responses that came before. A SOFT step that fails has no more responses; if
    none answers, the ensemble fails.
    """

    @override
    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        answered: set[int] = set()
        sources = (self._responses_of(index, run.fork(), answered) for index in range(len(self._steps)))
        async with contextlib.aclosing(by_arrival(sources)) as arrivals:
            async for index, response in arrivals:
                yield await self._response(run, index, response)
        if not answered:
            raise self._out_of_reach(run.record)

    async def _responses_of(self, index: int, run: Run, answered: set[int]) -> AsyncGenerator[tuple[int, Run], None]:
        try:
            if not await self._steps[index].run(run):
                return
            answered.add(index)
            async with contextlib.aclosing(responses_of(run)) as responses:
                async for response in responses:
                    yield index, response
        finally:
            await close_streams((run,))

    async def _response(self, run: Run, index: int, response: Run) -> Run:
        step = self._steps[index].plan
        merged = of_part(run, response, STEP_PARAMETER, step.name)
        for binding in step.outputs:
            merged.frame[binding.slot] = response.frame[binding.slot]
        await self._finish(merged, [index])
        return merged
