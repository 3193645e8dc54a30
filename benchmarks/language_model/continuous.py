"""C1: answers of mixed length, continuously, in static batches, and in ``transformers``; what the cache wastes."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.language_model.baseline import make_transformers, run_continuous, run_static
from benchmarks.language_model.drive import Driver, Run, run_burst, run_waves
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.shapes import Model
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.workloads import LONGEST_TEXT, Job, chatting, mixed
from weft.llm.config import EngineConfig
from weft.llm.engine_core import Runner
from weft.llm.runner import StepTokens
from weft.llm.scheduler.blocks import BlockPool
from weft.llm.scheduler.plan import ForwardPlan

_CASE = "C1"
_RATIO_NOTE = (
    "Tokens are the same in all ways. 'ended rows stay' is static batching as generate does it: rows that have ended "
    "are computed until the longest of their batch ends. 'ended rows leave' is the same schedule with smaller batches, "
    "so its late steps are cheap and the ratio in time is below that in steps."
)
_BOUND_NOTE = (
    "Counted from the workload: steps of static batches, the longest answer of each, over those of a schedule in which "
    "a slot is taken again in the next step, the first token included in the prompt's step. The prompts of a static "
    "batch take steps of their own besides, so that the ratio may pass the bound."
)
_CACHE_NOTE = (
    "The last block of a sequence is half empty on average: with blocks of 16, the default on a GPU, that is 7.5 slots "
    "for each sequence, so the share can be below 4 % only where sequences have more than 180 tokens on average; C1's "
    "are shorter. The texts of 400 have the mean lengths of a chat (215 and 198 tokens), run through the scheduler "
    "without a model."
)
_BASELINE_NOTE = (
    "The same weights, prompts, slots, lengths and number of threads (1), in the same process and the same minutes; "
    "generate pads on the left and runs each batch to its longest answer, of which only wanted tokens are counted."
)


class CacheProbe:
    """A runner that looks, at every step, how much of the blocks that sequences own holds a token.

    Attributes:
        pool: Of the engine; set once there is one.
    """

    pool: BlockPool

    def __init__(self, runner: Runner) -> None:
        self.num_blocks, self.num_offload_blocks = runner.num_blocks, runner.num_offload_blocks
        self._runner = runner
        self._owned = self._filled = self._reserved = 0

    def bind_thread(self) -> None:
        """See ``Runner``."""
        self._runner.bind_thread()

    def close(self) -> None:
        """See ``Runner``."""
        self._runner.close()

    def run(self, plan: ForwardPlan) -> StepTokens:
        """See ``Runner``."""
        self._owned += self.pool.num_used * self.pool.block_size
        self._filled += int(plan.ctx_len.sum())
        self._reserved += len(plan.slots) * LONGEST_TEXT
        return self._runner.run(plan)

    def launch(self, plan: ForwardPlan) -> Callable[[], StepTokens]:
        """See ``Runner``."""
        return partial(self.run, plan)

    @property
    def waste_percent(self) -> float:
        """Share of owned slots without a token, over all steps."""
        return 100 * (1 - self._filled / self._owned)

    @property
    def waste_if_reserved_percent(self) -> float:
        """The same, had each sequence got room for the longest prompt and answer when it was scheduled."""
        return 100 * (1 - self._filled / self._reserved)


class NoModel:
    """A runner whose every token is 0 and costs nothing."""

    num_offload_blocks = 0

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def bind_thread(self) -> None:
        """See ``Runner``."""

    def close(self) -> None:
        """See ``Runner``."""

    def run(self, plan: ForwardPlan) -> StepTokens:
        """See ``Runner``."""
        return StepTokens(np.zeros(len(plan.sample_rows), np.int32), None)

    def launch(self, plan: ForwardPlan) -> Callable[[], StepTokens]:
        """See ``Runner``."""
        return partial(self.run, plan)


def schedule_steps(jobs: Sequence[Job], num_slots: int) -> tuple[int, int]:
    """Steps in static batches, and at best in continuous ones, if a step gives each slot one token."""
    static = sum(
        max(job.num_tokens for job in jobs[first : first + num_slots]) for first in range(0, len(jobs), num_slots)
    )
    ends = [0] * num_slots
    for job in jobs:
        heapq.heapreplace(ends, ends[0] + job.num_tokens)
    return static, max(ends)


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """Rates, their ratios, and the cache."""
    jobs = mixed(sizes.mixed_jobs, model.shape.vocab_size)
    config = model.engine_config(max_num_seqs=sizes.num_slots, max_num_batched_tokens=sizes.num_step_tokens)
    ways: dict[str, Callable[[], Run]] = {
        "continuous": lambda: run_burst(Driver(model, config), jobs),
        "stay": lambda: run_waves(Driver(model, config), jobs, sizes.num_slots, is_padded=True),
        "leave": lambda: run_waves(Driver(model, config), jobs, sizes.num_slots),
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(sizes.num_rounds):
        for name, run in ways.items():
            runs[name].append(run())
    return [
        *_ratios(jobs, runs, sizes),
        *_cache(model, config, jobs),
        *_baseline(model, jobs, runs["continuous"], sizes),
    ]


def _ratios(jobs: Sequence[Job], runs: dict[str, list[Run]], sizes: Sizes) -> list[Figure]:
    def rates(name: str) -> list[float]:
        return [run.tokens_per_s for run in runs[name]]

    def over(name: str) -> list[float]:
        return [a / b for a, b in zip(rates("continuous"), rates(name), strict=True)]

    static_steps, best_steps = schedule_steps(jobs, sizes.num_slots)
    bound = static_steps / best_steps
    steps = [
        static.num_steps / continuous.num_steps
        for static, continuous in zip(runs["stay"], runs["continuous"], strict=True)
    ]
    wanted = Target(">=", 85)
    return [
        figure(_CASE, "continuous", rates("continuous"), "tokens/s"),
        figure(_CASE, "static, ended rows stay", rates("stay"), "tokens/s", note=_RATIO_NOTE),
        figure(_CASE, "static, ended rows leave", rates("leave"), "tokens/s", note=_RATIO_NOTE),
        figure(_CASE, "bound of the ratio by schedule", [bound], "x", note=_BOUND_NOTE),
        figure(_CASE, "ratio in steps", steps, "x"),
        figure(_CASE, "ratio in steps, of the bound", [100 * x / bound for x in steps], "%", target=wanted),
        figure(_CASE, "ratio in time, ended rows stay", over("stay"), "x"),
        figure(_CASE, "the same, of the bound", [100 * x / bound for x in over("stay")], "%", target=wanted),
        figure(_CASE, "ratio in time, ended rows leave", over("leave"), "x"),
    ]


def _cache(model: Model, config: EngineConfig, jobs: Sequence[Job]) -> list[Figure]:
    """What the blocks that sequences own hold, while C1 runs, and by schedule alone for texts as people write them."""
    chats = chatting(len(jobs), model.shape.vocab_size)
    probes = {
        f"C1, blocks of {config.block_size}": _probed(model, config, jobs),
        f"texts of 400, blocks of {config.block_size}": _probed(model, config, chats, has_model=False),
        "texts of 400, blocks of 16": _probed(model, replace(config, block_size=16), chats, has_model=False),
    }
    less = Target("<", 4)
    reserved = next(iter(probes.values())).waste_if_reserved_percent
    return [
        *(
            figure(_CASE, f"slots without a token: {name}", [got.waste_percent], "%", target=less, note=_CACHE_NOTE)
            for name, got in probes.items()
        ),
        figure(_CASE, f"slots without a token: C1, had each sequence {LONGEST_TEXT} slots", [reserved], "%"),
    ]


def _probed(model: Model, config: EngineConfig, jobs: Sequence[Job], *, has_model: bool = True) -> CacheProbe:
    probes: list[CacheProbe] = []

    def wrap(runner: Runner) -> CacheProbe:
        probes.append(CacheProbe(runner if has_model else NoModel(runner.num_blocks)))
        return probes[0]

    driver = Driver(model, config, wrap=wrap)
    probes[0].pool = driver.engine.pool
    run_burst(driver, jobs)
    return probes[0]


def _baseline(model: Model, jobs: Sequence[Job], ours: Sequence[Run], sizes: Sizes) -> list[Figure]:
    """``transformers`` on the same jobs."""
    theirs = make_transformers(model)
    expected = [answer.token_ids for answer in ours[0].answers]
    ways = {
        "generate, static batches": lambda: run_static(theirs, jobs, sizes.num_slots),
        "continuous batching": lambda: run_continuous(theirs, jobs, sizes.num_slots, sizes.num_step_tokens),
    }
    figures: list[Figure] = []
    for name, run in ways.items():
        try:
            done = [run() for _ in range(sizes.baseline_rounds)]
        except Exception as error:  # another project's defect must not end the measurement
            note = f"transformers' {name} does not run here: {type(error).__name__}: {error}"
            figures.append(figure(_CASE, f"transformers, {name}", [], "tokens/s", note=note))
            continue
        rates = [ours[0].num_tokens / one.duration_s for one in done]
        ratios = [run.tokens_per_s / rates[0] for run in ours]
        num_equal = sum(a == b for a, b in zip(done[0].token_ids, expected, strict=True))
        figures += [
            figure(_CASE, f"transformers, {name}", rates, "tokens/s", note=_BASELINE_NOTE),
            figure(_CASE, "  engine, continuous, over it", ratios, "x"),
            figure(_CASE, f"  answers equal to the engine's, of {len(jobs)}", [num_equal], "answers"),
        ]
    return figures
