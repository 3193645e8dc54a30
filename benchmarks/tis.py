"""A real Triton Inference Server for the length of a ``with`` block.

It comes from the PyPI package ``nvidia-pytriton``, which has the python backend alone, and is put into an environment
of its own, ``.venv-tis``.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.floor import SERVICE
from benchmarks.servers import Server, process_tree
from weft_protos import grpc_service_pb2 as pb

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv-tis"
NAME = "Triton Inference Server"
#: The backend of that version reads arrays of numpy 2 as empty. The last two are for ``embed``.
PACKAGES = ("nvidia-pytriton==0.7.0", "numpy==1.26.4", "onnxruntime==1.31.1", "tokenizers==0.23.3")

_START_TIMEOUT_S = 60.0


def tis_environment() -> Path:
    """Folder of the server in an environment that has it; made at the first call. Raises CalledProcessError."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / ".installed"
    if not stamp.exists() or stamp.read_text().split() != list(PACKAGES):
        print(f"installing {', '.join(PACKAGES)} into {ENVIRONMENT.name}", file=sys.stderr)
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
        stamp.write_text("\n".join(PACKAGES))
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
            yield Server(NAME, address, lambda: process_tree(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


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
