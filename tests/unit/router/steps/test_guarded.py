"""What becomes of a step that is skipped or fails: fallback, softness, defaults, and the messages."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import (
    InvalidArgumentError,
    RemoteError,
)
from weft.language.plan import GraphPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.runtime import Runtime

SEQUENCE = SequencePlan
pytestmark = pytest.mark.usefixtures("virtual_clock")


def one(**options: Any) -> GraphPlan:
    """X -> a (model m) -> Y."""
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, **options)]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


def then(**options: Any) -> GraphPlan:
    """X -> a (model m) -> T; X and, if it is there, T -> b (model n) -> Y."""
    steps = [
        make.step("a", "m", {"IN": "X"}, {"OUT": "T"}, **options),
        make.step("b", "n", {"IN": "X", "MORE": "T"}, {"OUT": "Y"}),
    ]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y", "T"]))


def spare(name: str = "spare", **options: Any) -> Any:
    return make.step(name, name, {"IN": "X"}, {"OUT": "Y"}, **options)


# --- when


@pytest.mark.parametrize("verdict", [True, False])
async def test_a_step_runs_only_if_its_when_holds(verdict: bool) -> None:
    """Else its outputs are absent, the step behind it goes on without them, and the path does not show it."""
    target = FakeTarget()
    plan = then(when=FakeCondition(lambda request, frame: verdict))
    context = CallContext()
    result = await make.run(plan, target, context=context)
    assert (["m", "n"] if verdict else ["n"]) == target.called()
    assert verdict == ("MORE" in target.calls[-1].inputs)
    assert ({"Y", "T"} if verdict else {"Y"}) == set(result.outputs)
    assert ("root.a;b" if verdict else "root.b") == context.trailing_metadata[0][1]


async def test_the_trace_shows_what_was_skipped() -> None:
    """With status SKIPPED."""
    plan = then(when=FakeCondition(lambda request, frame: False))
    result = await make.run(plan, FakeTarget(), parameters={"graph_trace": True})
    entries = json.loads(str(result.parameters["graph_trace"]))
    assert [("root/a", "SKIPPED"), ("root/b", "OK")] == [(entry["path"], entry["status"]) for entry in entries]


@pytest.mark.parametrize("is_soft", [False, True])
async def test_a_when_that_cannot_be_evaluated_fails_the_request(is_soft: bool) -> None:
    """Whatever the policies are; and no model is called."""

    def fail(request: Any, frame: Any) -> bool:
        raise InvalidArgumentError("no such key")

    target = FakeTarget()
    plan = then(when=FakeCondition(fail), is_soft=is_soft)
    with pytest.raises(InvalidArgumentError, match=r"^g/1: root/a: no such key$"):
        await make.run(plan, target)
    assert [] == target.calls


@pytest.mark.parametrize("nested", [False, True])
async def test_a_condition_failing_inside_a_soft_step_fails_the_request(nested: bool) -> None:
    """A soft step hides failures of models, not mistakes of the graph's author; fallbacks do not hide them either."""

    def fail(request: Any, frame: Any) -> bool:
        raise InvalidArgumentError("no such key")

    inner = make.node(
        "inner",
        SEQUENCE,
        [make.step("i", "i", {"IN": "X"}, {"OUT": "T"}, when=FakeCondition(fail))],
        inputs=["X"],
        outputs=["T"],
    )
    fallback = make.step("f", "f", {"IN": "X"}, {"T" if not nested else "OUT": "T"})
    steps = [make.step("a", inner, {"X": "X"}, {"T": "T"}, is_soft=True, **({"fallback": fallback} if nested else {}))]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["T"]))
    with pytest.raises(InvalidArgumentError, match="inner/i: no such key"):
        await make.run(plan, FakeTarget())


# --- soft and defaults


