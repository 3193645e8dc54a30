"""``python -m benchmarks.fan_out``: what a ``map`` over many rows costs the router.

One request brings 1,000 rows of 16 numbers, which a map sends to a model in chunks. The CPU time of the router is
read before and after, so that everything is in it: the request, its chunks, their calls and the answer.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from benchmarks import machine
from weft.base.processes.process import Endpoint
from weft.mesh.preflight import MeshError
from weft.mesh.running import running_mesh
from weft.v2.client.channels import open_channel
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

ROOT = Path(__file__).resolve().parents[1]
NUM_ROWS = 1000
CHUNKS = (32, 64)
_TIMEOUT_S = 30.0
_GRAPH = """
name: "each{chunk}" platform: "graph"
input  [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, 16 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, 16 ] }} ]
node {{ name: "root" map {{ over: "INPUT0" max_batch_size: {chunk} step {{ name: "row" model_name: "identity" }} }} }}
"""


class Outcome(NamedTuple):
    """Rows in a chunk, and microseconds of CPU for one row by service."""

    chunk: int
    cpu_us: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.fan_out", description="What a map costs the router.")
    parser.add_argument("--repository", type=Path, default=ROOT / "model_repository", metavar="DIR")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="for each size of a chunk (default 100)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        repository = made(Path(folder), options.repository)
        try:
            with running_mesh(repository, log=None) as endpoints:
                outcomes = asyncio.run(measure(endpoints, options.requests))
        except (MeshError, grpc.aio.AioRpcError) as error:
            print(error, file=sys.stderr)
            return 1
    print(machine.describe()["cpu"], f"({machine.describe()['num_cores']} cores)")
    print(f"{NUM_ROWS} rows in a request, one request at a time; CPU-us for one row")
    print(f"{'chunk':>5}  {'router':>8}  {'model':>8}")
    for chunk, cpu_us in outcomes:
        print(f"{chunk:5}  {cpu_us['router']:8.2f}  {cpu_us['model']:8.2f}")
    return 0


def made(folder: Path, samples: Path) -> Path:
    """A repository of a model that answers with its input, and a graph for each size of a chunk."""
    shutil.copytree(samples / "model" / "identity", folder / "model" / "identity")
    for chunk in CHUNKS:
        graph = folder / "graphs" / f"each{chunk}" / "1" / "graph.pbtxt"
        graph.parent.mkdir(parents=True)
        graph.write_text(_GRAPH.format(chunk=chunk))
    return folder


async def measure(endpoints: dict[str, Endpoint], num_requests: int) -> list[Outcome]:
    """Both sizes, the first requests of each unmeasured."""
    pids = {name: endpoint.pid for name, endpoint in endpoints.items()}
    outcomes = []
    rows = np.arange(NUM_ROWS * 16, dtype=np.float32).tobytes()
    async with open_channel(endpoints["router"].grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for chunk in CHUNKS:
            request = pb.ModelInferRequest(model_name=f"each{chunk}", raw_input_contents=[rows])
            request.inputs.add(name="INPUT0", datatype="FP32", shape=[NUM_ROWS, 16])
            before: dict[str, float] = {}
            for number in range(-max(num_requests // 10, 1), num_requests):
                if number == 0:
                    before = machine.cpu_seconds(pids)
                answer = await stub.ModelInfer(request, timeout=_TIMEOUT_S)
                if answer.raw_output_contents[0] != rows:
                    raise ValueError("the rows did not come back as they were sent")
            after = machine.cpu_seconds(pids)
            scale = 1e6 / num_requests / NUM_ROWS
            outcomes.append(Outcome(chunk, {name: (after[name] - before[name]) * scale for name in pids}))
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
