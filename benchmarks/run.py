"""``python -m benchmarks.run``: start a mesh, load it, print one table, write JSON to ``benchmarks/results/``."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from benchmarks import machine, requests
from benchmarks.floor import running_floor
from benchmarks.report import Row, make_row, render, write_json
from weft.base.processes.process import Endpoint
from weft.capacity.tuning.load import Bounds, caller, closed_loop, open_loop
from weft.mesh.preflight import MeshError
from weft.mesh.running import running_mesh
from weft.v2.client.channels import open_channel

ROOT = Path(__file__).resolve().parents[1]
_NUM_TEXTS = 64


class Workload(NamedTuple):
    """Requests for one service; ``rate_per_s`` above 0 adds an open loop at that rate."""

    name: str
    service: str
    make_requests: Callable[[], Sequence[bytes]]
    rate_per_s: float = 0.0


class Plan(NamedTuple):
    """How long and how hard.

    Attributes:
        concurrencies: Of the closed loops.
        bounds: Of each run.
        num_warmups: Requests before each workload that are not counted.
    """

    concurrencies: tuple[int, ...]
    bounds: Bounds
    num_warmups: int


FULL = Plan(concurrencies=(1, 8, 32), bounds=Bounds(num_requests=20_000, duration_s=6.0), num_warmups=50)
QUICK = Plan(concurrencies=(1, 4), bounds=Bounds(num_requests=20, duration_s=2.0), num_warmups=2)


def _identity_requests(model_name: str) -> list[bytes]:
    row = np.random.default_rng(requests.SEED).normal(size=(1, 16)).astype(np.float32)
    return [requests.serialize(model_name, {"INPUT0": row})]


WORKLOADS = (
    Workload("floor: bare grpcio gives identity's bytes back", "floor", lambda: _identity_requests("identity")),
    Workload("identity, model service alone", "model", lambda: _identity_requests("identity")),
    Workload("identity, through the router", "router", lambda: _identity_requests("identity"), rate_per_s=100.0),
    Workload("identity3, three steps", "router", lambda: _identity_requests("identity3")),
    Workload(
        f"embed, {requests.MIN_WORDS} to {requests.MAX_WORDS} words",
        "router",
        lambda: requests.text_requests("embed", "TEXT", (1, 1), _NUM_TEXTS),
    ),
)


async def measure(
    endpoints: Mapping[str, Endpoint], workloads: Iterable[Workload], plan: Plan, report: Callable[[str], None]
) -> list[Row]:
    """One row for each workload and load; ``report`` hears of each when it is done.

    Raises:
        grpc.aio.AioRpcError: A warm-up request failed.
    """
    pids = {name: endpoint.pid for name, endpoint in endpoints.items()} | {"client": os.getpid()}
    rows: list[Row] = []
    for workload in workloads:
        payloads = workload.make_requests()
        async with open_channel(endpoints[workload.service].grpc) as channel:
            call = caller(channel)
            for number in range(plan.num_warmups):
                await call(payloads[number % len(payloads)])
            loops = {
                f"closed, {concurrency} at once": partial(closed_loop, concurrency=concurrency)
                for concurrency in plan.concurrencies
            }
            if workload.rate_per_s:
                loops[f"open, {workload.rate_per_s:g}/s"] = partial(
                    open_loop, rate_per_s=workload.rate_per_s, seed=requests.SEED
                )
            for mode, loop in loops.items():
                before_s = machine.cpu_seconds(pids)
                load = await loop(call, payloads, plan.bounds)
                after_s = machine.cpu_seconds(pids)
                used_s = {name: after_s[name] - before_s[name] for name in pids}
                rows.append(make_row(workload.name, mode, load, used_s))
                report(f"{workload.name}; {mode}: {load.rate_per_s:.0f}/s")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every run is measured without an error, else 1."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description="Load a mesh and print one table.")
    parser.add_argument("--repository", type=Path, default=ROOT / "model_repository", metavar="DIR")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="workloads whose name has TEXT")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; figures mean nothing")
    options = parser.parse_args(argv)
    workloads = [w for w in WORKLOADS if not options.only or any(text in w.name for text in options.only)]
    if not workloads:
        parser.error(f"no workload matches {options.only}; there are: {'; '.join(w.name for w in WORKLOADS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    log_path = options.results / "mesh.log"
    try:
        with (
            log_path.open("w") as log,
            running_mesh(options.repository, log=log) as endpoints,
            running_floor() as floor,
        ):
            plan = QUICK if options.quick else FULL
            rows = asyncio.run(measure(endpoints | {"floor": floor}, workloads, plan, _report))
    except (MeshError, grpc.aio.AioRpcError) as error:
        _report(f"{error}\nThe services' log is {log_path}")
        return 1
    described = machine.describe()
    print(render(rows, described))
    print(f"written to {write_json(options.results, rows, described)}")
    return 1 if any(row.num_errors for row in rows) else 0


def _report(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
