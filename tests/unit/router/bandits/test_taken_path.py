"""What bandits chose, read from the path that a client gives back."""

import asyncio
import contextlib
import dataclasses

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.random_drawing import graphs, num_examples
from tests.unit.router.random_graph_text import plan_of, scripts_of
from tests.unit.router.random_graphs import WIDTH, Node
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import InvalidArgumentError, NotFoundError, WeftError
from weft.base.tensors import WireTensor
from weft.language.bandit_algorithms import ALGORITHMS, BanditPlan
from weft.language.plan import NodePlan, StepPlan
from weft.router.bandits.store import BanditStore, RecentPulls, bandit_choices
from weft.router.combine import METHODS
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.splitter import SplitterPlan
from weft.router.reporting.path import MAX_PATH_CHARS

BANDIT = BanditPlan(ALGORITHMS["EPSILON_GREEDY"], 0.5, 0)


def graph() -> NodePlan:
    """A bandit whose step B is a cascade with a bandit in it; names that begin alike, and one with a point."""
    inner = make.node(
        "ab.2",
        SplitterPlan,
        [make.step(name, name, {"IN": "X"}, {"OUT": "Y"}) for name in ("A", "AB", "A-B")],
        inputs=["X"],
        outputs=["Y"],
        bandit=BANDIT,
    )
    fallback = make.step("inner", inner, {"X": "X"}, {"Y": "Y"})
    cascade = make.node(
        "tries",
        CascadePlan,
        [
            make.step("first", "small", {"IN": "X"}, {"OUT": "Y"}, fallback=fallback),
            make.step("second", inner, {"X": "X"}, {"Y": "Y"}),
        ],
        inputs=["X"],
        outputs=["Y"],
    )
    outer = make.node(
        "ab",
        SplitterPlan,
        [
            make.step("A", "a", {"IN": "X"}, {"OUT": "Y"}, fallback=make.step("spare", "a", {"IN": "X"}, {"OUT": "Y"})),
            make.step("B", cascade, {"X": "X"}, {"Y": "Y"}),
        ],
        inputs=["X"],
        outputs=["Y"],
        bandit=BANDIT,
    )
    steps = [
        make.step("ab", outer, {"X": "X"}, {"Y": "M"}),
        make.step("post", "post", {"IN": "M"}, {"OUT": "Z"}),
    ]
    return make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Z"])


def choices(path: str, root: NodePlan) -> list[tuple[str, str]]:
    """Path of each splitter, and the step that was chosen there; "!" behind one that has not answered."""
    return [(node.path, step + "!" * (not answered)) for node, _, step, answered in bandit_choices(path, root)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("root.ab=ab[A];post", [("ab", "A")]),
        ("root.ab=ab[A!]!", [("ab", "A!")]),
        ("root.ab=ab[A!>spare];post", [("ab", "A!")]),
        ("root.ab=ab[A~]~", [("ab", "A!")]),
        ("root.ab=ab[B=tries<first>];post!", [("ab", "B")]),
        ("root.ab=ab[B=tries<first!;second=ab.2[AB]>];post", [("ab", "B"), ("ab.2", "AB")]),
        ("root.ab=ab[B=tries<first#3;second#2=ab.2[A-B]>];post", [("ab", "B"), ("ab.2", "A-B")]),
        ("root.ab=ab[B=tries<first!>inner=ab.2[A]>]", [("ab", "B"), ("ab.2", "A")]),
        (
            "root.ab=ab[B=tries<first!>inner=ab.2[A!]!;second=ab.2[A!]!>!]!",
            [("ab", "B!"), ("ab.2", "A!"), ("ab.2", "A!")],
        ),
        ("root.ab=ab[A];ab=ab[A];post", [("ab", "A"), ("ab", "A")]),
        ("root.post", []),
        ("root.ab=ab~", []),
        ("root", []),
    ],
)
def test_a_path_leads_to_the_choices(path: str, expected: list[tuple[str, str]]) -> None:
    """Through cascades, rows, fallbacks, loops, and up to where a request failed."""
    assert expected == choices(path, graph())


