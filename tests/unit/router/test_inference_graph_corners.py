"""What surprises users of KServe's InferenceGraph, Seldon and ensembles of Triton Inference Server, and what Weft does.

Every test compiles a file and runs it over fakes on a virtual clock.
"""

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.fake_random import FakeRandom
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn
from tests.unit.router.text_graphs import DEFAULT, HEAD, compiled, sequence, x, y
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.errors import InvalidArgumentError, WeftError
from weft.language import GraphError
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime


def faults(nodes: str, head: str = HEAD) -> set[str]:
    """Codes of everything that is wrong with a file."""
    with pytest.raises(GraphError) as caught:
        compiled(nodes, head)
    return {one.code for one in caught.value.diagnostics if one.severity == "error"}


def _bytes(value: float) -> bytes:
    return np.float32(value).tobytes()


pytestmark = pytest.mark.usefixtures("virtual_clock")


async def test_a_nested_node_gets_what_its_step_gives_it() -> None:
    """KServe's $request in a nested node is what the parent passed; here too: X of the inner node is the step's Y."""
    target = FakeTarget(first=answering(5), second=answering(7))
    nodes = sequence(
        'step { name: "a" model_name: "first" output_map { key: "Y" value: "M" } }',
        'step { name: "b" node: "inner" input_map { key: "X" value: "M" } }',
    ) + sequence('step { name: "c" model_name: "second" }', name="inner")
    assert 7 == y(await make.run(compiled(nodes), target, x()))
    assert _bytes(5) == target.calls[1].inputs["X"].data


async def test_no_output_is_dropped_on_the_way() -> None:
    """KServe keeps only `predictions`; here every tensor of an answer can be read by any later step."""
    target = FakeTarget(**{"a-W": answering(5), "b": answering(6), "c+Z": answering(7)})
    nodes = sequence(
        'step { name: "a" model_name: "a-W" output_map { key: "Y" value: "M" } }',
        'step { name: "b" model_name: "b" input_map { key: "X" value: "M" } output_map { key: "Y" value: "N" } }',
        'step { name: "c" model_name: "c+Z" input_map [ { key: "X" value: "N" }, { key: "Z" value: "W" } ] }',
    )
    await make.run(compiled(nodes), target, x())
    assert {"X": _bytes(6), "Z": _bytes(5)} == {name: t.data for name, t in target.calls[2].inputs.items()}


async def test_a_test_on_the_first_step_works() -> None:
    """KServe answers 500 for a condition on step 0; here `when` sees the node's inputs."""
    nodes = sequence(f'step {{ name: "a" model_name: "a" when: \'inputs.X[0] > 2.0\' {DEFAULT} }}')
    target = FakeTarget(a=answering(5))
    assert [-1.0, 5.0] == [y(await make.run(compiled(nodes), target, x(value))) for value in (1, 3)]


async def test_an_error_body_is_never_the_next_input() -> None:
    """KServe hands the error body of a soft step on, and answers 200; here the output is absent, or its default."""
    nodes = sequence(
        f'step {{ name: "a" model_name: "a" dependency: SOFT {DEFAULT.replace("Y", "M")} '
        'output_map { key: "Y" value: "M" } }',
        'step { name: "b" model_name: "b" input_map { key: "X" value: "M" } }',
    )
    target = FakeTarget(a=failing("INTERNAL"), b=answering(6))
    assert 6 == y(await make.run(compiled(nodes), target, x()))
    assert _bytes(-1) == target.calls[1].inputs["X"].data


def test_a_soft_step_without_default_feeds_optional_inputs_only() -> None:
    """What KServe finds out at run time, the loader proves: an absent tensor never reaches a required input."""
    nodes = sequence(
        'step { name: "a" model_name: "a" dependency: SOFT output_map { key: "Y" value: "M" } }',
        'step { name: "b" model_name: "b" input_map { key: "X" value: "M" } }',
    )
    assert {"G010"} == faults(nodes)


async def test_steps_are_hard_by_default() -> None:
    """KServe's default is Soft; here a failure ends the request with the step's own status; nothing runs after it."""
    nodes = sequence(
        'step { name: "a" model_name: "a" output_map { key: "Y" value: "M" } }',
        'step { name: "b" model_name: "b" input_map { key: "X" value: "M" } }',
    )
    target = FakeTarget(a=failing("DATA_LOSS"))
    with pytest.raises(WeftError) as caught:
        await make.run(compiled(nodes), target, x())
    assert ("DATA_LOSS", ["a"]) == (caught.value.code, target.called())


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"])
async def test_soft_holds_for_transport_errors_too(code: str) -> None:
    """In KServe a refused connection or a timeout is 500 though the step is Soft."""
    nodes = sequence(f'step {{ name: "a" model_name: "a" dependency: SOFT {DEFAULT} }}')
    assert -1 == y(await make.run(compiled(nodes), FakeTarget(a=failing(code)), x()))


