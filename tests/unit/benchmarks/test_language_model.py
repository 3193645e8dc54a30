"""The benchmark of the language-model engine: its cases run, and its counts are right."""

from dataclasses import replace

import pytest
import torch
from benchmarks.language_model import __main__ as program
from benchmarks.language_model.baseline import make_transformers, run_continuous, run_static
from benchmarks.language_model.continuous import CacheProbe, NoModel, schedule_steps
from benchmarks.language_model.drive import Driver, run_arrivals, run_burst, run_waves
from benchmarks.language_model.figures import Target, figure, render
from benchmarks.language_model.shapes import Model, make_model
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.workloads import Job, alike, arriving, mixed, with_levels, with_prefix

from weft.base.errors import InternalError
from weft.llm.engine_core import Runner
from weft.llm.runner import StepTokens
from weft.llm.scheduler.plan import ForwardPlan

pytestmark = pytest.mark.long

torch.set_num_threads(1)

_SIZES = Sizes(
    num_rounds=1, num_slots=4, num_step_tokens=64, mixed_jobs=8, baseline_rounds=1, prefix_jobs=4, prefix_len=64,
    decoders=2, long_prompt=100, open_jobs=6, alone_jobs=2, cancel_jobs=12, scheduler_steps=5, serving_jobs=4,
    speculated_tokens=8, speculated_batches=(2,), head_steps=2, head_tokens=1024,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    """The smallest one."""
    return make_model("tiny")


def _jobs(model: Model, *answers: int) -> list[Job]:
    jobs = mixed(len(answers), model.shape.vocab_size)
    return [replace(job, num_tokens=answer) for job, answer in zip(jobs, answers, strict=True)]


@pytest.mark.parametrize("case", program.CASES)
@pytest.mark.filterwarnings("ignore")  # of transformers' and tritonclient's
def test_every_case_runs(model, case):
    """It gives figures, all of its own case and all measured."""
    figures = program.CASES[case](model, _SIZES)
    assert {case} == {one.case for one in figures}
    assert not [one.what for one in figures if one.value is None]


def test_nothing_is_left_of_cancelled_requests(model):
    """Also in the smallest run: no block is owned, and no release takes more than a step."""
    figures = {one.what: one for one in program.CASES["C6"](model, _SIZES)}
    assert figures["blocks not free at the end"].is_met
    assert figures["steps until free, most"].is_met


@pytest.mark.filterwarnings("ignore")  # of transformers'
def test_transformers_does_the_same_work(model):
    """Both of its ways give the engine's tokens, each as many as its job wants."""
    jobs = _jobs(model, 3, 9, 1, 6, 2)
    run = run_burst(Driver(model, model.engine_config(max_num_seqs=2)), jobs)
    expected = [answer.token_ids for answer in run.answers]
    theirs = make_transformers(model)
    assert expected == run_static(theirs, jobs, 2).token_ids
    assert expected == run_continuous(theirs, jobs, 2, 64).token_ids


def test_a_schedule_counts_its_steps():
    """Static: the longest of each batch; continuous: a slot is taken again by the next in line."""
    jobs = [Job(None, answer) for answer in (5, 1, 2, 2, 1)]  # type: ignore[arg-type]
    assert (5 + 2 + 1, 6) == schedule_steps(jobs, 2)


def test_the_cache_probe_counts_slots_without_a_token(model):
    """A text of 17 tokens owns three blocks of 8; a place for the longest text would be of 320."""
    probes: list[CacheProbe] = []

    def wrap(runner: Runner) -> CacheProbe:
        probes.append(CacheProbe(NoModel(runner.num_blocks)))
        return probes[0]

    driver = Driver(model, model.engine_config(), wrap=wrap)
    probes[0].pool = driver.engine.pool
    run_burst(driver, alike(1, model.shape.vocab_size, prompt_len=17, num_tokens=1))
    assert 100 * (1 - 17 / 24) == pytest.approx(probes[0].waste_percent)
    assert 100 * (1 - 17 / 320) == pytest.approx(probes[0].waste_if_reserved_percent)


def test_waves_wait_for_all_their_members(model):
    """The engine runs as many steps as the schedule says, and ended members leave or stay as asked."""
    jobs = _jobs(model, 5, 1, 2, 2, 1)
    config = model.engine_config(max_num_seqs=2, max_num_batched_tokens=256)
    leaving = run_waves(Driver(model, config), jobs, 2)
    staying = run_waves(Driver(model, config), jobs, 2, is_padded=True)
    assert 5 + 2 + 1 == leaving.num_steps == staying.num_steps
    assert 11 == leaving.num_tokens == staying.num_tokens
    assert [5, 5, 2, 2, 1] == [len(answer.token_ids) for answer in staying.answers]


def test_a_failed_request_ends_the_measurement(model):
    """Its error is raised, and nobody waits for answers that do not come."""

    class Broken(NoModel):
        def run(self, plan: ForwardPlan) -> StepTokens:
            raise RuntimeError("broken")

    driver = Driver(model, model.engine_config(), wrap=lambda runner: Broken(runner.num_blocks))
    with pytest.raises(InternalError, match="a step of the model failed"):
        run_burst(driver, _jobs(model, 2, 2))


def test_arrivals_are_counted_from_their_time(model):
    """A request that comes late waits from its arrival, not from the start."""
    jobs = [replace(job, at_s=at_s) for job, at_s in zip(_jobs(model, 2, 2), (0.0, 0.2), strict=True)]
    first, second = run_arrivals(Driver(model, model.engine_config()), jobs).answers
    assert 0.2 == pytest.approx((second.start_ns - first.start_ns) / 1e9)
    assert 0 < second.ttft_s


def test_workloads_are_what_they_say():
    """The same seed gives the same jobs; lengths, shares and rates are those asked for."""
    jobs, again = mixed(400, 64), mixed(400, 64)
    assert [job.prompt.tolist() for job in jobs] == [job.prompt.tolist() for job in again]
    assert all(16 <= len(job.prompt) <= 64 and 1 <= job.num_tokens <= 256 for job in jobs)
    assert 40 == sum(job.level == 1 for job in with_levels(jobs, 0.1, 1, 3))
    assert 40.0 == pytest.approx(arriving(jobs, 10.0)[-1].at_s, rel=0.15)
    one, other = with_prefix(2, 64, num_shared=5, num_own=3, num_tokens=1)
    assert one.prompt[:5].tolist() == other.prompt[:5].tolist()
    assert one.prompt[5:].tolist() != other.prompt[5:].tolist()


def test_a_figure_is_the_median_and_is_held_against_its_target():
    """What could not be measured meets nothing and misses nothing."""
    assert (3.0, True, ">= 3") == (
        (got := figure("C0", "x", [1.0, 9.0, 3.0], "ms", target=Target(">=", 3))).value, got.is_met, got.target,
    )  # fmt: skip
    assert figure("C0", "x", [3.0], "ms", target=Target("<", 3)).is_met is False
    absent = figure("C0", "x", [], "ms", target=Target("<", 3), note="why")
    assert (None, None) == (absent.value, absent.is_met)
    assert "MISSED" in render([figure("C0", "x", [3.0], "ms", target=Target("<", 3))])
    assert "[1] why" in render([absent])


def test_the_program_runs_the_cases_that_are_named(capsys, monkeypatch):
    """With ``--quick`` nothing is written and a missed target is no failure; figures are shown."""
    missed = figure("C6", "a figure", [1.0], "ms", target=Target("<", 1))
    monkeypatch.setitem(program.CASES, "C6", lambda model, sizes: [missed])
    monkeypatch.setattr(program, "write_json", lambda *args, **kwargs: pytest.fail("--quick writes nothing"))
    assert 0 == program.main(["--only", "C6", "--shape", "tiny", "--quick"])
    assert "a figure" in capsys.readouterr().out
