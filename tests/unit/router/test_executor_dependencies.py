"""Sequences: steps that are skipped, fail softly or are copies, and those that wait for them."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.tensors import WireTensor
from weft.language.plan import ShadowPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.runtime import Runtime

SEQUENCE = SequencePlan


async def test_skipped_and_soft_steps_release_their_consumers(virtual_clock: VirtualClock) -> None:
    """The consumer starts when the slowest of them has ended, and is called without what is absent."""
    steps = [
        make.step("skipped", "m", {"IN": "X"}, {"OUT": "S"}, when=FakeCondition(lambda r, f: False)),
        make.step("soft", "soft", {"IN": "X"}, {"OUT": "F"}, is_soft=True),
        make.step("hard", "m", {"IN": "X"}, {"OUT": "H"}),
        make.step("last", "last", {"A": "H", "B": "S", "C": "F"}, {"OUT": "Y"}),
    ]
    root = make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"])
    context = CallContext()
    target = FakeTarget(soft=failing(after_ms=20))
    await make.run(make.graph(root), target, context=context)
    assert ["A"] == list(target.calls[-1].inputs)
    assert 20.0 == virtual_clock.elapsed_ms()
    assert [("x-graph-path", "root.soft!;hard;last")] == context.trailing_metadata


async def test_whether_a_step_answered_is_a_dependency() -> None:
    """`steps.<name>.ok` is known when the step has ended: true for one that answered, false for one that failed."""
    seen: dict[str, bool] = {}

    def note(name: str) -> Any:
        ok = f"steps.{name}.ok"

        def condition(request: Any, values: Mapping[str, Any]) -> bool:
            seen[name] = values[ok] is not None
            return True

        return FakeCondition(condition, names=(ok,))

    steps = [
        make.step("good", "good", {"IN": "X"}, {"OUT": "G"}),
        make.step("bad", "bad", {"IN": "X"}, {"OUT": "B"}, is_soft=True),
        make.step("a", "a", {"IN": "X"}, {"OUT": "YA"}, when=note("good")),
        make.step("b", "b", {"IN": "X"}, {"OUT": "YB"}, when=note("bad")),
    ]
    root = make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["YA", "YB"])
    await make.run(make.graph(root), FakeTarget(bad=failing()))
    assert {"good": True, "bad": False} == seen


async def test_a_shadow_takes_no_part_in_the_order() -> None:
    """Beside a lone step it needs no task of its own there; it gets what the step before it gave."""
    steps = [
        make.step("a", "a", {"IN": "X"}, {"OUT": "M"}),
        make.step("copy", "copy", {"IN": "M"}, {}, shadow=ShadowPlan(100, 0)),
        make.step("b", "b", {"IN": "M"}, {"OUT": "Y"}),
    ]
    root = make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"])
    is_copied = asyncio.Event()

    async def copy(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        is_copied.set()
        return {}

    tasks: list[int] = []

    async def last(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        tasks.append(make.num_other_tasks())
        return {"OUT": call.inputs["IN"]}

    target = FakeTarget(copy=copy, b=last)
    context = CallContext()
    executor = GraphExecutor(make.graph(root), Runtime({"model": target}))
    await make.run(executor, inputs={"X": make.tensor(5.0)}, context=context)
    await is_copied.wait()
    assert [("x-graph-path", "root.a;b")] == context.trailing_metadata
    assert [1] == tasks
    assert {"a", "b", "copy"} == set(target.called())
    assert [make.tensor(5.0)] * 3 == [call.inputs["IN"] for call in target.calls]
    await executor._runtime.close()


async def test_an_ordered_sequence_does_not_wait_for_a_shadow(virtual_clock: VirtualClock) -> None:
    """What stands behind it starts at once."""
    steps = [
        make.step("a", "a", {"IN": "X"}, {"OUT": "M"}),
        make.step("copy", "copy", {"IN": "X"}, {}, shadow=ShadowPlan(100, 0)),
        make.step("b", "b", {"IN": "X"}, {"OUT": "Y"}),
    ]
    plan = make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"])
    edges = [((1,), 0), ((2,), 1), ((), 1)]
    ordered = replace(
        plan,
        steps=tuple(
            replace(one, consumers=consumers, num_dependencies=count)
            for one, (consumers, count) in zip(plan.steps, edges, strict=True)
        ),
    )
    target = FakeTarget(a=answering(after_ms=10), copy=answering(after_ms=1_000))
    executor = GraphExecutor(make.graph(ordered), Runtime({"model": target}))
    result = await make.run(executor)
    assert ["Y"] == list(result.outputs)
    assert 10.0 == virtual_clock.elapsed_ms()
    await executor._runtime.close()
