"""Splitters with a rollout: who gets the candidate, and what is counted."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing
from tests.unit.router.graph_cases import compiled
from tests.unit.router.stream_targets import collected, counting, stream_of, stream_target
from tests.unit.router.stream_targets import compiled as streaming
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import RemoteError
from weft.base.tensors import WireTensor, bytes_tensor, encode
from weft.language.plan import ShadowPlan
from weft.router.bandits.store import bandit_choices
from weft.router.executor import GraphExecutor
from weft.router.rollouts.machine import ABORTED, ROLLED_BACK, begin
from weft.router.rollouts.store import Rollout
from weft.router.runtime import Runtime
from weft.router.steps.mirror import agrees

STICKY = """node { name: "root" splitter { sticky_by: 'request.id'
  step { name: "a" weight: 3 model_name: "a" } step { name: "b" model_name: "b" }
  step { name: "new" model_name: "new" FALLBACK }
  rollout { steps: [ 5, 20, 50, 100 ] every: "1m" guard { max_error_rate: 0.01 } } } }"""


class Splitting:
    """An executor of a graph with a rollout."""

    def __init__(self, graph: str, target: FakeTarget | None = None, fallback: str = "", **options: Any) -> None:
        self.runtime = Runtime({"model": FakeTarget() if target is None else target}, **options)
        self.executor = GraphExecutor(compiled(graph.replace("FALLBACK", fallback)), self.runtime)
        (self.rollout,) = self.runtime.rollouts

    async def path(self, request_id: str = "", **options: Any) -> str:
        """The path of a request."""
        context = options.setdefault("context", CallContext())
        await make.run(self.executor, request_id=request_id, **options)
        return dict(context.trailing_metadata)["x-graph-path"]

    async def paths(self, num: int) -> list[str]:
        return [await self.path(f"user-{i}") for i in range(num)]

    def at(self, step: int, phase: str = "RUNNING") -> None:
        self.rollout.follow(replace(self.rollout.state, step=step, phase=phase))

    def counts(self) -> tuple[int, int, int, int]:
        """Runs and errors of the candidate, and of the baseline."""
        mine, base = self.rollout.candidate, self.rollout.baseline
        return mine.num_requests, mine.num_errors, base.num_requests, base.num_errors


async def test_each_key_moves_to_the_candidate_once_and_back_once() -> None:
    """No other key moves; the others keep their shares among themselves. A state takes effect at once."""
    s, before = Splitting(STICKY), []
    for step in range(4):
        s.at(step)
        before.append(await s.paths(1000))
    s.at(2, ROLLED_BACK)
    back = await s.paths(1000)
    for earlier, later in pairwise(before):
        assert all(two in (one, "root[new]") for one, two in zip(earlier, later, strict=True))
    assert all(two == one for one, two in zip(before[0], back, strict=True) if one != "root[new]")
    shares = [paths.count("root[new]") / 1000 for paths in (*before, back)]
    assert [0.05, 0.2, 0.5, 1.0, 0.0] == pytest.approx(shares, abs=0.05)
    assert 3.0 == pytest.approx(back.count("root[a]") / back.count("root[b]"), abs=0.5)


async def test_a_pinned_request_is_no_evidence() -> None:
    """Who chooses the step of a request can neither end nor promote a rollout."""
    s = Splitting(STICKY, is_pinning_allowed=True)
    for step in ("new", "a"):
        pinned = CallContext(headers={"x-graph-route": f"root={step}"})
        assert f"root[{step}]" == await s.path("user", context=pinned)
    assert (0, 0, 0, 0) == s.counts()


async def test_without_a_key_the_shares_are_drawn() -> None:
    """As they stand."""
    s = Splitting(STICKY.replace("sticky_by: 'request.id'", ""))
    s.at(2)
    assert 0.5 == pytest.approx((await s.paths(1000)).count("root[new]") / 1000, abs=0.06)


@pytest.mark.parametrize("fallback", ["", 'fallback { name: "spare" model_name: "a" }'])
async def test_a_candidate_that_fails_counts_as_failing_whoever_answers(fallback: str) -> None:
    """Also where a fallback answers and clients see nothing of it."""
    s = Splitting(STICKY, FakeTarget(new=failing()), fallback)
    s.at(3)
    for i in range(5):
        await _any(s, f"{i}")
    assert (5, 5, 0, 0) == s.counts()


async def test_what_a_client_cancels_is_not_counted_unless_it_is_late(virtual_clock: VirtualClock) -> None:
    """A hanging candidate fails at its clients' deadlines."""
    s = Splitting(STICKY, FakeTarget(new=answering(after_ms=60_000)), clock_ns=virtual_clock)
    s.at(3)
    for after_s in (0.05, 0.5):
        running = asyncio.create_task(s.path("1", context=make.context(timeout_ms=400)))
        running.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.sleep(after_s)
        running.cancel()
        await asyncio.wait([running])
        assert (int(after_s > 0.4),) * 2 + (0, 0) == s.counts()


