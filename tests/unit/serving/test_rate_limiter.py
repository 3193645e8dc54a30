"""Who may execute next where models share resources: fairness, no deadlock, nothing kept by those who wait."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases, literals

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError, ResourceExhaustedError
from weft.serving.queues.sequence import SequenceQueue
from weft.serving.queues.settings import SchedulerSettings, SequenceSettings
from weft.serving.request.request import InferenceRequest
from weft.serving.runtime.idle import RateLimitedInstances
from weft.serving.scheduler import rate_limiter
from weft.serving.scheduler.admission import CALL_PATH_HEADER
from weft.serving.scheduler.rate_limiter import PATIENCE, RESERVATION_NS, Contender, RateLimit, RateLimiter, parse_limit


class Clock:
    """A virtual clock in place of ``time.monotonic_ns``."""

    def __init__(self):
        self.now_ns = 0

    def monotonic_ns(self):
        return self.now_ns


class Queue(list):
    """As much of a queue as the limiter asks for."""

    def has_work_for(self, instance):
        return bool(self)


class Model:
    """A model whose batches end when the test says so."""

    def __init__(self, limiter, name, *, count=1, priority=1, device_id=0, is_global=False, work=0, **resources):
        limit = RateLimit(priority, *((), tuple(resources.items()))[:: 1 if is_global else -1])
        contenders = {
            f"{name}{i}": Contender(f"{name}{i}", priority, limit.demands(device_id), f"{name}{i}")
            for i in range(count)
        }
        self.contenders = contenders
        self.work, self.running, self.num_run, self.calls = work, [], 0, []
        self.idle = RateLimitedInstances(limiter, contenders, queued=self.queue, dispatch=self.dispatch)
        self.idle.open()
        self.idle.extend(contenders)

    def queue(self) -> Any:
        return Queue(self.calls or [None] * self.work)

    def dispatch(self):
        while self.idle and self.work:
            self.running.append(self.idle.take())
            self.work -= 1
            self.num_run += 1

    def end(self, *, is_lost=False):
        self.idle.give_back(self.running.pop(0), is_lost=is_lost)
        self.dispatch()


class Limits:
    """A limiter with its clock."""

    def __init__(self, monkeypatch):
        self.clock = Clock()
        self.alarms = []
        monkeypatch.setattr("weft.serving.runtime.idle.time", self.clock)

    def make(self, **limits):
        limits = {(name, None): count for name, count in limits.items()}
        self.limiter = RateLimiter(limits, set_alarm=self.alarms.append)  # type: ignore[arg-type]
        return self.limiter


@pytest.fixture
def limits(monkeypatch):
    """Makes limiters; ``limits.clock`` is their time."""
    return Limits(monkeypatch)


class Timeline:
    """Models that share resources, by name."""

    def __init__(self, limits: Limits, case: Case) -> None:
        self.limiter = limits.make(**literals(case.option("limits")))
        self.models: dict[str, Model] = {}

    def run(self, line: str) -> Iterator[str]:
        """Which models run after the commands of a line."""
        for command in line.split(", "):
            name, *words = command.split()
            if name == "count":
                yield ", ".join(f"{name} has begun {model.num_run}" for name, model in self.models.items())
                return
            try:
                getattr(self, name)(*words)
            except InvalidArgumentError as error:
                yield f"{words[0]} is refused: {error.message}"
        running = {name: len(model.running) for name, model in self.models.items() if model.running}
        yield " ".join(f"{name}:{number}" for name, number in running.items()) or "none runs"

    def model(self, name: str, *fields: str) -> None:
        self.models[name] = Model(self.limiter, name, **literals(" ".join(fields)))

    def start(self, name: str) -> None:
        self.models[name].dispatch()

    def end(self, name: str) -> None:
        self.models[name].end()

    def lose(self, name: str) -> None:
        self.models[name].end(is_lost=True)

    def close(self, name: str) -> None:
        self.models[name].idle.close()

    def work(self, name: str, number: str) -> None:
        self.models[name].work += int(number)

    def turns(self, number: str) -> None:
        for _ in range(int(number)):
            next(model for model in self.models.values() if model.running).end()


@cases(Path(__file__).parent / "timelines" / "rate_limits.txt")
def test_timeline(limits: Limits, case: Case) -> None:
    """Models run as their resources allow, as the case says."""
    case.check_script(Timeline(limits, case).run)


def test_the_demanding_do_not_starve(limits):
    """Small ones that keep the units busy leave them to a big one after some turns."""
    limiter = limits.make(R=2)
    small = Model(limiter, "s", count=2, work=1000, R=1)
    small.dispatch()
    big = Model(limiter, "b", work=1, R=2)
    num_turns = 0
    while not big.running and num_turns < 100:
        small.end()
        num_turns += 1
    assert 2 <= num_turns <= 4 * PATIENCE
    big.end()
    assert 2 == len(small.running)


def test_a_reservation_lapses(limits):
    """Where the holder of the rest waits for the one that is kept out, that one gets its turn after a while."""
    limiter = limits.make(R=2)
    holder, child = Model(limiter, "h", work=1, R=1), Model(limiter, "c", work=1000, R=1)
    holder.dispatch()
    big = Model(limiter, "b", work=1, R=2)
    child.dispatch()
    for _ in range(10 * PATIENCE):
        if child.running:
            child.end()
    assert [0, 0] == [len(child.running), len(big.running)]
    assert [RESERVATION_NS] == limits.alarms
    limits.clock.now_ns = RESERVATION_NS
    limiter.serve()
    assert 1 == len(child.running)
    child.work = 0
    child.end()
    holder.end()
    assert 1 == len(big.running)


def test_nothing_is_kept_for_more_than_a_model_needs(limits):
    """A model that has its turns is not starved, though one of its instances needs more than is ever free."""
    limiter = limits.make(R=2)
    uneven = Model(limiter, "a", count=2, work=200, R=1)
    uneven.contenders["a1"].demands = {("R", 0): 2}
    uneven.dispatch()
    models = [uneven, Model(limiter, "b", work=200, R=1)]
    models[1].dispatch()
    for i in range(100):
        models[i % 2].end()
    assert [] == limits.alarms
    assert [51, 51] == [model.num_run for model in models]


def test_an_instance_whose_sequences_have_no_request_does_not_wait(limits):
    """Work for one instance is none for the other: the sequence cannot move."""
    queue = SequenceQueue(SchedulerSettings(4, sequences=SequenceSettings()), "m", "XY")
    contenders = {name: Contender(name, 1, {("R", 0): 1}) for name in "XY"}
    idle = RateLimitedInstances(limits.make(), contenders, queued=lambda: queue, dispatch=lambda: None)
    idle.extend("XY")
    assert [] == idle.waiting()
    call = InferCall("m", parameters={"sequence_id": 1, "sequence_start": True})
    queue.add(InferenceRequest(call, CallContext()), 0)
    assert [contenders["X"]] == idle.waiting()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("R:4", (("R", None), 4)), ("R:4:0", (("R", 0), 4)), ("my-mem:12:3", (("my-mem", 3), 12))],
)
def test_limits_as_written(text, expected):
    """Name, count, and maybe a device."""
    assert expected == parse_limit(text)


@pytest.mark.parametrize("text", ["", "R", "R:", ":4", "R:x", "R:-1", "R:1:", "R:1:x", "R:1:2:3"])
def test_limits_that_are_none(text):
    """What cannot be read says what it should be."""
    with pytest.raises(ValueError, match="must be NAME:COUNT or NAME:COUNT:DEVICE"):
        parse_limit(text)


def test_call_that_its_callers_keep_from_running_is_refused(limits):
    """A model that holds the last unit calls one that needs it; or two models each wait for what the other holds."""
    limiter = limits.make(R=2)
    callers = [Model(limiter, name, work=1, R=1) for name in "ab"]
    called = Model(limiter, "c", R=1)
    for model in callers:
        model.dispatch()
    requests = [
        InferenceRequest(InferCall("c"), CallContext(headers={CALL_PATH_HEADER: f"m.1.{name}0"})) for name in "ab"
    ]
    called.idle.check_call(requests[0])
    called.calls.append(requests[0])
    with pytest.raises(ResourceExhaustedError, match="c0 needs 1 of 'R', which instances hold that wait for this call"):
        called.idle.check_call(requests[1])
    callers[1].end()
    called.idle.check_call(requests[1])


def test_everyone_runs_in_the_end(limits):
    """Ten models with mixed demands: all work is done, and the units are never exceeded."""
    limiter = limits.make(R=4, S=2)
    models = [Model(limiter, f"m{i}", work=20, R=1 + i % 4, S=i % 3) for i in range(10)]
    for model in models:
        model.dispatch()
    counts = Counter()
    while any(model.running for model in models):
        assert 4 >= sum(1 + i % 4 for i, model in enumerate(models) if model.running)
        limits.clock.now_ns += rate_limiter.RESERVATION_NS // 3
        model = next(model for model in models[counts["turn"] % 10 :] + models if model.running)
        counts["turn"] += 1
        model.end()
        limiter.serve()
    assert [20] * 10 == [model.num_run for model in models]
