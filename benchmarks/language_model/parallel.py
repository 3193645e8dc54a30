"""``python -m benchmarks.language_model.parallel``: steps of a model that several processes compute, beside one.

Each process has one thread. A step's time is that of the first rank, the least of several; communication is the time
within operations of its groups, in which it also waits for the others.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.ranks import on_ranks
from torch import Tensor

from benchmarks import machine
from benchmarks.language_model import ring
from benchmarks.language_model.shapes import MAX_MODEL_LEN, SHAPES, WEIGHTS_SEED, hugging_face_config
from benchmarks.report import machine_lines, table, write_json
from weft.llm.config import EngineConfig
from weft.llm.engine_core import EngineCore
from weft.llm.metrics import EngineMetrics
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import config_from_json
from weft.llm.models.weights import random_weights
from weft.llm.parallel import context
from weft.llm.parallel.groups import Group, Groups
from weft.llm.parallel.topology import ParallelSizes
from weft.llm.request import EngineRequest, SamplingParams
from weft.llm.runner import ModelRunner

ROOT = Path(__file__).resolve().parents[2]
_BLOCK_SIZE, _CONTEXT = 16, 128
_NUM_STEPS, _NUM_WARM = 60, 5
#: A long prompt, in tokens, and the tokens of it that a step computes.
_PROMPT_LEN, _CHUNKS = 8000, (128, 256)
#: Steps by their names: sequences, and new tokens of each behind ``_CONTEXT`` others; a prompt has no others.
_STEPS = {
    "decode, 1 row": (1, 1),
    "decode, 8 rows": (8, 1),
    "decode, 32 rows": (32, 1),
    "prompt, 128 tokens": (1, 128),
}


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        axis: Which sizes of ``ParallelSizes``; "one" for one process.
        communication: Share of the time within operations of groups.
        ratio: Of the time by that of one process.
    """

    axis: str
    step: str
    step_ms: float
    communication: float
    ratio: float


class TimedGroup(Group):
    """A group that adds up the time of its operations."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group._ranks, group._handle, group._back)
        self.spent_s = 0.0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("all_gather", "all_reduce", "broadcast", "send", "receive") or self.size == 1:
            return found

        def timed(*args: Any, **options: Any) -> Any:
            start_s, before_s = time.perf_counter(), self.spent_s
            try:
                return found(*args, **options)
            finally:
                self.spent_s = before_s + time.perf_counter() - start_s  # also where one operation calls another

        return timed


def random_model(groups: Groups, **options: Any) -> TransformerModel:
    """This rank's part of a random Llama of 28 M parameters, in float32."""
    config = config_from_json(hugging_face_config(SHAPES["mid"]))
    by_outputs = options.get("deterministic", False)
    weights = random_weights(config, WEIGHTS_SEED, groups=groups, by_outputs=by_outputs)
    return TransformerModel(config, dict(weights), max_model_len=MAX_MODEL_LEN, groups=groups, **options)


