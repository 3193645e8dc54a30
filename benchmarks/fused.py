"""``python -m benchmarks.fused``: the CPU time of one request in a process that has router and models, without a wire.

``FusedCore`` is driven as the service drives it, with identities of the Python and the ONNX backend; so the figures are
Weft's own share of a request, and what one more step of a graph adds to it: a third of the distance between graphs of
four steps and of one. ``at once`` are callers in the same process. ``4x8`` are four connections of a process of its own
with eight requests in flight each, over the least possible wire; there requests arrive as they do in a service, and are
parsed from bytes and answered in bytes. Cases take turns; the figures are medians of the rounds.
"""

import argparse
import asyncio
import cProfile
import gc
import pstats
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median, quantiles
from typing import NamedTuple

import numpy as np
import uvloop

from benchmarks import machine
from benchmarks.fused_wire import listening, send
from benchmarks.report import machine_lines, table, write_json
from weft.backends import BACKENDS
from weft.base.core import CallContext, InferCall
from weft.base.tensors import encode
from weft.mesh.fused import FusedCore
from weft.serving.core import ServingCore
from weft.v2.protocol.codec import deserialize_request
from weft.v2.protocol.encoding import serialize_call, serialize_result
from weft.v2.protocol.wire import call_of

ROOT = Path(__file__).resolve().parents[1]
_NEVER_S = 3600.0
_NUM_SHOWN = 40
_NUM_STEPS = 4

_PYTHON = ROOT / "benchmarks" / "tis_repository" / "identity_py"
_ONNX = ROOT / "model_repository" / "model" / "identity"

_GRAPH = """
platform: "ensemble" max_batch_size: 32
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
ensemble_scheduling { STEPS }
"""
_STEP = """step [ { model_name: "MODEL" model_version: -1
    input_map { key: "INPUT0" value: "INPUT" } output_map { key: "OUTPUT0" value: "OUTPUT" } } ]
"""

MODELS = ("identity_py", "identity_py_thread", "identity")


class Case(NamedTuple):
    """What is called: a model by its name, or a graph of so many of it."""

    name: str
    callee: str


CASES = tuple(
    case
    for model in MODELS
    for case in (
        Case(model, model),
        Case(f"{model}, graph of 1 step", f"{model}_1"),
        Case(f"{model}, graph of {_NUM_STEPS} steps", f"{model}_{_NUM_STEPS}"),
    )
)


class Load(NamedTuple):
    """How requests arrive: ``num_connections`` of another process, or 0, with ``depth`` requests in flight each."""

    name: str
    num_connections: int
    depth: int


