"""``python -m benchmarks.cascade``: what ``digits_cascade`` saves, and what it costs in right answers.

The held-out pictures of digits go through the graph twice in each of several rounds: small first, and, with the
parameter ``quality=best``, all to the committee. Both are the same graph, service and payload in one run.
"""

import argparse
import asyncio
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks import machine
from weft.base.processes.process import Endpoint
from weft.base.tensors import bytes_tensor
from weft.mesh.preflight import MeshError
from weft.mesh.running import running_mesh
from weft.v2.client.channels import open_channel
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

ROOT = Path(__file__).resolve().parents[1]
_HELD_OUT = "data/digits/held_out.npz"
_MAX_IN_FLIGHT = 8
_TIMEOUT_S = 30.0
MODES = ("auto", "best")


class Outcome(NamedTuple):
    """One mode at one batch size.

    Attributes:
        batch_size: Pictures in a request.
        quality: The parameter.
        accuracy: Share of right answers.
        cpu_ms: CPU of the services for one picture, milliseconds, by service.
    """

    batch_size: int
    quality: str
    accuracy: float
    cpu_ms: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.cascade", description="Small first against always large.")
    parser.add_argument("--repository", type=Path, default=ROOT / "model_repository", metavar="DIR")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="times through the pictures (default 10)")
    options = parser.parse_args(argv)
    held_out = np.load(options.repository / _HELD_OUT)
    try:
        with running_mesh(options.repository, log=None) as endpoints:
            outcomes = asyncio.run(measure(endpoints, held_out["images"], held_out["labels"], options.rounds))
    except (MeshError, grpc.aio.AioRpcError) as error:
        print(error, file=sys.stderr)
        return 1
    print(machine.describe()["cpu"], f"({machine.describe()['num_cores']} cores)")
    print("\n".join(render(outcomes, len(held_out["labels"]))))
    return 0


async def measure(
    endpoints: dict[str, Endpoint], images: NDArray[np.uint8], labels: NDArray[np.int64], num_rounds: int
) -> list[Outcome]:
    """Both modes at several batch sizes; the modes take turns, round by round."""
    pids = {name: endpoint.pid for name, endpoint in endpoints.items()}
    outcomes = []
    async with open_channel(endpoints["router"].grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for batch_size in (1, 8, 32):
            num_right, cpu_s = dict.fromkeys(MODES, 0), {mode: dict.fromkeys(pids, 0.0) for mode in MODES}
            for turn in range(num_rounds + 1):
                for quality in MODES:
                    before = machine.cpu_seconds(pids)
                    right = await _ask_all(stub, images, labels, batch_size, quality)
                    after = machine.cpu_seconds(pids)
                    if turn:  # the first round warms up
                        num_right[quality] += right
                        for name in pids:
                            cpu_s[quality][name] += after[name] - before[name]
            num_pictures = num_rounds * len(labels)
            outcomes += [
                Outcome(
                    batch_size,
                    quality,
                    num_right[quality] / num_pictures,
                    {name: seconds * 1e3 / num_pictures for name, seconds in cpu_s[quality].items()},
                )
                for quality in MODES
            ]
    return outcomes


async def _ask_all(
    stub: Any, images: NDArray[np.uint8], labels: NDArray[np.int64], batch_size: int, quality: str
) -> int:
    """Number of right answers."""
    gate = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def ask(start: int) -> int:
        rows = slice(start, start + batch_size)
        async with gate:
            answer = await stub.ModelInfer(_request(images[rows], quality), timeout=_TIMEOUT_S)
        return int((np.frombuffer(answer.raw_output_contents[0], np.int64) == labels[rows]).sum())

    return sum(await asyncio.gather(*(ask(start) for start in range(0, len(images), batch_size))))


def _request(images: NDArray[np.uint8], quality: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="digits_cascade")
    request.parameters["quality"].string_param = quality
    request.inputs.add(name="IMAGE", datatype="BYTES", shape=[len(images), 1])
    request.outputs.add(name="LABEL")
    request.raw_input_contents.append(bytes_tensor([_png(image) for image in images], (len(images), 1)).data)
    return request


def _png(image: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def render(outcomes: Sequence[Outcome], num_pictures: int) -> list[str]:
    """Lines of a table; CPU in milliseconds for one picture."""
    lines = [f"{num_pictures} held-out pictures, {_MAX_IN_FLIGHT} requests in flight; CPU-ms for one picture"]
    lines.append(f"{'batch':>5}  {'quality':8}  {'accuracy':>8}  {'all services':>12}  {'model':>8}  {'router':>8}")
    for batch_size, quality, accuracy, cpu_ms in outcomes:
        cpu = f"{sum(cpu_ms.values()):12.3f}  {cpu_ms['model']:8.3f}  {cpu_ms['router']:8.3f}"
        lines.append(f"{batch_size:5}  {quality:8}  {accuracy:8.4f}  {cpu}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
