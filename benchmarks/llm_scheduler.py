"""``python -m benchmarks.llm_scheduler``: what a step costs the scheduler of the language-model engine, with no model.

Sequences run and wait as in a full engine, tokens are drawn at random, and every sequence that ends is followed by a
new one. ``schedule`` makes the plan, ``complete`` takes the tokens in; the steps of a case are measured one by one, in
CPU time of the thread, since another process on the core is none of the scheduler's cost.
"""

import argparse
import cProfile
import gc
import pstats
import sys
import time
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.report import machine_lines, table, write_json
from weft.llm.config import EngineConfig
from weft.llm.request import EngineRequest, SamplingParams
from weft.llm.scheduler.blocks import BlockPool
from weft.llm.scheduler.scheduler import Scheduler
from weft.llm.scheduler.sequence import Sequence

ROOT = Path(__file__).resolve().parents[1]
_BUDGET_TOKENS = 2048
_BLOCK_SIZE = 16
_VOCAB = 32_000
_ENDLESS = 3_900
_TARGET_US = 500.0


class Case(NamedTuple):
    """What runs and waits.

    Attributes:
        mean_output: Tokens of an answer on average, exponentially distributed; 0: more than the steps measured.
        num_blocks: Of the pool; below what all that run need, sequences are preempted.
        num_shared: Tokens of a prompt, of 128, that all prompts have in common.
        has_penalties: Every sequence asks for penalties.
        num_levels: Priority levels, by turns.
    """

    name: str
    num_running: int = 256
    num_waiting: int = 1000
    mean_output: int = 200
    num_blocks: int = 16_384
    num_shared: int = 0
    has_penalties: bool = False
    num_levels: int = 1


