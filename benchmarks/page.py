"""``python -m benchmarks.page``: what the page costs a router of 1,000 graphs at 200 requests a second.

One mesh, with a page that nobody looks at and with one viewer of one graph, in turns; the figure is the CPU time of the
router's process. ``--baseline DIR`` runs the mesh of another checkout in the same turns, without a page: the difference
is what the page costs while nobody looks.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import machine
from benchmarks.report import machine_lines, table
from benchmarks.requests import SEED, serialize
from weft.base.processes.process import Endpoint
from weft.capacity.tuning.load import Bounds, caller, open_loop
from weft.mesh.running import running_mesh
from weft.router.observe import LEASE_S
from weft.v2.client.channels import open_channel

ROOT = Path(__file__).resolve().parents[1]
GRAPH = ROOT / "model_repository/graphs/identity3"


def write_repository(folder: Path, num_graphs: int) -> None:
    """One model, and graphs of three steps that call it."""
    shutil.copytree(ROOT / "model_repository/model/identity", folder / "model/identity")
    text = (GRAPH / "config.pbtxt").read_text()
    for number in range(num_graphs):
        home = folder / f"graphs/g{number}"
        (home / "1").mkdir(parents=True)
        (home / "config.pbtxt").write_text(text.replace("identity3", f"g{number}"))


@contextlib.contextmanager
def viewer(address: str, graph: str) -> Iterator[None]:
    """A browser that looks at a graph, which has its first figures when the block begins."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", f"/ui/api/live?graph={graph}")
    response = connection.getresponse()
    has_figures, is_over = threading.Event(), threading.Event()

    def read() -> None:
        for line in response:
            if line.startswith(b"data: ") and json.loads(line[6:])["type"] == "tick":
                has_figures.set()
            if is_over.is_set():
                return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    has_figures.wait(60)
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        connection.close()


async def cpu_percent(mesh: dict[str, Endpoint], requests: Sequence[bytes], rate_per_s: float, seconds: float) -> float:
    """CPU time of the router's process under this load, in percent of a core."""
    router = mesh["router"]
    async with open_channel(router.grpc) as channel:
        call = caller(channel)
        before = machine.cpu_seconds({"router": router.pid})["router"]
        load = await open_loop(call, requests, Bounds(1 << 30, seconds), rate_per_s=rate_per_s, seed=SEED)
        if load.errors:
            raise SystemExit(f"requests failed: {load.errors}")
        return 100 * (machine.cpu_seconds({"router": router.pid})["router"] - before) / load.duration_s


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--baseline", type=Path, help="checkout without the page")
    options = parser.parse_args(argv)
    rows = np.zeros((1, 16), dtype=np.float32)
    requests = [serialize(f"g{number}", {"INPUT0": rows}) for number in range(options.graphs)]
    figures: dict[str, list[float]] = {}

    def measure(name: str, mesh: dict[str, Endpoint]) -> None:
        percent = asyncio.run(cpu_percent(mesh, requests, options.rate, options.seconds))
        figures.setdefault(name, []).append(percent)

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as meshes:
        folder = Path(name)
        write_repository(folder, options.graphs)
        log = meshes.enter_context((folder / "log").open("w"))
        page = meshes.enter_context(running_mesh(folder, ["--ui-port", "0"], log=log))
        baseline = None
        if options.baseline is not None:
            path = os.environ["PYTHONPATH"]
            os.environ["PYTHONPATH"] = path.replace(str(ROOT), str(options.baseline.resolve()))
            baseline = meshes.enter_context(running_mesh(folder, log=log))
            os.environ["PYTHONPATH"] = path
        asyncio.run(cpu_percent(page, requests, options.rate, 2.0))  # everything was used once
        for _ in range(options.rounds):
            if baseline is not None:
                measure("baseline", baseline)
            measure("nobody looks", page)
            with viewer(page["page"].http, "g7"):
                measure("one looks", page)
            time.sleep(1 + LEASE_S)  # so long requests are kept for a viewer who may come back
    lines = [("", "CPU of the router, % of a core", "rounds")]
    for case, found in figures.items():
        lines.append((case, f"{statistics.median(found):.2f}", " ".join(f"{one:.2f}" for one in found)))
    print(table(lines, left_columns={0, 2}))
    print("\n".join(machine_lines(machine.describe())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
