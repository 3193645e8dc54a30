"""Switches and cascades in which each row of a batch goes its own way."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, failing
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.signature import TensorSpec
from weft.base.tensors import WireTensor, decode, encode
from weft.language.plan import GraphPlan, NodePlan
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.switch import SwitchPlan

Answer = Callable[[InferCall, CallContext], Awaitable[Mapping[str, WireTensor]]]
SOFT: dict[str, Any] = {"is_soft": True}


def column(*values: float) -> WireTensor:
    """FP32, shape [rows, 1]."""
    return encode(np.array(values, np.float32).reshape(-1, 1))


def values_of(tensor: WireTensor) -> list[float]:
    return decode(tensor).ravel().tolist()


def adding(amount: float, after_ms: float = 0) -> Answer:
    """A model that adds to each value."""

    async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        if after_ms:
            await asyncio.sleep(after_ms / 1e3)
        return {"OUT": encode(decode(call.inputs["IN"]) + np.float32(amount))}

    return answer


def per_row(kind: type[NodePlan], steps: Mapping[str, dict[str, Any]], **options: Any) -> GraphPlan:
    """Steps that call the models named like them; batches of up to 8."""
    made = [make.step(n, n, {"IN": "X"}, {"OUT": "Y"}, **how) for n, how in steps.items()]
    root = make.node("root", kind, made, inputs=["X"], outputs=["Y"], max_batch_size=8, per_row=True, **options)
    specs = {slot: TensorSpec(name, "FP32", (1,)) for name, slot in (*root.inputs, *root.outputs)}
    return make.graph(replace(root, specs=specs), max_batch_size=8)


def switch(steps: Mapping[str, dict[str, Any]], **options: Any) -> GraphPlan:
    """Chooses by the sign of X where the steps have cases: neg, zero, pos."""
    if any("cases" in how for how in steps.values()):
        names = {-1.0: "neg", 0.0: "zero", 1.0: "pos"}
        options["on"] = FakeCondition(
            lambda r, values: names[float(np.sign(values["X"][0, 0]))], names=("X",), source="sign"
        )
    return per_row(SwitchPlan, steps, **options)


SIGNS: dict[str, dict[str, Any]] = {
    "neg": {"cases": ("neg",)},
    "pos": {"cases": ("pos",)},
    "rest": {"is_otherwise": True},
}


async def answered(plan: GraphPlan, target: FakeTarget, *rows: float, **options: Any) -> tuple[str, list[float]]:
    """Path and values of the answer."""
    context = make.context(**options)
    result = await make.run(plan, target, {"X": column(*rows)}, context=context)
    [(_, path)] = context.trailing_metadata
    return path, values_of(result.outputs["Y"])


async def test_rows_take_the_branch_of_their_own() -> None:
    """Each model is called once, with its rows; the answers come back in order."""
    target = FakeTarget(neg=adding(-10), pos=adding(10), rest=adding(0.5))
    path, rows = await answered(switch(SIGNS), target, 1, -1, 0, 2, -2)
    assert "root[neg#2;pos#2;rest#1]" == path
    assert [11.0, -11.0, 0.5, 12.0, -12.0] == rows
    assert {"neg": [-1.0, -2.0], "pos": [1.0, 2.0], "rest": [0.0]} == {
        call.model_name: values_of(call.inputs["IN"]) for call in target.calls
    }


async def test_a_batch_of_one_kind_is_handed_on_as_it_is() -> None:
    """Nothing is copied on the way in or out."""
    x = column(1, 2, 3)
    target = FakeTarget()
    result = await make.run(switch(SIGNS), target, {"X": x})
    assert target.calls[0].inputs["IN"].data is x.data
    assert result.outputs["Y"].data is x.data


async def test_branches_run_at_once(virtual_clock: VirtualClock) -> None:
    """The slowest of them sets the time."""
    target = FakeTarget(neg=adding(0, 20), pos=adding(0, 30))
    await answered(switch(SIGNS), target, 1, -1)
    assert 30.0 == virtual_clock.elapsed_ms()


async def test_a_failing_branch_cancels_the_others(virtual_clock: VirtualClock) -> None:
    """And fails the request."""
    target = FakeTarget(neg=adding(0, 900), pos=failing(after_ms=5))
    context = make.context()
    with pytest.raises(WeftError, match=r"^g/1: root/pos -> pos@1: gone \(row 0 of 2\)$"):
        await make.run(switch(SIGNS), target, {"X": column(1, -1)}, context=context)
    assert ["neg"] == target.cancelled
    assert [("x-graph-path", "root[neg#1~;pos#1!]")] == context.trailing_metadata
    assert 0 == make.num_other_tasks()


async def test_tests_are_tried_with_the_rows_that_are_left() -> None:
    """As if each row were a request of its own: a row that has its branch is not tested again."""
    tested: dict[str, list[float]] = {"big": [], "even": []}

    def test(name: str, function: Callable[[float], bool]) -> Any:
        def condition(request: Any, values: Mapping[str, np.ndarray]) -> bool:
            tested[name].append(values["X"].item())
            return function(values["X"].item())

        return FakeCondition(condition, names=("X",))

    steps = {
        "big": {"when": test("big", lambda x: x > 10)},
        "even": {"when": test("even", lambda x: x % 2 == 0)},
        "rest": {"is_otherwise": True},
    }
    path, rows = await answered(switch(steps), FakeTarget(), 12, 1, 2, 20)
    assert ("root[big#2;even#1;rest#1]", [12.0, 1.0, 2.0, 20.0]) == (path, rows)
    assert {"big": [12.0, 1.0, 2.0, 20.0], "even": [1.0, 2.0]} == tested


async def test_a_condition_without_tensors_is_evaluated_once() -> None:
    """It is the same for all rows."""
    on = FakeCondition(lambda r, f: r.parameters["lang"])
    plan = per_row(SwitchPlan, {"de": {"cases": ("de",)}}, on=on)
    await make.run(plan, FakeTarget(), {"X": column(1, 2, 3)}, parameters={"lang": "de"})
    assert 1 == on.num_evaluations


async def test_a_row_without_a_branch_fails_the_request() -> None:
    """The message has node, row and value; nothing is called."""
    plan = switch({"neg": {"cases": ("neg",)}, "pos": {"cases": ("pos",)}})
    target = FakeTarget()
    with pytest.raises(InvalidArgumentError) as caught:
        await make.run(plan, target, {"X": column(1, 0, -1)})
    assert (
        "g/1: root: no branch of switch 'root' matches row 1: value 'zero' of 'sign' is no case; branches are 'neg', "
        "'pos', and there is no 'otherwise'"
    ) == caught.value.message
    assert [] == target.called()


@pytest.mark.parametrize("kind", [SwitchPlan, CascadePlan])
async def test_no_rows_have_an_empty_answer(kind: type[NodePlan]) -> None:
    """Nothing is called; the shape is the declared one."""
    on = FakeCondition(lambda r, values: "a", names=("X",))
    plan = per_row(kind, {"a": {}}, **({"on": on} if kind is SwitchPlan else {}))
    target = FakeTarget()
    result = await make.run(plan, target, {"X": WireTensor("FP32", (0, 1), b"")})
    assert {"Y": WireTensor("FP32", (0, 1), b"")} == result.outputs
    assert [] == target.called()


async def test_an_output_that_some_rows_lack_is_absent() -> None:
    """A soft branch without default failed: there is no such tensor. With a default every row has a value."""
    target = FakeTarget(neg=failing(), pos=adding(10))
    soft = SIGNS | {"neg": SIGNS["neg"] | SOFT}
    result = await make.run(switch(soft), target, {"X": column(1, -1)})
    assert {} == result.outputs
    default = soft | {"neg": soft["neg"] | {"batched_defaults": {"Y": column(7)}}}
    assert ("root[neg#2!;pos#1]", [11.0, 7.0, 7.0]) == await answered(switch(default), target, 1, -1, -2)


async def test_rows_whose_answers_do_not_fit_together_fail_the_request() -> None:
    """A variable dimension came out different; the message has node, output, rows and shapes."""

    async def wide(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return {"OUT": encode(np.zeros((len(decode(call.inputs["IN"])), 3), np.float32))}

    with pytest.raises(
        InternalError,
        match=r"^g/1: root: output 'Y': rows that went different ways do not make one tensor: row 1 is FP32\[1\], "
        r"row 0 is FP32\[3\]",
    ):
        await make.run(switch(SIGNS), FakeTarget(pos=wide), {"X": column(1, -1)})


async def test_an_answer_with_other_rows_fails_the_request() -> None:
    """A model must answer as many rows as it got."""

    async def forget(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return {"OUT": column(1)}

    for rows in ((1, 2, -1), (1, 2)):
        with pytest.raises(
            InternalError, match=r"'OUT' of model 'pos' .*: its batch size is 1, that of the request is 2"
        ):
            await make.run(switch(SIGNS), FakeTarget(pos=forget), {"X": column(*rows)})


async def test_inputs_of_different_rows_fail_the_request() -> None:
    """A model before the node must have given the wrong number."""
    steps = [make.step("a", "a", {"IN": "X", "Z": "Z"}, {"OUT": "Y"}, is_otherwise=True)]
    root = make.node("root", SwitchPlan, steps, inputs=["X", "Z"], outputs=["Y"], per_row=True, max_batch_size=8)
    plan = make.graph(root, max_batch_size=8)
    with pytest.raises(InternalError, match=r"^g/1: root: .*: X has shape \[2, 1\], Z has shape \[3, 1\]"):
        await make.run(plan, FakeTarget(), {"X": column(1, 2), "Z": column(1, 2, 3)})
    with pytest.raises(InvalidArgumentError, match="all inputs are absent"):
        await make.run(plan, FakeTarget(), {})


async def test_strings_travel_by_row() -> None:
    """Whatever their lengths."""
    on = FakeCondition(lambda r, values: "long" if len(values["X"][0, 0]) > 3 else "short", names=("X",))
    made = [
        make.step(
            n,
            make.call_plan(n, [make.spec("IN", "BYTES")], [make.spec("OUT", "BYTES")], max_batch_size=8),
            {"IN": "X"},
            {"OUT": "Y"},
            cases=(n,),
        )
        for n in ("long", "short")
    ]
    root = make.node("root", SwitchPlan, made, inputs=["X"], outputs=["Y"], per_row=True, on=on)
    x = make.text("a", "tiger", "", "elephant", shape=(4, 1))
    target = FakeTarget()
    result = await make.run(make.graph(root, max_batch_size=8), target, {"X": x})
    assert x == result.outputs["Y"]
    assert make.text("a", "", shape=(2, 1)) in [call.inputs["IN"] for call in target.calls]


def at_least(limit: float) -> Any:
    return FakeCondition(lambda r, values: bool(values["Y"][0, 0] >= limit), names=("Y",))


def cascade(steps: Mapping[str, dict[str, Any]], **options: Any) -> GraphPlan:
    """All steps but the last accept rows of 10 and more."""
    last = list(steps)[-1]
    accepting = {n: ({} if n == last else {"accept": at_least(10)}) | how for n, how in steps.items()}
    return per_row(CascadePlan, accepting, **options)


async def test_only_the_rows_that_are_not_accepted_travel_on() -> None:
    """Each step gets what is left; the answers come back in order."""
    target = FakeTarget(a=adding(5), b=adding(7), c=adding(100))
    path, rows = await answered(cascade({"a": {}, "b": {}, "c": {}}), target, 1, 5, 3, 9, 2)
    assert "root<a#5;b#3;c#2>" == path
    assert [[1.0, 5.0, 3.0, 9.0, 2.0], [1.0, 3.0, 2.0]] == [values_of(c.inputs["IN"]) for c in target.calls[:2]]
    assert [[1.0, 2.0]] == [values_of(call.inputs["IN"]) for call in target.calls[2:]]
    assert [101.0, 10.0, 10.0, 14.0, 102.0] == rows


async def test_when_all_rows_are_accepted_nothing_is_copied() -> None:
    """The answer is the step's own."""
    x = column(10, 20)
    target = FakeTarget()
    result = await make.run(cascade({"a": {}, "b": {}}), target, {"X": x})
    assert result.outputs["Y"].data is x.data
    assert ["a"] == target.called()


