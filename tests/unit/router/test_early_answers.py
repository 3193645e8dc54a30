"""The ways in which a guard ends a request early, as docs/graphs.md lists them."""

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing
from tests.unit.router.text_graphs import DEFAULT, HEAD, compiled, sequence, y
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.base.tensors import WireTensor

GUARD = 'step { name: "guard" model_name: "guard" output_map { key: "Y" value: "BLOCKED" } EXTRA }'
#: What it guards; the answer is 7, of a guard 1 or 0, by default -1.
MAIN = 'step { name: "main" model_name: "main" EXTRA }'


def _steps(guard: str = "", main: str = "") -> str:
    return sequence(GUARD.replace("EXTRA", guard), MAIN.replace("EXTRA", main))


async def _answer(nodes: str, guard) -> tuple[float, list[str]]:
    """The answer, and the models that were called."""
    target = FakeTarget(guard=guard, main=answering(7.0))
    return y(await make.run(compiled(nodes), target)), target.called()


async def test_the_status_of_the_guard_is_the_status_of_the_request() -> None:
    """KServe's Hard step: what stands behind it is not called."""
    target = FakeTarget(guard=failing("NOT_FOUND", "no such thing"))
    with pytest.raises(RemoteError, match="root/guard -> guard@1: no such thing") as caught:
        await make.run(compiled(_steps(main='after: "guard"')), target)
    assert ("NOT_FOUND", ["guard"]) == (caught.value.code, target.called())


@pytest.mark.parametrize(("guard", "answer"), [(answering(1.0), 7.0), (failing("NOT_FOUND", "no"), -1.0)])
async def test_a_default_is_the_answer_where_a_soft_guard_fails(guard, answer: float) -> None:
    """`when: 'has(steps.guard)'` of what it guards."""
    nodes = _steps("dependency: SOFT", f"when: 'has(steps.guard)' {DEFAULT}")
    assert (answer, ["guard", "main"][: 1 + (answer > 0)]) == await _answer(nodes, guard)


@pytest.mark.parametrize(("blocked", "answer"), [(0.0, 7.0), (1.0, -1.0)])
async def test_a_default_is_the_answer_where_the_guard_says_so(blocked: float, answer: float) -> None:
    """In a tensor that the `when` of what it guards reads."""
    nodes = _steps(main=f"when: 'inputs.BLOCKED[0] < 0.5' {DEFAULT}")
    assert (answer, ["guard", "main"][: 1 + (answer > 0)]) == await _answer(nodes, answering(blocked))


@pytest.mark.parametrize(("blocked", "outputs"), [(0.0, ["Z", "Y"]), (1.0, ["Z"])])
async def test_the_answer_is_left_out_where_the_guard_says_so(blocked: float, outputs: list[str]) -> None:
    """The graph's output is `optional: true`; what the guard gives is an output too, and says why."""
    head = HEAD.replace("output [", 'output [ { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] },')
    head = head.replace('name: "Y"', 'name: "Y" optional: true')
    nodes = _steps(main="when: 'inputs.Z[0] < 0.5'").replace("BLOCKED", "Z")
    target = FakeTarget(guard=answering(blocked))
    result = await make.run(compiled(nodes, head), target)
    assert (outputs, len(outputs)) == (list(result.outputs), len(target.called()))


@pytest.mark.parametrize(("has_failed", "answer", "elapsed_ms"), [(True, -1.0, 5.0), (False, 7.0, 1000.0)])
async def test_a_guard_beside_the_model_ends_its_call(
    virtual_clock: VirtualClock, has_failed: bool, answer: float, elapsed_ms: float
) -> None:
    """Both in a node whose step is soft: the guard refuses at once, while the model runs."""
    inner = _steps().replace("root", "guarded").replace("} }", '} answer_after: "guard" }')
    nodes = sequence(f'step {{ node: "guarded" dependency: SOFT {DEFAULT} }}') + inner
    guard = failing("NOT_FOUND", "no", after_ms=5) if has_failed else answering(after_ms=5)
    target = FakeTarget(guard=guard, main=answering(7.0, after_ms=1000))
    context = CallContext()
    assert answer == y(await make.run(compiled(nodes), target, context=context))
    assert (elapsed_ms, 0) == (virtual_clock.elapsed_ms(), make.num_other_tasks())
    assert ["main"] * has_failed == target.cancelled


@pytest.mark.parametrize(("blocked", "answer"), [(0.0, 7.0), (1.0, 3.0)])
async def test_the_outputs_of_the_guard_are_the_answer(blocked: float, answer: float) -> None:
    """A cascade: KServe's condition that stops a sequence, and answers with the body so far."""

    async def guard(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
        return {"Y": make.tensor(3.0), "W": make.tensor(blocked)}

    nodes = """node { name: "root" cascade {
      step { name: "guard" model_name: "guard-W" accept: 'outputs.W[0] > 0.5' }
      step { name: "main" model_name: "main" } } }"""
    target = FakeTarget(**{"guard-W": guard, "main": answering(7.0)})
    assert answer == y(await make.run(compiled(nodes), target))
    assert ["guard-W", "main"][: 1 + (answer > 3)] == target.called()


@pytest.mark.parametrize(("blocked", "called"), [(0.0, "main"), (1.0, "refuse")])
async def test_a_switch_takes_another_step_for_the_answer(blocked: float, called: str) -> None:
    """Where the refusal is an answer of its own, made by a model."""
    choice = """node { name: "choice" switch {
      step { name: "refuse" when: 'inputs.BLOCKED[0] > 0.5' model_name: "refuse" }
      step { name: "main" otherwise: true model_name: "main" } } }"""
    nodes = sequence(GUARD.replace("EXTRA", ""), 'step { node: "choice" }') + choice
    target = FakeTarget(guard=answering(blocked))
    await make.run(compiled(nodes), target)
    assert ["guard", called] == target.called()
