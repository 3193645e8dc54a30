"""Steps whose answers are kept, or shared by equal requests."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import DeadlineExceededError, InvalidArgumentError, RemoteError
from weft.base.tensors import WireTensor
from weft.language.plan import GraphPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.splitter import SplitterPlan
from weft.router.policies.cache import CachePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime

SEQUENCE = SequencePlan
pytestmark = pytest.mark.usefixtures("virtual_clock")


def one(plan: CachePlan, **options: Any) -> GraphPlan:
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, cache=plan, **options)]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


class Bench:
    """A graph over a target, its counters, and what it answers."""

    def __init__(self, plan: GraphPlan, target: FakeTarget, clock_ns: Any) -> None:
        self.target = target
        self.runtime = Runtime({"model": target}, clock_ns=clock_ns)
        self.executor = GraphExecutor(plan, self.runtime)

    async def ask(self, value: float = 1.0, **options: Any) -> Any:
        inputs: Mapping[str, WireTensor] = {"X": make.tensor(value)}
        return await make.run(self.executor, inputs=inputs, **options)

    @property
    def hits_and_misses(self) -> tuple[int, int]:
        counters = next(iter(self.runtime.step_counters))
        return counters.events["cache_hits"], counters.events["cache_misses"]


async def test_the_same_inputs_get_the_same_answer_without_a_call(virtual_clock: VirtualClock) -> None:
    """Parameters of the answer and the version that gave it included; the trace says so."""
    target = FakeTarget(m=in_turn(answering(5.0, p=1), answering(6.0)))
    bench = Bench(one(CachePlan(0, 1 << 20)), target, virtual_clock)
    first, second = [await bench.ask(parameters={"graph_trace": True}) for _ in range(2)]
    assert [make.tensor(5.0)] * 2 == [first.outputs["Y"], second.outputs["Y"]]
    assert [1, 1] == [first.parameters["p"], second.parameters["p"]]
    traces = [json.loads(str(result.parameters["graph_trace"]))[0] for result in (first, second)]
    assert [(False, "OK", "1"), (True, "OK", "1")] == [(e["cached"], e["status"], e["version"]) for e in traces]
    assert (1, (1, 1)) == (len(target.calls), bench.hits_and_misses)


async def test_other_inputs_get_another_answer(virtual_clock: VirtualClock) -> None:
    """Each is kept for itself."""
    target = FakeTarget()
    bench = Bench(one(CachePlan(0, 1 << 20)), target, virtual_clock)
    answers = [(await bench.ask(value)).outputs["Y"] for value in (1.0, 2.0, 1.0, 2.0)]
    assert [make.tensor(value) for value in (1.0, 2.0, 1.0, 2.0)] == answers
    assert (2, (2, 2)) == (len(target.calls), bench.hits_and_misses)


async def test_an_answer_is_as_old_as_its_time_to_live_at_most(virtual_clock: VirtualClock) -> None:
    """On the clock of the runtime."""
    bench = Bench(one(CachePlan(1000, 1 << 20)), FakeTarget(), virtual_clock)
    await bench.ask()
    await asyncio.sleep(0.999)
    await bench.ask()
    await asyncio.sleep(0.001)
    await bench.ask()
    assert (1, 2) == bench.hits_and_misses


async def test_errors_are_not_kept(virtual_clock: VirtualClock) -> None:
    """The next request is a new chance, for the fallback's answers too."""
    target = FakeTarget(m=in_turn(failing(), answering(5.0)))
    fallback = make.step("f", "f", {"IN": "X"}, {"OUT": "Y"})
    bench = Bench(one(CachePlan(0, 1 << 20), fallback=fallback), target, virtual_clock)
    await bench.ask()
    result = await bench.ask()
    assert (["m", "f", "m"], make.tensor(5.0)) == (target.called(), result.outputs["Y"])


async def test_the_key_condition_tells_requests_apart(virtual_clock: VirtualClock) -> None:
    """The same inputs of another tenant are another request."""
    tenant = FakeCondition(lambda request, frame: request.parameters.get("tenant", ""))
    target = FakeTarget()
    bench = Bench(one(CachePlan(0, 1 << 20, tenant)), target, virtual_clock)
    for name in ("a", "b", "a"):
        await bench.ask(parameters={"tenant": name})
    assert (2, (1, 2)) == (len(target.calls), bench.hits_and_misses)


async def test_a_key_that_cannot_be_evaluated_fails_the_request(virtual_clock: VirtualClock) -> None:
    """A soft step is no way around it: one tenant would get the answers of another."""

    def fail(request: Any, frame: Any) -> str:
        raise InvalidArgumentError("no such key")

    plan = one(CachePlan(0, 1 << 20, FakeCondition(fail)), is_soft=True)
    bench = Bench(plan, FakeTarget(), virtual_clock)
    with pytest.raises(InvalidArgumentError, match=r"^g/1: root/a: cache key: no such key$"):
        await bench.ask()
    assert [] == bench.target.calls


