"""``python -m benchmarks.floor``: a bare grpcio server whose only method gives its bytes back; the floor of a hop.

It has what every service has (asyncio server, uvloop, the same options) and nothing else: no protobuf, no checks, no
queue. It prints one JSON line with its address and process id, and ends with its standard input.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import uvloop

from weft_common.client.channels import server_options
from weft_common.processes.process import Endpoint

SERVICE, METHOD = "inference.GRPCInferenceService", "ModelInfer"


@contextmanager
def running_floor() -> Iterator[Endpoint]:
    """A floor server in a process of its own, ended when the block is left."""
    command = [sys.executable, "-m", "benchmarks.floor"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[1]
    ) as process:
        try:
            yield Endpoint(**json.loads(process.stdout.readline() if process.stdout is not None else ""))
        finally:
            process.terminate()


async def _echo(request: bytes, context: object) -> bytes:
    return request


async def _serve() -> None:
    server = grpc.aio.server(options=server_options())
    handler = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"grpc": f"127.0.0.1:{port}", "metrics": "", "pid": os.getpid()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
