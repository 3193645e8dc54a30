"""``python -m benchmarks.transport_services WIRE SOCKET``: a service that gives back what it gets.

It listens on TCP and on a Unix socket, in a process of its own, which ends with its standard input.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.floor import wire_server
from weft.base.core import CallContext, InferCall, InferResult
from weft.base.processes.process import Endpoint
from weft.v2.client.channels import server_options
from weft.v2.server.server import add_services


@contextlib.contextmanager
def running(module: str, *arguments: str) -> Iterator[Endpoint]:
    """A service in a process of its own; it is ready, and ended when the block is left."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment
    ) as process:
        try:
            endpoints = json.loads(process.stdout.readline() if process.stdout is not None else "")
            yield Endpoint(endpoints["grpc"], endpoints["metrics"], process.pid)
        finally:
            process.terminate()


class _EchoCore:
    """Answers each call with its inputs."""

    def is_ready(self) -> bool:
        return True

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        return InferResult(call.model_name, "1", call.request_id, {}, call.inputs)


async def _serve_echo(wire: str, socket_path: str) -> None:
    server = wire_server()() if wire == "weft" else grpc.aio.server(options=server_options())
    core: Any = _EchoCore()
    add_services(server, core, "weft.echo")
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    print(json.dumps({"grpc": f"127.0.0.1:{port}", "metrics": ""}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop; the exit status."""
    wire, socket_path = argv
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_echo(wire, socket_path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
