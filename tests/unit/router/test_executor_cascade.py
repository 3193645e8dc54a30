"""Cascades: one step after another until an answer is accepted, for the whole request or for each of its rows."""

import re
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.outcomes import GONE, Late, models, outcome
from tests.unit.router.row_plans import adding, column, per_row, values_of
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.errors import InvalidArgumentError
from weft.language.plan import GraphPlan
from weft.router.operators.cascade import CascadePlan

LATE, INVALID = "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"
NO_ANSWER = "g/1: root/b -> b@1: no answer of 'b' in 100 ms"
TOO_LITTLE = (
    "less time is left than 'min_remaining_ms' of its steps asks for; give the request more time, or a step without "
    "that limit"
)


def reading(name: str, function: Any, source: str = "condition") -> FakeCondition:
    return FakeCondition(lambda r, values: function(values[name]), names=(name,), source=source)


def steps_of(text: str) -> dict[str, dict[str, Any]]:
    """All but the last accept 10 and more.

    ``a?`` is soft, ``a-`` has a false ``when``, ``a%`` one for even X, ``c@a`` one for an answer of a;
    ``a<50`` needs 50 ms.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, how in re.findall(r"(\w)(\S*)", text):
        more: dict[str, Any] = {"accept": reading("Y", lambda y: bool(y.item() >= 10))}
        if "?" in how:
            more["is_soft"] = True
        if "-" in how:
            more["when"] = FakeCondition(lambda r, f: False, source="tier")
        if "%" in how:
            more["when"] = reading("X", lambda x: x.item() % 2 == 0)
        if limit := re.search(r"<(\d+)", how):
            more["min_remaining_ms"] = int(limit[1])
        if other := re.search(r"@(\w)", how):
            more["when"] = reading(f"steps.{other[1]}.ok", lambda ok: ok is not None)
        found[name] = more
    del found[name]["accept"]
    return found


def cascade(text: str, **changes: dict[str, Any]) -> GraphPlan:
    steps = {name: how | changes.get(name, {}) for name, how in steps_of(text).items()}
    made = [make.step(name, name, {"IN": "X"}, {"OUT": "Y"}, **how) for name, how in steps.items()]
    return make.graph(make.node("root", CascadePlan, made, inputs=["X"], outputs=["Y"]))


@pytest.mark.parametrize(
    ("steps", "answers", "expected"),
    [
        # The first accepted answer wins, and no step runs after it; the last answer counts as it is.
        ("a b c", {"a": 12}, "Y=12 root<a>"),
        ("a b c", {"a": 5, "b": 20}, "Y=20 root<a;b>"),
        ("a b c", {"a": 5, "b": 6, "c": 30}, "Y=30 root<a;b;c>"),
        ("a b c", {"a": 5, "b": 6, "c": 1}, "Y=1 root<a;b;c>"),
        # A soft step that fails passes on, also where nothing is left but an answer that was not accepted.
        ("a b? c", {"a": 5, "b": GONE, "c": 30}, "Y=30 root<a;b!;c>"),
        ("a b?", {"a": 5, "b": GONE}, "Y=5 root<a;b!>"),
        # A hard step that fails, or runs out of time, fails the node, though there is an answer.
        ("a b c", {"a": 5, "b": "ABORTED"}, "ABORTED: g/1: root/b -> b@1: gone root<a;b!>"),
        (
            "a b",
            {"a": 5, "b": Late(30, 900)},
            f"{LATE}: {NO_ANSWER} root<a;b!> 100 ms",
        ),
        # With an answer in hand a soft step that runs into the deadline of the request is left out.
        ("a b? c", {"a": 5, "b": Late(30, 900)}, "Y=5 root<a;b!> 100 ms"),
        ("b? c", {"b": Late(30, 900)}, f"{LATE}: {NO_ANSWER} root<b!> 100 ms"),
        # A false `when` passes the step over; a step knows which ones before it answered, accepted or not.
        ("a- b", {"b": 20}, "Y=20 root<b>"),
        ("a? b c@a d@b", {"a": GONE, "b": 1, "d": 4}, "Y=4 root<a!;b;d>"),
        # A step is passed over when too little time is left.
        ("a b<50", {"a": Late(5, 60), "b": 30}, "Y=5 root<a> 60 ms"),
        ("a b<50", {"a": Late(5, 40), "b": 30}, "Y=30 root<a;b> 40 ms"),
        # Without any answer an error of a step goes before lack of time, and that before a false `when`.
        ("a? b?", {"a": GONE, "b": "ABORTED"}, "ABORTED: g/1: root/b -> b@1: gone root<a!;b!>"),
        ("a? b?<500", {"a": GONE}, "UNAVAILABLE: g/1: root/a -> a@1: gone root<a!>"),
        ("a- b?", {"b": "ABORTED"}, "ABORTED: g/1: root/b -> b@1: gone root<b!>"),
        ("a<500 b<101", {}, f"{LATE}: g/1: root: cascade 'root' has no answer: {TOO_LITTLE} root"),
        ("a- b<101", {}, f"{LATE}: g/1: root: cascade 'root' has no answer: {TOO_LITTLE} root"),
        (
            "a- b-",
            {},
            f"{INVALID}: g/1: root: no step of cascade 'root' is for this request: no 'when' holds of 'a' 'tier', 'b' "
            "'tier' root",
        ),
    ],
)
async def test_a_cascade_answers(
    virtual_clock: VirtualClock, steps: str, answers: dict[str, Any], expected: str
) -> None:
    """Within 100 ms, as its tests and the dependencies of its steps say."""
    assert expected == await outcome(cascade(steps), models(**answers), timeout_ms=100)


async def test_without_a_deadline_there_is_time() -> None:
    """`min_remaining_ms` counts where the request has a deadline."""
    assert "Y=30 root<a;b>" == await outcome(cascade("a b<50"), models(a=5, b=30))


async def test_the_latest_answer_is_the_best() -> None:
    """Not the first, and not a mixture of both: every output is of the same step."""
    steps = [make.step(n, n, {"IN": "X"}, {"O": "Y", "P": "Z"}, **how) for n, how in steps_of("a b c?").items()]
    plan = make.graph(make.node("root", CascadePlan, steps, inputs=["X"], outputs=["Y", "Z"]))
    assert "Y=6 Z=6 root<a;b;c!>" == await outcome(plan, models(a=5, b=6, c=GONE))


@pytest.mark.parametrize("field", ["when", "accept"])
async def test_a_test_that_cannot_be_evaluated_fails_the_request(field: str) -> None:
    """A soft step makes no difference; of a row the condition's own message names it."""

    def fail(request: Any, frame: Any) -> Any:
        raise InvalidArgumentError("row 0: no such key")

    failing = {field: FakeCondition(fail, names=("X",)), "is_soft": True}
    expected = f"{INVALID}: g/1: root: row 0: no such key root"
    assert (await outcome(cascade("a b", a=failing), models())).startswith(expected)
    assert (await rows("a b", (1, 2), models(), a=failing)).startswith(expected)


