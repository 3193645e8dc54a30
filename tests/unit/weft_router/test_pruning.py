"""Requests for some of a graph's outputs: only the steps behind those run."""

import asyncio
from types import SimpleNamespace

import pytest

from weft_common.core import CallContext, InferCall
from weft_common.errors import RemoteError
from weft_router.executor import MAX_PRUNED_ROOTS, GraphExecutor
from weft_router.graph.plan import GraphPlan, NodeKind


def tree(make: SimpleNamespace) -> GraphPlan:
    """X -> a -> (b, c); c -> d. Outputs A, B, C, D and the input X itself."""
    steps = [
        make.step("d", "md", {"IN": "C"}, {"OUT": "D"}),
        make.step("a", "ma", {"IN": "X"}, {"OUT": "A"}),
        make.step("b", "mb", {"IN": "A"}, {"OUT": "B"}),
        make.step("c", "mc", {"IN": "A"}, {"OUT": "C"}),
    ]
    return make.graph(make.node("root", NodeKind.SEQUENCE, steps, inputs=["X"], outputs=[*"ABCDX"]))


@pytest.mark.parametrize(
    ("outputs", "models"),
    [("", "abcd"), ("A", "a"), ("B", "ab"), ("D", "acd"), ("BD", "abcd"), ("DC", "acd"), ("X", ""), ("XA", "a")],
)
async def test_only_the_steps_behind_the_requested_outputs_run(
    make: SimpleNamespace, outputs: str, models: str
) -> None:
    """As in ensembles of Triton Inference Server; without a choice every step runs."""
    target = make.FakeTarget()
    executor = GraphExecutor(tree(make), {"model": target})
    for _ in range(2):
        target.calls.clear()
        result = await make.run(executor, outputs=outputs)
        assert list(outputs or "ABCDX") == list(result.outputs)
        assert sorted(f"m{model}" for model in models) == sorted(target.called())


async def test_a_step_that_is_not_needed_cannot_fail_the_request(make: SimpleNamespace) -> None:
    """Nor does the path name it."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, object]:
        raise RemoteError("INTERNAL", "boom")

    executor = GraphExecutor(tree(make), {"model": make.FakeTarget(mc=fail)})
    context = CallContext()
    await make.run(executor, outputs="B", context=context)
    assert [("x-graph-path", "root.a;b")] == context.trailing_metadata
    with pytest.raises(RemoteError):
        await make.run(executor)


async def test_what_is_kept_for_requested_outputs_is_bounded(make: SimpleNamespace) -> None:
    """Clients that ask for ever other outputs cannot fill the memory; past the limit every step runs."""
    names = [f"o{i}" for i in range(MAX_PRUNED_ROOTS + 2)]
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": name}) for name in names]
    plan = make.graph(make.node("root", NodeKind.SEQUENCE, steps, inputs=["X"], outputs=names))
    target = make.FakeTarget()
    executor = GraphExecutor(plan, {"model": target})
    for name in names:
        result = await make.run(executor, outputs=[name])
        assert [name] == list(result.outputs)
    assert MAX_PRUNED_ROOTS + 2 * len(names) == len(target.calls)


async def test_pruned_steps_still_run_at_once(make: SimpleNamespace) -> None:
    """Of b, c and d the first two are in flight together."""
    both = asyncio.Barrier(2)

    async def meet(call: InferCall, context: CallContext) -> dict[str, object]:
        await both.wait()
        return {"OUT": call.inputs["IN"]}

    executor = GraphExecutor(tree(make), {"model": make.FakeTarget(mb=meet, mc=meet)})
    async with asyncio.timeout(5):
        await make.run(executor, outputs="BC")
    assert 0 == make.num_other_tasks()
