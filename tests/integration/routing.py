"""A real router process over a real V2 server whose models answer with their own names."""

import asyncio
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult
from weft.base.signature import VERSION_DIGEST_PARAMETER, ModelSignature, TensorSpec
from weft.base.statistics import ModelStatistics
from weft.base.tensors import bytes_tensor, encode_bytes, split_bytes
from weft.router.repository.config import config_of_signature
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos import grpc_service_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig

MODELS = ("alpha", "beta", "gamma", "delta")


class NamingCore(InferenceCore):
    """Each model takes X and gives NAME: its own name behind what X says.

    Attributes:
        models: Names.
        dims: Of X, by model; [1] where nothing else is said.
        digests: Of the files, by model; none where nothing else is said.
        held: Name of a model whose answers wait until ``is_released``; once one does, ``is_holding``.
    """

    def __init__(self) -> None:
        self.models = MODELS
        self.dims: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        self.held = ""
        self.is_holding = threading.Event()
        self.is_released = threading.Event()

    def is_ready(self) -> bool:
        return True

    def is_model_ready(self, name: str, version: str) -> bool:
        return True

    def signature(self, name: str, version: str) -> ModelSignature:
        text = TensorSpec("X", "BYTES", (self.dims.get(name, 1),))
        return ModelSignature(name, "1", "naming", 0, (text,), (TensorSpec("NAME", "BYTES", (1,)),))

    def config(self, name: str, version: str) -> ModelConfig:
        config = config_of_signature(self.signature(name, version))
        config.parameters[VERSION_DIGEST_PARAMETER].string_value = self.digests.get(name, "")
        return config

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry(name, "1", "READY", "") for name in self.models]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        return []

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        (said,) = split_bytes(call.inputs["X"].data)
        await asyncio.sleep(0.001)
        if call.model_name == self.held:
            self.is_holding.set()
            await asyncio.to_thread(self.is_released.wait, 30)
        answer = b"%s,%s" % (said, call.model_name.encode())
        return InferResult(call.model_name, "1", call.request_id, {}, {"NAME": bytes_tensor([answer], (1,))})


@contextmanager
def naming_service(core: NamingCore | None = None) -> Iterator[str]:
    """Address of a V2 server with the naming models, on a thread of its own."""
    served = core if core is not None else NamingCore()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = make_server()
        add_services(server, served, "naming")
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


class Router:
    """A running router process; ``grpc`` and ``metrics`` are its addresses."""

    def __init__(self, process: "subprocess.Popen[str]", endpoints: dict[str, Any]) -> None:
        self.process = process
        self.grpc: str = endpoints["grpc"]
        self.metrics: str = endpoints["metrics"]
        self.was_killed = False

    def kill(self) -> None:
        """It has ended at once, as in a crash."""
        self.was_killed = True
        self.process.kill()
        self.process.wait(10)

    def scrape(self) -> dict[str, float]:
        """Every sample of ``/metrics`` by name and labels."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def command_of(repository: Path, target: str) -> list[str]:
    """The command line of a router on free ports."""
    return [
        sys.executable, "-P", "-m", "weft.services.router", "--repository", str(repository),
        "--target", f"model={target}",
        "--grpc-port", "0", "--metrics-port", "0",
    ]  # fmt: skip


@contextmanager
def running_router(repository: Path, target: str, arguments: Sequence[str] = ()) -> Iterator[Router]:
    """A router over one target; it has ended by itself when the block is left."""
    command = [*command_of(repository, target), "--stop-with-stdin", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            assert line, f"the router ended with exit status {process.wait(10)}"
            router = Router(process, json.loads(line))
            yield router
            process.terminate()
            assert process.wait(30) == 0 or router.was_killed
        finally:
            process.kill()


def message(graph: str, request_id: str = "", text: bytes = b"x") -> pb.ModelInferRequest:
    """A request that says ``text``."""
    request = pb.ModelInferRequest(model_name=graph, id=request_id)
    request.inputs.add(name="X", datatype="BYTES", shape=(1,))
    request.raw_input_contents.append(encode_bytes([text]))
    return request


def write(root: Path, text: str, name: str, version: int = 1) -> None:
    """The graph's file, replaced as a whole."""
    path = root / name / str(version) / "graph.pbtxt"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)
