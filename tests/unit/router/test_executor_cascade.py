"""Cascades: one step after another until an answer is accepted."""

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
from weft.base.tensors import WireTensor, decode
from weft.language.plan import GraphPlan
from weft.router.operators.cascade import CascadePlan

SOFT: dict[str, Any] = {"is_soft": True}


def at_least(limit: float) -> Any:
    return FakeCondition(lambda r, values: bool(values["Y"][0] >= limit), names=("Y",), source=f"Y >= {limit}")


def cascade(steps: Mapping[str, dict[str, Any]], **options: Any) -> GraphPlan:
    """Steps that call the models named like them; all but the last accept 10 and more."""
    last = list(steps)[-1]
    made = [
        make.step(n, n, {"IN": "X"}, {"OUT": "Y"}, **({} if n == last else {"accept": at_least(10)}) | how)
        for n, how in steps.items()
    ]
    return make.graph(make.node("root", CascadePlan, made, inputs=["X"], outputs=["Y"], **options))


async def path_and_answer(plan: GraphPlan, target: FakeTarget, **options: Any) -> tuple[str, float]:
    context = make.context(**options)
    result = await make.run(plan, target, context=context)
    [(_, path)] = context.trailing_metadata
    return path, decode(result.outputs["Y"]).item()


@pytest.mark.parametrize(
    ("answers", "path", "value"),
    [
        ((12, 20, 30), "root<a>", 12.0),
        ((5, 20, 30), "root<a;b>", 20.0),
        ((5, 6, 30), "root<a;b;c>", 30.0),
        ((5, 6, 1), "root<a;b;c>", 1.0),  # the last answer counts as it is
    ],
)
async def test_the_first_accepted_answer_wins(answers: tuple[float, ...], path: str, value: float) -> None:
    """No step runs after it."""
    target = FakeTarget(**{name: answering(answer) for name, answer in zip("abc", answers, strict=True)})
    assert (path, value) == await path_and_answer(cascade({"a": {}, "b": {}, "c": {}}), target)


async def test_a_soft_step_that_fails_passes_on() -> None:
    """Whether the step after it answers, or nothing is left but an answer that was not accepted."""
    target = FakeTarget(a=answering(5), b=failing(), c=answering(30))
    assert ("root<a;b!;c>", 30.0) == await path_and_answer(cascade({"a": {}, "b": SOFT, "c": {}}), target)
    target = FakeTarget(a=answering(5), b=failing())
    assert ("root<a;b!>", 5.0) == await path_and_answer(cascade({"a": {}, "b": SOFT}), target)


async def test_a_hard_step_that_fails_fails_the_node() -> None:
    """Though there is an answer."""
    target = FakeTarget(a=answering(5), b=failing("ABORTED"))
    with pytest.raises(WeftError, match=r"^g/1: root/b -> b@1: gone$") as caught:
        await make.run(cascade({"a": {}, "b": {}, "c": {}}), target)
    assert "ABORTED" == caught.value.code
    assert ["a", "b"] == target.called()


async def test_a_hard_step_that_runs_out_of_time_fails_the_node(virtual_clock: VirtualClock) -> None:
    """Though there is an answer; a soft one would be left out."""
    target = FakeTarget(a=answering(5), b=answering(30, after_ms=900))
    with pytest.raises(WeftError) as caught:
        await make.run(cascade({"a": {}, "b": {}}), target, context=make.context(timeout_ms=50))
    assert "DEADLINE_EXCEEDED" == caught.value.code


async def test_the_latest_answer_is_the_best() -> None:
    """Not the first, and not a mixture of both: every output is of the same step."""
    steps = [
        make.step("a", "a", {"IN": "X"}, {"O": "Y", "P": "Z"}, accept=at_least(10)),
        make.step("b", "b", {"IN": "X"}, {"O": "Y", "P": "Z"}, accept=at_least(10)),
        make.step("c", "c", {"IN": "X"}, {"O": "Y", "P": "Z"}, is_soft=True),
    ]
    plan = make.graph(make.node("root", CascadePlan, steps, inputs=["X"], outputs=["Y", "Z"]))
    target = FakeTarget(a=answering(5), b=answering(6), c=failing())
    assert {"Y": make.tensor(6.0), "Z": make.tensor(6.0)} == (await make.run(plan, target)).outputs


async def test_a_false_when_passes_the_step_over() -> None:
    """It does not run, and is not in the path."""
    never = {"when": FakeCondition(lambda r, f: False)}
    target = FakeTarget(b=answering(20))
    assert ("root<b>", 20.0) == await path_and_answer(cascade({"a": never, "b": {}}), target)