async def test_the_same_definition_goes_on_after_a_reload_and_another_one_begins() -> None:
    """Counts and share stay; another candidate, guard or step is another rollout. Weights of the others may change."""
    s = Splitting(STICKY)
    s.at(1)
    await s.paths(10)
    same = GraphExecutor(compiled(STICKY.replace("FALLBACK", "").replace("weight: 3", "weight: 7")), s.runtime)
    assert [s.rollout] == list(s.runtime.rollouts)
    assert (10, (7.0, 1.0, 2.0)) == (s.counts()[0] + s.counts()[2], s.rollout.weights)
    for old, new in (('model_name: "new"', 'model_name: "newer"'), ("0.01", "0.02"), ('name: "b"', 'name: "c"')):
        other = GraphExecutor(compiled(STICKY.replace("FALLBACK", "").replace(old, new)), s.runtime)
        assert 2 == len({one.plan.digest for one in s.runtime.rollouts})
        del other
    del same


async def test_rewards_count_for_the_side_that_answered() -> None:
    """By a request's id and by its path; a candidate that failed earns nothing."""
    s = Splitting(STICKY.replace("guard {", "guard { min_score: 0.1"), FakeTarget(b=failing()))
    paths = {f"user-{i}": path for i in range(40) if "b" not in (path := await _any(s, f"user-{i}"))}
    for request_id in paths:
        s.runtime.bandits.reward_request("g", request_id, 0.5)
    (first, *_) = paths.values()
    s.runtime.bandits.reward_choices("g", bandit_choices(first, s.executor.plan.root), 1.0)
    other = STICKY.replace("guard {", "guard { min_score: 0.1").replace('name: "a" weight', 'name: "z" weight')
    GraphExecutor(compiled(other.replace("FALLBACK", "")), s.runtime)  # another version of the graph
    s.runtime.bandits.reward_choices("g", bandit_choices("root[a]", s.executor.plan.root), 1.0)
    num = [s.rollout.candidate.num_scores, s.rollout.baseline.num_scores]
    assert len(paths) + 1 == sum(num)
    assert len(paths) * 0.5 + 1.0 == s.rollout.candidate.score_sum + s.rollout.baseline.score_sum


async def _any(s: Splitting, request_id: str) -> str:
    context = CallContext()
    try:
        await s.path(request_id, context=context)
    except RemoteError:
        return "b"
    return dict(context.trailing_metadata)["x-graph-path"]


async def test_a_bandit_s_candidate_is_never_chosen_after_a_rollback() -> None:
    """The bandit goes on with the others, and knows what it has learned."""
    graph = """node { name: "root" splitter { bandit { algorithm: THOMPSON }
      step { name: "a" model_name: "a" } step { name: "new" model_name: "new" }
      rollout { guard { min_score: 0.5 } } } }"""
    s = Splitting(graph)
    before = await s.paths(50)
    for i in range(50):
        s.runtime.bandits.reward_request("g", f"user-{i}", float(before[i] == "root[new]"))
    assert (50, float(before.count("root[new]"))) == (
        s.rollout.candidate.num_scores + s.rollout.baseline.num_scores,
        s.rollout.candidate.score_sum,
    )
    s.at(0, ABORTED)
    assert {"root[a]"} == set(await s.paths(50))
    s.at(0)
    assert (await s.paths(50)).count("root[new]") > 30


