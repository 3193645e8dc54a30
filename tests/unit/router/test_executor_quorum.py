"""Ensembles that need some of their members: who is waited for, who is left out, what is said when too few answer."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.tensors import WireTensor
from weft.language.plan import CallPlan, GraphPlan
from weft.router.combine import METHODS, CombineMethod
from weft.router.operators.ensemble import EnsemblePlan

SUM, FIRST, KEYED, MEDIAN = METHODS["SUM"], METHODS["FIRST"], METHODS["KEYED"], METHODS["MEDIAN"]


def ensemble(
    members: Mapping[str, dict[str, Any]],
    method: CombineMethod = SUM,
    combine: Mapping[str, Any] = {},
    **options: Any,
) -> GraphPlan:
    """The members take X; Y combines their answers."""
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.Y"}, **how) for m, how in members.items()]
    made = ("Y", method, {m: f"{m}.Y" for m in members}, dict(combine))
    root = make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["Y"], combines=[made], **options)
    return make.graph(root)


HARD: dict[str, Any] = {}
SOFT: dict[str, Any] = {"is_soft": True}


async def test_a_soft_member_may_fail() -> None:
    """The others are combined; the path shows the failure."""
    context = CallContext()
    plan = ensemble({"a": HARD, "b": SOFT, "c": SOFT})
    target = FakeTarget(a=answering(1), b=failing(), c=answering(4))
    result = await make.run(plan, target, context=context)
    assert make.tensor(5.0) == result.outputs["Y"]
    assert [("x-graph-path", "root{a;b!;c}")] == context.trailing_metadata


async def test_the_weights_are_those_of_the_members_that_answered() -> None:
    """(3 x 2 + 1 x 6) / (3 + 1), without the weight of the one that failed."""
    members = {m: SOFT | {"weight": weight} for m, weight in (("a", 3.0), ("b", 90.0), ("c", 1.0))}
    plan = ensemble(members, METHODS["AVERAGE"], {"is_weighted": True})
    target = FakeTarget(a=answering(2), b=failing(), c=answering(6))
    assert make.tensor(3.0) == (await make.run(plan, target)).outputs["Y"]


async def test_weights_do_not_matter_unless_asked_for() -> None:
    """They break ties of votes elsewhere."""
    members = {m: HARD | {"weight": weight} for m, weight in (("a", 3.0), ("b", 1.0))}
    target = FakeTarget(a=answering(2), b=answering(6))
    assert make.tensor(4.0) == (await make.run(ensemble(members, METHODS["AVERAGE"]), target)).outputs["Y"]
    assert make.tensor(8.0) == (await make.run(ensemble(members, SUM), target)).outputs["Y"]


async def test_a_late_member_is_left_out(virtual_clock: VirtualClock) -> None:
    """25 ms after the second answer; its call is cancelled, and the path shows it as cancelled."""
    plan = ensemble({"a": SOFT, "b": SOFT, "c": SOFT}, quorum=2, straggler_ms=25)
    target = FakeTarget(a=answering(1, after_ms=90), b=answering(2, after_ms=10), c=answering(4, after_ms=30))
    context = CallContext()
    result = await make.run(plan, target, context=context)
    assert make.tensor(6.0) == result.outputs["Y"]
    assert 55.0 == virtual_clock.elapsed_ms()
    assert ["a"] == target.cancelled
    assert [("x-graph-path", "root{a~;b;c}")] == context.trailing_metadata
    assert (0, 0) == (target.num_open, make.num_other_tasks())


async def test_a_late_member_is_awaited(virtual_clock: VirtualClock) -> None:
    """A call that takes its time to go away is over when the answer is given."""

    async def slow_to_leave(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        try:
            await asyncio.sleep(1_000)
        finally:
            await asyncio.sleep(0.003)
        return {}

    plan = ensemble({"a": SOFT, "b": SOFT}, quorum=1, straggler_ms=10)
    target = FakeTarget(a=slow_to_leave, b=answering(2))
    assert make.tensor(2.0) == (await make.run(plan, target)).outputs["Y"]
    assert 13.0 == virtual_clock.elapsed_ms()
    assert 0 == target.num_open


async def test_a_late_member_has_its_default(virtual_clock: VirtualClock) -> None:
    """To be late is to fail softly; it still does not count as an answer."""
    members = {"a": SOFT | {"defaults": {"a.Y": make.tensor(100)}}, "b": SOFT}
    plan = ensemble(members, quorum=1, straggler_ms=10)
    target = FakeTarget(a=answering(1, after_ms=90), b=answering(2))
    assert make.tensor(102.0) == (await make.run(plan, target)).outputs["Y"]
    with pytest.raises(WeftError, match=r"1 of 2 steps must answer, and cannot any more: a failed.*; b failed"):
        await make.run(plan, FakeTarget(a=failing(), b=failing()))


async def test_a_hard_member_is_waited_for_however_late(virtual_clock: VirtualClock) -> None:
    """The soft one is not, meanwhile."""
    plan = ensemble({"a": HARD, "b": SOFT, "c": SOFT}, quorum=1, straggler_ms=5)
    target = FakeTarget(a=answering(1, after_ms=80), b=answering(2, after_ms=40), c=answering(4))
    assert make.tensor(5.0) == (await make.run(plan, target)).outputs["Y"]
    assert 80.0 == virtual_clock.elapsed_ms()
    assert ["b"] == target.cancelled


async def test_without_a_quorum_the_hard_members_make_it(virtual_clock: VirtualClock) -> None:
    """`straggler_ms` counts from the moment when all of them have answered."""
    plan = ensemble({"a": HARD, "b": HARD, "c": SOFT, "d": SOFT}, straggler_ms=10)
    delays = {"a": 20, "b": 30, "c": 35, "d": 45}
    target = FakeTarget(**{m: answering(1, after_ms=delay) for m, delay in delays.items()})
    assert make.tensor(3.0) == (await make.run(plan, target)).outputs["Y"]
    assert 40.0 == virtual_clock.elapsed_ms()


async def test_a_failing_hard_member_fails_at_once(virtual_clock: VirtualClock) -> None:
    """Though there is a quorum without it."""
    plan = ensemble({"a": SOFT, "b": HARD, "c": SOFT}, quorum=1, straggler_ms=500)
    target = FakeTarget(a=answering(1), b=failing("ABORTED", after_ms=20), c=answering(1, after_ms=100))
    with pytest.raises(WeftError, match="root/b -> b@1: gone") as caught:
        await make.run(plan, target)
    assert "ABORTED" == caught.value.code
    assert 20.0 == virtual_clock.elapsed_ms()
    assert ["c"] == target.cancelled


@pytest.mark.parametrize(
    ("codes", "expected"), [(["ABORTED", "ABORTED"], "ABORTED"), (["ABORTED", "UNKNOWN"], "UNAVAILABLE")]
)
async def test_a_quorum_out_of_reach_fails_at_once_and_tells_of_each_member(
    virtual_clock: VirtualClock, codes: list[str], expected: str
) -> None:
    """With the code of the failures if they agree; the calls that are left are cancelled."""
    skipped = SOFT | {"when": FakeCondition(lambda r, f: False)}
    plan = ensemble({"a": SOFT, "b": SOFT, "c": SOFT, "d": SOFT, "e": skipped}, quorum=3)
    target = FakeTarget(
        a=failing(codes[0], after_ms=5),
        b=answering(1),
        c=failing(codes[1], after_ms=7),
        d=answering(1, after_ms=900),
    )
    with pytest.raises(WeftError) as caught:
        await make.run(plan, target)
    assert (
        "g/1: root: 3 of 5 steps must answer, and cannot any more: "
        f"a failed: {codes[0]}: root/a -> a@1: gone; b answered; c failed: {codes[1]}: root/c -> c@1: gone; "
        "d was still running; e did not run, its 'when' is false"
    ) == caught.value.message
    assert expected == caught.value.code
    assert 7.0 == virtual_clock.elapsed_ms()
    assert ["d"] == target.cancelled
    assert 0 == make.num_other_tasks()


async def test_nobody_asked_is_an_invalid_argument() -> None:
    """Every `when` is false: the request is at fault, not a service."""
    skipped = {"when": FakeCondition(lambda r, f: False)}
    for members in ({"a": skipped, "b": skipped}, {"a": skipped}):
        with pytest.raises(InvalidArgumentError, match="a did not run, its 'when' is false"):
            await make.run(ensemble(members), FakeTarget())


async def test_a_fallback_counts_as_an_answer() -> None:
    """The member failed, and its fallback gave the tensor."""
    fallback = make.step("f", "f", {"IN": "X"}, {"OUT": "a.Y"})
    plan = ensemble({"a": SOFT | {"fallback": fallback}, "b": SOFT}, quorum=2)
    target = FakeTarget(a=failing(), f=answering(7), b=answering(1))
    assert make.tensor(8.0) == (await make.run(plan, target)).outputs["Y"]
    target = FakeTarget(a=failing(), f=answering(7), b=failing("ABORTED"))
    with pytest.raises(WeftError, match="cannot any more: a answered; b failed: ABORTED") as caught:
        await make.run(plan, target)
    assert "ABORTED" == caught.value.code


async def test_with_a_quorum_the_end_of_all_time_is_an_answer(virtual_clock: VirtualClock) -> None:
    """Two members have answered when the deadline of the graph passes; one has not."""
    plan = ensemble({"a": SOFT, "b": SOFT, "c": SOFT}, quorum=2)
    target = FakeTarget(a=answering(1), b=answering(2), c=answering(4, after_ms=900))
    result = await make.run(plan, target, context=make.context(timeout_ms=50))
    assert make.tensor(3.0) == result.outputs["Y"]
    with pytest.raises(WeftError) as caught:
        await make.run(ensemble({"a": SOFT, "c": SOFT}, quorum=2), target, context=make.context(timeout_ms=50))
    assert "DEADLINE_EXCEEDED" == caught.value.code


async def test_a_keyed_output_of_a_member_that_is_missing_is_absent() -> None:
    """The others are there."""
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.t"}, is_soft=True) for m in "ab"]
    combines = [(f"{m}.t", KEYED, {m: f"{m}.t"}, {}) for m in "ab"]
    root = make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["a.t", "b.t"], combines=combines)
    result = await make.run(make.graph(root), FakeTarget(a=failing()))
    assert ["b.t"] == list(result.outputs)


async def test_first_among_other_methods_is_the_first_that_answered(virtual_clock: VirtualClock) -> None:
    """All members are waited for; the quickest gives the tensor."""
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.Y"}, is_soft=True) for m in "abc"]
    sources = {m: f"{m}.Y" for m in "abc"}
    root = make.node(
        "root",
        EnsemblePlan,
        steps,
        inputs=["X"],
        outputs=["Y", "M"],
        combines=[("Y", FIRST, sources, {}), ("M", MEDIAN, sources, {})],
    )
    target = FakeTarget(a=answering(9, after_ms=20), b=failing(), c=answering(5, after_ms=10))
    result = await make.run(make.graph(root), target)
    assert {"Y": make.tensor(5.0), "M": make.tensor(7.0)} == result.outputs


async def test_first_with_a_quorum_is_no_race(virtual_clock: VirtualClock) -> None:
    """Two must answer; the first of them is taken."""
    plan = ensemble({"a": SOFT, "b": SOFT, "c": SOFT}, FIRST, quorum=2, straggler_ms=1)
    delays = {"a": 20, "b": 10, "c": 900}
    target = FakeTarget(**{m: answering(delay, after_ms=delay) for m, delay in delays.items()})
    assert make.tensor(10.0) == (await make.run(plan, target)).outputs["Y"]
    assert 21.0 == virtual_clock.elapsed_ms()


async def test_a_race_of_soft_members_fails_as_one_of_hard_members_does() -> None:
    """With the error of the member declared first; a skipped one has none."""
    skipped = SOFT | {"when": FakeCondition(lambda r, f: False)}
    plan = ensemble({"s": skipped, "a": SOFT, "b": SOFT}, FIRST)
    with pytest.raises(WeftError, match=r"^g/1: root/a -> a@1: gone$") as caught:
        await make.run(plan, FakeTarget(a=failing("ABORTED"), b=failing()))
    assert "ABORTED" == caught.value.code
    with pytest.raises(InvalidArgumentError, match=r"1 of 1 steps must answer, .* s did not run"):
        await make.run(ensemble({"s": skipped}, FIRST), FakeTarget())


@pytest.mark.parametrize("method", [FIRST, SUM])
async def test_a_condition_that_fails_fails_the_request(method: CombineMethod) -> None:
    """Though the member is soft and the others answer: there is no silent false."""

    def fail(request: Any, frame: Any) -> Any:
        raise InvalidArgumentError("no such key")

    plan = ensemble({"a": SOFT | {"when": FakeCondition(fail)}, "b": SOFT}, method)
    with pytest.raises(InvalidArgumentError, match=r"^g/1: root/a: no such key$"):
        await make.run(plan, FakeTarget(b=answering(1, after_ms=1)))
    assert 0 == make.num_other_tasks()


def judging(model: str) -> CallPlan:
    return make.call_plan(model, [make.spec("S", dims=(-1, -1)), make.spec("MASK", "BOOL"), "X"], ["OUT"])


def custom(is_soft: bool = True, **options: Any) -> GraphPlan:
    """Members a, b; the model `judge` gets their answers stacked, the mask, and X."""
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.Y"}, is_soft=is_soft) for m in "ab"]
    judge = make.step("judge", judging("judge"), {"S": "stack", "MASK": "mask", "X": "X"}, {"OUT": "Y"}, **options)
    combine = (
        "Y",
        METHODS["CUSTOM"],
        {m: f"{m}.Y" for m in "ab"},
        {"custom": judge, "stack": "stack", "mask": "mask"},
    )
    root = make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["Y"], combines=[combine])
    return make.graph(root)


async def test_a_model_combines_a_stack_with_its_mask() -> None:
    """A member that is missing leaves zeros, and false in the mask; node inputs go along."""
    context = CallContext()
    target = FakeTarget(a=failing(), b=answering(2, 3), judge=answering(42))
    result = await make.run(custom(), target, {"X": make.tensor(7.0)}, context=context)
    assert make.tensor(42.0) == result.outputs["Y"]
    assert {
        "S": make.tensor(0, 0, 2, 3, shape=(2, 2)),
        "MASK": WireTensor("BOOL", (2,), b"\x00\x01"),
        "X": make.tensor(7.0),
    } == target.calls[-1].inputs
    assert [("x-graph-path", "root{a!;b;judge}")] == context.trailing_metadata


async def test_a_model_that_combines_may_fail_and_have_a_fallback() -> None:
    """It is a step like any other."""
    fallback = make.step("mean", judging("mean"), {"S": "stack"}, {"OUT": "Y"})
    target = FakeTarget(judge=failing(), mean=answering(1))
    assert make.tensor(1.0) == (await make.run(custom(fallback=fallback), target)).outputs["Y"]
    with pytest.raises(WeftError, match="root/judge -> judge@1: gone"):
        await make.run(custom(), target)


async def test_members_that_do_not_stack_are_refused() -> None:
    """The message names node and method."""
    target = FakeTarget(a=answering(1), b=answering(2, 3))
    with pytest.raises(WeftError, match=r"^g/1: root: CUSTOM: the steps answered tensors that differ"):
        await make.run(custom(), target)


@pytest.mark.parametrize("num_cancels", [1, 2])
@pytest.mark.parametrize("at_ms", [0, 12, 22])
async def test_a_cancel_at_any_moment_leaves_nothing(
    virtual_clock: VirtualClock, at_ms: float, num_cancels: int
) -> None:
    """While members run, while stragglers are waited for, while the combining model runs."""
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.Y"}, is_soft=True) for m in "ab"]
    judge = make.step("judge", judging("judge"), {"S": "stack"}, {"OUT": "Y"})
    combine = (
        "Y",
        METHODS["CUSTOM"],
        {m: f"{m}.Y" for m in "ab"},
        {"custom": judge, "stack": "stack", "mask": "mask"},
    )
    root = make.node(
        "root", EnsemblePlan, steps, inputs=["X"], outputs=["Y"], combines=[combine], quorum=1, straggler_ms=10
    )
    target = FakeTarget(a=answering(1, after_ms=10), b=answering(1, after_ms=500), judge=answering(1, after_ms=500))
    request = asyncio.create_task(make.run(make.graph(root), target))
    await asyncio.sleep(at_ms / 1e3)
    for _ in range(num_cancels):
        request.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (0, 0) == (target.num_open, make.num_other_tasks())
