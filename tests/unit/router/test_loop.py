"""Sequences that run again while a condition holds."""

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError, RemoteError
from weft.base.tensors import WireTensor, decode, encode
from weft.language.plan import GraphPlan
from weft.router.operators.sequence import SequencePlan


def loop(again: Any, max_iterations: int = 10, **options: Any) -> GraphPlan:
    """X -> double -> M -> add (with B) -> Y, which is X of the next round."""
    steps = [
        make.step("double", "double", {"IN": "X"}, {"OUT": "M"}),
        make.step("add", "add", {"A": "M", "B": "B"}, {"OUT": "Y"}, **options),
    ]
    plan = make.loop(again, max_iterations, ("Y", "X"))
    root = make.node("root", SequencePlan, steps, inputs=["X", "B"], outputs=["Y", "M"], loop=plan)
    return make.graph(root)


def calculator(**more: Any) -> Any:
    async def double(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return {"OUT": encode(decode(call.inputs["IN"]) * np.float32(2))}

    async def add(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return {"OUT": encode(decode(call.inputs["A"]) + decode(call.inputs["B"]))}

    return FakeTarget(**{"double": double, "add": add, **more})


async def test_a_loop_runs_while_its_condition_holds() -> None:
    """From x to 2x + 1 until it is 20 or more; the input that is not carried stays, the path shows every round."""
    again = FakeCondition(lambda r, values: bool(values["Y"][0] < 20), names=("Y",))
    context = CallContext()
    result = await make.run(loop(again), calculator(), context=context)
    assert {"Y": make.tensor(31.0), "M": make.tensor(30.0)} == result.outputs
    assert 4 == again.num_evaluations
    assert [("x-graph-path", "root.double;add;double;add;double;add;double;add")] == context.trailing_metadata


@pytest.mark.parametrize(("max_iterations", "expected"), [(1, 3.0), (3, 15.0)])
async def test_a_loop_ends_with_its_last_round(max_iterations: int, expected: float) -> None:
    """The answer is what that round gave; the condition is not asked any more."""
    again = FakeCondition(lambda r, values: True)
    result = await make.run(loop(again, max_iterations), calculator())
    assert make.tensor(expected) == result.outputs["Y"]
    assert max_iterations - 1 == again.num_evaluations


async def test_the_condition_sees_the_inputs_of_the_round() -> None:
    """Carried ones included."""
    seen: list[tuple[float, float]] = []

    def note(request: Any, values: Mapping[str, np.ndarray]) -> bool:
        seen.append((values["X"].item(), values["Y"].item()))
        return len(seen) < 3

    await make.run(loop(FakeCondition(note, names=("X", "Y"))), calculator())
    assert [(1.0, 3.0), (3.0, 7.0), (7.0, 15.0)] == seen


async def test_a_round_starts_without_the_tensors_of_the_one_before() -> None:
    """A step that is skipped in the second round leaves its output absent, not as it was."""
    rounds = iter([True, False])
    when = FakeCondition(lambda r, f: next(rounds))
    again = iter([True, False])
    plan = loop(FakeCondition(lambda r, f: next(again)), when=when)
    result = await make.run(plan, calculator(), {"B": make.tensor(1.0), "X": make.tensor(1.0)})
    assert {"M": make.tensor(6.0)} == result.outputs


async def test_a_swap_carries_both_ways() -> None:
    """What is carried is taken before anything is overwritten."""
    steps = [make.step(n, n, {"IN": x}, {"OUT": y}) for n, x, y in (("p", "A", "B1"), ("q", "B", "A1"))]
    again = FakeCondition(lambda r, f: True)
    plan = make.loop(again, 2, ("A1", "A"), ("B1", "B"))
    root = make.node("root", SequencePlan, steps, inputs=["A", "B"], outputs=["A1", "B1"], loop=plan)
    inputs = {"A": make.tensor(1.0), "B": make.tensor(2.0)}
    result = await make.run(make.graph(root), FakeTarget(), inputs)
    assert {"A1": make.tensor(1.0), "B1": make.tensor(2.0)} == result.outputs


async def test_a_condition_that_cannot_be_evaluated_fails_the_request() -> None:
    """The message has the place."""

    def fail(request: Any, frame: Any) -> bool:
        raise InvalidArgumentError("no such key")

    with pytest.raises(InvalidArgumentError, match=r"^g/1: root: no such key$"):
        await make.run(loop(FakeCondition(fail)), calculator())


async def test_a_failure_ends_the_loop() -> None:
    """In whichever round it happens."""
    fails_second = in_turn(answering(1.0), failing())
    context = CallContext()
    with pytest.raises(RemoteError, match="root/double -> double@1: gone"):
        await make.run(loop(FakeCondition(lambda r, f: True)), calculator(double=fails_second), context=context)
    assert [("x-graph-path", "root.double;add;double!")] == context.trailing_metadata


async def test_a_loop_that_is_pruned_still_loops() -> None:
    """Steps that neither the outputs asked for nor the loop need are left out of every round."""
    steps = [make.step(n, n, {"IN": "X"}, {"OUT": n.upper()}) for n in "abc"]
    plan = make.loop(FakeCondition(lambda r, f: True), 2, ("A", "X"))
    root = make.node("root", SequencePlan, steps, inputs=["X"], outputs=[*"ABC"], loop=plan)
    target = FakeTarget()
    await make.run(make.graph(root), target, outputs=["B"])
    assert ["a", "b", "a", "b"] == target.called()


async def test_a_round_does_not_hold_the_tensors_of_the_one_before() -> None:
    """They are freed before the first step of the next round."""

    class Data(bytearray):
        """Bytes that can be watched."""

    watched: list[weakref.ref[Data]] = []
    freed: list[bool] = []

    async def double(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        target.calls.clear()
        freed.extend(one() is None for one in watched)
        data = Data(4)
        watched.append(weakref.ref(data))
        return {"OUT": WireTensor("FP32", (1,), data)}  # type: ignore[arg-type]

    target = FakeTarget(double=double, add=answering(1.0))
    await make.run(loop(FakeCondition(lambda r, f: True), 2), target)
    assert [True] == freed