async def test_a_test_per_row_passes_rows_over() -> None:
    """Rows that the step is not for wait for the next one."""
    even = FakeCondition(lambda r, values: values["X"].item() % 2 == 0, names=("X",))
    target = FakeTarget(a=adding(20), b=adding(30))
    path, rows = await answered(cascade({"a": {"when": even}, "b": {}}), target, 1, 2, 3, 4)
    assert ("root<a#2;b#2>", [31.0, 22.0, 33.0, 24.0]) == (path, rows)


async def test_the_latest_answer_of_each_row_counts() -> None:
    """Row 0 is answered by the first step only, row 1 by the second too; neither is accepted, the last step fails."""
    even = FakeCondition(lambda r, values: values["X"].item() % 2 == 0, names=("X",))
    plan = cascade({"a": {}, "b": {"when": even}, "c": SOFT})
    target = FakeTarget(a=adding(1), b=adding(2), c=failing())
    assert ("root<a#3;b#1;c#2!>", [2.0, 4.0, 31.0]) == await answered(plan, target, 1, 2, 30)


async def test_a_row_without_any_answer_fails_the_request() -> None:
    """The others have theirs; the message has the row and the last failure on it."""
    even = FakeCondition(lambda r, values: values["X"].item() % 2 == 0, names=("X",), source="even")
    plan = cascade({"a": SOFT, "b": {"when": even}})
    target = FakeTarget(a=failing("ABORTED"))
    with pytest.raises(WeftError, match=r"^g/1: root/a -> a@1: gone; so row 1 has no answer$") as caught:
        await make.run(plan, target, {"X": column(2, 3)})
    assert "ABORTED" == caught.value.code
    with pytest.raises(
        InvalidArgumentError, match="no step of cascade 'root' is for this request for row 1: no 'when'"
    ):
        await make.run(cascade({"a": {"when": even}}), FakeTarget(), {"X": column(2, 3)})


