"""Second tier of the KV cache: prompts that return after they were evicted, and preempted sequences that go on."""

from dataclasses import replace

from benchmarks.language_model.drive import Driver, Run, run_arrivals, run_waves
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.shapes import Model
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.workloads import Job, alike

_CASE = "tier"
_NUM_PROMPTS = 6
_NUM_TOKENS = 8
#: The cache holds so many of the prompts.
_NUM_HELD = 2.5
_TIER_BYTES = 1 << 30
_NUM_LOW_TOKENS = 96
_PREEMPTION_NOTE = (
    "Long prompts of a low level run; others of a high level, one after the other, take a slot and the blocks, so that "
    "what was preempted is evicted. The low ones compute it again, or load it."
)


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """Time to the first token of returning prompts, and tokens computed with preemptions, with a tier and without."""
    length = sizes.prefix_len
    prompts = alike(_NUM_PROMPTS, model.shape.vocab_size, length, _NUM_TOKENS)
    base = model.engine_config(max_num_seqs=2, max_num_batched_tokens=sizes.num_step_tokens)
    base = replace(base, num_blocks=int(_NUM_HELD * length) // base.block_size)
    configs = {True: replace(base, kv_offload_bytes=_TIER_BYTES), False: base}
    returning: dict[bool, list[float]] = {True: [], False: []}
    preempted: dict[bool, list[Run]] = {True: [], False: []}
    computed: dict[bool, list[int]] = {True: [], False: []}
    for _ in range(sizes.num_rounds):
        for has_tier, config in configs.items():
            run = run_waves(Driver(model, config), [*prompts, *prompts], 1)
            returning[has_tier].append(replace(run, answers=run.answers[_NUM_PROMPTS:]).ttft_ms(50))
    for _ in range(sizes.num_rounds):
        for has_tier, config in configs.items():
            driver = Driver(model, config)
            # The rounds are of one pace: that of this machine for these prompts.
            preempted[has_tier].append(run_arrivals(driver, _interrupted(prompts, returning[False][0] / 1e3)))
            computed[has_tier].append(driver.engine.metrics.num_computed_tokens)
    ratios = [slow / quick for slow, quick in zip(returning[False], returning[True], strict=True)]
    return [
        figure(_CASE, f"p50 time to first token, {length} tokens return, computed", returning[False], "ms"),
        figure(_CASE, "  loaded", returning[True], "ms"),
        figure(_CASE, "  computed over loaded", ratios, "x", target=Target(">=", 5)),
        *(
            row
            for has_tier, name in ((False, "without a tier"), (True, "with one"))
            for row in (
                figure(_CASE, f"preemptions {name}", [run.num_preemptions for run in preempted[has_tier]], ""),
                figure(_CASE, "  tokens computed", computed[has_tier], "tokens", note=_PREEMPTION_NOTE),
                figure(_CASE, "  CPU time", [run.cpu_s for run in preempted[has_tier]], "s"),
            )
        ),
    ]


def _interrupted(prompts: list[Job], prompt_s: float) -> list[Job]:
    """The first two prompts with a low level and longer answers, and the others later, with a high level."""
    low = [replace(job, num_tokens=_NUM_LOW_TOKENS, level=2) for job in prompts[:2]]
    high = [replace(job, level=1, at_s=(3 + 2 * number) * prompt_s) for number, job in enumerate(prompts[2:])]
    return [*low, *high]
