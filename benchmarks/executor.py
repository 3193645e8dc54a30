"""``python -m benchmarks.executor``: the CPU time that the router's graph executor itself adds to a request.

Everything runs in one process: graphs are compiled from their text, the target answers at once. What the calls of the
target cost alone is measured in the same rounds and subtracted. The cases take turns, so that a machine that becomes
slower does so for all of them; the figures are medians of the rounds.
"""

import argparse
import asyncio
import cProfile
import gc
import pstats
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import uvloop

from benchmarks import machine
from benchmarks.executor_cases import CASES, Case, InstantTarget
from benchmarks.report import machine_lines, table, write_json
from weft.base.core import CallContext, InferCall
from weft.language import GraphSource
from weft.router.compile import compile_graph
from weft.router.core import RouterCore
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

ROOT = Path(__file__).resolve().parents[1]
_NUM_SHOWN = 16

#: Sends one request.
Send = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one case; times are medians of the rounds, microseconds.

    Attributes:
        case: What ran.
        num_steps, num_calls: Of one request.
        cpu_us: CPU for one request.
        wall_us: Time for one request.
        added_us: CPU for one request, without that of its calls of the target.
        added_per_step_us: That for one step.
        spread_us: Half the distance of the quartiles of ``cpu_us``.
    """

    case: str
    num_steps: int
    num_calls: int
    cpu_us: float
    wall_us: float
    added_us: float
    added_per_step_us: float
    spread_us: float


async def prepare(case: Case) -> Send:
    """A function that sends the case's request to its graph; the path that it takes is checked once."""
    target = InstantTarget()
    executor = GraphExecutor(compile_graph(GraphSource(case.graph, case.name), target), Runtime({"model": target}))
    make, headers = case.request(), case.headers

    async def send() -> None:
        await executor.execute(make(), CallContext(headers=headers))

    await send()  # what is cached is in the cache
    before = target.num_calls
    await send()
    if target.num_calls - before != case.num_calls:
        raise RuntimeError(f"{case.name}: {target.num_calls - before} calls, not {case.num_calls}")
    return send


async def prepare_router(stack: AsyncExitStack, folder: Path, case: Case) -> Send:
    """The same through ``RouterCore.infer``: validation, admission and statistics around the executor."""
    path = folder / "bench" / "1" / "graph.pbtxt"
    path.parent.mkdir(parents=True)
    path.write_text(case.graph)
    core = RouterCore(folder, [InstantTarget()], poll_s=3600.0)
    await core.start()
    stack.push_async_callback(core.close, grace_s=0)
    make, headers = case.request(), case.headers
    return lambda: core.infer(make(), CallContext(headers=headers))


def prepare_call(case: Case) -> Send:
    """One call of the target as a step makes it, and nothing around it."""
    target, inputs = InstantTarget(), case.inputs()
    return lambda: target.infer(InferCall("m", "", "", {}, dict(inputs)), CallContext())


async def time_us(send: Send, num_requests: int) -> tuple[float, float]:
    """CPU and wall time of one request, microseconds, of ``num_requests`` one after another."""
    cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
    for _ in range(num_requests):
        await send()
    cpu_ns, wall_ns = time.process_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
    return cpu_ns / num_requests / 1000, wall_ns / num_requests / 1000


