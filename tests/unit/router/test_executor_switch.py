"""Switches: which branch answers, a request or each of its rows, and what is said when none does."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.outcomes import GONE, Late, models, outcome
from tests.unit.router.row_plans import adding, column, per_row
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import WireTensor, decode, encode
from weft.language.plan import GraphPlan, NodePlan
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.switch import SwitchPlan

OTHERWISE = {"is_otherwise": True}


def switch(branches: Mapping[str, dict[str, Any]], **options: Any) -> GraphPlan:
    """A switch whose branches call the models named like them; `on` is the parameter lang."""
    if any("cases" in how for how in branches.values()):
        options["on"] = FakeCondition(lambda request, frame: request.parameters.get("lang"), source="parameters.lang")
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": "Y"}, **how) for name, how in branches.items()]
    return make.graph(make.node("root", SwitchPlan, steps, inputs=["X"], outputs=["Y"], **options))


async def taken(plan: GraphPlan, **parameters: Any) -> str:
    """What becomes of a request, without its output."""
    return (await outcome(plan, models(), parameters=parameters)).removeprefix("Y=1 ")


async def test_the_case_that_equals_on_answers() -> None:
    """`on` is evaluated once, however many branches there are; `otherwise` is the last choice, wherever it stands."""
    plan = switch({"rest": OTHERWISE, "de": {"cases": ("de", "nl")}, "en": {"cases": ("en",)}})
    paths = [await taken(plan, lang=lang) for lang in ("nl", "en", "fr")]
    assert ["root[de]", "root[en]", "root[rest]"] == [*paths]
    assert 3 == plan.root.on.num_evaluations  # type: ignore[attr-defined]


async def test_the_first_when_that_holds_answers() -> None:
    """Tests are tried in declared order, on the node's frame; those behind the first that holds are not evaluated."""
    seen: list[Any] = []
    never, yes, late = (FakeCondition(lambda r, f, v=v: seen.append(f[0]) or v) for v in (False, True, True))
    assert "root[b]" == await taken(switch({"a": {"when": never}, "b": {"when": yes}, "c": {"when": late}}))
    assert [1, 1, 0] == [never.num_evaluations, yes.num_evaluations, late.num_evaluations]
    assert [make.tensor(1.0)] * 2 == seen


@pytest.mark.parametrize(("lang", "shown"), [("fr", "fr"), ("x" * 3_000_000, "x" * 100 + "...")])
async def test_no_match_is_an_invalid_argument_that_names_graph_node_and_value(lang: str, shown: str) -> None:
    """Nothing is called; of a value of megabytes the beginning says enough."""
    plan = switch({"de": {"cases": ("de",)}})
    assert (
        f"INVALID_ARGUMENT: g/1: root: no branch of switch 'root' matches: value '{shown}' of 'parameters.lang' is no "
        "case; branches are 'de', and there is no 'otherwise' root"
    ) == await taken(plan, lang=lang)


