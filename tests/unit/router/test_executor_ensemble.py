"""Ensembles: all members at once, who is waited for, who is left out, and what is said when too few answer."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.outcomes import GONE, Late, models, outcome
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import WireTensor
from weft.language.plan import CallPlan, GraphPlan
from weft.router.combine import METHODS
from weft.router.operators.ensemble import EnsemblePlan


def ensemble(members: str, methods: str = "SUM", datatype: str = "FP32", **options: Any) -> GraphPlan:
    """Members take X; each method makes an output of their answers: Y, then M.

    ``a?`` is soft, ``a-`` is skipped, ``a:3`` has a weight, ``a=100`` a default, ``a>f`` a fallback.
    """
    given: dict[str, Any] = {name: options.pop(name) for name in ("is_weighted", "axis") if name in options}
    steps: list[make.StepSpec] = []
    sources: dict[str, str] = {}
    for name, how in re.findall(r"(\w)(\S*)", members):
        more: dict[str, Any] = {"is_soft": "?" in how}
        if "-" in how:
            more["when"] = FakeCondition(lambda r, f: False)
        if weight := re.search(r":(\d+)", how):
            more["weight"] = float(weight[1])
        if default := re.search(r"=(\d+)", how):
            more["defaults"] = {f"{name}.Y": make.tensor(float(default[1]))}
        if fallback := re.search(r">(\w)", how):
            more["fallback"] = make.step(fallback[1], fallback[1], {"IN": "X"}, {"OUT": f"{name}.Y"})
        call = make.call_plan(name, ["IN"], [make.spec("OUT", datatype)])
        steps.append(make.step(name, call, {"IN": "X"}, {"OUT": f"{name}.Y"}, **more))
        sources[name] = f"{name}.Y"
    combines = [(name, METHODS[m], sources, given) for name, m in zip("YM", methods.split(), strict=False)]
    outputs = [combine[0] for combine in combines]
    root = make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=outputs, combines=combines, **options)
    return make.graph(root)


CAT, DOG = make.text("cat"), make.text("dog")
VOTE: dict[str, Any] = {"methods": "VOTE", "datatype": "BYTES"}
FIRST: dict[str, Any] = {"methods": "FIRST"}


@pytest.mark.parametrize(
    ("members", "options", "answers", "expected"),
    [
        # All members run at once, and the majority wins; weighted, one heavy member may.
        ("a b c", VOTE, {"a": Late(CAT, 9), "b": Late(DOG, 9), "c": Late(DOG, 9)}, "Y=dog root{a;b;c} 9 ms"),
        ("a:5 b c", VOTE | {"is_weighted": True}, {"a": CAT, "b": DOG, "c": DOG}, "Y=cat root{a;b;c}"),
        # Answers are taken in declared order, whoever comes first.
        ("a b c", {"methods": "AVERAGE"}, {"a": Late(1, 2), "b": 2, "c": 6}, "Y=3 root{a;b;c} 2 ms"),
        ("a b c", {"methods": "CONCAT", "axis": 0}, {"a": Late(1, 2), "b": 2, "c": 6}, "Y=1,2,6 root{a;b;c} 2 ms"),
        ("a", {"methods": "AVERAGE"}, {"a": 2}, "Y=2 root{a}"),
        # Weights are those of the members that answered, and count where they are asked for.
        (
            "a?:3 b?:90 c?:1",
            {"methods": "AVERAGE", "is_weighted": True},
            {"a": 2, "b": GONE, "c": 6},
            "Y=3 root{a;b!;c}",
        ),
        ("a:3 b:1", {"methods": "AVERAGE"}, {"a": 2, "b": 6}, "Y=4 root{a;b}"),
        ("a:3 b:1", {}, {"a": 2, "b": 6}, "Y=8 root{a;b}"),
        # A hard member that fails cancels the others, though there is a quorum without it; a soft one may fail.
        (
            "a b c",
            {},
            {"a": Late(1, 99), "b": Late(GONE, 5), "c": Late(1, 99)},
            "UNAVAILABLE: g/1: root/b -> b@1: gone root{a~;b!;c~} 5 ms ~a,c",
        ),
        (
            "a? b c?",
            {"quorum": 1, "straggler_ms": 500},
            {"a": 1, "b": Late("ABORTED", 20), "c": Late(1, 100)},
            "ABORTED: g/1: root/b -> b@1: gone root{a;b!;c~} 20 ms ~c",
        ),
        ("a b? c?", {}, {"a": 1, "b": GONE, "c": 4}, "Y=5 root{a;b!;c}"),
        # Of a race the first success wins, a failure before it does not matter; if all fail, the first declared counts.
        ("a b c", FIRST, {"a": Late(1, 99), "b": GONE, "c": Late(9, 1)}, "Y=9 root{a~;b!;c} 1 ms ~a"),
        (
            "a b c",
            FIRST,
            {"a": GONE, "b": "ABORTED", "c": GONE},
            "UNAVAILABLE: g/1: root/a -> a@1: gone root{a!;b!;c!}",
        ),
        ("s?- a? b?", FIRST, {"a": "ABORTED", "b": GONE}, "ABORTED: g/1: root/a -> a@1: gone root{a!;b!}"),
        (
            "s?-",
            FIRST,
            {},
            "INVALID_ARGUMENT: g/1: root: 1 of 1 steps must answer, and cannot any more: s did not run, its 'when' is "
            "false root",
        ),
        # Among other methods, or with a quorum, FIRST is no race: who answered first is taken when all have.
        (
            "a? b? c?",
            {"methods": "FIRST MEDIAN"},
            {"a": Late(9, 20), "b": GONE, "c": Late(5, 10)},
            "Y=5 M=7 root{a;b!;c} 20 ms",
        ),
        (
            "a? b? c?",
            FIRST | {"quorum": 2, "straggler_ms": 1},
            {"a": Late(20, 20), "b": Late(10, 10), "c": Late(900, 900)},
            "Y=10 root{a;b;c~} 21 ms ~c",
        ),
        # A late member is left out and cancelled, so long after the quorum-th answer; its default stands in.
        (
            "a? b? c?",
            {"quorum": 2, "straggler_ms": 25},
            {"a": Late(1, 90), "b": Late(2, 10), "c": Late(4, 30)},
            "Y=6 root{a~;b;c} 55 ms ~a",
        ),
        ("a?=100 b?", {"quorum": 1, "straggler_ms": 10}, {"a": Late(1, 90), "b": 2}, "Y=102 root{a~;b} 10 ms ~a"),
        (
            "a?=100 b?",
            {"quorum": 1, "straggler_ms": 10},
            {"a": GONE, "b": GONE},
            "UNAVAILABLE: g/1: root: 1 of 2 steps must answer, and cannot any more: a failed: UNAVAILABLE: root/a -> "
            "a@1: gone; b failed: UNAVAILABLE: root/b -> b@1: gone root{a!;b!}",
        ),
        # Nobody is late without a limit, within it, or when all are needed.
        *(
            ("a? b? c?", options, {"a": Late(1, 30), "b": Late(2, 10), "c": Late(4, 20)}, "Y=7 root{a;b;c} 30 ms")
            for options in ({"quorum": 2}, {"quorum": 2, "straggler_ms": 15}, {"quorum": 3, "straggler_ms": 5})
        ),
        ("a? b", {"quorum": 1, "straggler_ms": 5}, {"a": Late(1, 10), "b": Late(2, 12)}, "Y=3 root{a;b} 12 ms"),
        # A hard member is waited for however late, soft ones are not; without a quorum the hard ones make it.
        (
            "a b? c?",
            {"quorum": 1, "straggler_ms": 5},
            {"a": Late(1, 80), "b": Late(2, 40), "c": 4},
            "Y=5 root{a;b~;c} 80 ms ~b",
        ),
        (
            "a b c? d?",
            {"straggler_ms": 10},
            {"a": Late(1, 20), "b": Late(1, 30), "c": Late(1, 35), "d": Late(1, 45)},
            "Y=3 root{a;b;c;d~} 40 ms ~d",
        ),
        # A quorum out of reach fails at once, tells of each member, and has the code of the failures if they agree.
        *(
            (
                "a? b? c? d? e?-",
                {"quorum": 3},
                {"a": Late("ABORTED", 5), "b": 1, "c": Late(code, 7), "d": Late(1, 900)},
                f"{expected}: g/1: root: 3 of 5 steps must answer, and cannot any more: a failed: ABORTED: root/a -> "
                f"a@1: gone; b answered; c failed: {code}: root/c -> c@1: gone; d was still running; e did not run, "
                "its 'when' is false root{a!;b;c!;d~} 7 ms ~d",
            )
            for code, expected in (("ABORTED", "ABORTED"), ("UNKNOWN", "UNAVAILABLE"))
        ),
        *(
            (
                members,
                {},
                {},
                f"INVALID_ARGUMENT: g/1: root: 1 of {members.count('-')} steps must answer, and cannot any more: a did "
                f"not run, its 'when' is false{more} root",
            )
            for members, more in (("a- b-", "; b did not run, its 'when' is false"), ("a-", ""))
        ),
        # A fallback counts as an answer.
        ("a?>f b?", {"quorum": 2}, {"a": GONE, "f": 7, "b": 1}, "Y=8 root{a!>f;b}"),
        (
            "a?>f b?",
            {"quorum": 2},
            {"a": GONE, "f": 7, "b": "ABORTED"},
            "ABORTED: g/1: root: 2 of 2 steps must answer, and cannot any more: a answered; b failed: ABORTED: root/b "
            "-> b@1: gone root{a!>f;b!}",
        ),
        # Answers that do not fit one another are an error that names node and method.
        (
            "a b",
            {"methods": "VOTE"},
            {"a": 1, "b": (1, 2)},
            "INTERNAL: g/1: root: VOTE: the steps answered tensors that differ in datatype or shape: FP32[1], FP32[2] "
            "root{a;b}",
        ),
    ],
)
async def test_an_ensemble_answers(
    virtual_clock: VirtualClock, members: str, options: dict[str, Any], answers: dict[str, Any], expected: str
) -> None:
    """As its methods, its quorum and the dependencies of its members say."""
    assert expected == await outcome(ensemble(members, **options), models(**answers))


async def test_with_a_quorum_the_end_of_all_time_is_an_answer(virtual_clock: VirtualClock) -> None:
    """Two members have answered when the deadline of the graph passes; one has not."""
    target = models(a=1, b=2, c=Late(4, 900))
    found = await outcome(ensemble("a? b? c?", quorum=2), target, timeout_ms=50)
    assert "Y=3 root{a;b;c!} 50 ms" == found
    assert (await outcome(ensemble("a? c?", quorum=2), target, timeout_ms=50)).startswith("DEADLINE_EXCEEDED: ")


async def test_a_late_member_is_awaited(virtual_clock: VirtualClock) -> None:
    """A call that takes its time to go away is over when the answer is given."""

    async def slow_to_leave(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        try:
            await asyncio.sleep(1_000)
        finally:
            await asyncio.sleep(0.003)
        return {}

    plan = ensemble("a? b?", quorum=1, straggler_ms=10)
    assert "Y=2 root{a~;b} 13 ms ~a" == await outcome(plan, models(a=slow_to_leave, b=2))


async def test_keyed_outputs_pass_through_undecoded() -> None:
    """Each member's tensor is an output of its own, the same bytes object; that of a missing one is absent."""
    answers = {m: make.tensor(float(i)) for i, m in enumerate("ab")}
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.t"}, is_soft=True) for m in "ab"]
    combines = [(f"{m}.t", METHODS["KEYED"], {m: f"{m}.t"}, {}) for m in "ab"]
    root = make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["a.t", "b.t"], combines=combines)
    result = await make.run(make.graph(root), models(**answers))
    assert all(result.outputs[f"{m}.t"].data is answers[m].data for m in "ab")
    assert ["b.t"] == list((await make.run(make.graph(root), models(a=GONE))).outputs)