async def test_too_little_time_counts_by_row(virtual_clock: VirtualClock) -> None:
    """Rows with an answer keep it; a row without one fails the request."""
    even = FakeCondition(lambda r, values: values["X"].item() % 2 == 0, names=("X",))
    target = FakeTarget(a=adding(1, 60), b=adding(30))
    limits = {"min_remaining_ms": 50}
    plan = cascade({"a": {}, "b": limits})
    assert ("root<a#2>", [2.0, 3.0]) == await answered(plan, target, 1, 2, timeout_ms=100)
    with pytest.raises(WeftError, match="has no answer for row 0: less time is left") as caught:
        await answered(cascade({"a": {"when": even}, "b": limits}), target, 1, 2, timeout_ms=100)
    assert "DEADLINE_EXCEEDED" == caught.value.code


async def test_whether_a_step_answered_is_asked_by_row() -> None:
    """The first step answered the even rows only, so the second is for those."""
    even = FakeCondition(lambda r, values: values["X"].item() % 2 == 0, names=("X",))
    ok = FakeCondition(lambda r, values: values["steps.a.ok"] is not None, names=("steps.a.ok",))
    plan = cascade({"a": {"when": even}, "b": {"when": ok}, "c": {}})
    target = FakeTarget(a=adding(1), b=adding(20), c=adding(300))
    assert ("root<a#2;b#2;c#2>", [301.0, 22.0, 303.0, 24.0]) == await answered(plan, target, 1, 2, 3, 4)


