"""``python -m benchmarks.scheduler``: what queue, batcher and answers cost a request, with a backend that does nothing.

Everything runs in one process. ``policy`` is queue and batcher alone: requests are added, batches are formed and taken.
``model`` is a whole ``ServedModel``: checks, queue, batch, the instance's thread and back, answer, statistics. Cases
take turns; the figures are medians of the rounds.
"""

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import numpy as np
import uvloop

from benchmarks import machine
from benchmarks.report import machine_lines, table, write_json
from weft.base.core import CallContext, InferCall
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import encode
from weft.serving.backends.base import Backend, Batch, InstanceContext, ModelContext
from weft.serving.backends.layout import BatchLayout
from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import LengthBuckets, SchedulerSettings
from weft.serving.request.request import InferenceRequest, InferenceResponse, Outcome
from weft.serving.runtime.model import ServedModel
from weft.serving.scheduler.admission import make_batch_key
from weft.serving.scheduler.batcher import make_batcher

ROOT = Path(__file__).resolve().parents[1]
_MAX_BATCH_SIZE = 32
_DEADLINE_NS = 10**12
_SIGNATURE = ModelSignature(
    "nothing", "1", "nothing", _MAX_BATCH_SIZE, (TensorSpec("IN", "FP32", (-1,)),), (TensorSpec("OUT", "FP32", (1,)),)
)
_BATCHING = SchedulerSettings(_MAX_BATCH_SIZE, is_batching=True)
_LEVELS = replace(_BATCHING, priority_levels=3, default_priority_level=2)


class Case(NamedTuple):
    """Settings of the model, and what the requests carry."""

    name: str
    settings: SchedulerSettings
    buckets: LengthBuckets | None = None
    has_deadline: bool = False


