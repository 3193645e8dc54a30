"""``python -m benchmarks.priorities``: what requests of level 1 notice of a model that is asked for too much.

The model sleeps: it takes a fixed time, one request after another, and no CPU, so that the figures are those of queue
and scheduling. Level 1 is 12 % of what the model can do; level 2 fills up to 120 %, its queue is bounded. ``first
come`` is the same load on a model without levels. The last rows have 4 callers at level 1 and 28 at level 2, each
sending its next request when it is answered.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np

from benchmarks import machine
from benchmarks.report import Row, make_row, render, write_json
from benchmarks.requests import SEED
from benchmarks.service import running_model_service
from weft.base.core import InferCall
from weft.base.processes.process import Endpoint
from weft.base.tensors import encode
from weft.capacity.tuning.load import Bounds, Load, caller, closed_loop, open_loop
from weft.v2.client.channels import open_channel
from weft.v2.protocol.encoding import serialize_call

ROOT = Path(__file__).resolve().parents[1]
_EXECUTION_S = 0.0054
_OVERLOAD, _SHARE = 1.2, 0.12
_MODEL = f"""
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({_EXECUTION_S} * len(requests))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
            for r in requests
        ]
"""
_CONFIG = """
backend: "python"
parameters { key: "EXECUTION" value { string_value: "thread" } }
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
_SETTINGS = {
    "levels": "dynamic_batching { preferred_batch_size: [ 1 ] priority_levels: 2 default_priority_level: 2 "
    "priority_queue_policy { key: 2 value { max_queue_size: 64 } } }",
    "first come": "dynamic_batching { preferred_batch_size: [ 1 ] default_queue_policy { max_queue_size: 64 } }",
}


def write_repository(repository: Path) -> None:
    """A model for each setting."""
    for name, settings in _SETTINGS.items():
        folder = repository / name.replace(" ", "_") / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(_MODEL)
        (folder.parent / "config.pbtxt").write_text(_CONFIG + settings)


def _requests(name: str, level: int) -> list[bytes]:
    inputs = {"IN": encode(np.zeros((1, 1), np.float32))}
    call = InferCall(name.replace(" ", "_"), parameters={"priority": level}, inputs=inputs)
    return [serialize_call(call)]


async def measure(endpoint: Endpoint, duration_s: float) -> list[Row]:
    """Rows of both levels, alone, overloaded, and with a fixed number of callers."""
    rows: list[Row] = []
    bounds = Bounds(10**9, duration_s)
    pids = {"model": endpoint.pid}
    cpu_s = machine.cpu_seconds(pids)

    def note(workload: str, mode: str, load: Load) -> None:
        nonlocal cpu_s
        before_s, cpu_s = cpu_s, machine.cpu_seconds(pids)
        rows.append(make_row(workload, mode, load, {name: cpu_s[name] - before_s[name] for name in pids}))

    async with open_channel(endpoint.grpc) as one, open_channel(endpoint.grpc) as other:
        first, second = caller(one), caller(other)
        full = await closed_loop(first, _requests("levels", 1), Bounds(10**9, duration_s / 4), concurrency=8)
        capacity_per_s = full.rate_per_s
        note("all the model can do, level 1", "closed, 8 at once", full)
        high_per_s, low_per_s = _SHARE * capacity_per_s, (_OVERLOAD - _SHARE) * capacity_per_s
        alone = await open_loop(first, _requests("levels", 1), bounds, rate_per_s=high_per_s, seed=SEED)
        note("level 1 alone", f"open, {high_per_s:.0f}/s", alone)
        for name in _SETTINGS:
            high, low = await asyncio.gather(
                open_loop(first, _requests(name, 1), bounds, rate_per_s=high_per_s, seed=SEED),
                open_loop(second, _requests(name, 2), bounds, rate_per_s=low_per_s, seed=SEED + 1),
            )
            note(f"{name}: level 1 of {_OVERLOAD:.0%}", f"open, {high_per_s:.0f}/s", high)
            note(f"{name}: level 2 of {_OVERLOAD:.0%}", f"open, {low_per_s:.0f}/s", low)
        for name in _SETTINGS:
            high, low = await asyncio.gather(
                closed_loop(first, _requests(name, 1), bounds, concurrency=4),
                closed_loop(second, _requests(name, 2), bounds, concurrency=28),
            )
            note(f"{name}: level 1", "closed, 4 at once", high)
            note(f"{name}: level 2", "closed, 28 at once", low)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.priorities", description="Level 1 on an overloaded model.")
    parser.add_argument("--duration-s", type=float, default=15.0, metavar="S", help="of each load; default: 15")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_repository(Path(folder))
            with running_model_service(Path(folder)) as endpoint:
                rows = asyncio.run(measure(endpoint, options.duration_s))
    except grpc.aio.AioRpcError as error:
        print(error, file=sys.stderr)
        return 1
    described = machine.describe()
    print(render(rows, described))
    by_name = {row.workload: row.latency_ms["p99"] or 0.0 for row in rows}
    alone_ms, loaded_ms = by_name["level 1 alone"], by_name[f"levels: level 1 of {_OVERLOAD:.0%}"]
    factor = loaded_ms / alone_ms
    print(f"\np99 of level 1: {loaded_ms:.1f} ms at {_OVERLOAD:.0%}, {alone_ms:.1f} ms alone: {factor:.2f} x")
    print(f"wrote {write_json(ROOT / 'benchmarks' / 'results', rows, described, prefix='priorities-')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