async def test_rows_stay_in_order_though_they_were_tested_in_groups() -> None:
    """The test reads what differs from row to row, and holds for all but one."""
    even = FakeCondition(lambda r, values: values["X"].item() % 2 == 0, names=("X",))
    small = FakeCondition(lambda r, values: values["X"].item() < 6, names=("steps.a.ok", "X"))
    plan = cascade({"a": {"when": even}, "b": {"when": small}})
    target = FakeTarget(a=adding(1), b=adding(20))
    assert ("root<a#2;b#3>", [21.0, 22.0, 7.0, 23.0]) == await answered(plan, target, 1, 2, 6, 3)
    assert [1.0, 2.0, 3.0] == values_of(target.calls[1].inputs["IN"])


async def test_with_an_answer_for_every_row_the_end_of_all_time_is_no_error(virtual_clock: VirtualClock) -> None:
    """A row without one makes it an error."""
    target = FakeTarget(a=adding(1), b=adding(30, 900))
    plan = cascade({"a": {}, "b": SOFT})
    assert ("root<a#2;b#2!>", [2.0, 3.0]) == await answered(plan, target, 1, 2, timeout_ms=50)
    even = FakeCondition(lambda r, values: values["X"].item() % 2 == 0, names=("X",))
    with pytest.raises(WeftError) as caught:
        await answered(cascade({"a": {"when": even}, "b": SOFT}), target, 1, 2, timeout_ms=50)
    assert "DEADLINE_EXCEEDED" == caught.value.code


async def test_a_condition_that_fails_on_a_row_fails_the_request() -> None:
    """The condition's own message names the row; the node is added."""

    def fail(request: Any, values: Any) -> Any:
        raise InvalidArgumentError("row 0: no such key")

    condition = FakeCondition(fail, names=("X",))
    for plan in (
        cascade({"a": SOFT | {"accept": condition}, "b": {}}),
        switch({"a": SOFT | {"when": condition}}),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^g/1: root: row 0: no such key$"):
            await make.run(plan, FakeTarget(), {"X": column(1, 2)})