CASES = (
    Case("one by one", SchedulerSettings(_MAX_BATCH_SIZE)),
    Case("batching", _BATCHING),
    Case("batching, 3 levels", _LEVELS),
    Case("batching, 3 levels, ageing", replace(_LEVELS, priority_aging_us=1000)),
    Case("batching, deadlines", _BATCHING, has_deadline=True),
    Case("batching, 4 length buckets", _BATCHING, LengthBuckets((8, 16, 24, 32), {"IN": 0.0})),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one case; medians of the rounds.

    Attributes:
        case: What ran.
        part: ``"policy"`` or ``"model, N at once"``.
        cpu_us: CPU of the process for one request, microseconds.
        spread_us: Half the distance of the quartiles of ``cpu_us``.
        wall_us: Time for one request, microseconds.
        mean_batch: Requests of one execution.
    """

    case: str
    part: str
    cpu_us: float
    spread_us: float
    wall_us: float
    mean_batch: float


class Nothing(Backend):
    """Answers every request with the same number."""

    def load(self) -> None:
        """The answer is made."""
        self._outputs = {"OUT": np.zeros((1, 1), np.float32)}

    def execute(self, batch: Batch) -> list[Outcome]:
        """The answer, for each request."""
        return [InferenceResponse(self._outputs) for _ in batch.requests]


def calls(case: Case) -> list[InferCall]:
    """Requests of four lengths and, where the model has levels, of each level."""
    levels = max(case.settings.priority_levels, 1)
    return [
        InferCall(
            "nothing",
            parameters={"priority": number % levels + 1} if levels > 1 else {},
            inputs={"IN": encode(np.zeros((1, 8 * (number % 4) + 1 if case.buckets else 8), np.float32))},
        )
        for number in range(60)
    ]


def run_policy(case: Case, num_requests: int) -> tuple[float, float, float]:
    """CPU and wall microseconds for one request, and requests in a batch; 64 requests are queued at a time."""
    queue, batcher = PriorityQueue(case.settings), make_batcher(case.settings, case.buckets)
    key = make_batch_key(_SIGNATURE, case.buckets) if case.settings.is_batching else None
    sent = calls(case)
    context = CallContext(deadline_ns=_DEADLINE_NS if case.has_deadline else None)
    num_batches = 0
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for start in range(0, num_requests, 64):
        for number in range(start, start + 64):
            call = sent[number % len(sent)]
            request = InferenceRequest(call, context, 1, int(call.parameters.get("priority", 0)))
            if key is not None:
                request.batch_key = key(call.inputs)
            queue.add(request, number)
        while batch := batcher.next_batch(queue, start).requests:
            queue.take(batch, start)
            num_batches += 1
    scale = 1e6 / num_requests
    return (
        (time.process_time() - start_cpu_s) * scale,
        (time.perf_counter() - start_s) * scale,
        num_requests / num_batches,
    )


async def run_model(case: Case, concurrency: int, num_requests: int) -> tuple[float, float, float]:
    """CPU and wall microseconds for one request, and requests in a batch."""
    context = ModelContext(_SIGNATURE, Path(), {}, {}, layout=BatchLayout(case.buckets))
    model = ServedModel(context, Nothing, case.settings, [InstanceContext("nothing_0")])
    await model.start()
    sent = calls(case)
    supply = iter(range(num_requests))

    async def worker() -> None:
        for number in supply:
            deadline_ns = time.monotonic_ns() + _DEADLINE_NS if case.has_deadline else None
            await model.infer(sent[number % len(sent)], CallContext(deadline_ns=deadline_ns))

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    scale = 1e6 / num_requests
    figures = (time.process_time() - start_cpu_s) * scale, (time.perf_counter() - start_s) * scale
    await model.stop(grace_s=5)
    return *figures, num_requests / model.statistics.execution_count


def measure(num_rounds: int, num_requests: int) -> list[Row]:
    """One row for each case and part."""
    parts: dict[str, Callable[[Case], tuple[float, float, float]]] = {"policy": lambda c: run_policy(c, num_requests)}
    for concurrency in (1, 32):
        parts[f"model, {concurrency} at once"] = lambda case, concurrency=concurrency: _run(
            case, concurrency, num_requests
        )
    figures: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    gc.freeze()
    for _ in range(num_rounds):
        for part, run in parts.items():
            for case in CASES:
                figures.setdefault((case.name, part), []).append(run(case))
    rows = []
    for (name, part), found in figures.items():
        cpu_us, wall_us, mean_batch = ([values[i] for values in found] for i in range(3))
        low, _, high = quantiles(cpu_us, n=4) if len(cpu_us) > 1 else (cpu_us[0],) * 3
        rows.append(
            Row(
                name,
                part,
                round(median(cpu_us), 2),
                round((high - low) / 2, 2),
                round(median(wall_us), 2),
                round(median(mean_batch), 1),
            )
        )
    return rows


def _run(case: Case, concurrency: int, num_requests: int) -> tuple[float, float, float]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_model(case, concurrency, num_requests))


def render(rows: Sequence[Row]) -> str:
    """A table with one line for each row; microseconds for one request."""
    lines = [["case", "part", "CPU us", "spread", "wall us", "batch"]]
    lines += [
        [row.case, row.part, f"{row.cpu_us:.1f}", f"{row.spread_us:.1f}", f"{row.wall_us:.1f}", f"{row.mean_batch:.1f}"]
        for row in rows
    ]
    return table(lines, left_columns=(0, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.scheduler", description="What queue and batcher cost a request.")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="default: 7")
    parser.add_argument("--requests", type=int, default=6_400, metavar="N", help="of a case in a round; default: 6400")
    parser.add_argument("--quick", action="store_true", help="seconds; shows only that everything works")
    options = parser.parse_args(argv)
    rows = measure(*((1, 128) if options.quick else (options.rounds, options.requests)))
    described = machine.describe()
    print("\n".join([*machine_lines(described), "", render(rows)]))
    if not options.quick:
        print(f"\nwrote {write_json(ROOT / 'benchmarks' / 'results', rows, described, prefix='scheduler-')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
