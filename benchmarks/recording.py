"""``python -m benchmarks.recording``: what recording 5 % of the requests costs a router.

A router in a process of its own serves a graph of one step over a model in Python, of rows of some floats. Rounds
without and with a recording take turns; the figures are medians over the pairs of rounds: CPU time of the router for
1,000 requests, and its ratio. 0 % is a pair without a recording in either: the noise of the machine.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from benchmarks import machine
from benchmarks.report import machine_lines, table
from weft.base.core import InferCall
from weft.base.tensors import encode
from weft.mesh.running import running_mesh
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
#: What was recorded is written by then.
_WRITTEN_S = 0.7
GRAPH = """name: "pipe" platform: "graph" max_batch_size: 32
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
node { name: "root" sequence { step { name: "same" model_name: "same" } } }
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0."""
    parser = argparse.ArgumentParser(description="What recording costs a router.")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of rounds for each row")
    parser.add_argument("--requests", type=int, default=4000, help="of a round")
    parser.add_argument("--percent", type=float, nargs="+", default=[0, 5, 100])
    parser.add_argument("--floats", type=int, nargs="+", default=[16, 4096], help="in a request, and in its answer")
    options = parser.parse_args(argv)
    print("\n".join(machine_lines(machine.describe())))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        for path, text in (
            ("model/same/1/model.py", MODEL),
            ("model/same/config.pbtxt", CONFIG),
            ("graphs/pipe/1/graph.pbtxt", GRAPH),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        log = stack.enter_context((root / "log").open("w"))
        ports = ["--router-port=0", "--metrics-port=0", f"--record-dir={root / 'kept'}"]
        endpoints = stack.enter_context(running_mesh(root, ports, log=log))
        pids = {name: endpoint.pid for name, endpoint in endpoints.items()}
        rows = asyncio.run(_rows(endpoints["router"].grpc, pids, options))
    head = ("floats", "% recorded", "router ms", "with", "ratio", "quartiles of pairs", "router and model")
    print(table([head, *rows], left_columns=()))
    return 0


async def _rows(address: str, pids: dict[str, int], options: argparse.Namespace) -> list[tuple[str, ...]]:
    rows = []
    async with V2Client(address) as client:
        for num_floats in options.floats:
            row = np.random.default_rng(1).random((1, num_floats), np.float32)
            call = InferCall("pipe", "", "", {}, {"X": encode(row)})
            await _cpu_ms(client, call, pids, options.requests)
            for percent in options.percent:
                pairs = []
                for _ in range(options.rounds):
                    off = await _cpu_ms(client, call, pids, options.requests)
                    on = await _cpu_ms(client, call, pids, options.requests, percent)
                    pairs.append((off, on))
                low, ratio, high = quantiles([on["router"] / off["router"] for off, on in pairs], n=4)
                off_ms, on_ms = (median(side["router"] for side in sides) for sides in zip(*pairs, strict=True))
                both = median(sum(on.values()) / sum(off.values()) for off, on in pairs)
                rows.append(
                    (f"{num_floats}", f"{percent:g}", f"{off_ms:.1f}", f"{on_ms:.1f}", f"{ratio:.3f}",
                     f"{low:.3f} to {high:.3f}", f"{both:.3f}")
                )  # fmt: skip
    return rows


async def _record(client: V2Client, action: str, percent: float) -> None:
    request = pb.RecordingRequest(action=action, graph="pipe", percent=percent)  # type: ignore[arg-type]  # its name
    await client.graph_service("Recording", request, timeout_s=30)


async def _cpu_ms(
    client: V2Client, call: InferCall, pids: dict[str, int], num_requests: int, percent: float = 0
) -> dict[str, float]:
    """CPU time of each process for 1,000 of these requests, 16 at once; start and end of a recording do not count."""
    left = iter(range(num_requests))

    async def send() -> None:
        for _ in left:
            await client.infer(call, timeout_s=60)

    if percent:
        await _record(client, "START", percent)
    before_ns = {name: _cpu_ns(pid) for name, pid in pids.items()}
    await asyncio.gather(*(send() for _ in range(16)))
    await asyncio.sleep(_WRITTEN_S)
    used = {name: (_cpu_ns(pid) - before_ns[name]) / 1e3 / num_requests for name, pid in pids.items()}
    if percent:
        await _record(client, "STOP", percent)
    return used


def _cpu_ns(pid: int) -> int:
    """CPU time of all threads; a round is too short for clock ticks."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


if __name__ == "__main__":
    main()
