"""``python -m benchmarks.floor``: a bare server whose only method gives its bytes back; the floor of a hop.

It is of grpcio, or with ``--wire weft`` of ``weft.wire``. It has what every service has (asyncio server, uvloop, the
same options) and nothing else: no protobuf, no checks, no queue. With ``--unix-socket PATH`` it listens there too. It
prints one JSON line with its address and process id, and ends with its standard input.
"""

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop

from weft.base.processes.malloc import keep_freed_memory
from weft.base.processes.process import Endpoint
from weft.v2.client.channels import server_options

SERVICE, METHOD = "inference.GRPCInferenceService", "ModelInfer"


def wire_server() -> Any:
    """Class of ``weft.wire``'s server; None where the package has none."""
    return _class_of("weft.wire.server", "Server")


def wire_channel() -> Any:
    """Class of ``weft.wire``'s channel; None where the package has none."""
    return _class_of("weft.wire.client", "Channel")


def _class_of(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


@contextmanager
def running_floor(*arguments: str) -> Iterator[Endpoint]:
    """A floor server in a process of its own, ended when the block is left."""
    command = [sys.executable, "-m", "benchmarks.floor", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[1]
    ) as process:
        try:
            yield Endpoint(**json.loads(process.stdout.readline() if process.stdout is not None else ""))
        finally:
            process.terminate()


async def _echo(request: bytes, context: object) -> bytes:
    return request


async def _serve(wire: str, socket_path: Path | None) -> None:
    keep_freed_memory()
    server = wire_server()() if wire == "weft" else grpc.aio.server(options=server_options())
    handler = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    if socket_path is not None:
        server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    print(json.dumps({"grpc": f"127.0.0.1:{port}", "metrics": "", "pid": os.getpid()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="benchmarks.floor", description="A server that gives its bytes back.")
    parser.add_argument("--wire", choices=("grpcio", "weft"), default="grpcio")
    parser.add_argument("--unix-socket", type=Path, metavar="PATH")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options.wire, options.unix_socket))