def test_a_node_without_steps_is_refused() -> None:
    """In KServe empty steps panic at run time."""
    assert "G025" in faults('node { name: "root" sequence { } }')


SWITCH = """node { name: "root" switch {
  step { name: "low" when: 'inputs.X[0] < 10.0' model_name: "low" }
  step { name: "high" when: 'inputs.X[0] < 20.0' model_name: "high" } } }"""


async def test_the_first_branch_that_holds_is_taken() -> None:
    """As in KServe, later matches are not looked at."""
    target = FakeTarget()
    for value in (5, 15):
        await make.run(compiled(SWITCH), target, x(value))
    assert ["low", "high"] == target.called()


async def test_no_branch_is_the_same_error_at_any_depth() -> None:
    """KServe: 404 at the root, 500 below, and the documentation says that the input comes back."""
    nested = sequence('step { name: "s" node: "inner" }') + SWITCH.replace("root", "inner")
    for nodes in (SWITCH, nested):
        with pytest.raises(InvalidArgumentError, match="no branch of switch"):
            await make.run(compiled(nodes), FakeTarget(), x(50))


async def test_a_soft_step_softens_a_switch_without_match() -> None:
    """In KServe a nested miss is 500 even as a soft step."""
    nodes = sequence(f'step {{ name: "s" node: "inner" dependency: SOFT {DEFAULT} }}') + SWITCH.replace("root", "inner")
    assert -1 == y(await make.run(compiled(nodes), FakeTarget(), x(50)))


def test_a_branch_without_test_is_refused() -> None:
    """In KServe an unset condition matches nothing, silently."""
    assert {"G013"} == faults('node { name: "root" switch { step { name: "a" model_name: "a" } } }')


async def test_soft_counts_on_a_branch() -> None:
    """In KServe the dependency of a branch only changes a line in the log."""
    nodes = f"""node {{ name: "root" switch {{
      step {{ name: "a" otherwise: true model_name: "a" dependency: SOFT {DEFAULT} }} }} }}"""
    assert -1 == y(await make.run(compiled(nodes), FakeTarget(a=failing()), x()))


SPLITTER = """node { name: "root" splitter {
  step { name: "a" weight: 3 model_name: "a" } step { name: "b" weight: 1.5 model_name: "b" } } }"""


@pytest.mark.parametrize(("point", "taken"), [(0.0, "a"), (0.66, "a"), (0.67, "b"), (1 - 2**-53, "b")])
async def test_every_point_of_the_draw_has_a_step(point: float, taken: str) -> None:
    """Weights are shares of their sum; KServe wants 100, and for two years panicked on one draw in a hundred."""
    target = FakeTarget()
    await make.run(compiled(SPLITTER), target, x(), generator=FakeRandom(point))
    assert [taken] == target.called()


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_a_weight_that_means_nothing_is_refused(weight: str) -> None:
    """KServe's webhook lets negative weights pass; a missing one is a nil dereference."""
    assert {"G014"} == faults(SPLITTER.replace("1.5", weight))


async def test_a_failing_route_has_another() -> None:
    """KServe never tries another route."""
    nodes = SPLITTER.replace('model_name: "a" }', 'model_name: "a" fallback { model_name: "b" } }')
    target = FakeTarget(a=failing(), b=answering(6))
    result = await make.run(compiled(nodes), target, x(), generator=FakeRandom(0.0))
    assert (6, ["a", "b"]) == (y(result), target.called())


def ensemble(*steps: str, more: str = 'combine { output: "Y" method: AVERAGE }') -> str:
    return f'node {{ name: "root" ensemble {{ {" ".join(steps)} {more} }} }}'


HARD = [f'step {{ name: "{name}" model_name: "{name}" }}' for name in "abc"]
SOFT = [f'step {{ name: "{name}" model_name: "{name}" dependency: SOFT }}' for name in "abc"]


async def test_the_first_failure_in_time_ends_the_node(virtual_clock: VirtualClock) -> None:
    """KServe waits for every child and reports the first as declared; here siblings are cancelled, none is left."""
    target = FakeTarget(
        a=failing("INTERNAL", after_ms=500),
        b=failing("DATA_LOSS", after_ms=10),
        c=answering(after_ms=900),
    )
    with pytest.raises(WeftError) as caught:
        await make.run(compiled(ensemble(*HARD)), target, x())
    assert ("DATA_LOSS", 10.0) == (caught.value.code, virtual_clock.elapsed_ms())
    assert "root[b] -> b@1" in caught.value.message
    assert ({"a", "c"}, 0, 0) == (set(target.cancelled), target.num_open, make.num_other_tasks())


