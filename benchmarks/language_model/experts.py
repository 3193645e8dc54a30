"""``python -m benchmarks.language_model.experts``: experts of a layer beside an MLP of the same active weights.

Each row goes to 8 of 64 experts drawn at random, all alike; every call has a new draw. The dense MLP is as wide as the
experts that the draw uses together, and multiplies as many rows as one of these has on average, so that both read the
same weights and do the same products; it is one of several that have as many weights as
all experts, so that it comes from memory as these do. Times are
of one thread's CPU, the least of several rounds, without the router's own product.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.report import machine_lines, table, write_json
from weft.llm import ops
from weft.llm.models.mlp import Experts, Mlp, Routing
from weft_kernels.linear.products import linear

ROOT = Path(__file__).resolve().parents[2]
_HIDDEN_SIZE, _EXPERT_SIZE = 1024, 512
_ROUTING = Routing(num_experts=64, num_chosen=8, is_normalized=True)
_NUM_ROWS = (1, 8, 32)
_NUM_CALLS, _NUM_ROUNDS = 16, 5
#: Type of numbers, and bits that the weights are rounded to.
_KINDS: dict[str, tuple[torch.dtype, int]] = {
    "float32": (torch.float32, 0),
    "bfloat16": (torch.bfloat16, 0),
    "int8": (torch.float32, 8),
    "int4": (torch.float32, 4),
}
_MOST = 1.3


@dataclass(frozen=True)
class Comparison:
    """One line of the table: ``ratio`` is the time of the experts by that of the dense MLP."""

    kind: str
    num_rows: int
    experts_ms: float
    dense_ms: float
    ratio: float


def _matrix(num_outputs: int, num_inputs: int, kind: str, num_experts: int = 1) -> ops.Linear:
    dtype, num_bits = _KINDS[kind]
    weight = torch.randn(num_experts * num_outputs, num_inputs).to(dtype) / num_inputs**0.5
    return linear(weight, dtype=dtype, num_bits=num_bits, num_experts=num_experts, deterministic=True)


def _experts(kind: str, scores: Iterator[torch.Tensor]) -> Experts:
    size, count = _EXPERT_SIZE, _ROUTING.num_experts
    products: dict[str, ops.Linear] = {
        "gate.weight": lambda x: next(scores),
        "experts.gate_up_proj.weight": _matrix(2 * size, _HIDDEN_SIZE, kind, count),
        "experts.down_proj.weight": _matrix(_HIDDEN_SIZE, size, kind, count),
    }
    return Experts("", products, ops.silu_mul, _ROUTING)


def _dense(kind: str, num_experts: int) -> Mlp:
    size = num_experts * _EXPERT_SIZE
    products = {
        "gate_up_proj.weight": _matrix(2 * size, _HIDDEN_SIZE, kind),
        "down_proj.weight": _matrix(_HIDDEN_SIZE, size, kind),
    }
    return Mlp("", products, ops.silu_mul)


def _least_ms(call: Callable[[], object]) -> float:
    times_ns = []
    for _ in range(_NUM_ROUNDS):
        start_ns = time.thread_time_ns()
        for _ in range(_NUM_CALLS):
            call()
        times_ns.append(time.thread_time_ns() - start_ns)
    return min(times_ns) / _NUM_CALLS / 1e6


def measure(kind: str) -> list[Comparison]:
    """A line for each number of rows."""
    draws: list[torch.Tensor] = []
    experts = _experts(kind, (draws[call % _NUM_CALLS] for call in itertools.count()))
    lines = []
    for num_rows in _NUM_ROWS:
        draws[:] = [torch.randn(num_rows, _ROUTING.num_experts) for _ in range(_NUM_CALLS)]
        x = torch.randn(num_rows, _HIDDEN_SIZE).to(_KINDS[kind][0])
        experts_ms, dense_ms = _least_ms(partial(experts, x)), _dense_ms(kind, draws, x[:1])
        lines.append(Comparison(kind, num_rows, experts_ms, dense_ms, experts_ms / dense_ms))
    return lines


def _dense_ms(kind: str, draws: Sequence[torch.Tensor], row: torch.Tensor) -> float:
    """Time of a dense MLP for the draws, between the whole numbers of rows that are nearest to their mean."""
    num_chosen, count = _ROUTING.num_chosen, _ROUTING.num_experts
    num_used = round(sum(draw.topk(num_chosen).indices.unique().numel() for draw in draws) / len(draws))
    num_rows = len(draws[0]) * num_chosen / num_used
    turns = itertools.cycle([_dense(kind, num_used) for _ in range(math.ceil(count / num_used))])
    few_ms, many_ms = (
        _least_ms(partial(_call_next, turns, row.repeat(whole, 1)))
        for whole in (math.floor(num_rows), math.ceil(num_rows))
    )
    return few_ms + (num_rows % 1) * (many_ms - few_ms)


def _call_next(turns: Iterator[Mlp], x: torch.Tensor) -> torch.Tensor:
    return next(turns)(x)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when no ratio is above the bound."""
    parser = argparse.ArgumentParser(prog="benchmarks.language_model.experts", description=__doc__)
    parser.add_argument("--only", default=",".join(_KINDS), metavar="KINDS", help=f"some of {','.join(_KINDS)}")
    kinds = parser.parse_args(argv).only.split(",")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [line for kind in kinds for line in measure(kind)]
    header = ["weights", "rows", "experts ms", "dense ms", "ratio"]
    rows = [
        [one.kind, str(one.num_rows), f"{one.experts_ms:.3f}", f"{one.dense_ms:.3f}", f"{one.ratio:.2f}"]
        for one in lines
    ]
    described = machine.describe()
    print("\n".join([*machine_lines(described), "", table([header, *rows], left_columns=(0,))]))
    print(f"\nwrote {write_json(ROOT / 'benchmarks' / 'results', lines, described, prefix='experts-')}")
    return int(any(one.ratio > _MOST for one in lines))


if __name__ == "__main__":
    sys.exit(main())
