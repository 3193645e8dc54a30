"""Guards in a graph that streams: those before a stream run once, those behind it for each response."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import answering, failing, in_turn
from tests.unit.router.stream_targets import collected, compiled, counting, numbers, stream_of, stream_target

from weft.base.core import CallContext, InferCall
from weft.language import GraphError

GUARD = 'step { name: "guard" model_name: "guard" output_map { key: "OUT" value: "G" } }'
#: Reads what the stream gives.
CHECK = """step { name: "check" model_name: "check" input_map { key: "IN" value: "OUT" }
           output_map { key: "OUT" value: "C" } }"""


@pytest.fixture
def target() -> Any:
    target = stream_target()
    target.streams["a"] = counting(3)
    return target


def stream(more: str = "") -> str:
    return f'step {{ name: "a" model_name: "a" {more} }}'


async def responses(target: Any, *steps: str) -> tuple[list[float | None], Any, str]:
    """Values of all responses, the error at the end, and the path; nothing is left behind."""
    context = CallContext()
    plan = compiled(f'node {{ name: "root" sequence {{ {" ".join(steps)} }} }}')
    got, error = await collected(stream_of(plan, target, context=context))
    assert (0, 0) == (target.num_open, make.num_other_tasks())
    return numbers(got, "OUT"), error, dict(context.trailing_metadata)["x-graph-path"]


@pytest.mark.parametrize("order", ['after: "guard"', "ordered: true"])
async def test_a_guard_before_a_stream_runs_once(target: Any, order: str) -> None:
    """The stream is opened when it has answered."""
    steps = (GUARD, stream(), order) if "ordered" in order else (GUARD, stream(order))
    values, error, path = await responses(target, *steps)
    assert ([1, 2, 3], None, "root.guard;a") == (values, error, path)
    assert ["guard", "a"] == target.called()


async def test_a_guard_that_fails_opens_no_stream(target: Any) -> None:
    """There is no response, and the error is the guard's."""
    target.answers["guard"] = failing("NOT_FOUND", "no")
    values, error, path = await responses(target, GUARD, stream('after: "guard"'))
    assert ([], "NOT_FOUND", "root.guard!") == (values, error.code, path)
    assert ["guard"] == target.called()


async def test_the_first_response_waits_for_a_guard_beside_the_stream(target: Any) -> None:
    """`answer_after`: both have begun, and where the guard refuses nobody sees a response."""

    async def says_one(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        yield make.tensor(1)
        await asyncio.Event().wait()

    async def refuse(call: InferCall, context: CallContext) -> Any:
        await target.has_made.wait()
        return await failing("NOT_FOUND", "no")(call, context)

    target.streams["a"], target.answers["guard"] = says_one, refuse
    values, error, _ = await responses(target, stream(), GUARD, 'answer_after: "guard"')
    assert ([], "NOT_FOUND", ["a"]) == (values, error.code, target.cancelled)


async def test_a_guard_behind_a_stream_judges_each_response(target: Any) -> None:
    """The response that it refuses is not given, and ends the stream; those before it were."""
    values, error, path = await responses(target, stream(), CHECK, 'answer_after: "check"')
    assert ([1, 2, 3], None, "root.a;check") == (values, error, path)
    assert ["a", "check", "check", "check"] == target.called()
    target.answers["check"] = in_turn(answering(), failing("PERMISSION_DENIED", "rude"))
    values, error, path = await responses(target, stream(), CHECK, 'answer_after: "check"')
    assert ([1], "PERMISSION_DENIED", "root.a~;check!") == (values, error.code, path)


async def test_what_is_after_a_stream_runs_for_each_response(target: Any) -> None:
    """Though it reads nothing of it: the stream has ended where a response is there."""
    log = GUARD.replace("output_map", 'after: "a" output_map')
    values, error, _ = await responses(target, stream(), log, 'answer_after: "guard"')
    assert ([1, 2, 3], None) == (values, error)
    assert ["a", "guard", "guard", "guard"] == target.called()


@pytest.mark.parametrize(
    "steps",
    [
        (stream(), stream().replace('name: "a"', 'name: "b"').replace("}", 'output_map { key: "OUT" value: "B" } }'),
         'answer_after: "b"'),
        (stream(), stream().replace('name: "a"', 'name: "b"').replace("}", 'output_map { key: "OUT" value: "B" } }'),
         GUARD.replace("output_map", 'after: "a" after: "b" output_map'), 'answer_after: "guard"'),
    ],
)  # fmt: skip
def test_an_answer_cannot_wait_for_a_second_stream(steps: tuple[str, ...]) -> None:
    """A response has one stream that it follows, also where only the end of another is waited for."""
    with pytest.raises(GraphError, match="G019"):
        compiled(f'node {{ name: "root" sequence {{ {" ".join(steps)} }} }}')
