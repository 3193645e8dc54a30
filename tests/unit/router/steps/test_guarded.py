"""What becomes of a step that is skipped or fails: fallback, softness, defaults, and the messages."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering
from tests.unit.router.outcomes import GONE, Late, models, outcome

from weft.base.errors import InvalidArgumentError
from weft.language.plan import GraphPlan, NodePlan
from weft.router.operators.sequence import SequencePlan

pytestmark = pytest.mark.usefixtures("virtual_clock")


def sequence(*steps: Any, outputs: str = "Y", name: str = "root", inputs: tuple[str, ...] = ("X",)) -> NodePlan:
    return make.node(name, SequencePlan, steps, inputs=inputs, outputs=list(outputs))


def one(**options: Any) -> GraphPlan:
    """X -> a (model m) -> Y."""
    return make.graph(sequence(make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, **options)))


def then(when: Any = None, **options: Any) -> GraphPlan:
    """X -> a (model m) -> T; X and, if it is there, T -> b (model n) -> Y."""
    first = make.step("a", "m", {"IN": "X"}, {"OUT": "T"}, when=when, **options)
    return make.graph(sequence(first, make.step("b", "n", {"IN": "X", "MORE": "T"}, {"OUT": "Y"}), outputs="YT"))


def spare(name: str = "spare", **options: Any) -> Any:
    return make.step(name, name, {"IN": "X"}, {"OUT": "Y"}, **options)


def inner(model: str = "i", **options: Any) -> NodePlan:
    """A node of one step, from X to Y."""
    return sequence(make.step("i", model, {"IN": "X"}, {"OUT": "Y"}, **options), name="inner")


def fail(request: Any, frame: Any) -> bool:
    raise InvalidArgumentError("no such key")


NEVER, ALWAYS, BROKEN = (FakeCondition(f) for f in (lambda r, f: False, lambda r, f: True, fail))
SEVEN = {"defaults": {"T": make.tensor(7.0)}}
LATE = "DEADLINE_EXCEEDED: g/1: root/a -> m@1: no answer of 'm' in"
BOOM = "INTERNAL"


@pytest.mark.parametrize(
    ("plan", "answers", "timeout_ms", "expected"),
    [
        # A step runs only if its `when` holds; what reads it goes on without, and the path does not show it.
        (then(ALWAYS), {"m": 2}, None, "Y=1 T=2 root.a;b"),
        (then(NEVER), {}, None, "Y=1 root.b"),
        # A hard failure fails the request; a soft one leaves outputs absent, or with their defaults.
        (then(), {"m": GONE}, None, "UNAVAILABLE: g/1: root/a -> m@1: gone root.a!"),
        (then(is_soft=True), {"m": GONE}, None, "Y=1 root.a!;b"),
        (then(is_soft=True, **SEVEN), {"m": GONE}, None, "Y=1 T=7 root.a!;b"),
        (then(NEVER, **SEVEN), {}, None, "Y=1 T=7 root.b"),
        # A `when` that cannot be evaluated fails the request, here, in a node and in a fallback; nothing hides it.
        *(
            (plan, {"m": GONE}, None, f"INVALID_ARGUMENT: g/1: {where}: no such key {path}")
            for plan, where, path in (
                (then(BROKEN), "root/a", "root"),
                (then(BROKEN, is_soft=True), "root/a", "root"),
                (
                    make.graph(sequence(make.step("a", inner(when=BROKEN), {"X": "X"}, {"Y": "Y"}, is_soft=True))),
                    "inner/i",
                    "root.a=inner!",
                ),
                (
                    make.graph(sequence(make.step("a", inner(when=BROKEN), {"X": "X"}, {"Y": "Y"}, fallback=spare()))),
                    "inner/i",
                    "root.a=inner!",
                ),
                (
                    one(is_soft=True, fallback=make.step("spare", inner(when=BROKEN), {"X": "X"}, {"Y": "Y"})),
                    "inner/i",
                    "root.a!>spare=inner!",
                ),
            )
        ),
        # The request's own deadline is not softened: nobody waits any more; a step's own timeout is.
        (then(is_soft=True), {"m": Late(1, 100)}, 50, f"{LATE} 50 ms root.a! 50 ms"),
        (then(is_soft=True, timeout_ms=40), {"m": Late(1, 100)}, 50, "Y=1 root.a!;b 40 ms"),
        # A fallback answers in place of a failing step; a step that answers needs none.
        (one(fallback=spare()), {"m": BOOM, "spare": 5}, None, "Y=5 root.a!>spare"),
        (one(fallback=spare()), {"m": 3}, None, "Y=3 root.a"),
        # The error tells of every fallback, and has the status of the last.
        (
            one(fallback=spare("b", fallback=spare("c"))),
            {"m": BOOM, "b": GONE, "c": "NOT_FOUND"},
            None,
            "NOT_FOUND: g/1: root/a -> m@1: gone (INTERNAL); fallback b: UNAVAILABLE: gone; fallback c: NOT_FOUND: "
            "gone root.a!>b!>c!",
        ),
        # A fallback has a timeout of its own, which starts when the step has used up its; none starts too late.
        (
            one(timeout_ms=20, fallback=spare(timeout_ms=40)),
            {"m": Late(1, 100), "spare": Late(5, 30)},
            None,
            "Y=5 root.a!>spare 50 ms",
        ),
        (one(fallback=spare()), {"m": Late(1, 100)}, 20, f"{LATE} 20 ms root.a! 20 ms"),
        # A node can be a fallback: its steps are in the path and in the error.
        (
            one(fallback=make.step("spare", inner(), {"X": "X"}, {"Y": "Y"})),
            {"m": GONE, "i": 4},
            None,
            "Y=4 root.a!>spare=inner(i)",
        ),
        (
            one(fallback=make.step("spare", inner(), {"X": "X"}, {"Y": "Y"})),
            {"m": GONE, "i": BOOM},
            None,
            "INTERNAL: g/1: root/a -> m@1: gone (UNAVAILABLE); fallback spare: INTERNAL: inner/i -> i@1: gone "
            "root.a!>spare=inner(i!)!",
        ),
    ],
)
async def test_a_request_goes_on_or_not(
    plan: GraphPlan, answers: dict[str, Any], timeout_ms: float | None, expected: str
) -> None:
    """As the guards of its steps say."""
    assert expected == await outcome(plan, models(**answers), timeout_ms=timeout_ms)


@pytest.mark.parametrize(
    ("plan", "answers", "expected"),
    [
        (then(NEVER), {}, [("root/a", "SKIPPED", None, None), ("root/b", "OK", None, None)]),
        (
            then(is_soft=True),
            {"m": GONE},
            [("root/a", "UNAVAILABLE", "g/1: root/a -> m@1: gone", None), ("root/b", "OK", None, None)],
        ),
        (
            one(fallback=spare()),
            {"m": BOOM},
            [("root/a", BOOM, "g/1: root/a -> m@1: gone", None), ("root/spare", "OK", None, "root/a")],
        ),
        (
            one(is_soft=True, fallback=spare()),
            {"m": BOOM, "spare": GONE},
            [
                ("root/a", GONE, "g/1: root/a -> m@1: gone (INTERNAL); fallback spare: UNAVAILABLE: gone", None),
                ("root/spare", GONE, None, "root/a"),
            ],
        ),
    ],
)
async def test_the_trace_has_the_whole_story(plan: GraphPlan, answers: dict[str, Any], expected: list[Any]) -> None:
    """What was skipped, failed and tried instead; of a soft step the status of the last failure."""
    result = await make.run(plan, models(**answers), parameters={"graph_trace": True})
    entries = json.loads(str(result.parameters["graph_trace"]))
    fields = ("path", "status", "error", "fallback_of")
    assert expected == [tuple(entry.get(field) for field in fields) for entry in entries]


@pytest.mark.parametrize("rows", [1, 3])
async def test_a_default_of_one_row_is_repeated_for_every_row(rows: int) -> None:
    """Texts and numbers alike; a default without a batch dimension stays as it is."""
    batched = {"T": make.text("n/a", shape=(1, 1)), "U": make.tensor(1.0, 2.0, shape=(1, 2))}
    outputs, whole = {"OUT": "T", "OUT2": "U", "OUT3": "V"}, {"V": make.tensor(9.0, shape=(1, 1))}
    step = make.step("a", "m", {"IN": "X"}, outputs, is_soft=True, defaults=whole, batched_defaults=batched)
    plan = make.graph(sequence(step, outputs="TUV"), max_batch_size=8)
    found = (await make.run(plan, models(m=GONE), {"X": make.tensor(*range(rows * 2), shape=(rows, 2))})).outputs
    assert make.text(*["n/a"] * rows, shape=(rows, 1)) == found["T"]
    assert make.tensor(*[1.0, 2.0] * rows, shape=(rows, 2)) == found["U"]
    assert make.tensor(9.0, shape=(1, 1)) == found["V"]


async def test_inputs_without_batch_dimension_do_not_tell_the_rows() -> None:
    """The first input is a vector that belongs to all rows; there are two rows, as the second says."""
    default = {"T": make.tensor(7.0, shape=(1, 1))}
    step = make.step("a", "m", {"IN": "X"}, {"OUT": "T"}, is_soft=True, batched_defaults=default)
    root = sequence(step, outputs="T", inputs=("V", "X"))
    root = replace(root, specs={0: make.spec("V", dims=(5,)), 1: make.spec("X", dims=(1,))})
    inputs = {"V": make.tensor(*range(5)), "X": make.tensor(1, 2, shape=(2, 1))}
    result = await make.run(make.graph(root, max_batch_size=8), models(m=GONE), inputs)
    assert make.tensor(7, 7, shape=(2, 1)) == result.outputs["T"]


@pytest.mark.parametrize(
    ("options", "answers", "path"),
    [
        ({"is_soft": True, **SEVEN}, {}, "root.a;b"),
        ({"is_soft": True, **SEVEN}, {"m": GONE}, "root.a!"),
        ({"fallback": make.step("f", "f", {"IN": "X"}, {"OUT": "T"})}, {"m": GONE}, "root.a!>f;b"),
    ],
)
async def test_a_later_step_can_ask_whether_a_step_answered(
    options: dict[str, Any], answers: dict[str, Any], path: str
) -> None:
    """`steps.a.ok` holds if it, or its fallback, did; a default does not count."""
    ok = FakeCondition(lambda request, tensors: tensors["steps.a.ok"] is not None, names=("steps.a.ok",))
    first = make.step("a", "m", {"IN": "X"}, {"OUT": "T"}, **options)
    plan = make.graph(sequence(first, make.step("b", "n", {"IN": "X"}, {"OUT": "Y"}, when=ok), outputs="YT"))
    assert (await outcome(plan, models(**answers))).endswith(f" {path}")


async def test_response_parameters_of_a_soft_node_that_failed_are_dropped() -> None:
    """Nothing of it is in the answer, though a step inside had answered."""
    steps = [make.step("i", "i", {"IN": "X"}, {"OUT": "S"}), make.step("j", "j", {"IN": "S"}, {"OUT": "T"})]
    node = make.step("a", sequence(*steps, outputs="T", name="inner"), {"X": "X"}, {"T": "T"}, is_soft=True)
    plan = make.graph(sequence(node, outputs="T"))
    assert {} == (await make.run(plan, models(i=answering(i=1), j=GONE))).parameters
    assert {"i": 1} == (await make.run(plan, models(i=answering(i=1)))).parameters


async def test_a_defect_is_not_softened() -> None:
    """Only errors that are meant for clients are; the others are for us."""

    async def break_down(call: Any, context: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await make.run(one(is_soft=True, fallback=spare()), FakeTarget(m=break_down))