CASES = (
    Case("256 running, 1000 waiting"),
    Case("the same, nobody ends", mean_output=0, num_blocks=65_537),
    Case("the same, prompts of 128 share 96", num_shared=96),
    Case("the same, three levels, too few blocks", num_blocks=4096, num_levels=3),
    Case("the same, all with penalties", has_penalties=True),
    Case("16 running, 10000 waiting", num_running=16, num_waiting=10_000),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one case; microseconds of CPU for one step.

    Attributes:
        case: What ran.
        schedule_us, complete_us, step_us: Medians over the steps of all rounds; a step is both.
        step_p99_us: What 99 of 100 steps did not exceed.
        num_tokens: Tokens of a step, median.
        ends_per_step: Sequences that ended in a step, mean.
        num_preemptions: In all rounds.
    """

    case: str
    schedule_us: float
    complete_us: float
    step_us: float
    step_p99_us: float
    num_tokens: float
    ends_per_step: float
    num_preemptions: int


class Load:
    """A scheduler that is kept full."""

    def __init__(self, case: Case, seed: int) -> None:
        self._case = case
        self._rng = np.random.default_rng(seed)
        config = EngineConfig(
            block_size=_BLOCK_SIZE,
            num_blocks=case.num_blocks,
            max_num_seqs=case.num_running,
            max_num_batched_tokens=_BUDGET_TOKENS,
            long_prefill_token_threshold=_BUDGET_TOKENS,  # as an engine resolves it
            max_model_len=4096,
        )
        self._pool = BlockPool(case.num_blocks, _BLOCK_SIZE, enable_prefix_caching=True, key=b"benchmark")
        self.scheduler = Scheduler(config, self._pool)
        self._ids = count(1)
        self._shared = self._rng.integers(_VOCAB, size=case.num_shared)
        for _ in range(case.num_running + case.num_waiting):
            self.add()

    def add(self) -> None:
        """One sequence more waits."""
        case, number = self._case, next(self._ids)
        own = self._rng.integers(_VOCAB, size=128 - case.num_shared)
        request = EngineRequest(
            np.concatenate([self._shared, own]).astype(np.int32),
            SamplingParams(
                max_tokens=1 + int(self._rng.exponential(case.mean_output)) if case.mean_output else _ENDLESS,
                presence_penalty=0.5 if case.has_penalties else 0.0,
            ),
            lambda delta: None,
            level=number % case.num_levels,
            arrival_ns=number,
        )
        # As the engine does on the thread that submits.
        tokens = array("i", request.prompt_ids.tobytes())
        request.block_hashes = self._pool.hasher.prompt(request.salt, tokens, lambda: False)
        self.scheduler.add(Sequence(request, number))

    def step(self) -> tuple[float, float, int, int]:
        """Microseconds of ``schedule`` and of ``complete``, tokens, and sequences that ended and were replaced."""
        start_ns = time.thread_time_ns()
        plan = self.scheduler.schedule()
        middle_ns = time.thread_time_ns()
        assert plan is not None  # noqa: S101  # the load never runs dry
        tokens = self._rng.integers(_VOCAB, size=len(plan.sample_rows), dtype=np.int32)
        again_ns = time.thread_time_ns()
        results = self.scheduler.complete(tokens)
        end_ns = time.thread_time_ns()
        num_ended = sum(result.is_finished for result in results)
        for _ in range(num_ended):
            self.add()
        return (middle_ns - start_ns) / 1e3, (end_ns - again_ns) / 1e3, len(plan.token_ids), num_ended


def measure(case: Case, num_rounds: int, num_warm: int, num_steps: int) -> Row:
    """Figures of a case; the first ``num_warm`` steps of a round fill the slots and are not counted."""
    steps: list[tuple[float, float, int, int]] = []
    num_preemptions = 0
    for seed in range(num_rounds):
        load = Load(case, seed)
        for _ in range(num_warm):
            load.step()
        before = load.scheduler.num_preemptions
        gc.collect()
        steps += [load.step() for _ in range(num_steps)]
        num_preemptions += load.scheduler.num_preemptions - before
    schedule_us, complete_us, num_tokens, num_ended = zip(*steps, strict=True)
    step_us = [first + second for first, second in zip(schedule_us, complete_us, strict=True)]
    return Row(
        case.name,
        round(median(schedule_us), 1),
        round(median(complete_us), 1),
        round(median(step_us), 1),
        round(quantiles(step_us, n=100)[98], 1),
        median(num_tokens),
        round(sum(num_ended) / len(steps), 2),
        num_preemptions,
    )


def render(rows: Seq[Row]) -> str:
    """A table with one line for each row."""
    lines = [["case", "schedule us", "complete us", "step us", "p99 us", "tokens", "ends", "preemptions"]]
    for row in rows:
        figures = (row.schedule_us, row.complete_us, row.step_us, row.step_p99_us)
        lines.append(
            [
                row.case,
                *(f"{figure:.0f}" for figure in figures),
                f"{row.num_tokens:.0f}",
                f"{row.ends_per_step:.2f}",
                str(row.num_preemptions),
            ]
        )
    return table(lines, left_columns=(0,))


def profile(case: Case, num_steps: int) -> None:
    """Print the functions that take the time of a case."""
    load = Load(case, 0)
    for _ in range(100):
        load.step()
    with cProfile.Profile() as profiler:
        for _ in range(num_steps):
            load.step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def main(argv: Seq[str] | None = None) -> int:
    """0 when everything was measured and the first case is below its target."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.llm_scheduler", description="What a step costs the scheduler of the language-model engine."
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="of a round; default: 1000")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text")
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    parser.add_argument("--quick", action="store_true", help="seconds; shows only that everything works")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if options.only in case.name]
    if options.profile:
        for case in cases:
            profile(case, options.steps)
        return 0
    sizes = (1, 60, 10) if options.quick else (options.rounds, 100, options.steps)
    rows = [measure(case, *sizes) for case in cases]
    described = machine.describe()
    print("\n".join([*machine_lines(described), "", render(rows)]))
    if options.quick:
        return 0
    print(f"\nwrote {write_json(ROOT / 'benchmarks' / 'results', rows, described, prefix='llm-scheduler-')}")
    is_slow = any(row.case == CASES[0].name and row.step_us >= _TARGET_US for row in rows)
    if is_slow:
        print(f"a step of '{CASES[0].name}' takes more than {_TARGET_US:.0f} us")
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
