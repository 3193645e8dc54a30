"""Random graphs that stream against an interpreter that takes one response after another; cancelled at any moment."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from hypothesis import given, note, reject, settings
from hypothesis import strategies as st
from tests.unit.router import make
from tests.unit.router.naive_streams import Stream, StreamInterpreter
from tests.unit.router.naive_values import AmbiguousError, present
from tests.unit.router.random_drawing import num_examples, streams
from tests.unit.router.random_graph_text import files_of, plan_of, target_of
from tests.unit.router.random_graphs import Node
from tests.unit.router.random_requests import inputs_of, policies, wired
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

Response = dict[str, bytes]


class World:
    """A graph, its models, and what it answers."""

    def __init__(self, root: Node, seed: int, num_rows: int, *, has_extra: bool) -> None:
        self.clock = VirtualClock()
        self.target = target_of(root)
        self.runtime = Runtime({"model": self.target}, clock_ns=self.clock, **policies())
        self.executor = GraphExecutor(plan_of(root), self.runtime)
        self.inputs = inputs_of(seed, num_rows, has_extra=has_extra)

    async def responses(self) -> AsyncGenerator[Response, None]:
        """What comes. Raises WeftError."""
        call = InferCall("g", "", "r", {}, dict(wired(self.inputs)))
        if not self.executor.plan.signature.is_decoupled:
            whole = await self.executor.execute(call, CallContext())
            yield {name: bytes(tensor.data) for name, tensor in whole.outputs.items()}
            return
        async with aclosing(self.executor.stream(call, CallContext())) as results:
            async for result in results:
                if not result.is_null and (result.outputs or "graph_incomplete" not in result.parameters):
                    yield {name: bytes(tensor.data) for name, tensor in result.outputs.items()}

    async def end(self) -> None:
        """Nothing may be left."""
        await self.runtime.close()
        assert (0, 0) == (self.target.num_open, make.num_other_tasks())


@settings(max_examples=num_examples(60), deadline=None)
@given(root=streams(), seed=st.integers(0, 5), num_rows=st.integers(1, 3), has_extra=st.booleans())
def test_a_graph_streams_as_one_response_at_a_time(root: Node, seed: int, num_rows: int, has_extra: bool) -> None:
    """The same responses in the same order, as often as they merge in any; the same status; nothing left behind."""
    note(files_of(root))

    async def check() -> tuple[Stream, list[Response], str]:
        world = World(root, seed, num_rows, has_extra=has_extra)
        values = {"X": world.inputs["X"], "E": world.inputs.get("E")}
        expected = StreamInterpreter().node(root, values, root.outputs)
        found: list[Response] = []
        code = ""
        try:
            async for response in world.responses():
                found.append(response)
        except WeftError as error:
            code = error.code
        await world.end()
        return expected, found, code

    try:
        expected, found, code = asyncio.run(check())
    except AmbiguousError:
        reject()
    assert (expected.code != "") == (code != "")
    if expected.may_be_fewer:
        return
    assert expected.code in (code, "ANY")
    wanted = [{name: b"".join(rows or ()) for name, rows in present(one).items()} for one in expected.responses]
    assert comparable(wanted, expected) == comparable(found, expected)


def comparable(responses: list[Response], expected: Stream) -> Any:
    """The responses; in an order of their own where they merge as they arrive."""
    return responses if expected.is_ordered else sorted(map(repr, responses))


@settings(max_examples=num_examples(30), deadline=None)
@given(root=streams(), seed=st.integers(0, 5), at_ms=st.integers(0, 250), num_read=st.integers(0, 3))
def test_a_cancelled_stream_leaves_nothing(root: Node, seed: int, at_ms: int, num_read: int) -> None:
    """At any moment, or after any response, whether the client goes or stops to read: no call and no task is left."""

    async def check() -> None:
        world = World(root, seed, 2, has_extra=True)

        async def read() -> None:
            async with aclosing(world.responses()) as responses:
                for _ in range(num_read):
                    if await anext(responses, None) is None:
                        return
                await asyncio.sleep(at_ms / 1e3)
                if at_ms % 2:
                    return
                async for _ in responses:
                    await asyncio.sleep(1e-3)

        reader = asyncio.create_task(read())
        await asyncio.sleep(at_ms / 1e3)
        reader.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled() or isinstance(reader.exception(), WeftError | None)
        await asyncio.sleep(0)
        await world.end()

    asyncio.run(check())