async def test_a_soft_failure_leaves_the_outputs_absent() -> None:
    """The request goes on, the path marks the step, the trace has the message."""
    target = FakeTarget(m=failing("UNAVAILABLE", "gone"))
    context = CallContext()
    result = await make.run(then(is_soft=True), target, context=context, parameters={"graph_trace": True})
    assert "MORE" not in target.calls[-1].inputs
    assert {"Y"} == set(result.outputs)
    assert "root.a!;b" == context.trailing_metadata[0][1]
    entry = json.loads(str(result.parameters["graph_trace"]))[0]
    assert ("UNAVAILABLE", "g/1: root/a -> m@1: gone") == (entry["status"], entry["error"])


async def test_a_hard_failure_fails_the_request() -> None:
    """Hard is the default."""
    with pytest.raises(RemoteError, match=r"^g/1: root/a -> m@1: gone$"):
        await make.run(then(), FakeTarget(m=failing()))


@pytest.mark.parametrize("options", [{"is_soft": True}, {"when": False}])
async def test_a_default_stands_in_for_a_missing_output(options: dict[str, Any]) -> None:
    """After a soft failure, and where the step was skipped."""
    if "when" in options:
        options = {"when": FakeCondition(lambda request, frame: False)}
    plan = then(defaults={"T": make.tensor(7.0)}, **options)
    result = await make.run(plan, FakeTarget(m=failing()))
    assert make.tensor(7.0) == result.outputs["T"]


@pytest.mark.parametrize("rows", [1, 3])
async def test_a_default_of_one_row_is_repeated_for_every_row(rows: int) -> None:
    """Texts and numbers alike; a default without a batch dimension stays as it is."""
    steps = [
        make.step(
            "a",
            "m",
            {"IN": "X"},
            {"OUT": "T", "OUT2": "U", "OUT3": "V"},
            is_soft=True,
            defaults={"V": make.tensor(9.0, shape=(1, 1))},
            batched_defaults={"T": make.text("n/a", shape=(1, 1)), "U": make.tensor(1.0, 2.0, shape=(1, 2))},
        )
    ]
    root = make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["T", "U", "V"])
    target = FakeTarget(m=failing())
    executor = GraphExecutor(make.graph(root, max_batch_size=8), Runtime({"model": target}))
    frame = {"X": make.tensor(*range(rows * 2), shape=(rows, 2))}
    outputs = (await make.run(executor, inputs=frame)).outputs
    assert make.text(*["n/a"] * rows, shape=(rows, 1)) == outputs["T"]
    assert make.tensor(*[1.0, 2.0] * rows, shape=(rows, 2)) == outputs["U"]
    assert make.tensor(9.0, shape=(1, 1)) == outputs["V"]


async def test_inputs_without_batch_dimension_do_not_tell_the_rows() -> None:
    """The first input is a vector that belongs to all rows; there are two rows, as the second says."""
    default = {"T": make.tensor(7.0, shape=(1, 1))}
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "T"}, is_soft=True, batched_defaults=default)]
    root = make.node("root", SEQUENCE, steps, inputs=["V", "X"], outputs=["T"])
    root = replace(root, specs={0: make.spec("V", dims=(5,)), 1: make.spec("X", dims=(1,))})
    inputs = {"V": make.tensor(*range(5)), "X": make.tensor(1, 2, shape=(2, 1))}
    result = await make.run(make.graph(root, max_batch_size=8), FakeTarget(m=failing()), inputs)
    assert make.tensor(7, 7, shape=(2, 1)) == result.outputs["T"]


@pytest.mark.parametrize(("fails", "expected"), [(False, ["m", "n"]), (True, ["m"])])
async def test_a_later_step_can_ask_whether_a_step_answered(fails: bool, expected: list[str]) -> None:
    """`steps.a.ok` holds if it did; a default does not count."""
    ok = FakeCondition(lambda request, tensors: tensors["steps.a.ok"] is not None, names=("steps.a.ok",))
    steps = [
        make.step("a", "m", {"IN": "X"}, {"OUT": "T"}, is_soft=True, defaults={"T": make.tensor(7.0)}),
        make.step("b", "n", {"IN": "X"}, {"OUT": "Y"}, when=ok),
    ]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y", "T"]))
    target = FakeTarget(**({"m": failing()} if fails else {}))
    await make.run(plan, target)
    assert expected == target.called()