def compared(first: str, shadow: str, target: FakeTarget, mirror: str = "") -> Splitting:
    s = Splitting(
        f"""node {{ name: "root" splitter {{
        step {{ name: "old" model_name: "old" }} step {{ name: "new" model_name: "new" }}
        step {{ name: "copy" model_name: "{shadow}" shadow {{ percent: 100 mirror_compare {{ {mirror} }} }} }}
        rollout {{ candidate: "{first}" steps: [ 50, 100 ] guard {{ min_agreement: 0.9 }} }} }} }}""",
        target,
    )
    s.at(1)
    return s


async def compare(s: Splitting, num: int) -> tuple[tuple[int, int], dict[tuple[str, bool], int]]:
    """What the candidate's arm, and the shadow's step, have counted of so many requests."""
    for i in range(num):
        await s.path(f"{i}")
    await asyncio.gather(*s.runtime.shadows._tasks)
    found = next(one.compared for one in s.runtime.step_counters if one.path == "root[copy]")
    return (s.rollout.candidate.num_compared, s.rollout.candidate.num_agreed), dict(found)


async def test_a_shadow_is_compared_with_the_node_s_answer() -> None:
    """By tensor; it agrees within the tolerance, whichever comes first."""
    target = FakeTarget(old=answering(1.0, after_ms=5), new=answering(1.001))
    assert ((3, 0), {("Y", False): 3}) == await compare(compared("new", "old", target), 3)
    assert ((3, 3), {("Y", True): 3}) == await compare(compared("new", "old", target, "rtol: 0.01"), 3)


async def test_agreement_counts_where_the_candidate_gave_one_of_the_answers() -> None:
    """As the step, or as the shadow; two answers of the candidate, or none of it, say nothing of it."""
    target = FakeTarget(old=answering(1.0), new=answering(2.0))
    assert ((0, 0), {("Y", True): 3}) == await compare(compared("new", "new", target), 3)
    s = compared("new", "new", target)
    s.rollout.weights = (1.0, 0.0)
    assert ((3, 0), {("Y", False): 3}) == await compare(s, 3)
    s = compared("new", "old", target)
    s.rollout.weights = (1.0, 0.0)
    assert ((0, 0), {("Y", True): 3}) == await compare(s, 3)


@pytest.mark.parametrize("failing_model", ["old", "new"])
async def test_what_failed_is_not_compared(failing_model: str) -> None:
    """Be it the shadow or the node."""
    s = compared("new", "old", FakeTarget(**{failing_model: failing()}))
    for i in range(2):
        await _any(s, f"{i}")
    assert ((0, 0), {}) == await compare(s, 0)


async def test_a_shadow_in_a_sequence_is_compared_with_the_sequence_s_answer() -> None:
    """When all of its steps have ended."""
    graph = """node { name: "root" sequence { step { name: "copy" model_name: "c" shadow { percent: 100
      mirror_compare { atol: 0.5 } } } step { name: "one" model_name: "a" output_map { key: "Y" value: "Z" } }
      step { name: "two" model_name: "b" input_map { key: "X" value: "Z" } } } }"""
    runtime = Runtime({"model": FakeTarget(c=answering(5.0), b=answering(5.4, after_ms=5))})
    executor = GraphExecutor(compiled(graph), runtime)
    await make.run(executor)
    await asyncio.gather(*runtime.shadows._tasks)
    assert {("Y", True): 1} == dict(next(one.compared for one in runtime.step_counters if one.path == "root/copy"))


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("mine", "theirs", "counted"),
    [
        (counting(3), counting(3), {("OUT", True): 1}),
        (counting(0), counting(3), {("OUT", False): 1}),
        (counting(3), counting(3, RemoteError("INTERNAL", "")), {}),  # not the whole answer
        (counting(20_000), counting(20_000), {}),  # more than is held
    ],
)
async def test_streams_are_compared_as_a_whole(mine: Any, theirs: Any, counted: Any, is_nested: bool) -> None:
    """By number and one by one, if both came to their ends, also within another node."""
    target = stream_target()
    target.streams |= {"n": theirs, "m": mine}
    runtime = Runtime({"model": target})
    graph = """node { name: "NAME" splitter { step { name: "n" model_name: "n" }
      step { name: "copy" model_name: "m" shadow { percent: 100 mirror_compare { } } } } }"""
    if is_nested:
        graph = 'node { name: "root" sequence { step { node: "in" } } }' + graph.replace("NAME", "in")
    executor = GraphExecutor(streaming(graph.replace("NAME", "root")), runtime)
    await collected(stream_of(executor, target))
    await asyncio.gather(*runtime.shadows._tasks)
    assert counted == dict(next(one.compared for one in runtime.step_counters if one.path.endswith("[copy]")))


