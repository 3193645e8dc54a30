"""``python -m benchmarks.batching``: what dynamic batching gains where it can gain something.

The model multiplies a row by three matrices of 16 MiB: a lone row waits for memory, 32 rows together share what is
read. One instance, one thread, 64 requests in work; the same file with and without ``dynamic_batching``.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks import machine, requests
from benchmarks.report import Row, make_row, render, write_json
from benchmarks.service import running_model_service
from weft.base.processes.process import Endpoint
from weft.capacity.tuning.load import Bounds, caller, closed_loop
from weft.v2.client.channels import open_channel

ROOT = Path(__file__).resolve().parents[1]
_WIDTH, _NUM_LAYERS, _CONCURRENCY = 2048, 3, 64
_CONFIG = f"""
backend: "onnxruntime"
max_batch_size: 32
input {{ name: "X" data_type: TYPE_FP32 dims: [ {_WIDTH} ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ {_WIDTH} ] }}
"""
_SETTINGS = {"one_by_one": "", "batching": "dynamic_batching { }"}


def write_repository(repository: Path) -> None:
    """The same network under each setting."""
    random = np.random.default_rng(requests.SEED)
    names = ["X", *(f"H{layer}" for layer in range(1, _NUM_LAYERS)), "Y"]
    weights = [
        numpy_helper.from_array((random.normal(size=(_WIDTH, _WIDTH)) / _WIDTH**0.5).astype(np.float32), f"W{layer}")
        for layer in range(_NUM_LAYERS)
    ]
    nodes = [
        helper.make_node("MatMul", [names[layer], f"W{layer}"], [names[layer + 1]]) for layer in range(_NUM_LAYERS)
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", _WIDTH]) for name in ("X", "Y")]
    graph = helper.make_graph(nodes, "wide", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    for name, settings in _SETTINGS.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        onnx.save(model, folder / "model.onnx")
        (folder.parent / "config.pbtxt").write_text(_CONFIG + settings)


async def measure(endpoint: Endpoint, duration_s: float) -> list[Row]:
    """One row for each setting; they take turns twice and the second one counts."""
    row = np.random.default_rng(requests.SEED).normal(size=(1, _WIDTH)).astype(np.float32)
    pids = {"model": endpoint.pid}
    rows: dict[str, Row] = {}
    async with open_channel(endpoint.grpc) as channel:
        send = caller(channel)
        for bounds in (Bounds(64, duration_s), Bounds(10**9, duration_s)):
            for name in _SETTINGS:
                before_s = machine.cpu_seconds(pids)
                load = await closed_loop(send, [requests.serialize(name, {"X": row})], bounds, concurrency=_CONCURRENCY)
                used_s = {key: value - before_s[key] for key, value in machine.cpu_seconds(pids).items()}
                rows[name] = make_row(name, f"closed, {_CONCURRENCY} at once", load, used_s)
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.batching", description="Dynamic batching against batch 1.")
    parser.add_argument("--duration-s", type=float, default=10.0, metavar="S", help="of each load; default: 10")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_repository(Path(folder))
            with running_model_service(Path(folder)) as endpoint:
                rows = asyncio.run(measure(endpoint, options.duration_s))
    except grpc.aio.AioRpcError as error:
        print(error, file=sys.stderr)
        return 1
    described = machine.describe()
    print(render(rows, described))
    single, batched = rows
    print(f"\ndynamic batching answers {batched.rate_per_s / single.rate_per_s:.1f} times as many requests")
    print(f"wrote {write_json(ROOT / 'benchmarks' / 'results', rows, described, prefix='batching-')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
