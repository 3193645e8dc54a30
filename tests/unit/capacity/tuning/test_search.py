"""The search, over a bench whose figures are a formula: no mesh, no clock."""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.base.errors import InvalidArgumentError
from weft.capacity.tuning.measurement import Contest, Goal, Measurement, TrialError, TrialLoad, parse_limit
from weft.capacity.tuning.search import Search, SearchResult
from weft.capacity.tuning.space import Configuration, Cost, SearchSpace, Setting
from weft.capacity.tuning.trials import FAILED, HOPELESS, INFEASIBLE, Study, pareto

SPACE = SearchSpace(
    {},
    {
        "m.instances": Setting((1, 2, 4, 8), 1),
        "m.threads": Setting((1, 2, 4), 1),
        "m.queue_delay_us": Setting(("off", 0, 100, 500, 2000), 0),
        "n.execution": Setting(("thread", "inline"), "thread"),
        "in_process": Setting(("none", "model"), "none"),
    },
)
BEST = {"m.instances": 4, "m.threads": 2, "m.queue_delay_us": 100, "n.execution": "inline", "in_process": "model"}
GOAL = Goal((parse_limit("p99=50ms"),), "throughput")
LOAD = TrialLoad(levels_vary=False, level=8, duration_s=1.0)


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study writes many small lines, and no power fails here."""
    monkeypatch.setattr("os.fsync", lambda _: None)


def factor(configuration: Configuration) -> float:
    """How fast it is: 1.5 times faster for each setting that is as in ``BEST``."""
    return 1.5 ** sum(configuration.get(key) == value for key, value in BEST.items())


def latency_ms(configuration: Configuration) -> float:
    """Eight instances would be as fast, and too slow for some."""
    return 80.0 if configuration.get("m.instances") == 8 else 40.0 / factor(configuration)


class Bench:
    """Runs configurations by a formula.

    Attributes:
        num_running: Configurations that run now.
        opened: Every configuration, in the order of its start.
    """

    def __init__(
        self,
        fault: Callable[[Configuration], str] = lambda _: "",
        *,
        noise: float = 0.0,
        speed: Callable[[Configuration], float] = factor,
    ) -> None:
        self.fault = fault
        self.speed = speed
        self.num_running = 0
        self.opened: list[Configuration] = []
        self.random = random.Random(7)
        self.noise = noise
        self.now_s = 0.0
        self.running: type[RunningFormula] = RunningFormula

    def open(self, configuration: Configuration, *, fresh: bool = False) -> "RunningFormula":
        if (fault := self.fault(configuration)) == "does not start":
            raise TrialError(fault)
        self.opened.append(configuration)
        self.now_s += 3.0
        self.num_running += 1
        assert self.num_running <= 2
        return self.running(self, configuration, fault)


class RunningFormula:
    """One that runs; ``fault`` tells what goes wrong under load."""

    def __init__(self, bench: Bench, configuration: Configuration, fault: str) -> None:
        self.bench, self.configuration, self.fault = bench, configuration, fault

    def measure(self, level: int, duration_s: float) -> Measurement:
        if self.fault == "ends":
            raise TrialError("the mesh has ended")
        self.bench.now_s += duration_s
        drift = 1 + self.bench.random.uniform(-self.bench.noise, self.bench.noise)
        rate = 100 * self.bench.speed(self.configuration) * drift
        errors = {"UNAVAILABLE": 5} if self.fault == "fails" else {}
        latency = latency_ms(self.configuration)  # of the shipped one 40
        return Measurement(level, rate, 10 / rate, dict.fromkeys((50.0, 99.0), latency), 0 if errors else 100, errors)

    def costs(self) -> Mapping[str, Cost]:
        return {"m": Cost(5000, 0.9), "n": Cost(50, 0.1)}

    def close(self) -> None:
        self.bench.num_running -= 1


def search(
    path: Path,
    bench: Bench,
    *,
    space: SearchSpace = SPACE,
    num_trials: int = 40,
    sampler: str = "nsga2",
    budget_s: float = 1e6,
    clock_s: Callable[[], float] = lambda: 0.0,
) -> tuple[SearchResult, Study]:
    """Search with that many trials in all; every configuration that ran is closed afterwards."""
    trials = Study(path, space, seed=1, sampler=sampler, setup={"graph": "g"})
    result = Search(space, bench, Contest(GOAL, LOAD), trials, num_trials, budget_s, 3, clock_s).run()
    assert not bench.num_running
    return result, trials


@pytest.mark.parametrize("sampler", ["nsga2", "tpe"])
def test_finds_the_best_of_all(tmp_path: Path, sampler: str) -> None:
    """Of 240 configurations, in 40 trials, under figures that are off by up to a tenth each time."""
    result, trials = search(tmp_path / "t", Bench(noise=0.1), sampler=sampler)
    assert result.pick == BEST
    assert result.confirmation.gain("throughput") == pytest.approx(1.5**5, rel=0.2)
    assert BEST in [record.configuration for record in pareto(trials.records)]


def test_instances_that_pay_only_together_are_found(tmp_path: Path) -> None:
    """One more of each model of a pipeline at once: of one model alone the other stays the bottleneck."""
    keys = ("m.instances", "n.instances")
    settings = {key: Setting((1, 2, 4), 1) for key in keys} | {"in_process": SPACE.settings["in_process"]}
    space = SearchSpace({}, settings)
    bench = Bench(noise=0.02, speed=lambda configuration: float(min(int(configuration[key]) for key in keys)))
    result, _ = search(tmp_path / "t", bench, space=space, num_trials=8)
    assert result.pick == {"m.instances": 4, "n.instances": 4, "in_process": "none"}


def test_no_configuration_is_tried_twice(tmp_path: Path) -> None:
    """The search ends when nothing is left."""
    few = SearchSpace({}, {key: SPACE.settings[key] for key in ("m.threads", "n.execution", "in_process")})
    result, trials = search(tmp_path / "t", Bench(speed=lambda _: 1.0), space=few, num_trials=1000)
    tried = [tuple(sorted(record.configuration.items())) for record in trials.records]
    assert len(set(tried)) == len(tried) == few.size
    assert "no configuration is left" in result.why


def test_what_breaks_a_limit_is_never_the_pick(tmp_path: Path) -> None:
    """However fast: its trial is kept as infeasible, with the reason."""
    bench = Bench(speed=lambda configuration: 50.0 if configuration["m.instances"] == 8 else factor(configuration))
    result, trials = search(tmp_path / "t", bench)
    assert result.pick["m.instances"] != 8
    broken = [record for record in trials.records if record.configuration["m.instances"] == 8]
    assert broken
    assert {record.outcome for record in broken} <= {INFEASIBLE, HOPELESS}
    assert any(record.reason == "p99 is 80 ms, above 50 ms" for record in broken)
    assert not set(map(id, broken)) & set(map(id, pareto(trials.records)))


@pytest.mark.parametrize("fault", ["does not start", "ends", "fails"])
def test_failing_trials_end_nothing(tmp_path: Path, fault: str) -> None:
    """They are kept with their reason, and the best of the others is found."""
    bench = Bench(lambda configuration: fault if configuration["in_process"] == "model" else "")
    result, trials = search(tmp_path / "t", bench)
    assert result.pick == {**BEST, "in_process": "none"}
    failed = [record for record in trials.records if record.configuration["in_process"] == "model"]
    assert failed
    assert {record.outcome for record in failed} == {HOPELESS if fault == "fails" else FAILED}
    assert all(record.reason for record in failed)


def test_an_incumbent_that_ends_is_started_again(tmp_path: Path) -> None:
    """As when a trial took the memory that it ran in."""
    count = itertools.count()
    bench = Bench(lambda _: "ends" if next(count) % 5 == 4 else "")
    result, _ = search(tmp_path / "t", bench, num_trials=25)
    assert factor(result.pick) >= 1.5**2


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_an_interrupted_study_goes_on(tmp_path: Path, cut: int) -> None:
    """After Ctrl-C during any trial: what was tried is not tried again, and the best so far is the start."""
    interrupted = Bench()

    def interrupt(_: Configuration) -> str:
        if len(interrupted.opened) == cut:
            raise KeyboardInterrupt
        return ""

    interrupted.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "t", interrupted)
    assert not interrupted.num_running
    bench = Bench()
    result, trials = search(tmp_path / "t", bench)
    assert result.pick == BEST
    assert len(trials.records) == 40
    before = trials.records[:cut]
    assert max(factor(record.configuration) for record in before if record.is_incumbent) == factor(bench.opened[0])


def test_a_study_is_read_from_its_file(tmp_path: Path) -> None:
    """Half a line of a killed process is dropped; a study of something else, and what is none, are refused."""
    path = tmp_path / "t"
    options: dict[str, Any] = {"seed": 1, "sampler": "nsga2"}
    search(path, Bench(), num_trials=5)
    content = path.read_bytes()
    path.write_bytes(content + content.splitlines()[-1][:20])
    assert len(Study(path, SPACE, setup={"graph": "g"}, **options).records) == 5
    assert path.read_bytes().startswith(content)
    with pytest.raises(InvalidArgumentError, match=r"is a study of something else \(graph changed\)"):
        Study(path, SPACE, setup={"graph": "h"}, **options)
    path.write_text("hello\nworld\n")
    with pytest.raises(InvalidArgumentError, match="is no study that can be read"):
        Study(path, SPACE, setup={"graph": "g"}, **options)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("does not start", "the configuration as it is shipped cannot be measured: does not start"),
        ("fails", "no request is answered as the graph is shipped"),
    ],
)
def test_shipped_configuration_must_answer(tmp_path: Path, fault: str, message: str) -> None:
    """Else there is nothing to compare with."""
    bench = Bench(lambda _: fault)
    with pytest.raises(InvalidArgumentError, match=message):
        search(tmp_path / "t", bench)
    assert not bench.num_running


def test_budget_ends_the_search(tmp_path: Path) -> None:
    """With time left for the confirmation."""
    bench = Bench()
    result, trials = search(tmp_path / "t", bench, num_trials=1000, budget_s=100.0, clock_s=lambda: bench.now_s)
    assert "the budget of 100 s is spent" in result.why
    assert 3 < len(trials.records) < 40
    assert 60 < bench.now_s <= 100


@pytest.mark.parametrize("useful", [{"m.threads": 2, "in_process": "model"}, {}])
def test_pick_has_no_change_that_is_worth_nothing(tmp_path: Path, useful: Configuration) -> None:
    """What the sampler changed beside what helped is taken back; noise alone moves nothing, which is said."""
    bench = Bench(speed=lambda configuration: 1.5 ** sum(configuration[key] == useful[key] for key in useful))
    bench.noise = 0.0 if useful else 0.02
    result, _ = search(tmp_path / "t", bench, num_trials=40 if useful else 15)
    assert result.pick == {**SPACE.shipped, **useful}
    assert bool(useful) != ("nothing was better than what is shipped" in result.why)


def test_a_bad_moment_of_the_incumbent_is_no_reason(tmp_path: Path) -> None:
    """Where it breaks a limit at times, slower configurations do not take its place."""

    class Stalling(RunningFormula):
        num_runs = 0

        def measure(self, level: int, duration_s: float) -> Measurement:
            Stalling.num_runs += 1
            run = super().measure(level, duration_s)
            stalls = self.configuration == BEST and Stalling.num_runs % 40 < 9
            return replace(run, latency_ms={99.0: 900.0}) if stalls else run

    bench = Bench()
    bench.running = Stalling
    result, _ = search(tmp_path / "t", bench, num_trials=60)
    assert factor(result.pick) >= 1.5**4


class Curve:
    """Saturates at 64 requests in work; latency grows with them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.levels: list[int] = []

    def measure(self, level: int, duration_s: float) -> Measurement:
        self.levels.append(level)
        return Measurement(level, min(level, 64) * 10.0, 1.0, {99.0: 50.0 * level / self.limit}, 100)


