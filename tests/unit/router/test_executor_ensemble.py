"""Ensembles: all members at once, one answer, no task left."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError, RemoteError
from weft.base.tensors import WireTensor
from weft.language.plan import GraphPlan
from weft.router.combine import METHODS, CombineMethod
from weft.router.operators.ensemble import EnsemblePlan

FIRST, VOTE, KEYED, AVERAGE, CONCAT = (
    METHODS["FIRST"],
    METHODS["VOTE"],
    METHODS["KEYED"],
    METHODS["AVERAGE"],
    METHODS["CONCAT"],
)


def ensemble(
    method: CombineMethod,
    members: str = "abc",
    weights: Mapping[str, float] = {},
    datatype: str = "FP32",
    **options: Any,
) -> GraphPlan:
    """Members a, b, c take X; Y combines their answers."""
    calls = {m: make.call_plan(m, ["IN"], [make.spec("OUT", datatype)]) for m in members}
    steps = [make.step(m, calls[m], {"IN": "X"}, {"OUT": f"{m}.Y"}, weight=weights.get(m, 1.0)) for m in members]
    combine = ("Y", method, {m: f"{m}.Y" for m in members}, options)
    return make.graph(make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["Y"], combines=[combine]))


def answering(value: WireTensor) -> Any:
    async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return {"OUT": value}

    return answer


async def failing(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
    raise RemoteError("UNAVAILABLE", f"{call.model_name} is gone")


async def never(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
    await asyncio.Event().wait()
    return {}


async def test_members_run_at_once_and_vote() -> None:
    """Every member is called before any answers; the majority wins."""
    all_called = asyncio.Barrier(3)

    def voting(label: str) -> Any:
        async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
            await all_called.wait()
            return {"OUT": make.text(label)}

        return answer

    target = FakeTarget(a=voting("cat"), b=voting("dog"), c=voting("dog"))
    context = CallContext()
    async with asyncio.timeout(5):
        result = await make.run(ensemble(VOTE, datatype="BYTES"), target, context=context)
    assert make.text("dog") == result.outputs["Y"]
    assert [("x-graph-path", "root{a;b;c}")] == context.trailing_metadata
    assert 0 == make.num_other_tasks()


async def test_step_weights_reach_the_combine() -> None:
    """A weighted vote follows one heavy member against two light ones."""
    target = FakeTarget(a=answering(make.text("cat")), b=answering(make.text("dog")), c=answering(make.text("dog")))
    plan = ensemble(VOTE, weights={"a": 5.0}, datatype="BYTES", is_weighted=True)
    assert make.text("cat") == (await make.run(plan, target)).outputs["Y"]


async def test_average_and_concat_take_the_members_in_declared_order() -> None:
    """The order of answering does not matter."""
    target = FakeTarget(**{m: answering(make.tensor(v)) for m, v in (("a", 1.0), ("b", 2.0), ("c", 6.0))})
    assert make.tensor(3.0) == (await make.run(ensemble(AVERAGE), target)).outputs["Y"]
    assert make.tensor(1.0, 2.0, 6.0) == (await make.run(ensemble(CONCAT, axis=0), target)).outputs["Y"]


async def test_keyed_outputs_pass_through_undecoded() -> None:
    """Each member's tensor is an output of its own, the same bytes object."""
    answers = {m: make.tensor(float(i)) for i, m in enumerate("ab")}
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.t"}) for m in "ab"]
    combines = [(f"{m}.OUT", KEYED, {m: f"{m}.t"}, {}) for m in "ab"]
    root = make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["a.OUT", "b.OUT"], combines=combines)
    result = await make.run(make.graph(root), FakeTarget(**{m: answering(t) for m, t in answers.items()}))
    assert result.outputs["a.OUT"].data is answers["a"].data
    assert result.outputs["b.OUT"].data is answers["b"].data


async def test_a_failing_member_cancels_the_others() -> None:
    """Without FIRST every member must answer."""
    target = FakeTarget(a=never, b=failing, c=never)
    with pytest.raises(RemoteError, match="root/b -> b@1: b is gone"):
        await make.run(ensemble(VOTE), target)
    assert ["a", "c"] == sorted(target.cancelled)
    assert 0 == make.num_other_tasks()


async def test_first_takes_the_first_success_and_cancels_the_losers() -> None:
    """A member that failed before does not matter."""
    target = FakeTarget(a=never, b=failing, c=answering(make.tensor(9.0)))
    context = CallContext()
    result = await make.run(ensemble(FIRST), target, context=context)
    assert make.tensor(9.0) == result.outputs["Y"]
    assert ["a"] == target.cancelled
    assert [("x-graph-path", "root{a~;b!;c}")] == context.trailing_metadata
    assert 0 == make.num_other_tasks()


async def test_first_fails_only_when_all_fail() -> None:
    """The error is that of the member declared first."""
    with pytest.raises(RemoteError, match="a is gone"):
        await make.run(ensemble(FIRST), FakeTarget(a=failing, b=failing, c=failing))
    assert 0 == make.num_other_tasks()


async def test_cancelling_a_race_cancels_every_member() -> None:
    """No member outlives the request."""
    all_called = asyncio.Barrier(4)

    async def wait(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        await all_called.wait()
        return await never(call, context)

    target = FakeTarget(a=wait, b=wait, c=wait)
    request = asyncio.create_task(make.run(ensemble(FIRST), target))
    await all_called.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert ["a", "b", "c"] == sorted(target.cancelled)
    assert 0 == make.num_other_tasks()


async def test_answers_that_do_not_fit_each_other_are_an_internal_error() -> None:
    """The message names the node and the method."""
    target = FakeTarget(a=answering(make.tensor(1.0)), b=answering(make.tensor(1.0, 2.0)))
    with pytest.raises(InternalError, match=r"^g/1: root: VOTE: the steps answered tensors that differ"):
        await make.run(ensemble(VOTE, "ab"), target)


async def test_members_with_and_without_batching_are_combined() -> None:
    """In a batching graph the answer of a member without batching gets its batch dimension back first."""
    plain, batching = (make.call_plan(m, ["IN"], ["OUT"], max_batch_size=size) for m, size in (("a", 0), ("b", 8)))
    steps = [make.step(p.model_name, p, {"IN": "X"}, {"OUT": f"{p.model_name}.Y"}) for p in (plain, batching)]
    combine = ("Y", AVERAGE, {"a": "a.Y", "b": "b.Y"}, {})
    root = make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["Y"], combines=[combine])
    x = make.tensor(1, 2, shape=(1, 2))
    result = await make.run(make.graph(root, max_batch_size=8), FakeTarget(), {"X": x})
    assert x == result.outputs["Y"]


async def test_an_ensemble_of_one_is_that_one() -> None:
    """A single member is awaited where it is."""
    target = FakeTarget(a=answering(make.tensor(2.0)))
    assert make.tensor(2.0) == (await make.run(ensemble(AVERAGE, "a"), target)).outputs["Y"]