async def rows(
    text: str, given: tuple[float, ...], target: FakeTarget, timeout_ms: float | None = None, **changes: Any
) -> str:
    """What becomes of some rows, each of which goes its own way."""
    steps = {name: how | changes.get(name, {}) for name, how in steps_of(text).items()}
    return await outcome(per_row(CascadePlan, steps), target, inputs={"X": column(*given)}, timeout_ms=timeout_ms)


@pytest.mark.parametrize(
    ("steps", "given", "answers", "expected"),
    [
        # Each step gets the rows that are not accepted; the answers come back in order.
        ("a b c", (1, 5, 3, 9, 2), {"a": 5, "b": 7, "c": 100}, "Y=101,10,10,14,102 root<a#5;b#3;c#2>"),
        # Rows that a step is not for wait for the next one.
        ("a% b", (1, 2, 3, 4), {"a": 20, "b": 30}, "Y=31,22,33,24 root<a#2;b#2>"),
        # The latest answer of each row counts: row 0 is answered by a alone, row 1 by b too.
        ("a b% c?", (1, 2, 30), {"a": 1, "b": 2, "c": GONE}, "Y=2,4,31 root<a#3;b#1;c#2!>"),
        # Whether a step answered is asked by row.
        ("a% b@a c", (1, 2, 3, 4), {"a": 1, "b": 20, "c": 300}, "Y=301,22,303,24 root<a#2;b#2;c#2>"),
        # A row that ends without any answer fails the request, though the others have theirs.
        ("a? b%", (2, 3), {"a": "ABORTED"}, "ABORTED: g/1: root/a -> a@1: gone; so row 1 has no answer root<a#2!;b#1>"),
        (
            "a%",
            (2, 3),
            {},
            f"{INVALID}: g/1: root: no step of cascade 'root' is for this request for row 1: no 'when' holds of 'a' "
            "'condition' root<a#1>",
        ),
        # Too little time counts by row: rows with an answer keep it.
        ("a b<50", (1, 2), {"a": Late(1, 60), "b": 30}, "Y=2,3 root<a#2> 60 ms"),
        (
            "a% b<50",
            (1, 2),
            {"a": Late(1, 60)},
            f"{LATE}: g/1: root: cascade 'root' has no answer for row 0: {TOO_LITTLE} root<a#1> 60 ms",
        ),
        # With an answer for every row the end of all time is no error; a row without one makes it an error.
        ("a b?", (1, 2), {"a": 1, "b": Late(30, 900)}, "Y=2,3 root<a#2;b#2!> 100 ms"),
        (
            "a% b?",
            (1, 2),
            {"a": 1, "b": Late(30, 900)},
            f"{LATE}: {NO_ANSWER} root<a#1;b#2!> 100 ms",
        ),
    ],
)
async def test_each_row_goes_its_own_way(
    virtual_clock: VirtualClock, steps: str, given: tuple[float, ...], answers: dict[str, Any], expected: str
) -> None:
    """As if it were a request of its own; models add to what they get."""
    target = models(**{name: one if isinstance(one, str) else adding(one) for name, one in answers.items()})
    assert expected == await rows(steps, given, target, timeout_ms=100)


async def test_rows_stay_in_order_though_they_were_tested_in_groups() -> None:
    """The test reads what differs from row to row, and holds for all but one."""
    small = FakeCondition(lambda r, values: values["X"].item() < 6, names=("steps.a.ok", "X"))
    target = models(a=adding(1), b=adding(20))
    assert "Y=21,22,7,23 root<a#2;b#3>" == await rows("a% b", (1, 2, 6, 3), target, b={"when": small})
    assert [1.0, 2.0, 3.0] == values_of(target.calls[1].inputs["IN"])


async def test_when_all_rows_are_accepted_nothing_is_copied() -> None:
    """The answer is the step's own."""
    x, target = column(10, 20), models()
    result = await make.run(per_row(CascadePlan, steps_of("a b")), target, {"X": x})
    assert (["a"], True) == (target.called(), result.outputs["Y"].data is x.data)
