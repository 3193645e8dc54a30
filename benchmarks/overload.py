"""``python -m benchmarks.overload``: what a mesh answers in time when it is asked for more than it can do.

A load of Poisson arrivals, at 0.25 to 4 times the capacity that was measured just before, of three priorities, goes
through a real mesh (router and model service, each a process). An answer counts if it comes within the deadline:
goodput. The model sleeps: it takes a fixed time in each of a few instances and no CPU, so that the figures are those of
admission, not of this machine. Each load runs on a router with limits (``--adaptive-inflight``) and on one without
(``--max-inflight 0``), for clients that tell their deadline and for clients that keep it to themselves.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from benchmarks import machine
from benchmarks.floor import METHOD, SERVICE
from benchmarks.report import machine_lines, table, write_json
from benchmarks.requests import SEED
from weft.base.core import InferCall
from weft.base.processes.process import Endpoint
from weft.base.tensors import encode
from weft.capacity.tuning.load import Bounds, Call, closed_loop, open_loop
from weft.mesh.preflight import MeshError
from weft.mesh.running import running_mesh
from weft.tools.chart import Line, Plot, render_svg
from weft.v2.client.channels import open_channel
from weft.v2.protocol.encoding import serialize_call

ROOT = Path(__file__).resolve().parents[1]
GRAPH = "work"
FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
#: Share of the load by priority.
SHARES = {1: 0.1, 2: 0.3, 3: 0.6}
NUM_INSTANCES, EXECUTION_S, DEADLINE_S = 4, 0.05, 0.5
#: How long a client waits that does not tell its deadline.
_PATIENCE_S = 30.0
_WARM_UP_FACTOR = 1.5
_LIMITED = "limits"
_ARGUMENTS = {_LIMITED: ["--adaptive-inflight"], "no limits": ["--max-inflight=0"]}
_MODEL = f"""
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({EXECUTION_S} * len(requests))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
            for r in requests
        ]