async def test_a_soft_failure_is_not_an_answer() -> None:
    """In KServe the error body of a soft child stands under its key, as if it had succeeded."""
    target = FakeTarget(a=answering(2), b=failing("UNAVAILABLE"), c=answering(4))
    assert 3 == y(await make.run(compiled(ensemble(HARD[0], *SOFT[1:])), target, x()))


async def test_the_slowest_soft_child_does_not_set_the_latency(virtual_clock: VirtualClock) -> None:
    """KServe has no timeout per child; here the late one is left out, and cancelled."""
    target = FakeTarget(a=answering(2), b=answering(4, after_ms=5), c=answering(9, after_ms=9_000))
    nodes = ensemble(*SOFT, more='quorum: 2 straggler_ms: 20 combine { output: "Y" method: AVERAGE }')
    assert 3 == y(await make.run(compiled(nodes), target, x()))
    assert (25.0, ["c"], 0) == (virtual_clock.elapsed_ms(), target.cancelled, make.num_other_tasks())


async def test_outputs_by_step_never_collide() -> None:
    """KServe names children by index where no name is given, and "1" may be a name too."""
    head = HEAD.replace('{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }', _outputs("1.Y", "m.Y", "m-2.Y"))
    nodes = ensemble('step { name: "1" model_name: "m" }', *['step { model_name: "m" }'] * 2, more="")
    result = await make.run(compiled(nodes, head), FakeTarget(), x())
    assert ["1.Y", "m.Y", "m-2.Y"] == list(result.outputs)


def _outputs(*names: str) -> str:
    return ", ".join(f'{{ name: "{name}" data_type: TYPE_FP32 dims: [ 1 ] }}' for name in names)


@pytest.mark.parametrize(
    ("nodes", "codes"),
    [
        (sequence('step { name: "a" node: "nowhere" }'), {"G002"}),
        (sequence('step { name: "a" model_name: "missing" }'), {"G002"}),
        (sequence('step { name: "a" node: "root" }'), {"G003"}),
        (sequence('step { name: "a" model_name: "a" }', name="top"), {"G002"}),
        (sequence('step { name: "a" model_name: "a" }') + sequence('step { model_name: "b" }', name="idle"), {"G004"}),
    ],
    ids=["unknown node", "unknown model", "a node in itself", "no root", "a node that nothing reaches"],
)
def test_references_are_checked_at_load(nodes: str, codes: set[str]) -> None:
    """KServe checks none: a typing error is a run-time error, a node in itself recurses for ever."""
    assert codes <= faults(nodes)


async def test_headers_and_parameters_reach_every_step_and_come_back() -> None:
    """KServe passes only what a cluster-wide expression matches, and no response header ever comes back."""
    nodes = sequence(
        'step { name: "a" model_name: "a" output_map { key: "Y" value: "M" } }',
        'step { name: "b" model_name: "b" input_map { key: "X" value: "M" } }',
    )
    target = FakeTarget(a=answering(5, tokens=3), b=answering(6, seconds=2))
    context = make.context(headers={"x-tenant": "blue", "te": "trailers"})
    result = await make.run(compiled(nodes), target, x(), parameters={"tier": "free"}, context=context)
    assert [{"x-tenant": "blue"}] * 2 == [dict(one.headers) for one in target.contexts]
    assert ["free"] * 2 == [call.parameters["tier"] for call in target.calls]
    assert {"tokens": 3, "seconds": 2} == result.parameters


async def test_one_deadline_holds_for_the_whole_graph(virtual_clock: VirtualClock) -> None:
    """KServe gives every call the same client timeout; here each call has what is left, the step's own at most."""
    nodes = sequence(
        'step { name: "a" model_name: "a" output_map { key: "Y" value: "M" } }',
        'step { name: "b" model_name: "b" input_map { key: "X" value: "M" } policy { timeout_ms: 30 } }',
    )
    target = FakeTarget(a=answering(after_ms=60), b=answering(after_ms=500))
    with pytest.raises(WeftError, match=r"root/b -> b@1"):
        await make.run(compiled(nodes), target, x(), context=make.context(timeout_ms=200))
    assert 90.0 == virtual_clock.elapsed_ms()
    with pytest.raises(WeftError, match=r"root/b -> b@1"):
        await make.run(compiled(nodes), target, x(), context=make.context(timeout_ms=70))
    assert 160.0 == virtual_clock.elapsed_ms()


