"""Outputs named ``<step>/<tensor>``: what can be asked for, what runs for it, what comes back."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn

from weft.base.core import CallContext, InferCall, RequestedOutput
from weft.base.errors import InternalError, InvalidArgumentError, RemoteError
from weft.base.tensors import WireTensor
from weft.language.plan import GraphPlan, ShadowPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import LoopPlan, SequencePlan
from weft.router.operators.switch import SwitchPlan
from weft.router.policies.cache import CachePlan
from weft.router.policies.retry import RetryPlan
from weft.router.requests import Intermediates
from weft.router.runtime import Runtime


def executor_of(plan: GraphPlan, target: FakeTarget) -> GraphExecutor:
    return GraphExecutor(plan, Runtime({"model": target}))


def pipeline(*, spare_outputs: bool = False) -> GraphPlan:
    """X -> lid -> clf (a switch of de, en) -> post; `lid` declares SCORE beside, which the graph does not use."""
    lid = make.call_plan("lid", ["IN"], ["LANG", "SCORE"] if spare_outputs else ["LANG"])
    when = FakeCondition(lambda request, frame: request.parameters.get("lang") == "de")
    branches = [
        replace(make.step(name, name, {"IN": "T"}, {"OUT": "P"}, **options), name=name)
        for name, options in (("de", {"when": when}), ("en", {"is_otherwise": True}))
    ]
    switch = make.node("by_language", SwitchPlan, branches, inputs=["T"], outputs=["P"])
    path = "root/clf/by_language"
    switch = replace(
        switch, path=path, steps=tuple(replace(step, path=f"{path}[{step.name}]") for step in switch.steps)
    )
    steps = [
        make.step("lid", lid, {"IN": "X"}, {"LANG": "L"}),
        make.step("clf", switch, {"T": "L"}, {"P": "P"}),
        make.step("post", "post", {"IN": "P"}, {"OUT": "Y"}),
    ]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs={"Y": "Y", "L": "L"}))


async def test_a_tensor_between_steps_can_be_asked_for() -> None:
    """With outputs of the graph or alone, in the order of the request, as often as it is named."""
    target = FakeTarget(lid=answering(5), de=answering(6))
    executor = executor_of(pipeline(), target)
    for _ in range(2):
        asked = ["clf/by_language[de]/OUT", "Y", "lid/LANG", "lid/LANG", "clf/P"]
        result = await make.run(executor, outputs=asked, parameters={"lang": "de"})
        assert ["clf/by_language[de]/OUT", "Y", "lid/LANG", "clf/P"] == list(result.outputs)
        assert [make.tensor(6), make.tensor(6), make.tensor(5), make.tensor(6)] == list(result.outputs.values())


async def test_only_what_is_needed_runs() -> None:
    """Steps after the one whose tensor is asked for do not, nor do those beside it."""
    target = FakeTarget()
    executor = executor_of(pipeline(), target)
    result = await make.run(executor, outputs=["lid/LANG"])
    assert (["lid"], ["lid/LANG"]) == (target.called(), list(result.outputs))
    target.calls.clear()
    await make.run(executor, outputs=["clf/by_language[en]/OUT"])
    assert ["lid", "en"] == target.called()


async def test_a_step_that_did_not_run_leaves_its_tensor_out() -> None:
    """The branch that was not taken."""
    executor = executor_of(pipeline(), FakeTarget())
    result = await make.run(executor, outputs=["Y", "clf/by_language[de]/OUT"])
    assert ["Y"] == list(result.outputs)


async def test_outputs_that_the_graph_does_not_use_can_be_asked_for() -> None:
    """The call asks for them too; calls of other requests do not."""
    target = FakeTarget()
    executor = executor_of(pipeline(spare_outputs=True), target)
    result = await make.run(executor, outputs=["lid/SCORE", "L"])
    assert ["lid/SCORE", "L"] == list(result.outputs)
    assert ["LANG", "SCORE"] == [output.name for output in target.calls[-1].outputs]
    await make.run(executor, outputs=["L"])
    assert ["LANG"] == [output.name for output in target.calls[-1].outputs]


async def test_strings_come_back_as_they_are() -> None:
    """BYTES of several elements and a shape."""
    call = make.call_plan("lid", ["IN"], ["OUT"])
    call = replace(call, signature=replace(call.signature, outputs=(make.spec("OUT", "BYTES", (-1, -1)),)))

    async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return {"OUT": make.text("a", "", "ü", "de", shape=(2, 2))}

    root = make.node(
        "root", SequencePlan, [make.step("lid", call, {"IN": "X"}, {"OUT": "L"})], inputs=["X"], outputs=["X"]
    )
    result = await make.run(executor_of(make.graph(root), FakeTarget(lid=answer)), outputs=["lid/OUT"])
    assert {"lid/OUT": make.text("a", "", "ü", "de", shape=(2, 2))} == result.outputs


async def test_an_asked_tensor_is_held_against_its_declaration() -> None:
    """One that has another type fails the request; one that the model leaves out is left out."""

    async def short(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return {"LANG": make.tensor(1)}

    async def wrong(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return {"LANG": make.tensor(1), "SCORE": make.text("x")}

    plan = pipeline(spare_outputs=True)
    result = await make.run(executor_of(plan, FakeTarget(lid=short)), outputs=["lid/SCORE"])
    assert {} == result.outputs
    with pytest.raises(InternalError, match=r"'SCORE' .* it is BYTES"):
        await make.run(executor_of(plan, FakeTarget(lid=wrong)), outputs=["lid/SCORE"])


async def test_the_tensor_has_the_batch_dimension_of_the_graph() -> None:
    """A model without one, in a graph with one."""
    step = make.step("lid", "lid", {"IN": "X"}, {"OUT": "Y"})
    plan = make.graph(make.node("root", SequencePlan, [step], inputs=["X"], outputs=["Y"]), max_batch_size=4)
    x = make.tensor(1, 2, shape=(1, 2))
    result = await make.run(plan, FakeTarget(), {"X": x}, outputs=["lid/OUT"])
    assert {"lid/OUT": x} == result.outputs


async def test_a_fallbacks_tensor_is_its_own() -> None:
    """That of the step which failed is left out."""
    spare = replace(
        make.node(
            "root",
            SequencePlan,
            [make.step("spare", "spare", {"IN": "X"}, {"OUT": "Y"})],
            inputs=["X"],
            outputs=["Y"],
        ).steps[0],
        path="root/lid>spare",
    )
    step = make.step("lid", "lid", {"IN": "X"}, {"OUT": "Y"}, fallback=spare)
    plan = make.graph(make.node("root", SequencePlan, [step], inputs=["X"], outputs=["Y"]))
    target = FakeTarget(lid=failing())
    result = await make.run(plan, target, outputs=["lid/OUT", "lid>spare/OUT"])
    assert ["lid>spare/OUT"] == list(result.outputs)


async def test_attempts_that_came_to_nothing_leave_nothing() -> None:
    """A node that is tried again: the tensor is that of the attempt that counts, or is left out."""
    inner = make.node(
        "n",
        SequencePlan,
        [make.step("a", "a", {"IN": "T"}, {"OUT": "A"}), make.step("b", "b", {"IN": "A"}, {"OUT": "B"})],
        inputs=["T"],
        outputs=["B"],
    )
    inner = replace(inner, steps=tuple(replace(step, path=f"root/s/n/{step.name}") for step in inner.steps))
    retry = RetryPlan(2, 0, frozenset({"UNAVAILABLE"}), 20)
    step = make.step("s", inner, {"T": "X"}, {"B": "Y"}, retry=retry, is_soft=True)
    plan = make.graph(make.node("root", SequencePlan, [step], inputs=["X"], outputs={"Y": "Y", "X": "X"}))
    target = FakeTarget(a=in_turn(answering(1), answering(2)))
    target.answers["b"] = in_turn(failing(), answering())
    result = await make.run(plan, target, outputs=["s/n/a/OUT", "Y"])
    assert {"s/n/a/OUT": make.tensor(2), "Y": make.tensor(2)} == result.outputs
    target = FakeTarget(b=failing("INTERNAL"))
    assert ["X"] == list((await make.run(plan, target, outputs=["s/n/a/OUT", "X"])).outputs)


async def test_of_a_loop_the_last_round_counts() -> None:
    """Each round puts its tensor in place of the one before."""
    rounds = [answering(number) for number in (1, 2, 3)]
    step = make.step("a", "a", {"IN": "X"}, {"OUT": "Y"})
    root = make.node("root", SequencePlan, [step], inputs=["X"], outputs=["Y"])
    loop = LoopPlan(FakeCondition(lambda request, frame: True), 3, ((1, 0),))
    plan = make.graph(replace(root, loop=loop))  # type: ignore[call-arg]
    result = await make.run(plan, FakeTarget(a=in_turn(*rounds)), outputs=["a/OUT"])
    assert {"a/OUT": make.tensor(3)} == result.outputs


async def test_of_rows_that_go_their_own_way_a_step_has_those_that_it_got() -> None:
    """In their order."""
    is_low = FakeCondition(lambda request, values: values["X"].item() != 2, names=("X",))
    steps = [
        make.step("low", "low", {"IN": "X"}, {"OUT": "Y"}, when=is_low),
        make.step("high", "high", {"IN": "X"}, {"OUT": "Y"}, is_otherwise=True),
    ]
    root = make.node("root", SwitchPlan, steps, inputs=["X"], outputs=["Y"], per_row=True, max_batch_size=4)
    root = replace(root, steps=tuple(replace(step, path=f"root[{step.name}]") for step in root.steps))
    x = make.tensor(1, 2, 3, shape=(3, 1))
    result = await make.run(
        make.graph(root, max_batch_size=4), FakeTarget(), {"X": x}, outputs=["[low]/OUT", "[high]/OUT", "Y"]
    )
    assert {
        "[low]/OUT": make.tensor(1, 3, shape=(2, 1)),
        "[high]/OUT": make.tensor(2, shape=(1, 1)),
        "Y": x,
    } == result.outputs


async def test_a_kept_answer_does_not_lack_what_is_asked_for() -> None:
    """What is asked for is part of the key: of a cached call, and of steps inside a cached node."""
    call = make.call_plan("a", ["IN"], ["OUT", "MORE"])
    inner = make.node("n", SequencePlan, [make.step("b", "b", {"IN": "T"}, {"OUT": "B"})], inputs=["T"], outputs=["B"])
    inner = replace(inner, steps=(replace(inner.steps[0], path="root/s/n/b"),))
    cache = CachePlan(0, 1 << 20)
    steps = [
        make.step("a", call, {"IN": "X"}, {"OUT": "M"}, cache=cache),
        make.step("s", inner, {"T": "M"}, {"B": "Y"}, cache=cache),
    ]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))
    target = FakeTarget(a=answering(4), b=answering(5))
    executor = executor_of(plan, target)
    await make.run(executor)
    assert ["a", "b"] == target.called()
    for _ in range(2):
        result = await make.run(executor, outputs=["a/MORE", "s/n/b/OUT", "Y"])
        expected = {"a/MORE": make.tensor(4), "s/n/b/OUT": make.tensor(5), "Y": make.tensor(5)}
        assert expected == result.outputs
        assert ["a", "b", "a", "b"] == target.called()
    assert ["Y"] == list((await make.run(executor)).outputs)
    assert ["a", "b", "a", "b"] == target.called()


async def test_a_race_gives_what_there_is() -> None:
    """A failed step of a soft pair has no tensor; the other has."""
    steps = [
        make.step("a", "a", {"IN": "X"}, {"OUT": "A"}, is_soft=True),
        make.step("b", "b", {"IN": "X"}, {"OUT": "B"}),
    ]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["B"]))
    result = await make.run(plan, FakeTarget(a=failing()), outputs=["a/OUT", "b/OUT"])
    assert ["b/OUT"] == list(result.outputs)


def asked(*names: str) -> tuple[RequestedOutput, ...]:
    return tuple(RequestedOutput(name, {}) for name in names)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """Names without a slash are left to the check of the graph's own outputs, so are those outputs themselves."""
    plan = pipeline()
    known = Intermediates(plan.root, ["Y", "L", "odd/name"])
    assert asked("Y", "nobody", "odd/name") == known.own_outputs(asked("Y", "nobody", "odd/name"), "g")
    assert asked("Y") == known.own_outputs(asked("lid/LANG", "Y", "clf/P"), "g")
    assert known.get("odd/name") is None
    for name, hint in (
        ("lid/LAN", "did you mean 'lid/LANG'?"),
        ("clf/by_language[fr]/OUT", "did you mean 'clf/by_language["),
        ("odd/names", "did you mean 'odd/name'?"),
        ("/", "use one of: Y, L, odd/name, lid/LANG, clf/P, clf/by_language[de]/OUT"),
        ("root/lid/LANG", "did you mean 'lid/LANG'?"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            known.own_outputs(asked("Y", name), "g")
        assert f"unexpected inference output '{name}' for model 'g'" in caught.value.message
        assert hint in caught.value.message
    with pytest.raises(InvalidArgumentError) as caught:
        known.own_outputs(asked("x/" * 50_000), "g")
    assert len(caught.value.message) < 1_000


def test_shadows_give_nothing() -> None:
    """Their answers are dropped, so there is nothing to ask for; combining models can be asked."""
    steps = [
        make.step("a", "a", {"IN": "X"}, {"OUT": "Y"}),
        make.step("new", "new", {"IN": "X"}, {}, shadow=ShadowPlan(50, 0)),
    ]
    root = make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"])
    known = Intermediates(root, ["Y"])
    assert known.get("new/OUT") is None
    assert ("root/a", "OUT", 0) == known.get("a/OUT")


async def test_a_failing_request_has_no_part_answers() -> None:
    """What was put aside before the failure is not sent."""
    plan = pipeline()
    target = FakeTarget(en=failing("INTERNAL", "boom"))
    with pytest.raises(RemoteError, match="boom"):
        await make.run(plan, target, outputs=["lid/LANG", "clf/P"])