async def test_members_with_and_without_batching_are_combined() -> None:
    """In a batching graph the answer of a member without batching gets its batch dimension back first."""
    plain, batching = (make.call_plan(m, ["IN"], ["OUT"], max_batch_size=size) for m, size in (("a", 0), ("b", 8)))
    steps = [make.step(p.model_name, p, {"IN": "X"}, {"OUT": f"{p.model_name}.Y"}) for p in (plain, batching)]
    combine = ("Y", METHODS["AVERAGE"], {"a": "a.Y", "b": "b.Y"}, {})
    root = make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["Y"], combines=[combine])
    x = make.tensor(1, 2, shape=(1, 2))
    result = await make.run(make.graph(root, max_batch_size=8), FakeTarget(), {"X": x})
    assert x == result.outputs["Y"]


@pytest.mark.parametrize("members", ["a? b?", "a b?"])
async def test_a_defect_is_raised(members: str) -> None:
    """Only errors that are meant for clients make a member missing."""

    async def break_down(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await make.run(ensemble(members, quorum=1), models(a=break_down, b=1))


@pytest.mark.parametrize("method", ["FIRST", "SUM"])
async def test_a_condition_that_fails_fails_the_request(method: str) -> None:
    """Though the member is soft and the others answer: there is no silent false."""

    def fail(request: Any, frame: Any) -> Any:
        raise InvalidArgumentError("no such key")

    plan = ensemble("a?- b?", method)
    plan.root.steps[0].when.function = fail  # type: ignore[union-attr,attr-defined]
    found = await outcome(plan, models(b=Late(1, 1)))
    assert found.startswith("INVALID_ARGUMENT: g/1: root/a: no such key ")


def custom(**options: Any) -> GraphPlan:
    """Soft members a, b; the model `judge` gets their answers stacked, the mask, and X."""
    node = {name: options.pop(name) for name in ("quorum", "straggler_ms") if name in options}
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.Y"}, is_soft=True) for m in "ab"]
    judge = make.step("judge", judging("judge"), {"S": "stack", "MASK": "mask", "X": "X"}, {"OUT": "Y"}, **options)
    given = {"custom": judge, "stack": "stack", "mask": "mask"}
    combine = ("Y", METHODS["CUSTOM"], {m: f"{m}.Y" for m in "ab"}, given)
    root = make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["Y"], combines=[combine], **node)
    return make.graph(root)


