"""Switches: which branch answers, and what is said when none does."""

from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext
from weft.base.errors import InvalidArgumentError
from weft.language.plan import GraphPlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.switch import SwitchPlan


def switch(branches: list[tuple[str, dict[str, Any]]], **options: Any) -> GraphPlan:
    """A switch whose branches call the models named like them."""
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": "Y"}, **how) for name, how in branches]
    return make.graph(make.node("root", SwitchPlan, steps, inputs=["X"], outputs=["Y"], **options))


def language() -> Any:
    return FakeCondition(lambda request, frame: request.parameters.get("lang"), source="parameters.lang")


async def test_the_case_that_equals_on_answers() -> None:
    """`on` is evaluated once, however many branches there are; the branch shows in the path."""
    on = language()
    plan = switch(
        [("de", {"cases": ("de", "nl")}), ("en", {"cases": ("en",)}), ("rest", {"is_otherwise": True})], on=on
    )
    target = FakeTarget()
    context = CallContext()
    for lang in ("nl", "en", "fr"):
        await make.run(plan, target, parameters={"lang": lang}, context=context)
    assert ["de", "en", "rest"] == target.called()
    assert 3 == on.num_evaluations
    assert ["root[de]", "root[en]", "root[rest]"] == [path for _, path in context.trailing_metadata]


async def test_the_first_when_that_holds_answers() -> None:
    """Tests are tried in declared order; those behind the first that holds are not evaluated."""
    never, yes, late = (FakeCondition(lambda r, f, v=value: v) for value in (False, True, True))
    plan = switch([("a", {"when": never}), ("b", {"when": yes}), ("c", {"when": late})])
    target = FakeTarget()
    await make.run(plan, target)
    assert ["b"] == target.called()
    assert [1, 1, 0] == [never.num_evaluations, yes.num_evaluations, late.num_evaluations]


async def test_otherwise_answers_only_when_nothing_else_does() -> None:
    """`otherwise` may stand first and still is the last choice."""
    plan = switch([("rest", {"is_otherwise": True}), ("de", {"cases": ("de",)})], on=language())
    target = FakeTarget()
    await make.run(plan, target, parameters={"lang": "de"})
    await make.run(plan, target, parameters={})
    assert ["de", "rest"] == target.called()


async def test_no_match_is_an_invalid_argument_that_names_graph_node_and_value() -> None:
    """Nothing is called; the message has what was compared and what there was."""
    plan = switch([("de", {"cases": ("de",)})], on=language())
    target = FakeTarget()
    with pytest.raises(InvalidArgumentError) as caught:
        await make.run(plan, target, parameters={"lang": "fr"})
    assert (
        "g/1: root: no branch of switch 'root' matches: value 'fr' of 'parameters.lang' is no case; branches are 'de', "
        "and there is no 'otherwise'"
    ) == caught.value.message
    assert [] == target.called()


async def test_a_value_of_megabytes_is_not_repeated_in_the_message() -> None:
    """Its beginning says enough."""
    plan = switch([("de", {"cases": ("de",)})], on=language())
    with pytest.raises(InvalidArgumentError, match=f"value '{'x' * 100}\\.\\.\\.' of") as caught:
        await make.run(plan, FakeTarget(), parameters={"lang": "x" * 3_000_000})
    assert len(caught.value.message) < 400


async def test_no_match_has_the_same_code_at_any_depth() -> None:
    """A switch inside a sequence fails as a switch at the root does."""
    inner = switch([("de", {"cases": ("de",)})], on=language()).root
    steps = [make.step("pre", "pre", {"IN": "X"}, {"OUT": "A"}), make.step("clf", inner, {"X": "A"}, {"Y": "Y"})]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))
    context = CallContext()
    with pytest.raises(InvalidArgumentError, match="no branch of switch"):
        await make.run(plan, FakeTarget(), parameters={"lang": "fr"}, context=context)
    assert [("x-graph-path", "root.pre;clf=root!")] == context.trailing_metadata


async def test_a_condition_that_fails_fails_the_request() -> None:
    """There is no silent false; the place is added to the condition's own message."""

    def fail(request: Any, frame: Any) -> Any:
        raise InvalidArgumentError("no such key: 'lang'")

    plan = switch([("a", {"when": FakeCondition(fail)}), ("rest", {"is_otherwise": True})])
    with pytest.raises(InvalidArgumentError, match=r"^g/1: root: no such key: 'lang'$"):
        await make.run(plan, FakeTarget())


async def test_a_condition_reads_the_nodes_own_frame() -> None:
    """The frame holds the node's input where the binding says."""
    seen = []
    when = FakeCondition(lambda request, frame: seen.append(frame[0]) or True)
    await make.run(switch([("a", {"when": when})]), FakeTarget(), {"X": make.tensor(3.0)})
    assert [make.tensor(3.0)] == seen
