"""``python -m benchmarks.recording``: what recording 5 % of the requests costs a router.

Two meshes serve a graph of one step over a model in Python, of rows of some floats; one of their routers records. Start
and end of a recording do not count, what it writes does. 0 % is without a recording in either: the noise.
"""

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import machine
from benchmarks.report import machine_lines, table
from benchmarks.requests import serialize
from benchmarks.side_by_side import effects, interval
from weft.base.processes.process import Endpoint
from weft.capacity.tuning.load import Call, caller
from weft.mesh.running import running_mesh
from weft.v2.client.channels import open_channel
from weft.v2.client.v2_client import V2Client
from weft_protos import graph_service_pb2 as pb

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", one.as_numpy())]) for one in inputs]
"""
CONFIG = """backend: "python" max_batch_size: 32 parameters { key: "EXECUTION" value { string_value: "inline" } }
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
GRAPH = """name: "pipe" platform: "graph" max_batch_size: 32
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
node { name: "root" sequence { step { name: "same" model_name: "same" } } }
"""
#: What was recorded is written by then.
_WRITTEN_S = 2.2


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0."""
    parser = argparse.ArgumentParser(description="What recording costs a router.")
    parser.add_argument("--rounds", type=int, default=40, help="of two measurements for each row")
    parser.add_argument("--requests", type=int, default=2000, help="of a measurement, to each router")
    parser.add_argument("--percent", type=float, nargs="+", default=[0, 5])
    parser.add_argument("--floats", type=int, nargs="+", default=[16, 4096], help="in a request, and in its answer")
    options = parser.parse_args(argv)
    print("\n".join(machine_lines(machine.describe())))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        for path, text in (
            ("model/same/1/model.py", MODEL),
            ("model/same/config.pbtxt", CONFIG),
            ("graphs/pipe/1/graph.pbtxt", GRAPH),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        log = stack.enter_context((root / "log").open("w"))
        routers = [
            stack.enter_context(running_mesh(root, [f"--record-dir={root / name}"], log=log))["router"] for name in "ab"
        ]
        rows = asyncio.run(_rows(routers, options))
    print(table([("floats", "% recorded", "CPU time", "95 % interval"), *rows], left_columns=()))
    return 0


async def _rows(routers: Sequence[Endpoint], options: argparse.Namespace) -> list[tuple[str, ...]]:
    rows = []
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(V2Client(one.grpc)) for one in routers]
        calls = [caller(await stack.enter_async_context(open_channel(one.grpc))) for one in routers]
        for num_floats in options.floats:
            request = serialize("pipe", {"X": np.random.default_rng(1).random((1, num_floats), np.float32)})
            load = partial(_load, calls, request, options.requests)
            await load()
            for percent in options.percent:
                pids = [one.pid for one in routers]
                found = await effects(pids, options.rounds, partial(_recording, clients, percent), load)
                low, ratio, high = interval(found)
                rows.append((f"{num_floats}", f"{percent:g}", f"{ratio:.4f}", f"{low:.4f} to {high:.4f}"))
    return rows


async def _load(calls: Sequence[Call], request: bytes, num_requests: int) -> None:
    """So many to each, 16 at once; and what was recorded is written."""
    left = iter(range(num_requests))

    async def send() -> None:
        for _ in left:
            for call in calls:
                await call(request)

    await asyncio.gather(*(send() for _ in range(16)))
    await asyncio.sleep(_WRITTEN_S)


@contextlib.asynccontextmanager
async def _recording(clients: Sequence[V2Client], percent: float, index: int) -> AsyncIterator[None]:
    for action in ("START", "", "STOP"):
        if not action:
            yield
        elif percent:
            asked = pb.RecordingRequest(action=action, graph="pipe", percent=percent)  # type: ignore[arg-type]  # its name
            await clients[index].graph_service("Recording", asked, timeout_s=30)


if __name__ == "__main__":
    main()