async def test_a_step_knows_which_ones_before_it_answered() -> None:
    """`steps.<name>.ok` of a step that failed softly is false, of one whose answer was not accepted true."""
    ok_a, ok_b = (
        FakeCondition(lambda r, values, name=name: values[name] is not None, names=(name,))
        for name in ("steps.a.ok", "steps.b.ok")
    )
    steps = {"a": SOFT, "b": {}, "c": {"when": ok_a}, "d": {"when": ok_b}}
    target = FakeTarget(a=failing(), b=answering(1), d=answering(4))
    assert ("root<a!;b;d>", 4.0) == await path_and_answer(cascade(steps), target)


async def test_a_step_is_passed_over_when_too_little_time_is_left(virtual_clock: VirtualClock) -> None:
    """100 ms less 60 is less than 50; the answer in hand is given."""
    plan = cascade({"a": {}, "b": {"min_remaining_ms": 50}})
    target = FakeTarget(a=answering(5, after_ms=60), b=answering(30))
    assert ("root<a>", 5.0) == await path_and_answer(plan, target, timeout_ms=100)
    assert ("root<a;b>", 30.0) == await path_and_answer(plan, target, timeout_ms=110)
    assert ("root<a;b>", 30.0) == await path_and_answer(plan, target)


@pytest.mark.parametrize(
    ("steps", "code", "message"),
    [
        ({"a": SOFT, "b": SOFT}, "ABORTED", r"^g/1: root/b -> b@1: second$"),
        ({"a": SOFT, "b": SOFT | {"min_remaining_ms": 500}}, "UNAVAILABLE", r"^g/1: root/a -> a@1: gone$"),
        ({"a": "never", "b": SOFT}, "ABORTED", r"root/b -> b@1: second$"),
        (
            {"a": {"min_remaining_ms": 500}, "b": {"min_remaining_ms": 101}},
            "DEADLINE_EXCEEDED",
            r"^g/1: root: cascade 'root' has no answer: less time is left than 'min_remaining_ms' of its steps asks",
        ),
        ({"a": "never", "b": {"min_remaining_ms": 101}}, "DEADLINE_EXCEEDED", "less time is left"),
        (
            {"a": "never", "b": "never"},
            "INVALID_ARGUMENT",
            r"^g/1: root: no step of cascade 'root' is for this request: no 'when' holds of 'a' 'tier', 'b' 'tier'$",
        ),
    ],
)
async def test_without_any_answer_the_last_cause_is_the_error(
    virtual_clock: VirtualClock, steps: dict[str, Any], code: str, message: str
) -> None:
    """An error of a step before lack of time before a false `when`."""
    never = {"when": FakeCondition(lambda r, f: False, source="tier")}
    plan = cascade({name: never if how == "never" else how for name, how in steps.items()})
    target = FakeTarget(a=failing(), b=failing("ABORTED", "second"))
    with pytest.raises(WeftError, match=message) as caught:
        await make.run(plan, target, context=make.context(timeout_ms=100))
    assert code == caught.value.code


async def test_with_an_answer_in_hand_the_end_of_all_time_is_no_error(virtual_clock: VirtualClock) -> None:
    """The soft step ran into the deadline of the request; without an answer that is the error."""
    target = FakeTarget(a=answering(5), b=answering(30, after_ms=900), c=answering(40))
    plan = cascade({"a": {}, "b": SOFT, "c": {}})
    assert ("root<a;b!>", 5.0) == await path_and_answer(plan, target, timeout_ms=50)
    assert 50.0 == virtual_clock.elapsed_ms()
    with pytest.raises(WeftError) as caught:
        await make.run(cascade({"b": SOFT, "c": {}}), target, context=make.context(timeout_ms=50))
    assert "DEADLINE_EXCEEDED" == caught.value.code


@pytest.mark.parametrize("field", ["when", "accept"])
async def test_a_test_that_cannot_be_evaluated_fails_the_request(field: str) -> None:
    """A soft step makes no difference."""

    def fail(request: Any, frame: Any) -> Any:
        raise InvalidArgumentError("no such key")

    plan = cascade({"a": SOFT | {field: FakeCondition(fail)}, "b": {}})
    with pytest.raises(InvalidArgumentError, match=r"^g/1: root: no such key$"):
        await make.run(plan, FakeTarget())


async def test_a_cancel_stops_the_cascade() -> None:
    """The answer in hand is not given: nobody listens."""
    is_called = asyncio.Event()

    async def hang(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        is_called.set()
        await asyncio.Event().wait()
        return {}

    target = FakeTarget(a=answering(5), b=hang)
    request = asyncio.create_task(make.run(cascade({"a": {}, "b": SOFT, "c": {}}), target))
    await is_called.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert ["a", "b"] == target.called()
    assert 0 == target.num_open
