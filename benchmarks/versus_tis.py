"""``python -m benchmarks.versus_tis``: one repository, served by a real Triton Inference Server and by Weft in turn.

Answers are compared, then both are loaded in the same way, workload by workload. ``--texts`` does so with `embed`, see
``tis_texts.py``.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine, requests
from benchmarks.report import machine_lines, table, write_json
from benchmarks.servers import Server, answers, differences
from benchmarks.tis import PACKAGES, running_tis
from benchmarks.tis_texts import measure_texts, misses_goal, render_texts
from weft.capacity.tuning.load import Bounds, caller, closed_loop
from weft.mesh.running import running_mesh
from weft.v2.client.channels import open_channel

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = ROOT / "benchmarks" / "tis_repository"

CONCURRENCIES = (1, 8, 32)
_NUM_COMPARED = 100


class Workload(NamedTuple):
    """Requests for one model: one row each; a graph is asked of the router alone."""

    model: str
    input_name: str
    num_columns: int
    is_graph: bool = False


WORKLOADS = (
    Workload("identity_py", "INPUT0", 16),
    Workload("identity3_py", "INPUT0", 16, is_graph=True),
    Workload("mlp_py", "X", 64),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one run.

    Attributes:
        workload: Model that was called.
        server: Which server.
        concurrency: Requests in work at once.
        num_answers, num_errors: Requests by outcome.
        rate_per_s: Answers per second.
        p50_ms, p99_ms: Of the latency.
        cpu_s_per_1000: CPU-seconds of all processes of the server for 1000 requests.
    """

    workload: str
    server: str
    concurrency: int
    num_answers: int
    num_errors: int
    rate_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_1000: float


@contextlib.contextmanager
def running_weft(repository: Path, log: Any) -> Iterator[tuple[Server, Server]]:
    """The router of a mesh over the same files, and its model service; ended with the block. Raises MeshError."""
    with running_mesh(repository, log=log) as endpoints:
        pids = [endpoint.pid for endpoint in endpoints.values()]
        yield (
            Server("Weft", endpoints["router"].grpc, lambda: pids),
            Server("Weft, model service alone", endpoints["model"].grpc, lambda: pids),
        )


async def measure(server: Server, workload: Workload, bounds: Bounds, num_warmups: int) -> list[Row]:
    """One row for each concurrency."""
    rows = []
    async with open_channel(server.address) as channel:
        call, payloads = caller(channel), _requests(workload, 64)
        for number in range(num_warmups):
            await call(payloads[number % len(payloads)])
        for concurrency in CONCURRENCIES:
            before_s = server.cpu_s()
            load = await closed_loop(call, payloads, bounds, concurrency=concurrency)
            used_s = server.cpu_s() - before_s
            num_requests = len(load.latencies_s) + load.errors.total()
            rows.append(
                Row(
                    workload.model,
                    server.name,
                    concurrency,
                    len(load.latencies_s),
                    load.errors.total(),
                    round(load.rate_per_s, 1),
                    round(load.percentile_ms(50), 3),
                    round(load.percentile_ms(99), 3),
                    round(used_s / max(num_requests, 1) * 1000, 4),
                )
            )
            _report(f"{workload.model}, {server.name}, {concurrency} at once: {load.rate_per_s:.0f}/s")
    return rows


def render(rows: Sequence[Row]) -> str:
    """Both servers side by side."""
    lines = [["workload", "at once", "server", "answers/s", "p50 ms", "p99 ms", "CPU-s per 1000", "errors"]]
    for row in sorted(rows, key=lambda row: (row.workload, row.concurrency, row.server)):
        figures = (f"{row.rate_per_s:.0f}", f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}", f"{row.cpu_s_per_1000:.2f}")
        lines.append([row.workload, str(row.concurrency), row.server, *figures, str(row.num_errors)])
    return table(lines, left_columns=(0, 2))


def _requests(workload: Workload, count: int) -> list[bytes]:
    rows = np.random.default_rng(requests.SEED).normal(size=(count, 1, workload.num_columns)).astype(np.float32)
    return [requests.serialize(workload.model, {workload.input_name: row}) for row in rows]


async def _compare(servers: tuple[Server, Server, Server], bounds: Bounds, num_warmups: int) -> list[Row]:
    """Rows of router, model service and Triton Inference Server. Raises RuntimeError where answers differ."""
    rows = []
    for workload in WORKLOADS:
        asked = [server for server in servers if not (workload.is_graph and server is servers[1])]
        expected, *others = [await answers(server.address, _requests(workload, _NUM_COMPARED)) for server in asked]
        for other in others:
            if found := differences(expected, other):
                raise RuntimeError(f"answers of {workload.model} differ: {'; '.join(found[:3])}")
        _report(f"{workload.model}: {len(expected)} answers of each server are equal")
        for server in asked:
            rows += await measure(server, workload, bounds, num_warmups)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every answer is equal and no request failed; with ``--texts`` when the goal is met, too."""
    parser = argparse.ArgumentParser(prog="benchmarks.versus_tis", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--texts", action="store_true", help="texts to embeddings, with weights of fp32 and of int8")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; figures mean nothing")
    options = parser.parse_args(argv)
    bounds, num_warmups = (Bounds(50, 1.0), 5) if options.quick else (Bounds(20_000, 5.0), 100)
    options.results.mkdir(parents=True, exist_ok=True)
    if options.texts:
        return _texts(options.results, is_quick=options.quick)
    with (
        (options.results / "tis.log").open("w") as tis_log,
        (options.results / "mesh.log").open("w") as mesh_log,
        running_tis(REPOSITORY, tis_log) as tis,
        running_weft(REPOSITORY, mesh_log) as (router, model),
    ):
        rows = asyncio.run(_compare((router, model, tis), bounds, num_warmups))
    described = machine.describe() | {"tis": PACKAGES[0]}
    print("\n".join([*machine_lines(described), "", render(rows)]))
    print(f"written to {write_json(options.results, rows, described, prefix='versus-tis-')}")
    return 1 if any(row.num_errors for row in rows) else 0


def _texts(results: Path, *, is_quick: bool) -> int:
    """0 when no request failed and Weft with int8 needs at most half of their CPU time."""
    rows = measure_texts(results, is_quick=is_quick)
    described = machine.describe() | {"tis": PACKAGES[0]}
    print("\n".join([*machine_lines(described), "", render_texts(rows)]))
    print(f"written to {write_json(results, rows, described, prefix='versus-tis-texts-')}")
    missed = misses_goal(rows)
    print("\n".join(missed) or "the goal is met")
    return 1 if missed else 0


def _report(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