def _step(model: TransformerModel, kv: Tensor, num_seqs: int, num_new: int) -> None:
    first = _CONTEXT if num_new == 1 else 0
    ends = torch.arange(num_seqs + 1, dtype=torch.int32) * num_new
    positions = torch.arange(first, first + num_new, dtype=torch.int32).repeat(num_seqs)
    per_seq = -(-(first + num_new) // _BLOCK_SIZE)
    tables = 1 + torch.arange(num_seqs * per_seq, dtype=torch.int32).view(num_seqs, per_seq)
    slots = tables.long().gather(1, positions.long().view(num_seqs, -1) // _BLOCK_SIZE) * _BLOCK_SIZE
    contexts = torch.full((num_seqs,), first + num_new, dtype=torch.int32)
    hidden = model.forward(
        positions * 7 % model.config.vocab_size, positions, kv, tables, ends, contexts,
        slots.flatten() + positions % _BLOCK_SIZE, num_new, first + num_new,
    )  # fmt: skip
    model.logits(hidden[ends[1:].long() - 1])


def step_times(groups: Groups, options: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Seconds of each step, and of its communication; of the fastest."""
    groups = Groups(*map(TimedGroup, groups))
    model = random_model(groups, **options)
    kv = model.new_kv(1 + 32 * (_CONTEXT // _BLOCK_SIZE + 1), _BLOCK_SIZE)
    model.prepare()
    found = {}
    for name, (num_seqs, num_new) in _STEPS.items():
        times = []
        for _ in range(_NUM_WARM + _NUM_STEPS):
            before_s, start_s = sum(group.spent_s for group in groups), time.perf_counter()
            _step(model, kv, num_seqs, num_new)
            times.append((time.perf_counter() - start_s, sum(group.spent_s for group in groups) - before_s))
        found[name] = min(times[_NUM_WARM:])
    return found


def _measure_steps(axis: str, sizes: ParallelSizes, **options: Any) -> list[Line]:
    """Steps of one process and of several, one after the other."""
    one, several = (on_ranks(each, step_times, options)[0] for each in (ParallelSizes(), sizes))
    alone = "one, deterministic" if options else "one"
    return [
        line
        for name in _STEPS
        for line in (
            Line(alone, name, one[name][0] * 1000, 0.0, 1.0),
            Line(
                axis,
                name,
                several[name][0] * 1000,
                several[name][1] / several[name][0],
                several[name][0] / one[name][0],
            ),
        )
    ]


def prompt_times(groups: Groups, cases: Sequence[tuple[int, int, int]]) -> dict[tuple[int, int], tuple[float, float]]:
    """Seconds from a prompt to its first token, and those of communication, by its tokens and those of a step.

    ``cases``: the tokens of the prompt, those of a step, and how often it is measured. Steps of any length are divided.
    """
    groups = Groups(*map(TimedGroup, groups))
    context.MIN_TOKENS["cpu"] = 1
    described = hugging_face_config(SHAPES["mid"]) | {"max_position_embeddings": _PROMPT_LEN + 64}
    config = config_from_json(described)
    model = TransformerModel(config, dict(random_weights(config, WEIGHTS_SEED)), groups=groups)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, _PROMPT_LEN, np.int32)
    found = {}
    for num_tokens, chunk, num_runs in cases:
        settings = EngineConfig(
            max_num_batched_tokens=chunk,
            max_num_seqs=8,
            block_size=_BLOCK_SIZE,
            num_blocks=_PROMPT_LEN // _BLOCK_SIZE + 8,
            enable_prefix_caching=False,
        ).resolved(config)
        runner, times = ModelRunner(model, settings), []
        runner.bind_thread()
        runner.warm_up()
        for _ in range(num_runs):
            core = EngineCore(runner, settings, config, EngineMetrics(settings, config), time.monotonic_ns)
            params = SamplingParams(max_tokens=1, temperature=0.0)
            before_s, start_s = sum(group.spent_s for group in groups), time.perf_counter()
            core.admit(EngineRequest(prompt[:num_tokens], params, lambda delta: None))
            while core.has_requests:
                core.step()
            times.append((time.perf_counter() - start_s, sum(group.spent_s for group in groups) - before_s))
        runner.close()
        found[num_tokens, chunk] = statistics.median(times)  # with its communication: an odd number
    return found


def _measure_prompts() -> list[Line]:
    found: dict[str, dict[tuple[int, int], tuple[float, float]]] = {"one": {}, "context 2": {}}
    short = [(num_tokens, 128, 15) for num_tokens in (16, 32, 64, 128)]
    for name, sizes in (("one", ParallelSizes()), ("context 2", ParallelSizes(context=2))):
        for cases in (short, *([(_PROMPT_LEN, chunk, 1)] for chunk in _CHUNKS)):
            found[name] |= on_ranks(sizes, prompt_times, cases)[0]
    return [
        Line(
            name,
            f"prompt, {num_tokens} tokens" + f", {chunk} a step" * (num_tokens > chunk),
            spent_s * 1000,
            communication_s / spent_s,
            spent_s / found["one"][num_tokens, min(chunk, 128)][0],
        )
        for num_tokens, chunk in found["one"]
        for name in found
        for spent_s, communication_s in [found[name][num_tokens, chunk]]
    ]


def _measure_rings() -> list[Line]:
    found = on_ranks(ParallelSizes(context=2), ring.attention_times)[0]
    return [
        Line(
            f"{way}, {num_bytes / 1e6:.2f} MB",
            f"attention, {num_new} of {num_keys} tokens",
            spent_s * 1000,
            communication_s / spent_s,
            spent_s / found["all-gather", num_new, num_keys][0],
        )
        for (way, num_new, num_keys), (spent_s, communication_s, num_bytes) in found.items()
    ]


AXES: dict[str, Callable[[], list[Line]]] = {
    "tensor": partial(_measure_steps, "tensor 2", ParallelSizes(tensor=2)),
    "deterministic": partial(_measure_steps, "tensor 2, deterministic", ParallelSizes(tensor=2), deterministic=True),
    "context": _measure_prompts,
    "ring": _measure_rings,
}


def main(argv: Sequence[str] | None = None) -> int:
    """0: there are no targets; what the ranks gain depends on what connects them."""
    parser = argparse.ArgumentParser(prog="benchmarks.language_model.parallel", description=__doc__)
    parser.add_argument("--only", default=",".join(AXES), metavar="AXES", help=f"some of {','.join(AXES)}")
    lines = [line for axis in parser.parse_args(argv).only.split(",") for line in AXES[axis]()]
    header = ["step", "processes", "ms", "communication", "ratio"]
    rows = [[one.step, one.axis, f"{one.step_ms:.2f}", f"{one.communication:.0%}", f"{one.ratio:.2f}"] for one in lines]
    described = machine.describe()
    print("\n".join([*machine_lines(described), "", table([header, *rows], left_columns=(0, 1))]))
    print(f"\nwrote {write_json(ROOT / 'benchmarks' / 'results', lines, described, prefix='parallel-')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