async def test_equal_requests_at_once_make_one_call(virtual_clock: VirtualClock) -> None:
    """Those that wait count as hits."""
    target = FakeTarget(m=answering(5.0, after_ms=100, p=1))
    bench = Bench(one(CachePlan(0, 1 << 20)), target, virtual_clock)
    results = await asyncio.gather(*(bench.ask() for _ in range(5)))
    assert [(make.tensor(5.0), {"p": 1})] * 5 == [(result.outputs["Y"], result.parameters) for result in results]
    assert (1, (4, 1), 100.0) == (len(target.calls), bench.hits_and_misses, virtual_clock.elapsed_ms())


async def test_answers_that_are_shared_are_not_mixed_up_afterwards(virtual_clock: VirtualClock) -> None:
    """What is added to one answer is not in another."""
    bench = Bench(one(CachePlan(0, 1 << 20)), FakeTarget(m=answering(p=1)), virtual_clock)
    first = await bench.ask()
    first.parameters["q"] = 2
    assert {"p": 1} == (await bench.ask()).parameters


@pytest.mark.parametrize("who", ["first", "others", "all"])
async def test_a_cancel_costs_the_others_nothing(virtual_clock: VirtualClock, who: str) -> None:
    """The call is cancelled only when all have gone."""
    target = FakeTarget(m=answering(after_ms=100))
    bench = Bench(one(CachePlan(0, 1 << 20)), target, virtual_clock)
    requests = [asyncio.create_task(bench.ask()) for _ in range(3)]
    await asyncio.sleep(0.05)
    cancelled = {"first": requests[:1], "others": requests[1:], "all": requests}[who]
    for request in cancelled:
        request.cancel()
    await asyncio.wait(requests)
    assert [request in cancelled for request in requests] == [request.cancelled() for request in requests]
    assert (1, who == "all", 0, 0) == (
        len(target.calls),
        bool(target.cancelled),
        target.num_open,
        make.num_other_tasks(),
    )
    await bench.ask()
    assert (2 if who == "all" else 1) == len(target.calls)


async def test_a_deadline_costs_the_others_nothing(virtual_clock: VirtualClock) -> None:
    """Neither that of the first, whose call it ends, nor that of one who waits."""
    target = FakeTarget(m=answering(after_ms=100))
    bench = Bench(one(CachePlan(0, 1 << 20)), target, virtual_clock)
    requests = [asyncio.create_task(bench.ask(context=make.context(timeout_ms=ms))) for ms in (50, 20, 500, 500)]
    await asyncio.wait(requests)
    first, second = (request.exception() for request in requests[:2])
    assert isinstance(first, RemoteError)
    assert "g/1: root/a -> m@1: no answer of 'm' in 50 ms" == first.message
    assert isinstance(second, DeadlineExceededError)
    assert "g/1: root/a -> m@1: an equal request was still in work when the time was over" == second.message
    assert [make.tensor(1.0)] * 2 == [request.result().outputs["Y"] for request in requests[2:]]
    assert (150.0, 2, 0, 0) == (
        virtual_clock.elapsed_ms(),
        len(target.calls),
        target.num_open,
        make.num_other_tasks(),
    )


async def test_a_kept_answer_uses_no_attempt(virtual_clock: VirtualClock) -> None:
    """The cache stands before the retry."""
    target = FakeTarget(m=in_turn(failing(), answering(5.0)))
    plan = one(CachePlan(0, 1 << 20), retry=RetryPlan(2, 0, frozenset({"UNAVAILABLE"}), 20.0))
    bench = Bench(plan, target, virtual_clock)
    results = [await bench.ask(parameters={"graph_trace": True}) for _ in range(2)]
    traces = [json.loads(str(result.parameters["graph_trace"]))[0] for result in results]
    assert [2, None] == [entry.get("attempts") for entry in traces]
    assert 2 == len(target.calls)


async def test_the_answer_of_a_node_is_kept_as_a_whole(virtual_clock: VirtualClock) -> None:
    """An absent output is absent again; the path of a hit ends at the step."""
    skipped = make.step("o", "o", {"IN": "X"}, {"OUT": "O"}, when=FakeCondition(lambda request, frame: False))
    inner = make.node(
        "inner",
        SEQUENCE,
        [make.step("i", "i", {"IN": "X"}, {"OUT": "T"}), skipped],
        inputs=["X"],
        outputs=["T", "O"],
    )
    steps = [make.step("a", inner, {"X": "X"}, {"T": "T", "O": "O"}, cache=CachePlan(0, 1 << 20))]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["T", "O"]))
    target = FakeTarget(i=answering(5.0, p=1))
    bench = Bench(plan, target, virtual_clock)
    paths = []
    for _ in range(2):
        context = CallContext()
        result = await bench.ask(context=context)
        assert ({"T": make.tensor(5.0)}, {"p": 1}) == (result.outputs, result.parameters)
        paths.append(context.trailing_metadata[0][1])
    assert (["root.a=inner(i)", "root.a"], ["i"]) == (paths, target.called())