LOADS = (Load("1 at once", 0, 1), Load("32 at once", 0, 32), Load("1x1", 1, 1), Load("4x8", 4, 8))


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one case; medians of the rounds, microseconds for one request.

    Attributes:
        case: What was called.
        load: How requests arrive.
        cpu_us: CPU of the process.
        system_us: Of that, in the kernel.
        spread_us: Half the distance of the quartiles of ``cpu_us``.
        wall_us: Time divided by the number of requests.
        num_switches: Voluntary context switches.
    """

    case: str
    load: str
    cpu_us: float
    system_us: float
    spread_us: float
    wall_us: float
    num_switches: float


@asynccontextmanager
async def serving() -> AsyncIterator[FusedCore]:
    """A core with the models and graphs of ``CASES``."""
    with tempfile.TemporaryDirectory() as folder:
        models, graphs = _write_repository(Path(folder))
        core = FusedCore(
            {"model": lambda callee: ServingCore(models, BACKENDS, num_gpus=0, callee=callee)},
            graphs,
            poll_s=_NEVER_S,
        )
        await core.start()
        try:
            if not core.is_ready():
                raise RuntimeError(f"not ready: {core.index(ready_only=False)}")
            yield core
        finally:
            await core.close(grace_s=5)


class Driver:
    """Sends requests to a core.

    Args:
        core: Answers.
        path: Of the socket that answers messages.
    """

    def __init__(self, core: FusedCore, path: str) -> None:
        self._core = core
        self._path = path

    async def answer(self, message: bytes) -> bytes:
        """The answer to a message, from bytes to bytes."""
        call = call_of(deserialize_request(message))
        return serialize_result(await self._core.infer(call, CallContext()))

    async def drive(self, case: Case, load: Load, num_requests: int) -> None:
        """Send so many requests."""
        call = InferCall(case.callee, inputs={"INPUT0": encode(np.zeros((1, 16), np.float32))})
        if load.num_connections:
            message = serialize_call(call)
            await send(
                self._path, message, num_connections=load.num_connections, depth=load.depth, num_requests=num_requests
            )
            return
        supply = iter(range(num_requests))

        async def worker() -> None:
            for _ in supply:
                await self._core.infer(call, CallContext())

        if load.depth == 1:
            await worker()
        else:
            await asyncio.gather(*(worker() for _ in range(load.depth)))


@asynccontextmanager
async def driving() -> AsyncIterator[Driver]:
    """A driver of a core that serves."""
    with tempfile.TemporaryDirectory() as folder:
        async with serving() as core:
            driver = Driver(core, f"{folder}/socket")
            async with listening(f"{folder}/socket", driver.answer):
                yield driver


async def measure(cases: Sequence[Case], loads: Sequence[Load], num_rounds: int, num_requests: int) -> list[Row]:
    """One row for each case and load."""
    figures: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    async with driving() as driver:
        for case in cases:
            await driver.drive(case, LOADS[1], max(num_requests // 10, 32))
        gc.collect()
        gc.freeze()
        for _ in range(num_rounds):
            for case in cases:
                for load in loads:
                    before, start_ns, start_s = getrusage(RUSAGE_SELF), time.process_time_ns(), time.perf_counter()
                    await driver.drive(case, load, num_requests)
                    after, end_ns, end_s = getrusage(RUSAGE_SELF), time.process_time_ns(), time.perf_counter()
                    figures.setdefault((case.name, load.name), []).append(
                        (
                            (end_ns - start_ns) / 1e3 / num_requests,
                            (after.ru_stime - before.ru_stime) * 1e6 / num_requests,
                            (end_s - start_s) * 1e6 / num_requests,
                            (after.ru_nvcsw - before.ru_nvcsw) / num_requests,
                        )
                    )
    rows = []
    for (name, load_name), found in figures.items():
        cpu_us, system_us, wall_us, num_switches = ([values[i] for values in found] for i in range(4))
        low, _, high = quantiles(cpu_us, n=4) if len(cpu_us) > 1 else (cpu_us[0],) * 3
        rows.append(
            Row(
                name,
                load_name,
                round(median(cpu_us), 1),
                round(median(system_us), 1),
                round((high - low) / 2, 1),
                round(median(wall_us), 1),
                round(median(num_switches), 2),
            )
        )
    return rows


def render(rows: Sequence[Row]) -> str:
    """A table with a line for each row, and what a step costs."""
    lines = [["case", "load", "CPU us", "kernel", "spread", "wall us", "switches", "CPU us of a step"]]
    cpu_us = {(row.case, row.load): row.cpu_us for row in rows}
    for row in rows:
        step, many = "", f", graph of {_NUM_STEPS} steps"
        if row.case.endswith(many):
            first = cpu_us.get((row.case.replace(many, ", graph of 1 step"), row.load))
            step = "" if first is None else f"{(row.cpu_us - first) / (_NUM_STEPS - 1):.1f}"
        figures = (row.cpu_us, row.system_us, row.spread_us, row.wall_us)
        lines.append([row.case, row.load, *(f"{value:.1f}" for value in figures), f"{row.num_switches:.2f}", step])
    return table(lines, left_columns={0, 1})


async def profile(case: Case, load: Load, num_requests: int) -> None:
    """Print where the event loop's thread spends the time of one case."""
    async with driving() as driver:
        await driver.drive(case, LOADS[1], 1000)
        profiler = cProfile.Profile()
        profiler.enable()
        await driver.drive(case, load, num_requests)
        profiler.disable()
    statistics = pstats.Stats(profiler)
    found = sorted(statistics.stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
    lines = [["self us", "total us", "calls", "function"]]
    for (file, line, function), (_, num_calls, self_s, total_s, _) in found[:_NUM_SHOWN]:
        where = "/".join(Path(file).parts[-2:])
        cells = [f"{self_s * 1e6 / num_requests:.2f}", f"{total_s * 1e6 / num_requests:.2f}"]
        lines.append([*cells, f"{num_calls / num_requests:.2f}", f"{where}:{line} {function}"])
    print(table(lines, left_columns={3}))


def _write_repository(folder: Path) -> tuple[Path, Path]:
    """Folders of models and of graphs."""
    models, graphs = folder / "models", folder / "graphs"
    models.mkdir()
    (models / "identity_py").symlink_to(_PYTHON)
    (models / "identity").symlink_to(_ONNX)
    _write_thread_variant(models / "identity_py_thread")
    for model in MODELS:
        for num_steps in (1, _NUM_STEPS):
            _write_graph(graphs / f"{model}_{num_steps}", model, num_steps)
    return models, graphs


def _write_thread_variant(folder: Path) -> None:
    """The Python identity on a thread, whatever its configuration declares."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text((_PYTHON / "1" / "model.py").read_text())
    config = (_PYTHON / "config.pbtxt").read_text().replace("identity_py", folder.name)
    (folder / "config.pbtxt").write_text("\n".join(li for li in config.splitlines() if "EXECUTION" not in li))


def _write_graph(folder: Path, model: str, num_steps: int) -> None:
    """Identities in a row, in the ensemble syntax of Triton Inference Server."""
    tensors = ["INPUT0", *(f"between_{i}" for i in range(1, num_steps)), "OUTPUT0"]
    step = _STEP.replace("MODEL", model)
    steps = (
        step.replace('"INPUT"', f'"{tensors[i]}"').replace('"OUTPUT"', f'"{tensors[i + 1]}"') for i in range(num_steps)
    )
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'name: "{folder.name}"' + _GRAPH.replace("STEPS", "".join(steps)))


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="benchmarks.fused", description="CPU of a request in one process, no wire.")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="default: 7")
    parser.add_argument("--requests", type=int, default=3_200, metavar="N", help="of a case in a round; default: 3200")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this text in their names")
    parser.add_argument("--load", choices=[load.name for load in LOADS], help="default: each")
    parser.add_argument("--profile", action="store_true", help="profile the cases")
    parser.add_argument("--quick", action="store_true", help="seconds; shows only that everything works")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if options.only in case.name]
    loads = [load for load in LOADS if options.load in (None, load.name)]
    if not cases:
        print(f"no case has '{options.only}' in its name: {', '.join(c.name for c in CASES)}", file=sys.stderr)
        return 2
    num_rounds, num_requests = (1, 64) if options.quick else (options.rounds, options.requests)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.profile:
            for case in cases:
                for load in loads:
                    print(f"\n{case.name}, {load.name}")
                    runner.run(profile(case, load, num_requests))
            return 0
        rows = runner.run(measure(cases, loads, num_rounds, num_requests))
    described = machine.describe()
    print("\n".join([*machine_lines(described), "", render(rows)]))
    if not options.quick:
        print(f"\nwrote {write_json(ROOT / 'benchmarks' / 'results', rows, described, prefix='fused-')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
