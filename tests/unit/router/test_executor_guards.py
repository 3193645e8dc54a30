"""Guards: steps that nothing reads, and that others, or the answer of their sequence, wait for."""

import asyncio

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing
from tests.unit.router.text_graphs import DEFAULT, HEAD, Models, compiled, sequence, y
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import WeftError
from weft.base.tensors import WireTensor
from weft.language import GraphSource
from weft.language.plan import GraphPlan
from weft.router.compile import check_graph
from weft.router.executor import GraphExecutor
from weft.router.repository.serving import missing_call
from weft.router.runtime import Runtime

SPARE = 'fallback { name: "spare" model_name: "spare" output_map { key: "Y" value: "of_guard" } }'
TWO = HEAD.replace("output [", 'output [ { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] },')


def guard(name: str = "guard", extra: str = "") -> str:
    """A step that gives a tensor that nothing reads."""
    return f'step {{ name: "{name}" model_name: "{name}" output_map {{ key: "Y" value: "of_{name}" }} {extra} }}'


def main(extra: str = 'after: "guard"') -> str:
    """The step that gives the answer."""
    return f'step {{ name: "main" model_name: "main" {extra} }}'


def other(extra: str = "") -> str:
    """A step that gives the second output of ``TWO``."""
    return f'step {{ name: "other" model_name: "other" output_map {{ key: "Y" value: "Z" }} {extra} }}'


async def run(plan: GraphPlan, target: FakeTarget, *outputs: str) -> tuple[dict[str, WireTensor] | str, str]:
    """The outputs, or the error, and the path of one request."""
    context = CallContext()
    try:
        result = await make.run(plan, target, outputs=outputs, context=context)
    except WeftError as error:
        return f"{error.code}: {error.message}", dict(context.trailing_metadata)["x-graph-path"]
    finally:
        assert make.num_other_tasks() == 0
    return dict(result.outputs), dict(context.trailing_metadata)["x-graph-path"]


async def test_a_guard_runs_though_nobody_reads_it_and_has_ended_before_its_follower_starts(
    virtual_clock: VirtualClock,
) -> None:
    """The follower is called when the guard has answered, 30 ms later."""
    target = FakeTarget(guard=answering(after_ms=30), main=answering(after_ms=10))
    outputs, path = await run(compiled(sequence(guard(), main())), target)
    assert ["guard", "main"] == target.called()
    assert (40.0, "root.guard;main", ["Y"]) == (virtual_clock.elapsed_ms(), path, list(outputs))


@pytest.mark.parametrize(("extra", "requested"), [("", []), (f"when: 'inputs.of_guard.size() > 0' {DEFAULT}", ["Y"])])
async def test_a_guard_is_asked_for_what_is_read_or_for_all(extra: str, requested: list[str]) -> None:
    """The protocol cannot ask for nothing, and to ask a graph for one output would leave steps of it out."""
    target = FakeTarget()
    await run(compiled(sequence(guard(), main(f'after: "guard" {extra}'))), target)
    assert requested == [output.name for output in target.calls[0].outputs]


async def test_without_after_nothing_runs_that_nobody_reads() -> None:
    """As in ensembles of Triton Inference Server."""
    target = FakeTarget(guard=failing())
    await run(compiled(sequence(guard(), main(""))), target)
    assert ["main"] == target.called()


async def test_a_hard_guard_that_fails_fails_the_request_and_cancels_what_runs(virtual_clock: VirtualClock) -> None:
    """The error has the guard's path and code; followers are not called, siblings in flight are cancelled."""
    target = FakeTarget(guard=failing("INVALID_ARGUMENT", "not for children", after_ms=5), other=answering(after_ms=99))
    error, path = await run(compiled(sequence(guard(), main(), other()), TWO), target)
    assert "INVALID_ARGUMENT: g/1: root/guard -> guard@1: not for children" == error
    assert ["guard", "other"] == sorted(target.called())
    assert (["other"], 5.0) == (target.cancelled, virtual_clock.elapsed_ms())
    assert "root.guard!;other~" == path


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ("dependency: SOFT", "root.guard!;main"),
        ("when: 'request.priority == 9'", "root.main"),
        (SPARE, "root.guard!>spare;main"),
    ],
)
async def test_a_guard_that_failed_softly_was_skipped_or_replaced_lets_its_followers_go_on(
    extra: str, path: str
) -> None:
    """It has ended, and nothing says that the follower wants more."""
    target = FakeTarget(guard=failing())
    outputs, taken = await run(compiled(sequence(guard(extra=extra), main())), target)
    assert ("main", ["Y"]) == (target.called()[-1], list(outputs))
    assert path == taken.replace("[", ">").replace("]", "").replace("!>>", "!>")


