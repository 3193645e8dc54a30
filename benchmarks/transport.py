"""``python -m benchmarks.transport``: what one call between services costs by each way it can go; one table, JSON.

One hop from this process to another that gives back what it gets: bytes over a bare connection, and calls of the
router's target, on either implementation of gRPC.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks import machine
from benchmarks.hop_ways import Repeated, Way, open_ways
from benchmarks.report import machine_lines, table, write_json

ROOT = Path(__file__).resolve().parents[1]


#: Of one way in one round of the hop.
DURATION_S = 1.0


class Case(NamedTuple):
    """A tensor of so many bytes, and so many calls at once."""

    payload_bytes: int
    concurrency: int


SMALL_CASES = (Case(64, 1), Case(64, 32))
CASES = (*SMALL_CASES, Case(64_000, 8), Case(600_000, 1), Case(600_000, 8), Case(4_000_000, 4))


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds.

    Attributes:
        case: What was sent, and how many at once.
        way: By which it went.
        rate_per_s: Answers per second.
        caller_s, service_s: CPU-seconds for 1000 calls; of the caller and the service.
    """

    case: str
    way: str
    rate_per_s: float
    caller_s: float
    service_s: float

    @property
    def cpu_s(self) -> float:
        """Of both."""
        return self.caller_s + self.service_s


class Measured(NamedTuple):
    """One round."""

    rate_per_s: float
    caller_s: float
    service_s: float


def summary(case: str, way: str, rounds: Sequence[Measured]) -> Row:
    """The medians of some rounds, each figure by itself."""
    rate, caller_s, service_s = (statistics.median(figures) for figures in zip(*rounds, strict=True))
    return Row(case, way, round(rate, 1), round(caller_s, 4), round(service_s, 4))


async def hops(folder: Path, num_rounds: int, duration_s: float, cases: Sequence[Case]) -> list[Row]:
    """One hop by each way; the ways take turns."""
    rows: list[Row] = []
    async with open_ways(folder) as ways:
        for case in cases:
            calls = {way: way.make_call(case.payload_bytes) for way in ways}
            rounds: dict[Way, list[Measured]] = {way: [] for way in ways}
            for _ in range(num_rounds):
                for way, call in calls.items():
                    await call()
                    rounds[way].append(await _hop(call, case.concurrency, duration_s, way.service_pid))
            text = f"{case.payload_bytes:,} bytes, {case.concurrency} at once"
            rows += [summary(text, way.name, measured) for way, measured in rounds.items()]
    return rows


async def _hop(call: Repeated, concurrency: int, duration_s: float, service_pid: int) -> Measured:
    num_calls = 0

    async def worker() -> None:
        nonlocal num_calls
        while time.perf_counter() < end_s:
            await call()
            num_calls += 1

    pids = {"caller": os.getpid(), "service": service_pid}
    before_s, start_s = machine.cpu_seconds(pids), time.perf_counter()
    end_s = start_s + duration_s
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    wall_s, after_s = time.perf_counter() - start_s, machine.cpu_seconds(pids)
    used = (1000 * (after_s[name] - before_s[name]) / num_calls for name in pids)
    return Measured(num_calls / wall_s, *used)


def render(rows: Sequence[Row], described: dict[str, object]) -> str:
    """Machine and table."""
    return "\n".join([*machine_lines(described), render_table(rows)])


def render_table(rows: Sequence[Row]) -> str:
    """One line for each row; the last column is the CPU of the case's first way, by that of this one."""
    lines = [["case", "way", "1/s", "caller", "service", "both", "x better"]]
    first: dict[str, Row] = {}
    for row in rows:
        base = first.setdefault(row.case, row)
        ratio = base.cpu_s / row.cpu_s if row.cpu_s else 0.0
        figures = (f"{row.caller_s:.3f}", f"{row.service_s:.3f}", f"{row.cpu_s:.3f}", f"{ratio:.2f}")
        lines.append([row.case, row.way, f"{row.rate_per_s:.0f}", *figures])
    meaning = "caller, service and both are CPU-seconds for 1000 calls; x better compares both with the first way."
    return "\n".join([meaning, "", table(lines, left_columns=(0, 1))])


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.transport", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each way (default %(default)s)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        rows = _measure(Path(name), options.rounds)
    described = machine.describe()
    print(render(rows, described))
    print(f"written to {write_json(options.results, rows, described, prefix='transport-')}")
    return 0


def _measure(folder: Path, num_rounds: int) -> list[Row]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(hops(folder, num_rounds, DURATION_S, CASES))


if __name__ == "__main__":
    sys.exit(main())