def judging(model: str) -> CallPlan:
    return make.call_plan(model, [make.spec("S", dims=(-1, -1)), make.spec("MASK", "BOOL"), "X"], ["OUT"])


async def test_a_model_combines_a_stack_with_its_mask() -> None:
    """A member that is missing leaves zeros, and false in the mask; node inputs go along."""
    target = models(a=GONE, b=(2, 3), judge=42)
    assert "Y=42 root{a!;b;judge}" == await outcome(custom(), target, inputs={"X": make.tensor(7.0)})
    assert {
        "S": make.tensor(0, 0, 2, 3, shape=(2, 2)),
        "MASK": WireTensor("BOOL", (2,), b"\x00\x01"),
        "X": make.tensor(7.0),
    } == target.calls[-1].inputs


async def test_a_model_that_combines_may_fail_and_have_a_fallback() -> None:
    """It is a step like any other; members that do not stack are refused, with node and method."""
    fallback = make.step("mean", judging("mean"), {"S": "stack"}, {"OUT": "Y"})
    plan, target = custom(fallback=fallback), models(judge=GONE, mean=1)
    assert "Y=1 root{a;b;judge!>mean}" == await outcome(plan, target)
    assert "UNAVAILABLE: g/1: root/judge -> judge@1: gone root{a;b;judge!}" == await outcome(custom(), target)
    refused = await outcome(custom(), models(a=1, b=(2, 3)))
    assert refused.startswith("INTERNAL: g/1: root: CUSTOM: the steps answered tensors that differ")