@pytest.mark.parametrize("test", ["has(steps.guard)", "steps.guard.ok", 'has(steps["guard"])'])
@pytest.mark.parametrize(
    ("extra", "answer", "has_run"),
    [
        ("", answering(), True),
        ("dependency: SOFT", answering(), True),
        ("dependency: SOFT", failing(), False),
        ("when: 'request.priority == 9'", answering(), False),
        ("dependency: SOFT when: 'true || request.id == \"\"'", failing(), False),
        (f"dependency: SOFT {SPARE}", failing(), True),
    ],
)
async def test_a_condition_asks_whether_a_guard_has_answered(test: str, extra: str, answer, has_run: bool) -> None:
    """`has(steps.NAME)` is true where the step ran and it, or its fallback, answered; it is after the step as well."""
    plan = compiled(sequence(guard(extra=extra), main(f"when: '{test}' {DEFAULT}")))
    target = FakeTarget(guard=answer, main=answering(7.0), spare=answering())
    result = await make.run(plan, target)
    assert (has_run, 7.0 if has_run else -1.0) == ("main" in target.called(), y(result))


async def test_two_guards_run_at_once_and_both_are_waited_for(virtual_clock: VirtualClock) -> None:
    """Their follower starts with the end of the slower one; a step that is after none of them starts at once."""
    steps = (guard("a"), guard("b"), main('after: "a" after: "b"'), other())
    target = FakeTarget(a=answering(after_ms=20), b=answering(after_ms=30), main=answering(after_ms=1))
    await run(compiled(sequence(*steps), TWO), target)
    assert 31.0 == virtual_clock.elapsed_ms()
    assert {"a", "b", "other"} == set(target.called()[:3])


async def test_a_guard_of_a_guard_runs() -> None:
    """What is named by a step that runs for nothing but its end runs as well."""
    target = FakeTarget()
    await run(compiled(sequence(guard("first"), guard("guard", 'after: "first"'), main())), target)
    assert ["first", "guard", "main"] == target.called()


async def test_the_last_step_guards_the_answer(virtual_clock: VirtualClock) -> None:
    """`answer_after`: a step that reads the answer and may refuse it; nothing follows it."""
    check = guard("check", 'input_map { key: "X" value: "Y" }')
    steps = (main(""), check, 'answer_after: "check"')
    good = FakeTarget(check=answering(after_ms=10))
    outputs, path = await run(compiled(sequence(*steps)), good)
    assert (["Y"], "root.main;check", 10.0) == (list(outputs), path, virtual_clock.elapsed_ms())
    error, path = await run(compiled(sequence(*steps)), FakeTarget(check=failing("PERMISSION_DENIED", "rude")))
    assert ("PERMISSION_DENIED: g/1: root/check -> check@1: rude", "root.main;check!") == (error, path)


@pytest.mark.parametrize(
    ("outputs", "called"), [("", "guard main other"), ("Y", "guard main"), ("Z", "other"), ("ZY", "guard main other")]
)
async def test_requested_outputs_decide_which_guards_run(outputs: str, called: str) -> None:
    """A guard runs for the outputs whose steps follow it, and for no other."""
    plan = compiled(sequence(guard(), main(), other()), TWO)
    target = FakeTarget()
    executor = GraphExecutor(plan, Runtime({"model": target}))
    for _ in range(2):
        target.calls.clear()
        await make.run(executor, outputs=outputs)
        assert called == " ".join(sorted(target.called()))


@pytest.mark.parametrize(
    ("outputs", "called"), [((), "guard main other"), (("Z",), "guard other"), (("main/Y",), "guard main")]
)
async def test_what_guards_the_answer_runs_for_every_output(outputs: tuple[str, ...], called: str) -> None:
    """For those of other steps too, and for intermediate tensors."""
    target = FakeTarget()
    await run(compiled(sequence(guard(), main(""), other(), 'answer_after: "guard"'), TWO), target, *outputs)
    assert called == " ".join(sorted(target.called()))


async def test_a_tensor_of_a_guard_or_of_its_follower_can_be_requested() -> None:
    """`step/tensor` of the follower runs its guard; that of the guard runs nothing else."""
    plan = compiled(sequence(guard(), main(), other()), TWO)
    for name, called in (("main/Y", ["guard", "main"]), ("guard/Y", ["guard"])):
        target = FakeTarget()
        outputs, _ = await run(plan, target, name)
        assert (called, [name]) == (target.called(), list(outputs))


async def test_an_ordered_sequence_runs_every_step_up_to_the_last_that_is_needed() -> None:
    """`ordered: true` is `after` from each step to the next; of requested outputs the last counts."""
    plan = compiled(sequence(guard(), other(), guard("idle"), main(""), guard("late"), "ordered: true"), TWO)
    for outputs, called in (((), ["guard", "other", "idle", "main"]), (("Z",), ["guard", "other"])):
        target = FakeTarget()
        await run(plan, target, *outputs)
        assert called == target.called()


