"""``python -m benchmarks.wire``: Weft beside Triton Inference Server in one run; tables, and JSON for later.

Parts: ``servers`` (both under the same loads; the default), ``burst`` (thousands of calls started at once), ``pace``
(one rate, in bursts and evenly) and ``hop`` (one call between two processes by every way there is).
"""

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
import uvloop

from benchmarks import machine, transport
from benchmarks.report import machine_lines, write_json
from benchmarks.tis import PACKAGES
from benchmarks.wire.burst import BURSTS, Burst, BurstRow, burst_table, run_burst
from benchmarks.wire.candidates import BARE, WIRES, running_candidates
from benchmarks.wire.figures import AS_USERS_WRITE, GOALS, full_table, goal_table
from benchmarks.wire.pace import AT_ONCE, PaceRow, pace_table, run_pace
from benchmarks.wire.rounds import Plan, Row, measure
from benchmarks.wire.senders import OWN, available_senders
from benchmarks.wire.workloads import (
    IDENTITY,
    REPOSITORIES,
    SHAPES,
    WORKLOADS,
    Shape,
    Workload,
    chosen,
    write_repository,
)
from weft.mesh.preflight import MeshError

ROOT = Path(__file__).resolve().parents[2]
SERVERS, BURST, PACE, HOP = PARTS = ("servers", "burst", "pace", "hop")
QUICK = Plan(num_rounds=1, duration_s=0.1, max_requests=200)
QUICK_SHAPES, QUICK_BURSTS = (Shape(1, 1), Shape(4, 8)), (Burst(200, 1), Burst(200, 10))
_DURATION_S = 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured, every answer was right and no request failed."""
    parser = _parser()
    options = parser.parse_args(argv)
    shapes = set(options.shape or map(str, QUICK_SHAPES if options.quick else SHAPES))
    workloads = [
        workload._replace(shapes=tuple(shape for shape in workload.shapes if str(shape) in shapes))
        for workload in chosen(options.only)
    ]
    if not any(workload.shapes for workload in workloads):
        names = ", ".join(f"{workload} ({', '.join(map(str, workload.shapes))})" for workload in WORKLOADS)
        parser.error(f"nothing matches; there are: {names}")
    if not set(options.parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}")
    senders = [sender.name for sender in available_senders()]
    if not set(options.sender) <= set(senders):
        parser.error(f"senders are {', '.join(senders)}")
    if OWN in senders:
        _report(f"h2load (Debian: nghttp2-client) is not installed: {OWN} sends instead")
    options.results.mkdir(parents=True, exist_ok=True)
    try:
        rows, bursts, paces, hops = _measure(options, workloads)
    except (MeshError, RuntimeError, grpc.aio.AioRpcError) as error:
        _report(f"{error}\nThe servers' logs are in {options.results}")
        return 1
    described = machine.describe() | {"tis": PACKAGES[0], "load_average": os.getloadavg()}
    parts = [*machine_lines(described), f"{PACKAGES[0]}; load average {os.getloadavg()[0]:.1f}"]
    if rows:
        goals = AS_USERS_WRITE if options.as_users_write else GOALS
        parts += ["", goal_table(rows, goals), "", full_table(rows)]
    if bursts:
        parts += ["", burst_table(bursts)]
    if paces:
        parts += ["", pace_table(paces)]
    if hops:
        parts += ["", transport.render_table(hops)]
    print("\n".join(parts))
    print(f"written to {write_json(options.results, [*rows, *bursts, *paces, *hops], described, prefix='wire-')}")
    is_good = all(burst.is_good for burst in bursts) and not any(pace.num_errors for pace in paces)
    return 1 if any(row.problems for row in rows) or not is_good else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.wire", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: {SERVERS})")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="workloads whose name has TEXT")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of everything (default %(default)s)")
    parser.add_argument("--wire", type=_wires, default=list(WIRES), metavar="NAMES", help="default: weft,grpcio")
    parser.add_argument("--shape", action="append", default=[], metavar="CxS", help="this load alone; may be repeated")
    parser.add_argument("--sender", action="append", default=[], metavar="NAME", help="this sender alone")
    parser.add_argument("--without-tis", action="store_true", help="Weft and the bare servers alone")
    text = "models without a line that Triton does not know, so each Python model has a process of its own"
    parser.add_argument("--as-users-write", action="store_true", help=text)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; figures mean nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    return parser


def _wires(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(WIRES):
        raise argparse.ArgumentTypeError(f"'{text}' must be of {', '.join(WIRES)}")
    return names


def _measure(
    options: argparse.Namespace, workloads: Sequence[Workload]
) -> tuple[list[Row], list[BurstRow], list[PaceRow], list[transport.Row]]:
    parts = options.parts or [SERVERS]
    rows: list[Row] = []
    bursts: list[BurstRow] = []
    paces: list[PaceRow] = []
    hops: list[transport.Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-wire-")))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        for key in REPOSITORIES:
            loads = [workload for workload in workloads if workload.repository == key and SERVERS in parts]
            extra = {BURST, PACE}.intersection(parts) if key == IDENTITY.repository else set()
            if loads or extra:
                found = _compare(options, runner, folder / key, loads, extra)
                rows, bursts, paces = rows + found[0], bursts + found[1], paces + found[2]
        if HOP in parts:
            num_rounds, duration_s = (1, QUICK.duration_s) if options.quick else (options.rounds, transport.DURATION_S)
            hops = runner.run(transport.hops(folder, num_rounds, duration_s, transport.SMALL_CASES))
    return rows, bursts, paces, hops


def _compare(
    options: argparse.Namespace,
    runner: asyncio.Runner,
    folder: Path,
    workloads: Sequence[Workload],
    extra: Collection[str],
) -> tuple[list[Row], list[BurstRow], list[PaceRow]]:
    """Rows, and with ``extra`` bursts and paces, of the servers over one repository, which run for so long."""
    folder.mkdir()
    senders = [sender for sender in available_senders() if not options.sender or sender.name in options.sender]
    plan = QUICK if options.quick else Plan(options.rounds, _DURATION_S)
    bursts: list[BurstRow] = []
    paces: list[PaceRow] = []
    with running_candidates(
        write_repository(folder.name, folder, as_users_write=options.as_users_write),
        options.wire,
        options.results,
        with_tis=not options.without_tis,
        with_floors=folder.name == IDENTITY.repository,
    ) as candidates:
        if PACE in extra:
            shown = [candidate for candidate in candidates if candidate.arrangement != BARE]
            for candidate, number in itertools.product(shown, AT_ONCE):
                paces.append(runner.run(run_pace(candidate, number, plan.duration_s)))
        if BURST in extra:
            for burst in QUICK_BURSTS if options.quick else BURSTS:
                for candidate in candidates:
                    bursts.append(runner.run(run_burst(candidate, burst)))
                    _report(f"burst, {candidate.name}, {burst.num_channels} channels: {bursts[-1].statuses}")
        rows = runner.run(measure(workloads, candidates, senders, plan, _report)) if workloads else []
    return rows, bursts, paces


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