async def test_an_answer_of_the_fallback_counts_as_one_of_the_step() -> None:
    """`steps.a.ok` holds."""
    ok = FakeCondition(lambda request, tensors: tensors["steps.a.ok"] is not None, names=("steps.a.ok",))
    steps = [
        make.step("a", "m", {"IN": "X"}, {"OUT": "T"}, fallback=make.step("f", "f", {"IN": "X"}, {"OUT": "T"})),
        make.step("b", "n", {"IN": "X"}, {"OUT": "Y"}, when=ok),
    ]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y", "T"]))
    target = FakeTarget(m=failing())
    await make.run(plan, target)
    assert ["m", "f", "n"] == target.called()


async def test_response_parameters_of_a_soft_node_that_failed_are_dropped() -> None:
    """Nothing of it is in the answer, though a step inside had answered."""
    inner = make.node(
        "inner",
        SEQUENCE,
        [make.step("i", "i", {"IN": "X"}, {"OUT": "S"}), make.step("j", "j", {"IN": "S"}, {"OUT": "T"})],
        inputs=["X"],
        outputs=["T"],
    )
    steps = [make.step("a", inner, {"X": "X"}, {"T": "T"}, is_soft=True)]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["T"]))
    target = FakeTarget(i=answering(i=1), j=failing())
    assert {} == (await make.run(plan, target)).parameters
    target = FakeTarget(i=answering(i=1))
    assert {"i": 1} == (await make.run(plan, target)).parameters


async def test_the_requests_own_deadline_is_not_softened(virtual_clock: VirtualClock) -> None:
    """When it has passed nobody waits for what the other steps say; a step's own timeout is softened."""
    target = FakeTarget(m=answering(after_ms=100))
    with pytest.raises(RemoteError) as caught:
        await make.run(then(is_soft=True), target, context=make.context(timeout_ms=50))
    assert ("DEADLINE_EXCEEDED", 50.0) == (caught.value.code, virtual_clock.elapsed_ms())
    await make.run(then(is_soft=True, timeout_ms=40), target, context=make.context(timeout_ms=50))
    assert 90.0 == virtual_clock.elapsed_ms()


async def test_a_cancel_is_not_softened() -> None:
    """Nor does it lead to a fallback; the call is cancelled and no task is left."""
    target = FakeTarget(m=answering(after_ms=100))
    plan = one(is_soft=True, fallback=spare())
    request = asyncio.create_task(make.run(plan, target))
    await asyncio.sleep(0.01)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (["m"], ["m"], 0) == (target.called(), target.cancelled, make.num_other_tasks())