async def test_outputs_asked_for_by_path_are_part_of_what_is_kept(virtual_clock: VirtualClock) -> None:
    """Those of the step itself, not those of another whose name begins alike."""
    steps = [
        make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, cache=CachePlan(0, 1 << 20)),
        make.step("ab", "n", {"IN": "X"}, {"OUT": "Z"}),
    ]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y", "Z"]))
    bench = Bench(plan, FakeTarget(), virtual_clock)
    seen = []
    for outputs in (["Y"], ["Y", "ab/OUT"], ["Y", "a/OUT"], ["Y", "a/OUT"], ["Y"]):
        seen.append((list((await bench.ask(outputs=outputs)).outputs), *bench.hits_and_misses))
    assert [
        (["Y"], 0, 1),
        (["Y", "ab/OUT"], 1, 1),
        (["Y", "a/OUT"], 1, 2),
        (["Y", "a/OUT"], 2, 2),
        (["Y"], 3, 2),
    ] == seen


async def test_a_stale_answer_stands_in_for_an_unavailable_model(virtual_clock: VirtualClock) -> None:
    """For so long beyond its time, marked in path and trace, and counted; other errors, and other requests, fail."""
    lost = failing("UNAVAILABLE", "down")
    calls = [answering(5.0), lost, lost, failing("INTERNAL", "a defect"), lost, answering(6.0)]
    target = FakeTarget(m=in_turn(*calls))
    bench = Bench(one(CachePlan(100, 1 << 20, stale_if_error_ms=900)), target, virtual_clock)
    await bench.ask()
    await asyncio.sleep(0.15)
    stale = await bench.ask(parameters={"graph_trace": True})
    assert make.tensor(5.0) == stale.outputs["Y"]
    (entry,) = json.loads(str(stale.parameters["graph_trace"]))
    assert (True, True, "OK") == (entry["cached"], entry["stale"], entry["status"])
    assert "down" in entry["error"]
    assert 1 == next(iter(bench.runtime.step_counters)).events["stale_answers"]
    with pytest.raises(RemoteError, match="down"):
        await bench.ask(2.0)
    with pytest.raises(RemoteError, match="a defect"):
        await bench.ask()
    await asyncio.sleep(0.85)
    with pytest.raises(RemoteError, match="down"):
        await bench.ask()
    assert make.tensor(6.0) == (await bench.ask()).outputs["Y"]


@pytest.mark.parametrize("is_whole_graph", [False, True])
async def test_a_request_of_a_sequence_is_not_answered_from_a_cache(
    virtual_clock: VirtualClock, is_whole_graph: bool
) -> None:
    """A model that adds up what a sequence sends gets every request, also equal ones, and of every sequence its own."""
    target = FakeTarget(m=in_turn(*(answering(float(number)) for number in range(1, 7))))
    cache = CachePlan(0, 1 << 20)
    plan = one(cache) if not is_whole_graph else dataclasses.replace(one_plain(), cache=cache)
    bench = Bench(plan, target, virtual_clock)
    answers = [await bench.ask(parameters={"sequence_id": number}) for number in (1, 1, 1, 2)]
    assert [make.tensor(float(number)) for number in (1, 2, 3, 4)] == [answer.outputs["Y"] for answer in answers]
    alone = [await bench.ask() for _ in range(2)]
    assert [make.tensor(5.0)] * 2 == [answer.outputs["Y"] for answer in alone]


def one_plain() -> GraphPlan:
    """A graph of one step without policies."""
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "Y"})]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


async def test_a_splitter_without_a_key_keeps_a_sequence_on_its_step(virtual_clock: VirtualClock) -> None:
    """All requests of one sequence go to one step, those of many sequences to both."""
    target = FakeTarget(a=answering(1.0), b=answering(2.0))
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": "Y"}) for name in "ab"]
    plan = make.graph(make.node("root", SplitterPlan, steps, inputs=["X"], outputs=["Y"]))
    bench = Bench(plan, target, virtual_clock)
    taken = []
    for number in range(1, 30):
        answers = [await bench.ask(parameters={"sequence_id": number}) for _ in range(4)]
        (one_answer,) = {bytes(answer.outputs["Y"].data) for answer in answers}
        taken.append(one_answer)
    assert 2 == len(set(taken))