async def test_a_node_that_is_a_guard_runs_as_a_whole() -> None:
    """None of its steps is left out because nothing reads its outputs; nor where something reads some of them."""
    checks = sequence(guard("one"), guard("two"), name="checks")
    step = 'step { name: "guard" node: "checks" }'
    reads = 'after: "guard" input_map { key: "X" value: "of_one" }'
    asks = "when: 'has(steps.guard)' " + DEFAULT
    for extra in ('after: "guard"', reads, asks):
        target = FakeTarget()
        await run(compiled(sequence(step, main(extra)) + checks), target)
        assert ["main", "one", "two"] == sorted(target.called())
    target = FakeTarget(two=failing("INVALID_ARGUMENT", "no"))
    error, _ = await run(compiled(sequence(step, main()) + checks), target)
    assert ("INVALID_ARGUMENT: g/1: root/guard/checks/two -> two@1: no", "main" in target.called()) == (error, False)


async def test_guards_within_a_node_guard_that_node() -> None:
    """A failing guard of a nested sequence fails the node, which may be soft: the request goes on with a default."""
    node = sequence(guard(), main('after: "guard"'), name="guarded")
    plan = compiled(sequence(f'step {{ node: "guarded" dependency: SOFT {DEFAULT} }}') + node)
    target = FakeTarget(guard=failing())
    assert -1.0 == y(await make.run(plan, target))
    assert ["guard"] == target.called()


async def test_guards_run_in_every_round_of_a_loop() -> None:
    """Before their follower, each time."""
    loop = 'loop { while: \'outputs.Y[0] > 0.0\' max_iterations: 3 carry { key: "Y" value: "X" } }'
    target = FakeTarget()
    await run(compiled(sequence(guard(), main(), loop)), target)
    assert ["guard", "main"] * 3 == target.called()


async def test_a_shadow_may_be_after_a_step() -> None:
    """It starts when that has ended, and only where that runs anyway."""
    shadow = 'step { name: "copy" model_name: "copy" after: "main" shadow { percent: 100 } }'
    plan = compiled(sequence(main(""), other(), shadow), TWO)
    for outputs, called in ((("Y",), ["main", "copy"]), (("Z",), ["other"])):
        target = FakeTarget()
        executor = GraphExecutor(plan, Runtime({"model": target}))
        await make.run(executor, outputs=outputs)
        await asyncio.sleep(0)  # its call starts
        assert called == target.called()
        await executor._runtime.close()


async def test_shadows_in_an_ordered_sequence_run_with_what_stands_before_them() -> None:
    """Also two in a row at the end, for a request that asks for an output; nothing waits for them."""
    one, two = (f'step {{ name: "{name}" model_name: "{name}" shadow {{ percent: 100 }} }}' for name in ("c", "d"))
    plan = compiled(sequence(main(""), one, two, "ordered: true"))
    target = FakeTarget()
    executor = GraphExecutor(plan, Runtime({"model": target}))
    await make.run(executor, outputs="Y")
    await asyncio.sleep(0)  # their calls start
    assert ["main", "c", "d"] == target.called()
    await executor._runtime.close()


@pytest.mark.parametrize(("read", "called"), [("Y", "guard main"), ("Z", "guard other"), ("YZ", "guard main other")])
async def test_the_guard_of_the_answer_of_a_node_runs_whatever_is_read_of_it(read: str, called: str) -> None:
    """Steps within that nothing reads are left out, the guard is not."""
    node = sequence(guard(), main(""), other(), 'answer_after: "guard"', name="inner")
    head = HEAD if read == "Y" else TWO if read == "YZ" else HEAD.replace('"Y"', '"Z"')
    target = FakeTarget()
    await run(compiled(sequence('step { node: "inner" }') + node, head), target)
    assert called == " ".join(sorted(target.called()))


def test_a_graph_without_its_guard_cannot_answer() -> None:
    """A HARD guard whose model is not ready keeps the graph from serving; a SOFT one does not."""
    for extra, model in (("", "guard"), ("dependency: SOFT", None)):
        root = compiled(sequence(guard(extra=extra), main())).root
        missing = missing_call(root, lambda call: call.model_name != "guard")
        assert model == (missing and missing.call.model_name)


def test_the_time_of_a_guard_counts() -> None:
    """What follows it has the rest of the graph's time: G021 adds the two up."""
    policy = "policy { timeout_ms: 60 }"
    head = HEAD + "policy { timeout_ms: 100 }"
    nodes = sequence(guard(extra=policy), main(f'after: "guard" {policy}'))
    (found,) = check_graph(GraphSource(head + nodes, "g.pbtxt"), Models(0))
    assert ("G021", True) == (found.code, "may take 120 ms one after another" in found.message)