async def test_a_client_that_hangs_up_ends_every_call() -> None:
    """In KServe the steps run on after the client has gone."""
    target = FakeTarget(**{name: answering(after_ms=900) for name in "abc"})
    request = asyncio.create_task(make.run(compiled(ensemble(*HARD)), target, x()))
    await asyncio.sleep(0.1)
    assert 3 == target.num_open
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert ({"a", "b", "c"}, 0, 0) == (set(target.cancelled), target.num_open, make.num_other_tasks())


async def test_no_request_runs_a_step_that_nobody_reads() -> None:
    """Triton Inference Server computed outputs that were not requested; Ray ran upstream nodes that nobody needed."""
    head = HEAD.replace('{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }', _outputs("Y", "V"))
    nodes = sequence('step { model_name: "a" }', 'step { model_name: "b" output_map { key: "Y" value: "V" } }')
    target = FakeTarget()
    await make.run(compiled(nodes, head), target, x(), outputs=["V"])
    assert ["b"] == target.called()


async def test_a_whole_branch_may_be_optional() -> None:
    """Users of Triton Inference Server write Python for this: an absent input skips its branch, nothing deadlocks."""
    head = HEAD.replace(
        "dims: [ 1 ] } ]\noutput",
        'dims: [ 1 ] }, { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]\noutput',
    )
    nodes = ensemble(
        'step { name: "a" model_name: "a" }',
        'step { name: "z" model_name: "b+Z" when: \'has(inputs.Z)\' }',
    )
    plan = compiled(nodes, head)
    target = FakeTarget(**{"a": answering(2), "b+Z": answering(4)})
    without = y(await make.run(plan, target, x()))
    both = y(await make.run(plan, target, {**x(), "Z": x()["X"]}))
    assert (2, 3, ["a", "a", "b+Z"]) == (without, both, target.called())


async def test_models_are_skipped_when_the_first_score_is_low() -> None:
    """Seldon's users route to child -2 for this; here a step's test reads what an earlier step gave."""
    nodes = sequence(
        'step { name: "limit" model_name: "limit" output_map { key: "Y" value: "SCORE" } }',
        f'step {{ name: "gpu" model_name: "gpu" when: \'inputs.SCORE[0] > 0.5\' {DEFAULT} }}',
    )
    target = FakeTarget(limit=in_turn(answering(0.2), answering(0.9)), gpu=answering(7))
    assert [-1, 7] == [y(await make.run(compiled(nodes), target, x())) for _ in range(2)]
    assert ["limit", "limit", "gpu"] == target.called()


async def test_a_graph_goes_on_after_its_combiner() -> None:
    """A Seldon tree cannot continue after a combiner; a node is a step like any other."""
    nodes = sequence(
        'step { name: "vote" node: "vote" output_map { key: "Y" value: "M" } }',
        'step { name: "after" model_name: "after" input_map { key: "X" value: "M" } }',
    ) + ensemble(*HARD).replace("root", "vote")
    target = FakeTarget(a=answering(1), b=answering(2), c=answering(6), after=answering(9))
    assert 9 == y(await make.run(compiled(nodes), target, x()))
    assert _bytes(3) == target.calls[-1].inputs["X"].data


async def test_every_answer_tells_its_path() -> None:
    """Seldon lost the path in a rewrite, which A/B tests and bandits need; errors of others name no step."""
    context = make.context()
    nodes = sequence('step { name: "s" node: "inner" }') + SWITCH.replace("root", "inner")
    await make.run(compiled(nodes), FakeTarget(), x(15), context=context)
    assert [("x-graph-path", "root.s=inner[high]")] == context.trailing_metadata


def test_everything_wrong_is_said_at_once() -> None:
    """Triton Inference Server stops at the first error, and gives no line."""
    nodes = sequence(
        'step { name: "a" model_name: "missing" }',
        'step { name: "b" model_name: "b" when: \'inputs.X\' }',
        'step { name: "c" node: "nowhere" weight: 3 }',
    )
    assert {"G002", "G011", "G018"} <= faults(nodes)


async def test_random_draws_follow_the_weights() -> None:
    """Seldon's router once always picked child 0; ten thousand draws fit the weights (chi-square, 1 in 10,000)."""
    target = FakeTarget()
    executor = GraphExecutor(compiled(SPLITTER), Runtime({"model": target}, generator=random.Random(7)))
    for _ in range(10_000):
        await make.run(executor, inputs=x())
    expected = {"a": 10_000 * 3 / 4.5, "b": 10_000 * 1.5 / 4.5}
    counts: Sequence[str] = target.called()
    chi_square = sum((counts.count(name) - number) ** 2 / number for name, number in expected.items())
    assert chi_square < 15.1
