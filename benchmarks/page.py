"""``python -m benchmarks.page``: what the page costs a router of 1,000 graphs at 200 requests a second.

Two meshes with a page each. While nobody looks, one page's process is stopped, and its router is one without a page;
while one looks, a viewer of a graph reads the events of one page.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import machine
from benchmarks.report import machine_lines, table
from benchmarks.requests import SEED, serialize
from benchmarks.side_by_side import effects, interval
from weft.base.processes.process import Endpoint
from weft.capacity.tuning.load import Bounds, caller, open_loop
from weft.mesh.running import running_mesh
from weft.router.observe import LEASE_S
from weft.v2.client.channels import open_channel

ROOT = Path(__file__).resolve().parents[1]
GRAPH = ROOT / "model_repository/graphs/identity3"

Mesh = dict[str, Endpoint]


def write_repository(folder: Path, num_graphs: int) -> None:
    """One model, and graphs of three steps that call it."""
    shutil.copytree(ROOT / "model_repository/model/identity", folder / "model/identity")
    text = (GRAPH / "config.pbtxt").read_text()
    for number in range(num_graphs):
        home = folder / f"graphs/g{number}"
        (home / "1").mkdir(parents=True)
        (home / "config.pbtxt").write_text(text.replace("identity3", f"g{number}"))


@contextlib.asynccontextmanager
async def stopped(meshes: Sequence[Mesh], index: int) -> AsyncIterator[None]:
    """The other router's page does nothing."""
    pid = meshes[1 - index]["page"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def viewed(meshes: Sequence[Mesh], index: int) -> AsyncIterator[None]:
    """A browser looks at a graph, and has its first figures."""
    reader, writer = await asyncio.open_connection(*meshes[index]["page"].http.split(":"), limit=1 << 24)
    writer.write(b"GET /ui/api/live?graph=g7 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    while not (line := await reader.readline()).startswith(b"data: ") or json.loads(line[6:])["type"] != "tick":
        pass
    read = asyncio.create_task(reader.read())
    yield
    read.cancel()
    writer.close()
    await asyncio.sleep(1 + LEASE_S)  # so long requests are kept for a viewer who may come back


async def measure(meshes: Sequence[Mesh], options: argparse.Namespace) -> list[tuple[str, ...]]:
    """A row for each case."""
    rows = np.zeros((1, 16), dtype=np.float32)
    requests = [serialize(f"g{number}", {"INPUT0": rows}) for number in range(options.graphs)]
    pids, lines = [mesh["router"].pid for mesh in meshes], []
    async with contextlib.AsyncExitStack() as stack:
        calls = [caller(await stack.enter_async_context(open_channel(mesh["router"].grpc))) for mesh in meshes]

        async def load(seconds: float) -> None:
            bounds = Bounds(1 << 30, seconds)
            loads = [open_loop(call, requests, bounds, rate_per_s=options.rate, seed=SEED) for call in calls]
            for one in await asyncio.gather(*loads):
                if one.errors:
                    raise SystemExit(f"requests failed: {one.errors}")

        for extra in (stopped, viewed):  # once, as at the start of a mesh
            async with extra(meshes, 0), extra(meshes, 1):
                await load(1000 / options.rate)
        for name, extra, rounds, seconds in (
            ("nobody looks", stopped, options.rounds * 5, 2.0),
            ("one looks", viewed, options.rounds, 10.0),  # in which the index is read once
        ):
            found = await effects(pids, rounds, partial(extra, meshes), partial(load, seconds))
            low, ratio, high = interval(found)
            lines.append((name, f"{ratio:.4f}", f"{low:.4f} to {high:.4f}"))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second, to each router")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_repository(folder, options.graphs)
        log = stack.enter_context((folder / "log").open("w"))
        meshes = [stack.enter_context(running_mesh(folder, ["--ui-port", "0"], log=log)) for _ in range(2)]
        lines = asyncio.run(measure(meshes, options))
    print(table([("", "CPU time of the router", "95 % interval"), *lines], left_columns={0}))
    print("\n".join(machine_lines(machine.describe())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
