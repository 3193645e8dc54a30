"""``python -m benchmarks.versus_tis``: one repository, served by a real Triton Inference Server and by Weft in turn.

Answers are compared, then both are loaded in the same way, workload by workload. The server comes from the PyPI package
``nvidia-pytriton``, which has the python backend alone; it is put into an environment of its own, ``.venv-tis``.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from benchmarks import machine, requests
from benchmarks.floor import SERVICE
from benchmarks.load import Bounds, caller, closed_loop
from benchmarks.report import machine_lines, table, write_json
from weft_common.client.channels import open_channel
from weft_common.protocol.wire import result_from_response
from weft_common.tensors import Array, decode
from weft_mesh.running import running_mesh
from weft_protos import grpc_service_pb2 as pb

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = ROOT / "benchmarks" / "tis_repository"
ENVIRONMENT = ROOT / ".venv-tis"
#: The backend of that version reads arrays of numpy 2 as empty.
PACKAGES = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")

CONCURRENCIES = (1, 8, 32)
_START_TIMEOUT_S = 60.0
_NUM_COMPARED = 100
#: Largest difference of two answers that counts as equal: batches of other sizes add up in another order.
_TOLERANCE = 1e-5


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


class Server(NamedTuple):
    """A server that runs.

    Attributes:
        name: For the table.
        address: ``host:port`` of its V2 service.
        pids: Its processes; read for each measurement.
    """

    name: str
    address: str
    pids: Callable[[], list[int]]


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


def tis_environment() -> Path:
    """Folder of the server in an environment that has it; made at the first call. Raises CalledProcessError."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / ".installed"
    if not stamp.exists():
        _report(f"installing {', '.join(PACKAGES)} into {ENVIRONMENT.name}")
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
        server = _site_packages() / "pytriton" / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = shutil.copy(
            server / "python_backend_stubs" / version / "triton_python_backend_stub", server / "backends" / "python"
        )
        for program in (stub, server / "bin" / "tritonserver"):
            Path(program).chmod(0o700)
        stamp.touch()
    return _site_packages() / "pytriton" / "tritonserver"


def _site_packages() -> Path:
    return next((ENVIRONMENT / "lib").glob("python*/site-packages"))


@contextlib.contextmanager
def running_tis(repository: Path, log: Any) -> Iterator[Server]:
    """A Triton Inference Server on loopback, ended with the block.

    Raises:
        RuntimeError: It did not become ready; the log says why.
    """
    folder = tis_environment()
    ports = _free_ports(3)
    command = [
        folder / "bin" / "tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={folder / 'backends'}",
        *(f"--{kind}-address=127.0.0.1" for kind in ("grpc", "http", "metrics")),
        *(f"--{kind}-port={port}" for kind, port in zip(("grpc", "http", "metrics"), ports, strict=True)),
    ]
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",  # the backend's Python finds numpy by it
    }
    with subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0) as process:
        try:
            address = f"127.0.0.1:{ports[0]}"
            _wait_until_ready(address, process)
            yield Server("Triton Inference Server", address, lambda: _tree(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def running_weft(repository: Path, log: Any) -> Iterator[tuple[Server, Server]]:
    """The router of a mesh over the same files, and its model service; ended with the block. Raises MeshError."""
    with running_mesh(repository, log=log) as endpoints:
        pids = [endpoint.pid for endpoint in endpoints.values()]
        yield (
            Server("Weft", endpoints["router"].grpc, lambda: pids),
            Server("Weft, model service alone", endpoints["model"].grpc, lambda: pids),
        )


async def answers(server: Server, workload: Workload) -> list[dict[str, Array]]:
    """What the server gives for some random rows. Raises AioRpcError."""
    async with open_channel(server.address) as channel:
        call = caller(channel)
        responses = [
            result_from_response(pb.ModelInferResponse.FromString(await call(request)))
            for request in _requests(workload, _NUM_COMPARED)
        ]
    return [{name: decode(tensor) for name, tensor in response.outputs.items()} for response in responses]


async def measure(server: Server, workload: Workload, bounds: Bounds, num_warmups: int) -> list[Row]:
    """One row for each concurrency."""
    rows = []
    async with open_channel(server.address) as channel:
        call, payloads = caller(channel), _requests(workload, 64)
        for number in range(num_warmups):
            await call(payloads[number % len(payloads)])
        for concurrency in CONCURRENCIES:
            before_s = _cpu_s(server)
            load = await closed_loop(call, payloads, bounds, concurrency=concurrency)
            used_s = _cpu_s(server) - before_s
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


def differences(mine: Sequence[Mapping[str, Array]], theirs: Sequence[Mapping[str, Array]]) -> list[str]:
    """How answers of two servers to the same requests differ; empty where they are equal."""
    found = []
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.keys() != other.keys():
            found.append(f"request {number}: outputs {sorted(one)} and {sorted(other)}")
            continue
        found += [
            f"request {number}: output {name} differs"
            for name in one
            if one[name].dtype != other[name].dtype
            or one[name].shape != other[name].shape
            or not np.allclose(one[name], other[name], rtol=_TOLERANCE, atol=_TOLERANCE)
        ]
    return found


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


def _cpu_s(server: Server) -> float:
    return sum(machine.cpu_seconds({str(pid): pid for pid in server.pids()}).values())


def _tree(pid: int) -> list[int]:
    """A process and everything below it."""
    found = [pid]
    for parent in found:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def _wait_until_ready(address: str, process: "subprocess.Popen[bytes]") -> None:
    end_s = time.monotonic() + _START_TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        ready = channel.unary_unary(
            f"/{SERVICE}/ServerReady",
            request_serializer=pb.ServerReadyRequest.SerializeToString,
            response_deserializer=pb.ServerReadyResponse.FromString,
        )
        while process.poll() is None and time.monotonic() < end_s:
            with contextlib.suppress(grpc.RpcError):
                if ready(pb.ServerReadyRequest(), timeout=1.0).ready:
                    return
            time.sleep(0.2)
    raise RuntimeError("Triton Inference Server did not become ready; its log says why")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


async def _compare(servers: tuple[Server, Server, Server], bounds: Bounds, num_warmups: int) -> list[Row]:
    """Rows of router, model service and Triton Inference Server. Raises RuntimeError where answers differ."""
    rows = []
    for workload in WORKLOADS:
        asked = [server for server in servers if not (workload.is_graph and server is servers[1])]
        expected, *others = [await answers(server, workload) for server in asked]
        for other in others:
            if found := differences(expected, other):
                raise RuntimeError(f"answers of {workload.model} differ: {'; '.join(found[:3])}")
        _report(f"{workload.model}: {len(expected)} answers of each server are equal")
        for server in asked:
            rows += await measure(server, workload, bounds, num_warmups)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every answer is equal and no request failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.versus_tis", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; figures mean nothing")
    options = parser.parse_args(argv)
    bounds, num_warmups = (Bounds(50, 1.0), 5) if options.quick else (Bounds(20_000, 5.0), 100)
    options.results.mkdir(parents=True, exist_ok=True)
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


def _report(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