async def test_a_defect_is_not_softened() -> None:
    """Only errors that are meant for clients are; the others are for us."""

    async def break_down(call: Any, context: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await make.run(one(is_soft=True, fallback=spare()), FakeTarget(m=break_down))


# --- fallback


async def test_a_fallback_answers_in_place_of_a_failing_step() -> None:
    """It writes the same outputs; path and trace show both."""
    target = FakeTarget(m=failing("INTERNAL", "boom"), spare=answering(5.0))
    context = CallContext()
    result = await make.run(one(fallback=spare()), target, context=context, parameters={"graph_trace": True})
    assert make.tensor(5.0) == result.outputs["Y"]
    assert "root.a!>spare" == context.trailing_metadata[0][1]
    step, fallback = json.loads(str(result.parameters["graph_trace"]))
    assert ("INTERNAL", "g/1: root/a -> m@1: boom") == (step["status"], step["error"])
    assert ("spare", "OK", "root/a") == (fallback["model"], fallback["status"], fallback["fallback_of"])


async def test_a_step_that_answers_needs_no_fallback() -> None:
    """It is not called."""
    target = FakeTarget()
    await make.run(one(fallback=spare()), target)
    assert ["m"] == target.called()


async def test_the_error_tells_of_every_fallback() -> None:
    """The status is that of the last; those before it are in the text, and the path shows all."""
    target = FakeTarget(
        m=failing("INTERNAL", "boom"),
        b=failing("UNAVAILABLE", "gone"),
        c=failing("NOT_FOUND", "who?"),
    )
    plan = one(fallback=spare("b", fallback=spare("c")))
    context = CallContext()
    with pytest.raises(RemoteError) as caught:
        await make.run(plan, target, context=context)
    assert "NOT_FOUND" == caught.value.code
    assert (
        "g/1: root/a -> m@1: boom (INTERNAL); fallback b: UNAVAILABLE: gone; fallback c: NOT_FOUND: who?"
        == caught.value.message
    )
    assert "root.a!>b!>c!" == context.trailing_metadata[0][1]


async def test_a_soft_step_goes_on_when_its_fallback_fails_too() -> None:
    """The trace has the whole story, with the status of the last."""
    target = FakeTarget(m=failing("INTERNAL", "boom"), spare=failing("UNAVAILABLE", "gone"))
    plan = one(is_soft=True, defaults={"Y": make.tensor(7.0)}, fallback=spare())
    result = await make.run(plan, target, parameters={"graph_trace": True})
    assert make.tensor(7.0) == result.outputs["Y"]
    entry = json.loads(str(result.parameters["graph_trace"]))[0]
    assert (
        "UNAVAILABLE",
        "g/1: root/a -> m@1: boom (INTERNAL); fallback spare: UNAVAILABLE: gone",
    ) == (entry["status"], entry["error"])


async def test_a_condition_failing_inside_the_fallback_of_a_soft_step_fails_the_request() -> None:
    """As one inside the step itself."""

    def fail(request: Any, frame: Any) -> bool:
        raise InvalidArgumentError("no such key")

    never = make.step("i", "i", {"IN": "X"}, {"OUT": "Y"}, when=FakeCondition(fail))
    inner = make.node("inner", SEQUENCE, [never], inputs=["X"], outputs=["Y"])
    plan = one(is_soft=True, fallback=make.step("spare", inner, {"X": "X"}, {"Y": "Y"}))
    with pytest.raises(InvalidArgumentError, match=r"^g/1: inner/i: no such key$"):
        await make.run(plan, FakeTarget(m=failing()))


async def test_a_fallback_has_a_timeout_of_its_own(virtual_clock: VirtualClock) -> None:
    """It starts when the step has used up its own."""
    target = FakeTarget(m=answering(after_ms=100), spare=answering(5.0, after_ms=30))
    plan = one(timeout_ms=20, fallback=spare(timeout_ms=40))
    result = await make.run(plan, target)
    assert (make.tensor(5.0), 50.0) == (result.outputs["Y"], virtual_clock.elapsed_ms())


async def test_no_fallback_starts_after_the_deadline(virtual_clock: VirtualClock) -> None:
    """There is no time left for it."""
    target = FakeTarget(m=answering(after_ms=100))
    with pytest.raises(RemoteError, match=r"no answer of 'm' in 20 ms$"):
        await make.run(one(fallback=spare()), target, context=make.context(timeout_ms=20))
    assert ["m"] == target.called()


async def test_a_node_can_be_a_fallback() -> None:
    """And its steps are in the path."""
    inner = make.node("inner", SEQUENCE, [make.step("i", "i", {"IN": "X"}, {"OUT": "Y"})], inputs=["X"], outputs=["Y"])
    plan = one(fallback=make.step("spare", inner, {"X": "X"}, {"Y": "Y"}))
    context = CallContext()
    await make.run(plan, FakeTarget(m=failing()), context=context)
    assert "root.a!>spare=inner(i)" == context.trailing_metadata[0][1]
    target = FakeTarget(m=failing(), i=failing("INTERNAL", "boom"))
    with pytest.raises(RemoteError) as caught:
        await make.run(plan, target)
    assert (
        "g/1: root/a -> m@1: gone (UNAVAILABLE); fallback spare: INTERNAL: inner/i -> i@1: boom" == caught.value.message
    )
