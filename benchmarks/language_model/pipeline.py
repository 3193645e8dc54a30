"""``python -m benchmarks.language_model.pipeline``: the bubble of a pipeline of two stages, and its steps beside one's.

A stage is idle while it awaits others. With parts alone, each step awaits the tokens of the one before, as an engine
does that does not plan ahead: of M parts and P stages (P - 1) / (M + P - 1) of the time, if parts and stages cost the
same. With plans ahead, a step begins while the one before is computed. Each process has one thread, but for the row
``one, 2 threads``.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tests.ranks import on_ranks

from benchmarks import machine
from benchmarks.language_model.parallel import TimedGroup, random_model
from benchmarks.report import machine_lines, table, write_json
from weft.llm.config import EngineConfig
from weft.llm.parallel.groups import Groups
from weft.llm.parallel.topology import ParallelSizes
from weft.llm.request import EngineRequest, SamplingParams
from weft.llm.runner import ModelRunner
from weft.llm.scheduler.decodes import Decodes, build_plan
from weft.llm.scheduler.micro_batches import split
from weft.llm.scheduler.plan import UNKNOWN_TOKEN, ForwardPlan
from weft.llm.scheduler.sequence import Sequence as EngineSequence

ROOT = Path(__file__).resolve().parents[2]
_NUM_STEPS, _NUM_WARM, _NUM_ROUNDS = 16, 3, 3
_CONTEXT, _BLOCK_SIZE = 128, 16
#: Steps by their names: sequences, and new tokens of each; one follows ``_CONTEXT - 1`` others, a prompt none.
_STEPS = {"decode, 1 row": (1, 1), "decode, 8 rows": (8, 1), "decode, 32 rows": (32, 1), "prompt, 128 tokens": (1, 128)}


@dataclass(frozen=True)
class Line:
    """One line of the table: ``idle`` is the share of each stage, ``formula`` what it is for equal parts."""

    step: str
    way: str
    num_parts: int
    step_ms: float
    ratio: float
    idle: tuple[float, ...]
    formula: float


def _plan(num_seqs: int, num_new: int, *, is_known: bool) -> ForwardPlan:
    """A step of sequences of ``_CONTEXT`` tokens, each of which computes its last ones."""
    num_blocks = _CONTEXT // _BLOCK_SIZE
    seqs = []
    for slot in range(num_seqs):
        request = EngineRequest(np.zeros(_CONTEXT, np.int32), SamplingParams(), sink=lambda delta: None)
        seq = EngineSequence(request, slot)
        seq.slot, seq.num_scheduled, seq.remaining = slot, num_new, num_new
        seq.block_table = [*range(1 + slot * num_blocks, 1 + (slot + 1) * num_blocks)]
        seqs.append(seq)
    nothing = Decodes(num_seqs, _BLOCK_SIZE)
    plan = build_plan(nothing, seqs, changed=seqs, has_sampling_extras=False, block_size=_BLOCK_SIZE)
    return plan if is_known else plan._replace(token_ids=np.full_like(plan.token_ids, UNKNOWN_TOKEN))


def step_times(groups: Groups, *, is_ahead: bool, num_threads: int) -> dict[str, tuple[float, float, int]]:
    """Of each step its seconds, its idle share and its parts; of the round whose steps were the fastest."""
    groups = Groups(*map(TimedGroup, groups))
    model, pipeline = random_model(groups), groups.pipeline
    config = EngineConfig(
        num_blocks=300,
        block_size=_BLOCK_SIZE,
        num_threads=num_threads,
        async_scheduling=str(is_ahead).lower(),
    ).resolved(model.config)
    runner = ModelRunner(model, config)
    runner.bind_thread()
    found = {}
    for name, (num_seqs, num_new) in _STEPS.items():
        plan = _plan(num_seqs, num_new, is_known=num_new > 1 or not is_ahead)
        rounds = []
        for _ in range(_NUM_ROUNDS):
            for index in range(_NUM_WARM + _NUM_STEPS):
                if index == _NUM_WARM:
                    start_s, before_s = time.perf_counter(), pipeline.spent_s
                runner.launch(plan)()
                _tell(groups)
                if index or not is_ahead:  # the engine plans one step ahead, and then awaits the one before
                    _await(groups)
            if is_ahead:
                runner._link.await_next([])
                _await(groups)
            total_s = time.perf_counter() - start_s
            rounds.append((total_s / _NUM_STEPS, (pipeline.spent_s - before_s) / total_s))
        num_parts = 1 if pipeline.size == 1 else len(split(plan, runner._num_parts(plan)))
        found[name] = (*min(rounds), num_parts)
    return found


def _tell(groups: Groups) -> None:
    """Tell the first of two stages that the last has the step's tokens."""
    if groups.pipeline.rank:
        groups.pipeline.send(torch.zeros(1), 0)


def _await(groups: Groups) -> None:
    """Wait at the first of two stages for that."""
    if groups.pipeline.rank < groups.pipeline.size - 1:
        groups.pipeline.receive(torch.zeros(1), 1)


def _on_ranks(size: int, is_ahead: bool = False, num_threads: int = 1) -> list[dict[str, tuple[float, float, int]]]:
    return on_ranks(ParallelSizes(pipeline=size), _step_times, is_ahead, num_threads)


def _step_times(groups: Groups, is_ahead: bool, num_threads: int) -> dict[str, tuple[float, float, int]]:
    return step_times(groups, is_ahead=is_ahead, num_threads=num_threads)


def measure() -> list[Line]:
    """Lines of every step: one process, with one thread and with two, and two stages in both ways."""
    ways = {
        "one": _on_ranks(1),
        "one, 2 threads": _on_ranks(1, num_threads=2),
        "two stages": _on_ranks(2),
        "two stages, plans ahead": _on_ranks(2, is_ahead=True),
    }
    lines = []
    for step in _STEPS:
        for way, stages in ways.items():
            seconds = max(stage[step][0] for stage in stages)
            num_parts, num_stages = stages[0][step][2], len(stages)
            is_full = "ahead" in way and (num_parts > 1 or step.startswith("prompt"))
            formula = 0.0 if is_full else (num_stages - 1) / (num_parts + num_stages - 1)
            idle = tuple(stage[step][1] for stage in stages)
            lines.append(Line(step, way, num_parts, 1e3 * seconds, seconds / ways["one"][0][step][0], idle, formula))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """0: there are no targets; what stages gain depends on the machine."""
    argparse.ArgumentParser(prog="benchmarks.language_model.pipeline", description=__doc__).parse_args(argv)
    lines = measure()
    header = ["step", "way", "parts", "ms", "ratio", "idle, by stage", "formula"]
    rows = [
        [
            one.step,
            one.way,
            str(one.num_parts),
            f"{one.step_ms:.2f}",
            f"{one.ratio:.2f}",
            ", ".join(f"{share:.0%}" for share in one.idle),
            f"{one.formula:.0%}",
        ]
        for one in lines
    ]
    described = machine.describe()
    print("\n".join([*machine_lines(described), "", table([header, *rows], left_columns=(0, 1))]))
    print(f"\nwrote {write_json(ROOT / 'benchmarks' / 'results', lines, described, prefix='pipeline-')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