@pytest.mark.parametrize(("limit", "expected"), [(1000, 64), (40, 32), (8, 8), (5, 4), (1, 1)])
def test_load_is_the_most_that_keeps_the_limit(limit: int, expected: int) -> None:
    """Found by doubling or halving, and no more of it than throughput gains from."""
    contest = Contest(GOAL, TrialLoad(levels_vary=True, level=8, duration_s=1.0))
    assert contest.best_level(Curve(limit), 8).level == expected  # type: ignore[arg-type]


def test_load_that_was_a_moments_luck_is_halved() -> None:
    """In a comparison, of the one that breaks the limit alone."""
    contest = Contest(GOAL, TrialLoad(levels_vary=True, level=8, duration_s=1.0))
    found = contest.compare(Curve(40), 64, Curve(100), 64, 2)  # type: ignore[arg-type]
    assert (found.old.level, found.new.level) == (32, 64)
    assert found.gain("throughput") == 2.0


def test_limits_have_units() -> None:
    """Microseconds, milliseconds, seconds."""
    limits = [parse_limit(text) for text in ("p50=500us", "p99=50ms", "p99.9=1.5s")]
    assert [limit.limit_ms for limit in limits] == [0.5, 50.0, 1500.0]
    assert str(limits[1]) == "p99=50ms"
