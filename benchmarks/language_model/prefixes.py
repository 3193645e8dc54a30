"""C2: prompts with a common beginning, with the prefix cache and without; what the cache costs where it never helps."""

from benchmarks.language_model.drive import Driver, Run, run_burst, run_waves
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.shapes import Model
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.workloads import alike, with_prefix

_CASE = "C2"
_NUM_OWN = 32
_NUM_TOKENS = 8
#: A difference of a percent needs more rounds than one of a factor.
_OVERHEAD_ROUNDS = 3
_BURST_NOTE = "All prompts come at once to an empty cache; the one that begins first computes the common part for all."
_OVERHEAD_NOTE = "Least CPU time of the process in all rounds: on a busy machine times vary by more than the target."


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """Times to the first token, hit rate, and the overhead."""
    jobs = with_prefix(sizes.prefix_jobs, model.shape.vocab_size, sizes.prefix_len, _NUM_OWN, _NUM_TOKENS)
    different = alike(sizes.prefix_jobs // 2, model.shape.vocab_size, sizes.prefix_len + _NUM_OWN, _NUM_TOKENS)
    configs = {
        is_on: model.engine_config(
            max_num_seqs=sizes.num_slots,
            max_num_batched_tokens=sizes.num_step_tokens,
            enable_prefix_caching=is_on,
        )
        for is_on in (True, False)
    }
    burst: dict[bool, list[Run]] = {True: [], False: []}
    single: dict[bool, list[Run]] = {True: [], False: []}
    no_hits: dict[bool, list[Run]] = {True: [], False: []}
    for _ in range(sizes.num_rounds):
        for is_on, config in configs.items():
            burst[is_on].append(run_burst(Driver(model, config), jobs))
            single[is_on].append(run_waves(Driver(model, config), jobs[: sizes.num_slots], 1))
    for round_ in range(_OVERHEAD_ROUNDS * sizes.num_rounds):
        for is_on in (True, False) if round_ % 2 else (False, True):
            no_hits[is_on].append(run_burst(Driver(model, configs[is_on]), different))
    return [
        *_ttft("at once", burst, _BURST_NOTE, Target(">=", 5)),
        *_ttft("one after the other", single, "", Target(">=", 5)),
        figure(_CASE, "prompt tokens that the cache had", [100 * run.hit_rate for run in burst[True]], "%"),
        figure(
            _CASE,
            "overhead of the cache, all prompts different",
            [100 * (min(run.cpu_s for run in no_hits[True]) / min(run.cpu_s for run in no_hits[False]) - 1)],
            "%",
            target=Target("<", 2),
            note=_OVERHEAD_NOTE,
        ),
    ]


def _ttft(how: str, runs: dict[bool, list[Run]], note: str, target: Target) -> list[Figure]:
    on, off = ([run.ttft_ms(50) for run in runs[is_on]] for is_on in (True, False))
    ratios = [slow / quick for slow, quick in zip(off, on, strict=True)]
    return [
        figure(_CASE, f"p50 time to first token, {how}, without cache", off, "ms", note=note),
        figure(_CASE, f"p50 time to first token, {how}, with cache", on, "ms", note=note),
        figure(_CASE, "  without over with", ratios, "x", target=target),
    ]
