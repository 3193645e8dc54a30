"""What users of other inference graphs ask for, and how a file says it."""

from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn
from tests.unit.router.text_graphs import BATCHING, HEAD, compiled, sequence, x, y

from weft.base.errors import WeftError
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

pytestmark = pytest.mark.usefixtures("virtual_clock")
AVERAGE = 'combine { output: "Y" method: AVERAGE }'
CASCADE = """node { name: "root" cascade {
  step { name: "small" model_name: "small" accept: 'outputs.Y[0] > 5.0' MORE }
  step { name: "large" model_name: "large" } } }"""


async def test_a_sure_answer_ends_the_graph_early() -> None:
    """Ensembles of Triton Inference Server always run to the end; here `accept` stops when it is good enough."""
    small = in_turn(answering(9), answering(3))
    target = FakeTarget(small=small, large=answering(7))
    plan = compiled(CASCADE.replace("MORE", ""))
    assert [9, 7] == [y(await make.run(plan, target, x())) for _ in range(2)]
    assert ["small", "small", "large"] == target.called()


async def test_an_early_end_is_never_that_of_a_failure() -> None:
    """A KServe sequence whose condition is not met answers 200 with the error body of the step before."""
    target = FakeTarget(small=failing("DATA_LOSS"), large=answering(7))
    assert 7 == y(await make.run(compiled(CASCADE.replace("MORE", "dependency: SOFT")), target, x()))
    with pytest.raises(WeftError) as caught:
        await make.run(compiled(CASCADE.replace("MORE", "")), target, x())
    assert "DATA_LOSS" == caught.value.code


async def test_members_may_get_different_inputs() -> None:
    """KServe ignores `data` of an ensemble's steps, and a Seldon combiner's children all get the same payload."""
    head = HEAD.replace("] } ]\noutput", '] }, { name: "V" data_type: TYPE_FP32 dims: [ 1 ] } ]\noutput')
    members = 'step { name: "a" model_name: "a" } step { name: "b" model_name: "b" input_map { key: "X" value: "V" } }'
    nodes = f'node {{ name: "root" ensemble {{ {members} {AVERAGE} }} }}'
    result = await make.run(compiled(nodes, head), FakeTarget(), {**x(2), "V": x(6)["X"]})
    assert 4 == y(result)


async def test_a_client_picks_the_members() -> None:
    """By a parameter; KServe ignores the condition of an ensemble's step, others fork to all."""
    members = " ".join(
        f'step {{ name: "{name}" model_name: "{name}" when: \'get(parameters, "models", "").contains("{name}")\' }}'
        for name in "abc"
    )
    plan = compiled(f'node {{ name: "root" ensemble {{ {members} {AVERAGE} }} }}')
    target = FakeTarget(a=answering(1), b=answering(2), c=answering(6))
    for models, expected in (("a,c", 3.5), ("b", 2)):
        assert expected == y(await make.run(plan, target, x(), parameters={"models": models}))
    assert ["a", "c", "b"] == target.called()
    with pytest.raises(WeftError, match="did not run, its 'when' is false") as caught:
        await make.run(plan, target, x())
    assert "INVALID_ARGUMENT" == caught.value.code


async def test_a_whole_graph_is_a_step_of_another() -> None:
    """KServe composes nodes of one resource only: no confidence cascade as a block, nothing around a whole graph."""
    inner = HEAD.replace('"g"', '"sure"') + CASCADE.replace("MORE", "")
    nodes = sequence(
        'step { name: "pre" model_name: "pre" output_map { key: "Y" value: "M" } }',
        'step { name: "main" graph: "sure" input_map { key: "X" value: "M" } output_map { key: "Y" value: "N" } }',
        'step { name: "post" model_name: "post" input_map { key: "X" value: "N" } }',
    )
    target = FakeTarget(pre=answering(2), small=answering(3), large=answering(7))
    context = make.context()
    result = await make.run(compiled(nodes, sure=inner), target, x(), context=context)
    assert (7, ["pre", "small", "large", "post"]) == (y(result), target.called())
    assert [("x-graph-path", "root.pre;main=root<small;large>;post")] == context.trailing_metadata


