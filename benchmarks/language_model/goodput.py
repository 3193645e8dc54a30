"""C8: requests that are answered as soon as was promised, at growing load."""

from benchmarks.language_model.drive import Driver, Run, capacity_per_s, run_arrivals, run_waves
from benchmarks.language_model.figures import Figure, figure
from benchmarks.language_model.shapes import Model
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.workloads import arriving, mixed

_CASE = "C8"
_LOADS = (0.4, 0.6, 0.8, 1.0, 1.2)
_MAX_TTFT, _MAX_TPOT = 10.0, 3.0
_GOOD_SHARE = 0.9
_NOTE = (
    f"Poisson arrivals at shares of what the engine does with all slots taken, measured just before. Good: first token "
    f"within {_MAX_TTFT:g} times, mean time of each further token within {_MAX_TPOT:g} times the median of requests "
    f"that come one after the other."
)


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """The curve, and the highest load at which nearly all are good."""
    config = model.engine_config(max_num_seqs=sizes.num_slots, max_num_batched_tokens=sizes.num_step_tokens)
    jobs = mixed(sizes.open_jobs, model.shape.vocab_size)
    shares: dict[float, list[float]] = {load: [] for load in _LOADS}
    goodputs: dict[float, list[float]] = {load: [] for load in _LOADS}
    capacities, ttfts_ms, tpots_ms = [], [], []
    for number in range(sizes.num_rounds):
        alone = run_waves(Driver(model, config), jobs[: sizes.alone_jobs], 1)
        ttft_s, tpot_s = alone.ttft_ms(50) / 1e3, alone.tpot_ms(50) / 1e3
        capacity = capacity_per_s(model, config, jobs)
        capacities.append(capacity)
        ttfts_ms.append(ttft_s * 1e3)
        tpots_ms.append(tpot_s * 1e3)
        for load in _LOADS:
            run = run_arrivals(Driver(model, config), arriving(jobs, load * capacity, number))
            share = _share_good(run, _MAX_TTFT * ttft_s, _MAX_TPOT * tpot_s)
            shares[load].append(100 * share)
            goodputs[load].append(share * len(jobs) / run.duration_s)
    figures = [
        figure(_CASE, "all slots taken", capacities, "requests/s"),
        figure(_CASE, "one at a time: p50 to first token", ttfts_ms, "ms"),
        figure(_CASE, "one at a time: p50 of each further token", tpots_ms, "ms"),
    ]
    for load in _LOADS:
        figures += [
            figure(_CASE, f"good answers at {load:.0%} load", goodputs[load], "requests/s", note=_NOTE),
            figure(_CASE, f"  of all at {load:.0%} load", shares[load], "%", note=_NOTE),
        ]
    knees = [
        100 * max((load for load in _LOADS if shares[load][number] >= 100 * _GOOD_SHARE), default=0.0)
        for number in range(sizes.num_rounds)
    ]
    return [*figures, figure(_CASE, f"knee: highest load with {_GOOD_SHARE:.0%} good", knees, "% load")]


def _share_good(run: Run, max_ttft_s: float, max_tpot_s: float) -> float:
    good = [answer.ttft_s <= max_ttft_s and answer.tpot_s <= max_tpot_s for answer in run.answers]
    return sum(good) / len(good)