async def test_a_stream_that_a_client_leaves_ends_its_call_beside_a_shadow() -> None:
    """Also where the node with the shadow is a step of another one."""
    target = stream_target()
    target.streams |= {"n": counting(1000), "m": counting(1)}
    runtime = Runtime({"model": target})
    graph = """node { name: "root" sequence { step { node: "in" } } }
      node { name: "in" splitter { step { name: "n" model_name: "n" }
        step { name: "copy" model_name: "m" shadow { percent: 100 } } } }"""
    responses = stream_of(GraphExecutor(streaming(graph), runtime), target)
    await anext(responses)
    await responses.aclose()
    assert ["n"] == target.cancelled
    await asyncio.gather(*runtime.shadows._tasks)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_record_that_is_kept_holds_no_tensors(is_stream: bool) -> None:
    """Those of a comparison are free when both sides have ended, also while a page shows the request."""
    target, records = stream_target(), []
    target.streams |= {"n": counting(3), "m": counting(3)}
    runtime = Runtime({"model": target}, on_end=lambda plan, run, *rest: records.append(run.record))
    first, second = "nm" if is_stream else ("old", "new")
    graph = f"""node {{ name: "root" splitter {{ step {{ name: "n" model_name: "{first}" }}
      step {{ name: "copy" model_name: "{second}" shadow {{ percent: 100 mirror_compare {{ }} }} }} }} }}"""
    if is_stream:
        await collected(stream_of(GraphExecutor(streaming(graph), runtime), target))
    else:
        await make.run(GraphExecutor(compiled(graph), runtime))
    await asyncio.gather(*runtime.shadows._tasks)
    (counters,) = (one for one in runtime.step_counters if one.path.endswith("[copy]"))
    assert 1 == sum(counters.compared.values())
    assert [()] == [one.watching for one in records]


def floats(*values: float) -> WireTensor:
    return encode(np.asarray(values, np.float32))


@pytest.mark.parametrize(
    ("mine", "theirs", "options", "agree"),
    [
        (floats(1, 2), floats(1, 2), {}, True),
        (floats(1, 2), floats(1, 2.1), {}, False),
        (floats(1, 2), floats(1, 2.1), {"atol": 0.2}, True),
        (floats(1, 200), floats(1, 201), {"rtol": 0.01}, True),
        (floats(np.nan), floats(np.nan), {"rtol": 0.01}, True),
        (floats(1, 2), floats(1), {"atol": 9.0}, False),
        (floats(1, 9, 3), floats(0, 4, 1), {"top_1": True}, True),
        (floats(1, 9, 3), floats(5, 4, 1), {"top_1": True}, False),
        (bytes_tensor([b"a"], (1,)), bytes_tensor([b"b"], (1,)), {"top_1": True}, False),
        (floats(1), bytes_tensor([b"a"], (1,)), {}, False),
        (floats(1)._replace(data=b"1"), floats(1), {}, False),
        ([bytes_tensor([b"a"], (1,)), bytes_tensor([b"b"], (1,))], [bytes_tensor([b"ab"], (1,))], {}, True),
        ([bytes_tensor([b"a"], (1,)), bytes_tensor([b"b"], (1,))], [bytes_tensor([b"a"], (1,))], {}, False),
        ([floats(1), floats(2)], [floats(1, 2)], {}, False),
    ],
)
def test_when_tensors_agree(mine: Any, theirs: Any, options: dict[str, Any], agree: bool) -> None:
    """Equal, within the tolerance, or in the place of the greatest element; strings of streams as one text."""
    first, second = (side if isinstance(side, list) else [side] for side in (mine, theirs))
    assert agree == agrees(first, second, ShadowPlan(100.0, 0, ("Y",), **options))


def test_a_rollout_begins_at_its_first_share() -> None:
    """Also at a router that knows nothing of it yet."""
    plan = compiled(STICKY.replace("FALLBACK", "")).root.rollout
    assert plan is not None
    rollout = Rollout("g", "root/x/y", plan)
    assert ("y", begin(plan, 0)) == (rollout.name, rollout.state)
