"""Requests for some of a graph's outputs: only the steps behind those run."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.language.plan import Binding, GraphPlan, NodePlan, ShadowPlan
from weft.language.pruning import live_steps, pruned, slots_read
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.policies.cache import CachePlan
from weft.router.requests import MAX_SELECTIONS
from weft.router.runtime import Runtime


def tree() -> GraphPlan:
    """X -> a -> (b, c); c -> d. Outputs A, B, C, D and the input X itself."""
    steps = [
        make.step("d", "md", {"IN": "C"}, {"OUT": "D"}),
        make.step("a", "ma", {"IN": "X"}, {"OUT": "A"}),
        make.step("b", "mb", {"IN": "A"}, {"OUT": "B"}),
        make.step("c", "mc", {"IN": "A"}, {"OUT": "C"}),
    ]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=[*"ABCDX"]))


@pytest.mark.parametrize(
    ("outputs", "models"),
    [("", "abcd"), ("A", "a"), ("B", "ab"), ("D", "acd"), ("BD", "abcd"), ("DC", "acd"), ("X", ""), ("XA", "a")],
)
async def test_only_the_steps_behind_the_requested_outputs_run(outputs: str, models: str) -> None:
    """As in ensembles of Triton Inference Server; without a choice every step runs."""
    target = FakeTarget()
    executor = GraphExecutor(tree(), Runtime({"model": target}))
    for _ in range(2):
        target.calls.clear()
        result = await make.run(executor, outputs=outputs)
        assert list(outputs or "ABCDX") == list(result.outputs)
        assert sorted(f"m{model}" for model in models) == sorted(target.called())


async def test_a_step_that_is_not_needed_cannot_fail_the_request() -> None:
    """Nor does the path name it."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, Any]:
        raise RemoteError("INTERNAL", "boom")

    executor = GraphExecutor(tree(), Runtime({"model": FakeTarget(mc=fail)}))
    context = CallContext()
    await make.run(executor, outputs="B", context=context)
    assert [("x-graph-path", "root.a;b")] == context.trailing_metadata
    with pytest.raises(RemoteError):
        await make.run(executor)


async def test_what_is_kept_for_requested_outputs_is_bounded() -> None:
    """Clients that ask for ever other outputs cannot fill the memory; the oldest is worked out again."""
    names = [f"o{i}" for i in range(MAX_SELECTIONS + 2)]
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": name}) for name in names]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=names))
    target = FakeTarget()
    executor = GraphExecutor(plan, Runtime({"model": target}))
    for name in (*names, names[0]):
        result = await make.run(executor, outputs=[name])
        assert [name] == list(result.outputs)
    assert [*names, names[0]] == target.called()
    assert MAX_SELECTIONS == len(executor._selections._known)


async def test_pruned_steps_still_run_at_once() -> None:
    """Of b, c and d the first two are in flight together."""
    both = asyncio.Barrier(2)

    async def meet(call: InferCall, context: CallContext) -> dict[str, Any]:
        await both.wait()
        return {"OUT": call.inputs["IN"]}

    executor = GraphExecutor(tree(), Runtime({"model": FakeTarget(mb=meet, mc=meet)}))
    async with asyncio.timeout(5):
        await make.run(executor, outputs="BC")
    assert 0 == make.num_other_tasks()


def reader(**options: Any) -> NodePlan:
    """X -> a, b, c; s reads X, and whatever the options say."""
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": name.upper()}) for name in "abc"]
    steps.append(make.step("s", "s", {"IN": "X"}, {"OUT": "S"}, **options))
    return make.node("root", SequencePlan, steps, inputs=["X"], outputs=[*"ABCS"])


def live(plan: NodePlan, *wanted: str) -> str:
    return "".join(plan.steps[index].name for index in live_steps(plan, wanted))


def test_what_conditions_caches_and_fallbacks_read_is_needed() -> None:
    """A step that only a `when`, a fallback's input, a cache key or `steps.<name>.ok` reads runs all the same."""
    condition = FakeCondition(lambda r, values: True, names=("A", "steps.b.ok"))
    assert "abs" == live(reader(when=condition), "S")
    fallback = make.step("f", "f", {"IN": "B"}, {"OUT": "S"}, fallback=make.step("g", "g", {"IN": "C"}, {"OUT": "S"}))
    assert "bcs" == live(reader(fallback=fallback), "S")
    key = FakeCondition(lambda r, values: "", tensors=(Binding("C", 3),))
    plan = reader(cache=CachePlan(0, 1, key))
    assert 3 == dict(plan.outputs)["C"]
    assert "cs" == live(plan, "S")
    assert "s" == live(reader(), "S")


def test_a_step_reads_each_slot_once() -> None:
    """However many of its parts read it."""
    condition = FakeCondition(lambda r, values: True, names=("X", "A"))
    plan = reader(when=condition, fallback=make.step("f", "f", {"IN": "X"}, {"OUT": "S"}))
    assert [0, 1] == slots_read(plan.steps[3])


def test_what_a_loop_carries_and_tests_is_needed() -> None:
    """The rounds would differ without it, whatever outputs are asked for."""
    again = FakeCondition(lambda r, values: False, names=("B",))
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": name.upper()}) for name in "abcd"]
    loop = make.loop(again, 3, ("A", "X"))
    plan = make.node("root", SequencePlan, steps, inputs=["X"], outputs=[*"ABCD"], loop=loop)
    assert "abd" == live(plan, "D")


@pytest.mark.parametrize(("wanted", "expected"), [("A", "ax"), ("B", "bx"), ("AB", "abxy"), ("C", "cx")])
def test_a_shadow_lives_if_what_it_reads_does(wanted: str, expected: str) -> None:
    """It makes no step live; one that reads inputs alone always lives."""
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": name.upper()}) for name in "abc"]
    steps.append(make.step("x", "x", {"IN": "X"}, {}, shadow=ShadowPlan(100, 0)))
    steps.append(make.step("y", "y", {"I": "A", "J": "B"}, {}, shadow=ShadowPlan(100, 0)))
    plan = make.node("root", SequencePlan, steps, inputs=["X"], outputs=[*"ABC"])
    assert expected == live(plan, *wanted)


def test_an_ordered_sequence_stays_ordered() -> None:
    """What waited for a step that is left out waits for what that one waited for, and for nothing else."""
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": name.upper()}) for name in "abcde"]
    plan = make.node("root", SequencePlan, steps, inputs=["X"], outputs=[*"ABCDE"])
    ordered = replace(
        plan,
        steps=tuple(
            replace(one, consumers=(index + 1,) if index < 4 else (), num_dependencies=min(index, 1))
            for index, one in enumerate(plan.steps)
        ),
    )
    rest = pruned(ordered, [0, 3, 4])
    assert [("a", (1,), 0), ("d", (2,), 1), ("e", (), 1)] == [
        (one.name, one.consumers, one.num_dependencies) for one in rest.steps
    ]
