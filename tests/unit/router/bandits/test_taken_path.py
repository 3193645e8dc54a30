"""What bandits chose, read from the path that a client gives back."""

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.case_files import Case, cases
from tests.unit.router import make
from tests.unit.router.random_drawing import graphs, num_examples
from tests.unit.router.random_graph_text import plan_of, target_of
from tests.unit.router.random_graphs import WIDTH, Node
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import InvalidArgumentError, NotFoundError, WeftError
from weft.base.tensors import WireTensor
from weft.language.bandit_algorithms import ALGORITHMS, BanditPlan
from weft.language.plan import NodePlan, StepPlan
from weft.router.bandits.store import BanditStore, Pulls, RecentPulls, bandit_choices
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


@cases(Path(__file__).with_name("paths.txt"))
def test_a_path_leads_to_the_choices(case: Case) -> None:
    """Through cascades, rows, fallbacks, loops, and up to where a request failed; or it is shown where it is none."""
    try:
        found = [f"{node} {step}" for node, step in choices(case.title, graph())]
    except InvalidArgumentError as error:
        found = [error.message]
    case.check("\n".join(found))


def test_the_model_that_combines_is_on_the_path() -> None:
    """Behind the members of its ensemble."""
    judge = make.step("judge", "judge", {"IN": "S"}, {"OUT": "Y"})
    combine = ("Y", METHODS["CUSTOM"], {"a": "A", "b": "B"}, {"custom": judge, "stack": "S", "mask": "M"})
    inner = graph().steps[0]
    members = [make.step("a", inner.action, {"X": "X"}, {"Y": "A"}), make.step("b", "b", {"IN": "X"}, {"OUT": "B"})]
    root = make.node("root", EnsemblePlan, members, inputs=["X"], outputs=["Y"], combines=[combine])
    assert [("ab", "A")] == choices("root{a=ab[A];b!;judge}", root)


@pytest.mark.parametrize("path", ["", "root.ab" * 300, "root." + "x" * (MAX_PATH_CHARS - 8) + "..."])
def test_what_is_empty_or_was_cut_is_no_path(path: str) -> None:
    """The message says so."""
    fault = (
        r"a path of 2\d00 characters was cut, or is none: paths have at most 2000"
        if path
        else "at character 1 it has ''"
    )
    with pytest.raises(InvalidArgumentError, match=fault):
        bandit_choices(path, graph())


def with_bandits(node: NodePlan) -> NodePlan:
    """The same node, every splitter in it a bandit."""
    own = {"bandit": BANDIT} if isinstance(node, SplitterPlan) else {}

    def of(step: StepPlan) -> StepPlan:
        action = with_bandits(step.action) if isinstance(step.action, NodePlan) else step.action
        return dataclasses.replace(step, action=action, fallback=of(step.fallback) if step.fallback else None)

    return dataclasses.replace(node, steps=tuple(of(step) for step in node.steps), **own)  # type: ignore[arg-type]


@settings(max_examples=num_examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
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
                target_of(root),
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
            pulls = Pulls()
        chosen = [(pull.node, pull.bandit.names[pull.step_index] + "!" * (not pull.has_answered)) for pull in pulls]
        assert sorted(chosen) == sorted(choices(path, plan.root)), path

    asyncio.run(check())