"""
_CONFIG = f"""
backend: "python"
parameters {{ key: "EXECUTION" value {{ string_value: "thread" }} }}
max_batch_size: 0
instance_group {{ count: {NUM_INSTANCES} }}
input {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }}
"""
_GRAPH = """
name: "work" platform: "graph"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
node { name: "root" sequence { step { name: "work" model_name: "work_model" } } }
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one load.

    Attributes:
        router: ``limits`` or ``no limits``.
        is_deadline_sent: Whether the clients told their deadline.
        factor: Load by capacity.
        offered_per_s: Requests sent each second.
        goodput_per_s: Answers within the deadline each second.
        goodput_share: By priority: of the requests sent, those answered within the deadline.
        p99_ms: Of the answers, by priority; nan without answers.
        errors: Failed requests by gRPC status name.
        limit: Of the graph at the end; 0 without.
        router_cpu_s: Each second.
    """

    router: str
    is_deadline_sent: bool
    factor: float
    offered_per_s: float
    goodput_per_s: float
    goodput_share: dict[int, float]
    p99_ms: dict[int, float]
    errors: dict[str, int]
    limit: float
    router_cpu_s: float


def write_repository(repository: Path) -> None:
    """A graph of one step, and its model, which takes time."""
    folder = repository / "model" / "work_model" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(_MODEL)
    (folder.parent / "config.pbtxt").write_text(_CONFIG)
    graph = repository / "graphs" / GRAPH / "1"
    graph.mkdir(parents=True)
    (graph / "graph.pbtxt").write_text(_GRAPH)


def _request(level: int) -> list[bytes]:
    inputs = {"IN": encode(np.zeros(1, np.float32))}
    return [serialize_call(InferCall(GRAPH, parameters={"priority": level}, inputs=inputs))]


def _caller(channel: grpc.aio.Channel, timeout_s: float) -> Call:
    method = channel.unary_unary(f"/{SERVICE}/{METHOD}", request_serializer=bytes, response_deserializer=bytes)

    async def call(request: bytes) -> bytes:
        answer: bytes = await method(request, timeout=timeout_s)
        return answer

    return call


async def measure_capacity(endpoint: Endpoint, duration_s: float) -> float:
    """Answers per second when twice as many requests are in work as there are instances."""
    async with open_channel(endpoint.grpc) as channel:
        call = _caller(channel, _PATIENCE_S)
        bounds = Bounds(10**9, duration_s)
        return (await closed_loop(call, _request(1), bounds, concurrency=2 * NUM_INSTANCES)).rate_per_s


async def measure(
    endpoint: Endpoint, router: str, factor: float, capacity_per_s: float, duration_s: float, *, sent: bool
) -> Row:
    """One load of all priorities; each has a connection of its own."""
    bounds = Bounds(10**9, duration_s)
    pids = {"router": endpoint.pid}
    before_s = machine.cpu_seconds(pids)["router"]
    channels = [open_channel(endpoint.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in SHARES]
    try:
        loads = await asyncio.gather(
            *(
                open_loop(
                    _caller(channel, DEADLINE_S if sent else _PATIENCE_S),
                    _request(level),
                    bounds,
                    rate_per_s=share * factor * capacity_per_s,
                    seed=SEED + level,
                )
                for channel, (level, share) in zip(channels, SHARES.items(), strict=True)
            )
        )
    finally:
        for channel in channels:
            await channel.close()
    cpu_s = machine.cpu_seconds(pids)["router"] - before_s
    good = [sum(latency_s <= DEADLINE_S for latency_s in load.latencies_s) for load in loads]
    num_sent = [len(load.latencies_s) + load.errors.total() for load in loads]
    errors: dict[str, int] = {}
    for load in loads:
        for code, count in load.errors.items():
            errors[code] = errors.get(code, 0) + count
    return Row(
        router,
        sent,
        factor,
        round(sum(num_sent) / duration_s, 1),
        round(sum(good) / duration_s, 1),
        {level: round(g / n, 3) if n else 0.0 for level, g, n in zip(SHARES, good, num_sent, strict=True)},
        {level: round(load.percentile_ms(99), 1) for level, load in zip(SHARES, loads, strict=True)},
        errors,
        _limit_of(endpoint),
        round(cpu_s / max(load.duration_s for load in loads), 3),
    )


def _limit_of(endpoint: Endpoint) -> float:
    with urllib.request.urlopen(f"http://{endpoint.metrics}/metrics", timeout=5) as response:  # our own
        text = response.read().decode()
    found = re.search(rf'(?m)^weft_admission_limit{{graph="{GRAPH}"}} (\S+)', text)
    return float(found[1]) if found else 0.0


async def measure_router(
    endpoint: Endpoint, router: str, capacity_per_s: float, factors: Sequence[float], duration_s: float
) -> tuple[float, list[Row]]:
    """The capacity, which is measured if it is 0, and every load on one router."""
    capacity_per_s = capacity_per_s or await measure_capacity(endpoint, duration_s)
    # The limit is found, and the median latency known, before anything counts.
    await measure(endpoint, router, _WARM_UP_FACTOR, capacity_per_s, duration_s, sent=True)
    rows: list[Row] = []
    for sent in (True, False):
        for factor in factors:
            row = await measure(endpoint, router, factor, capacity_per_s, duration_s, sent=sent)
            rows.append(row)
            print(f"{router}, {factor:g} x: {row.goodput_per_s:.0f}/s in time", file=sys.stderr)
    return capacity_per_s, rows


def render(rows: Sequence[Row], capacity_per_s: float) -> str:
    """A table with a line for each load, and what is left at three times the capacity."""
    header = ["router", "deadline", "load", "sent 1/s", "good 1/s"]
    header += [f"good {level}" for level in SHARES] + [f"p99 ms {level}" for level in SHARES]
    lines = [[*header, "limit", "router CPU"]]
    for row in rows:
        cells = [row.router, "sent" if row.is_deadline_sent else "kept", f"{row.factor:g} x"]
        cells += [f"{row.offered_per_s:.0f}", f"{row.goodput_per_s:.0f}"]
        cells += [f"{row.goodput_share[level]:.1%}" for level in SHARES]
        cells += [f"{row.p99_ms[level]:.0f}" for level in SHARES]
        lines.append([*cells, f"{row.limit:g}", f"{row.router_cpu_s:.2f}"])
    text = f"Capacity: {capacity_per_s:.0f}/s. Deadline {DEADLINE_S * 1e3:.0f} ms.\n\n"
    text += table(lines, left_columns=(0, 1)) + "\n"
    for key in dict.fromkeys((row.router, row.is_deadline_sent) for row in rows):
        points = _goodput(rows, *key)
        peak = max(goodput for _, goodput in points)
        at_three = dict(points).get(3.0)
        if at_three is not None and peak:
            how = "sent" if key[1] else "kept"
            text += f"\n{key[0]}, deadline {how}: {at_three / peak:.2f} of the peak is left at 3 x"
    return text


def draw(rows: Sequence[Row], capacity_per_s: float) -> str:
    """Goodput by load, of both routers; and by priority, of the one with limits."""
    names = {True: "clients send their deadline", False: "they do not"}
    lines = [
        Line(
            f"{router}, {names[sent]}",
            [(x, y / capacity_per_s) for x, y in _goodput(rows, router, sent)],
            router != _LIMITED,
        )
        for sent in (True, False)
        for router in _ARGUMENTS
    ]
    levels = [
        Line(
            f"priority {level}, {SHARES[level]:.0%} of the load, {router}",
            [
                (row.factor, row.goodput_share[level])
                for row in rows
                if (row.router, row.is_deadline_sent) == (router, False)
            ],
            router != _LIMITED,
        )
        for router in _ARGUMENTS
        for level in (SHARES if router == _LIMITED else (1,))
    ]
    x_title = "load, times the capacity"
    return render_svg(
        f"Answers within {DEADLINE_S * 1e3:.0f} ms under overload",
        [
            Plot("All requests", x_title, "goodput, by capacity", lines),
            Plot("By priority, deadline not sent", x_title, "share answered in time", levels),
        ],
    )


def _goodput(rows: Sequence[Row], router: str, sent: bool) -> list[tuple[float, float]]:
    key = (router, sent)
    return [(row.factor, row.goodput_per_s) for row in rows if (row.router, row.is_deadline_sent) == key]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.overload", description="Goodput of a mesh under overload.")
    parser.add_argument("--duration-s", type=float, default=5.0, metavar="S", help="of each load; default: 5")
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS, metavar="X", help="loads by capacity")
    parser.add_argument("--svg", type=Path, default=ROOT / "docs" / "overload.svg", metavar="FILE")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    options = parser.parse_args(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    capacity_per_s = 0.0
    try:
        with tempfile.TemporaryDirectory() as folder, (options.results / "mesh.log").open("w") as log:
            write_repository(Path(folder))
            for router in reversed(_ARGUMENTS):  # the capacity is that without limits
                with running_mesh(Path(folder), _ARGUMENTS[router], log=log) as endpoints:
                    measuring = measure_router(
                        endpoints["router"], router, capacity_per_s, options.factors, options.duration_s
                    )
                    capacity_per_s, more = asyncio.run(measuring)
                    rows += more
    except (MeshError, grpc.aio.AioRpcError) as error:
        print(error, file=sys.stderr)
        return 1
    described = machine.describe()
    print("\n".join([*machine_lines(described), "", render(rows, capacity_per_s)]))
    options.svg.write_text(draw(rows, capacity_per_s))
    print(f"wrote {write_json(options.results, rows, described, prefix='overload-')} and {options.svg}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