async def measure(cases: Sequence[Case], num_rounds: int, num_requests: int) -> list[Row]:
    """A row for each case, and one for the first case through ``RouterCore.infer``."""
    calls = {size: prepare_call(case) for case in cases for size in [len(case.first_element)]}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sends = [(case.name, case, await prepare(case)) for case in cases]
        sends.append((f"{cases[0].name}, RouterCore.infer", cases[0], await prepare_router(stack, folder, cases[0])))
        cpu_us: list[list[float]] = [[] for _ in sends]
        wall_us: list[list[float]] = [[] for _ in sends]
        call_us: dict[int, list[float]] = {size: [] for size in calls}
        for turn in range(num_rounds + 1):
            gc.collect()
            for size, call in calls.items():
                call_us[size].append((await time_us(call, num_requests))[0])
            for i, (_, _, send) in enumerate(sends):
                cpu, wall = await time_us(send, num_requests)
                if turn:  # the first round warms up
                    cpu_us[i].append(cpu)
                    wall_us[i].append(wall)
    rows = []
    for (name, case, _), cpu, wall in zip(sends, cpu_us, wall_us, strict=True):
        added = median(cpu) - case.num_calls * median(call_us[len(case.first_element)][1:])
        low, _, high = quantiles(cpu, n=4) if len(cpu) > 1 else (cpu[0],) * 3
        figures = (median(cpu), median(wall), added, added / case.num_steps, (high - low) / 2)
        rows.append(Row(name, case.num_steps, case.num_calls, *(round(figure, 2) for figure in figures)))
    return rows


def render(rows: Sequence[Row]) -> str:
    """A table with one line for each row."""
    header = ["graph", "steps", "calls", "CPU us", "wall us", "added us", "per step", "spread"]
    lines = [header]
    for row in rows:
        figures = (row.cpu_us, row.wall_us, row.added_us, row.added_per_step_us, row.spread_us)
        lines.append([row.case, str(row.num_steps), str(row.num_calls), *(f"{figure:.1f}" for figure in figures)])
    by_name = {row.case: row for row in rows}
    longest, shortest = by_name.get("sequence of 10"), by_name.get("sequence of 1")
    text = table(lines, left_columns={0})
    if longest is None or shortest is None:
        return text
    step_us = (longest.added_us - shortest.added_us) / (longest.num_steps - shortest.num_steps)
    return f"{text}\n\nEach further step of a sequence adds {step_us:.1f} us."


def profile(cases: Sequence[Case], num_requests: int) -> str:
    """Where the time of each case goes: the functions that take most of it, microseconds for one request."""
    return "\n\n".join(_profile(case, num_requests) for case in cases)


def _profile(case: Case, num_requests: int) -> str:
    profiler = cProfile.Profile()

    async def run() -> None:
        send = await prepare(case)
        await time_us(send, 100)
        profiler.enable()
        await time_us(send, num_requests)
        profiler.disable()

    asyncio.run(run())
    stats: Any = pstats.Stats(profiler)
    by_function = {where: (num_calls, own_s) for where, (_, num_calls, own_s, _, _) in stats.stats.items()}
    lines = [["us", "calls", "function"]]
    for (file, line, name), (num_calls, own_s) in sorted(by_function.items(), key=lambda item: -item[1][1])[
        :_NUM_SHOWN
    ]:
        where = "" if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} "
        lines.append([f"{own_s / num_requests * 1e6:.2f}", f"{num_calls / num_requests:.1f}", f"{where}{name}"])
    return f"{case.name} (with the profiler's own time)\n{table(lines, left_columns={2})}"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.executor", description="What the graph executor itself costs.")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="default: 30")
    parser.add_argument("--requests", type=int, default=1_000, metavar="N", help="of a case in a round; default: 1000")
    parser.add_argument("--quick", action="store_true", help="seconds; shows only that everything works")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has the text")
    parser.add_argument("--profile", action="store_true", help="where the time goes, in place of the table")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        print(f"no case has '{options.only}' in its name: {', '.join(case.name for case in CASES)}", file=sys.stderr)
        return 2
    num_rounds, num_requests = (2, 20) if options.quick else (options.rounds, options.requests)
    if options.profile:
        print(profile(cases, num_requests))
        return 0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(cases, num_rounds, num_requests))
    described = machine.describe()
    print("\n".join([*machine_lines(described), "", render(rows)]))
    if not options.quick:
        print(f"\nwrote {write_json(ROOT / 'benchmarks' / 'results', rows, described, prefix='executor-')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