async def test_a_canary_meets_its_canary() -> None:
    """With KServe a canary transformer may call the old predictor; splitters that share a salt decide alike."""
    halves = """node { name: "NAME" splitter { sticky_by: 'headers["x-user-id"]' salt: "2026-10"
      step { name: "old" weight: 80 model_name: "NAME-old" }
      step { name: "new" weight: 20 model_name: "NAME-new" } } }"""
    nodes = sequence(
        'step { name: "a" node: "pre" output_map { key: "Y" value: "M" } }',
        'step { name: "b" node: "main" input_map { key: "X" value: "M" } }',
    )
    target = FakeTarget()
    executor = GraphExecutor(
        compiled(nodes + halves.replace("NAME", "pre") + halves.replace("NAME", "main")), Runtime({"model": target})
    )
    for user in range(100):
        await make.run(executor, inputs=x(), context=make.context(headers={"x-user-id": f"u{user}"}))
    called = target.called()
    pairs = zip(called[::2], called[1::2], strict=True)
    taken = [(one.removeprefix("pre-"), other.removeprefix("main-")) for one, other in pairs]
    assert {("old", "old"), ("new", "new")} == set(taken)
    assert 5 < taken.count(("new", "new")) < 40


@pytest.mark.parametrize("head", [HEAD, BATCHING], ids=["[1]", "[[1]]"])
async def test_a_choice_reads_the_value_whatever_the_batch(head: str) -> None:
    """Seldon's router always took child 0 where [1] came as [[1]]."""
    nodes = """node { name: "root" switch { on: 'int(inputs.X[0])'
      step { name: "zero" case: "0" model_name: "zero" } step { name: "one" case: "1" model_name: "one" } } }"""
    target = FakeTarget()
    for value in (1, 0):
        inputs = {"X": make.tensor(value, shape=(1, 1) if head is BATCHING else (1,))}
        await make.run(compiled(nodes, head), target, inputs)
    assert ["one", "zero"] == target.called()


async def test_a_step_may_wait_for_another_without_its_data() -> None:
    """Seldon's triggers; here `steps.<name>.ok`, which also tells whether the other answered."""
    nodes = sequence(
        'step { name: "audit" model_name: "audit" dependency: SOFT output_map { key: "Y" value: "UNUSED" } }',
        'step { name: "main" model_name: "main" when: "steps.audit.ok" default { output: "Y" number: -1 } }',
    )
    good = FakeTarget(audit=answering(1, after_ms=20), main=answering(7))
    assert (7, ["audit", "main"]) == (y(await make.run(compiled(nodes), good, x())), good.called())
    bad = FakeTarget(audit=failing(), main=answering(7))
    assert (-1, ["audit"]) == (y(await make.run(compiled(nodes), bad, x())), bad.called())


@pytest.mark.parametrize(
    ("test", "more"),
    [
        ("headers['x-tier'] == 'gold'", {"context": {"headers": {"x-tier": "gold"}}}),
        ("get(parameters, 'tier', '') == 'gold'", {"parameters": {"tier": "gold"}}),
        ("request.id == 'r7'", {"request_id": "r7"}),
    ],
)
async def test_a_choice_sees_all_of_the_request(test: str, more: dict[str, Any]) -> None:
    """Seldon's routers do not see metadata; a gjson path of KServe sees the body alone."""
    nodes = f"""node {{ name: "root" switch {{ step {{ name: "a" when: "{test}" model_name: "a" }}
      step {{ name: "rest" otherwise: true model_name: "rest" }} }} }}"""
    target = FakeTarget()
    options = {**more, "context": make.context(**more.get("context", {}))}
    await make.run(compiled(nodes), target, x(), **options)
    assert ["a"] == target.called()