async def test_no_match_has_the_same_code_at_any_depth() -> None:
    """A switch inside a sequence fails as a switch at the root does."""
    inner = switch({"de": {"cases": ("de",)}}).root
    steps = [make.step("pre", "pre", {"IN": "X"}, {"OUT": "A"}), make.step("clf", inner, {"X": "A"}, {"Y": "Y"})]
    found = await taken(make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"])), lang="fr")
    assert found.startswith("INVALID_ARGUMENT: g/1: root: no branch of switch")
    assert found.endswith(" root.pre;clf=root!")


@pytest.mark.parametrize("by_row", [False, True])
async def test_a_condition_that_fails_fails_the_request(by_row: bool) -> None:
    """There is no silent false, though the step is soft; the place is added to the condition's own message."""

    def fail(request: Any, frame: Any) -> Any:
        raise InvalidArgumentError("row 0: no such key")

    branches: dict[str, dict[str, Any]] = {
        "a": {"when": FakeCondition(fail, names=("X",)), "is_soft": True},
        "rest": OTHERWISE,
    }
    plan = per_row(SwitchPlan, branches) if by_row else switch(branches)
    found = await outcome(plan, models(), inputs={"X": column(1, 2)})
    assert "INVALID_ARGUMENT: g/1: root: row 0: no such key root" == found


def by_sign(steps: Mapping[str, dict[str, Any]]) -> GraphPlan:
    """Chooses for each row by the sign of X: neg, zero, pos."""
    names = {-1.0: "neg", 0.0: "zero", 1.0: "pos"}
    on = FakeCondition(lambda r, values: names[float(np.sign(values["X"][0, 0]))], names=("X",), source="sign")
    return per_row(SwitchPlan, steps, on=on)


NEG, POS = {"cases": ("neg",)}, {"cases": ("pos",)}
SIGNS: dict[str, dict[str, Any]] = {"neg": NEG, "pos": POS, "rest": OTHERWISE}
SOFT_NEG = SIGNS | {"neg": NEG | {"is_soft": True}}


async def other_rows(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
    return {"OUT": column(1)}


async def wide(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
    return {"OUT": encode(np.zeros((len(decode(call.inputs["IN"])), 3), np.float32))}


@pytest.mark.parametrize(
    ("steps", "rows", "answers", "expected"),
    [
        # Rows take the branch of their own; the answers come back in order.
        (
            SIGNS,
            (1, -1, 0, 2, -2),
            {"neg": -10, "pos": 10, "rest": 0.5},
            "Y=11,-11,0.5,12,-12 root[neg#2;pos#2;rest#1]",
        ),
        # Branches run at once; one that fails cancels the others, and tells of which rows.
        (SIGNS, (1, -1), {"neg": Late(0, 20), "pos": Late(0, 30)}, "Y=1,-1 root[neg#1;pos#1] 30 ms"),
        (
            SIGNS,
            (1, -1),
            {"neg": Late(0, 900), "pos": Late(GONE, 5)},
            "UNAVAILABLE: g/1: root/pos -> pos@1: gone (row 0 of 2) root[neg#1~;pos#1!] 5 ms ~neg",
        ),
        # A row without a branch fails the request, before anything is called.
        (
            {"neg": NEG, "pos": POS},
            (1, 0, -1),
            {},
            "INVALID_ARGUMENT: g/1: root: no branch of switch 'root' matches row 1: value 'zero' of 'sign' is no case; "
            "branches are 'neg', 'pos', and there is no 'otherwise' root",
        ),
        # An output that some rows lack is absent; with a default every row has a value.
        (SOFT_NEG, (1, -1), {"neg": GONE, "pos": 10}, "nothing root[neg#1!;pos#1]"),
        (
            SOFT_NEG | {"neg": SOFT_NEG["neg"] | {"batched_defaults": {"Y": column(7)}}},
            (1, -1, -2),
            {"neg": GONE, "pos": 10},
            "Y=11,7,7 root[neg#2!;pos#1]",
        ),
        # Answers that do not fit together, or have other rows than they got, are errors that say so.
        (
            SIGNS,
            (1, -1),
            {"pos": wide},
            "INTERNAL: g/1: root: output 'Y': rows that went different ways do not make one tensor: row 1 is FP32[1], "
            "row 0 is FP32[3]; a variable dimension must come out the same for all rows of a request, else send rows "
            "one by one root[neg#1;pos#1]",
        ),
        *(
            (
                SIGNS,
                rows,
                {"pos": other_rows},
                "INTERNAL: g/1: root/pos -> pos@1: output 'OUT' of model 'pos' is not as it declares: its batch size "
                f"is 1, that of the request is 2{where}",
            )
            for rows, where in (((1, 2, -1), " (rows 0, 1 of 3) root[neg#1;pos#2!]"), ((1, 2), " root[pos#2!]"))
        ),
    ],
)
async def test_each_row_takes_its_own_branch(
    virtual_clock: VirtualClock,
    steps: Mapping[str, dict[str, Any]],
    rows: tuple[float, ...],
    answers: dict[str, Any],
    expected: str,
) -> None:
    """Rows of the same branch travel together; models add to what they get."""

    def script(one: Any) -> Any:
        fails = isinstance(one, str) or (isinstance(one, Late) and isinstance(one.answer, str))
        return one if fails or callable(one) else adding(one)

    target = models(**{name: script(one) for name, one in answers.items()})
    assert expected == await outcome(by_sign(steps), target, inputs={"X": column(*rows)})


async def test_a_batch_of_one_kind_is_handed_on_as_it_is() -> None:
    """Nothing is copied on the way in or out."""
    x, target = column(1, 2, 3), models()
    result = await make.run(by_sign(SIGNS), target, {"X": x})
    assert target.calls[0].inputs["IN"].data is x.data
    assert result.outputs["Y"].data is x.data


async def test_tests_are_tried_with_the_rows_that_are_left() -> None:
    """As if each row were a request of its own: a row that has its branch is not tested again."""
    tested: dict[str, list[float]] = {"big": [], "even": []}

    def test(name: str, function: Callable[[float], bool]) -> Any:
        def condition(request: Any, values: Mapping[str, np.ndarray]) -> bool:
            tested[name].append(values["X"].item())
            return function(values["X"].item())

        return {"when": FakeCondition(condition, names=("X",))}

    steps = {"big": test("big", lambda x: x > 10), "even": test("even", lambda x: x % 2 == 0), "rest": OTHERWISE}
    found = await outcome(per_row(SwitchPlan, steps), models(), inputs={"X": column(12, 1, 2, 20)})
    assert "Y=12,1,2,20 root[big#2;even#1;rest#1]" == found
    assert {"big": [12.0, 1.0, 2.0, 20.0], "even": [1.0, 2.0]} == tested


async def test_a_condition_without_tensors_is_evaluated_once() -> None:
    """It is the same for all rows."""
    on = FakeCondition(lambda r, f: r.parameters["lang"])
    plan = per_row(SwitchPlan, {"de": {"cases": ("de",)}}, on=on)
    await outcome(plan, models(), inputs={"X": column(1, 2, 3)}, parameters={"lang": "de"})
    assert 1 == on.num_evaluations


@pytest.mark.parametrize("kind", [SwitchPlan, CascadePlan])
async def test_no_rows_have_an_empty_answer(kind: type[NodePlan]) -> None:
    """Nothing is called; the shape is the declared one."""
    on = FakeCondition(lambda r, values: "a", names=("X",))
    plan, target = per_row(kind, {"a": {}}, **({"on": on} if kind is SwitchPlan else {})), models()
    result = await make.run(plan, target, {"X": WireTensor("FP32", (0, 1), b"")})
    assert ({"Y": WireTensor("FP32", (0, 1), b"")}, []) == (result.outputs, target.called())


async def test_inputs_of_different_rows_fail_the_request() -> None:
    """A model before the node must have given the wrong number."""
    steps = [make.step("a", "a", {"IN": "X", "Z": "Z"}, {"OUT": "Y"}, **OTHERWISE)]
    root = make.node("root", SwitchPlan, steps, inputs=["X", "Z"], outputs=["Y"], per_row=True, max_batch_size=8)
    plan = make.graph(root, max_batch_size=8)
    for inputs, message in (
        ({"X": column(1, 2), "Z": column(1, 2, 3)}, "X has shape [2, 1], Z has shape [3, 1]"),
        ({}, "all inputs are absent"),
    ):
        assert message in await outcome(plan, models(), inputs=inputs)


async def test_strings_travel_by_row() -> None:
    """Whatever their lengths."""
    on = FakeCondition(lambda r, values: "long" if len(values["X"][0, 0]) > 3 else "short", names=("X",))
    specs = [make.spec("IN", "BYTES")], [make.spec("OUT", "BYTES")]
    calls = {name: make.call_plan(name, *specs, max_batch_size=8) for name in ("long", "short")}
    made = [make.step(name, call, {"IN": "X"}, {"OUT": "Y"}, cases=(name,)) for name, call in calls.items()]
    root = make.node("root", SwitchPlan, made, inputs=["X"], outputs=["Y"], per_row=True, on=on)
    x, target = make.text("a", "tiger", "", "elephant", shape=(4, 1)), models()
    assert x == (await make.run(make.graph(root, max_batch_size=8), target, {"X": x})).outputs["Y"]
    assert make.text("a", "", shape=(2, 1)) in [call.inputs["IN"] for call in target.calls]
