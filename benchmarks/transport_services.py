"""What ``benchmarks.transport`` measures, each in a process of its own that ends with its standard input.

``python -m benchmarks.transport_services echo SOCKET``: a service that gives back what it gets, over TCP and over a
Unix socket. ``... router unary|exchange ARGUMENTS``: a router that makes its calls one by one, or as it always does.
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

import uvloop

from weft_common.client.exchange_client import ExchangeClient
from weft_common.core import CallContext, InferCall, InferResult
from weft_common.processes.process import Endpoint
from weft_common.server.make_server import make_server
from weft_common.server.server import add_services
from weft_router.__main__ import main as router_main


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


async def _serve_echo(socket_path: str) -> None:
    server = make_server()
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
    role, first, *rest = argv
    if role == "echo":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_echo(first))
        return 0
    if first == "unary":
        ExchangeClient.begin = lambda *_: None  # type: ignore[method-assign]  # as if no service offered one
    return router_main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