def test_the_model_that_combines_is_on_the_path() -> None:
    """Behind the members of its ensemble."""
    judge = make.step("judge", "judge", {"IN": "S"}, {"OUT": "Y"})
    combine = ("Y", METHODS["CUSTOM"], {"a": "A", "b": "B"}, {"custom": judge, "stack": "S", "mask": "M"})
    inner = graph().steps[0]
    members = [make.step("a", inner.action, {"X": "X"}, {"Y": "A"}), make.step("b", "b", {"IN": "X"}, {"OUT": "B"})]
    root = make.node("root", EnsemblePlan, members, inputs=["X"], outputs=["Y"], combines=[combine])
    assert [("ab", "A")] == choices("root{a=ab[A];b!;judge}", root)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("", "at character 1 it has '' in place of the name of the root node, 'root'"),
        ("toor.ab", "at character 1 it has 'toor.ab' in place of the name of the root node"),
        ("root[ab]", "at character 5 it has '[ab]' in place of its end"),
        ("root.", "at character 6 it has '' in place of a step of node 'root': ab, post"),
        ("root.abc", "at character 6 it has 'abc' in place of a step of node 'root': ab, post"),
        ("root.ab=xy[A]", "at character 9 it has 'xy[A]' in place of node 'ab'"),
        ("root.ab=ab[C]", "at character 12 it has 'C]' in place of a step of node 'ab': A, B"),
        ("root.ab=ab[A", "at character 13 it has '' in place of ']' or ';'"),
        ("root.ab=ab[A];post=x", "in place of no node, because step 'post' is a call"),
        ("root.ab=ab[A];post)", "at character 19 it has ')' in place of its end"),
        ("root.ab=ab[A]!!", "in place of its end"),
        ("root.ab=ab[A!>inner=ab.2[A]]", "in place of ']' or ';'"),
        ("root.äb", "in place of a step of node 'root'"),
        ("root.ab" * 300, "a path of 2100 characters was cut, or is none: paths have at most 2000"),
        ("root." + "x" * (MAX_PATH_CHARS - 8) + "...", "a path of 2000 characters was cut"),
    ],
)
def test_what_is_no_path_of_the_graph_is_refused(path: str, fault: str) -> None:
    """The message shows where it leaves the graph."""
    with pytest.raises(InvalidArgumentError) as caught:
        bandit_choices(path, graph())
    assert fault in caught.value.message


def with_bandits(node: NodePlan) -> NodePlan:
    """The same node, every splitter in it a bandit."""
    own = {"bandit": BANDIT} if isinstance(node, SplitterPlan) else {}

    def of(step: StepPlan) -> StepPlan:
        action = with_bandits(step.action) if isinstance(step.action, NodePlan) else step.action
        return dataclasses.replace(step, action=action, fallback=of(step.fallback) if step.fallback else None)

    return dataclasses.replace(node, steps=tuple(of(step) for step in node.steps), **own)  # type: ignore[arg-type]


@settings(max_examples=num_examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(root=graphs(), num_rows=st.integers(1, 3))
def test_every_path_that_is_written_can_be_read(root: Node, num_rows: int) -> None:
    """Whatever fails, is late, goes round, is tried again or falls back: the request's id stands for its path."""

    async def check() -> None:
        VirtualClock()
        plan = plan_of(root)
        plan = dataclasses.replace(plan, root=with_bandits(plan.root))
        recent, context = RecentPulls(), CallContext()
        data = bytes(range(WIDTH * num_rows))
        with contextlib.suppress(WeftError):
            await make.run(
                plan,
                FakeTarget(**scripts_of(root)),
                {"X": WireTensor("UINT8", (num_rows, WIDTH), data)},
                context=context,
                request_id="r",
                bandits=BanditStore(recent=recent),
            )
        path = dict(context.trailing_metadata)["x-graph-path"]
        assume(len(path) < MAX_PATH_CHARS)
        try:
            pulls = recent.take("g", "r")
        except NotFoundError:
            pulls = []
        chosen = [(pull.node, pull.bandit.names[pull.step_index] + "!" * (not pull.has_answered)) for pull in pulls]
        assert sorted(chosen) == sorted(choices(path, plan.root)), path

    asyncio.run(check())
