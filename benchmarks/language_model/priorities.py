"""C5: more requests than the engine can serve, some of them urgent: by priority, with ageing, first come first."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.language_model.drive import Driver, Run, capacity_per_s, run_arrivals, run_waves
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.shapes import Model
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.workloads import Job, arriving, mixed, with_levels

_CASE = "C5"
_LOAD = 1.2
_SHARE_HIGH, _HIGH, _LOW = 0.1, 1, 3
_AGING_S = 0.25
_LOAD_NOTE = (
    f"Open loop at {_LOAD:.0%} of what the engine does with all slots taken, measured just before; {_SHARE_HIGH:.0%} "
    f"have priority {_HIGH}, the others {_LOW}."
)
_STARVING_NOTE = (
    f"The other way round: the urgent ones alone are {_LOAD:.0%} of what the engine can do, {_SHARE_HIGH:.0%} more are "
    f"not urgent. Strictly, those wait until the urgent ones stop coming; with ageing of {_AGING_S * 1e3:.0f} ms a "
    f"level one is overtaken only by urgent ones that came up to {_AGING_S * (_LOW - _HIGH) * 1e3:.0f} ms after it."
)


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """Times to the first token of both classes, each way."""
    fields = {"max_num_seqs": sizes.num_slots, "max_num_batched_tokens": sizes.num_step_tokens}
    strict = model.engine_config(**fields)
    aging = model.engine_config(**fields, aging_ns=round(_AGING_S * 1e9))
    jobs = mixed(sizes.open_jobs, model.shape.vocab_size)
    alone: list[Run] = []
    runs: dict[str, list[Run]] = {"first come": [], "strict": [], "ageing": []}
    starved: dict[str, list[Run]] = {"strict": [], "ageing": []}
    for number in range(sizes.num_rounds):
        alone.append(run_waves(Driver(model, strict), jobs[: sizes.alone_jobs], 1))
        rate_per_s = _LOAD * capacity_per_s(model, strict, jobs)
        few_high = arriving(with_levels(jobs, _SHARE_HIGH, _HIGH, _LOW, number), rate_per_s, number)
        runs["first come"].append(_first_come(model, sizes, few_high))
        for name, config in (("strict", strict), ("ageing", aging)):
            runs[name].append(run_arrivals(Driver(model, config), few_high))
        if not number:  # one round is enough: the ways differ by what they do, not by percents
            few_low = arriving(with_levels(jobs, 1 - _SHARE_HIGH, _HIGH, _LOW), rate_per_s / (1 - _SHARE_HIGH), number)
            for name, config in (("strict", strict), ("ageing", aging)):
                starved[name].append(run_arrivals(Driver(model, config), few_low))
    return [*_classes(alone, runs), *_starved(starved)]


def _first_come(model: Model, sizes: Sizes, jobs: Sequence[Job]) -> Run:
    """All of one level; the answers are told by the level that their job would have had."""
    config = model.engine_config(max_num_seqs=sizes.num_slots, max_num_batched_tokens=sizes.num_step_tokens)
    run = run_arrivals(Driver(model, config), [replace(job, level=0) for job in jobs])
    for answer, job in zip(run.answers, jobs, strict=True):
        answer.job = job
    return run


def _classes(alone: Sequence[Run], runs: dict[str, list[Run]]) -> list[Figure]:
    figures = [figure(_CASE, "p99 to first token, one at a time", [run.ttft_ms(99) for run in alone], "ms")]
    for name, done in runs.items():
        for level, who in ((_HIGH, "urgent"), (_LOW, "others")):
            rounds = [run.ttft_ms(99, level) for run in done]
            figures.append(figure(_CASE, f"p99 to first token, {who}, {name}", rounds, "ms", note=_LOAD_NOTE))
    first, strict = runs["first come"], runs["strict"]
    ratios = [a.ttft_ms(99, _HIGH) / b.ttft_ms(99, _HIGH) for a, b in zip(first, strict, strict=True)]
    slower = [a.ttft_ms(99, _LOW) / b.ttft_ms(99, _LOW) for a, b in zip(strict, first, strict=True)]
    waits = [run.ttft_ms(100, _LOW) for run in runs["ageing"]]
    return [
        *figures,
        figure(_CASE, "urgent, first come over strict", ratios, "x", target=Target(">=", 5)),
        figure(_CASE, "others, strict over first come", slower, "x"),
        figure(_CASE, "longest wait of the others, ageing", waits, "ms"),
        figure(_CASE, "slots lost to urgent ones, strict", [run.num_preemptions for run in strict], "times"),
    ]


def _starved(runs: dict[str, list[Run]]) -> list[Figure]:
    return [
        figure(
            _CASE,
            f"longest wait of few others, {name}",
            [run.ttft_ms(100, _LOW) for run in done],
            "ms",
            note=_STARVING_NOTE,
        )
        for name, done in runs.items()
    ]
