"""A V2 server in a thread of its own, for commands that talk to one."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from weft.base.core import IndexEntry, InferenceCore
from weft.base.errors import NotFoundError
from weft.base.signature import ModelSignature
from weft.router.repository.config import config_of_signature
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft.v2.server.servicer import Extension
from weft_protos.model_config_pb2 import ModelConfig


class ListingCore(InferenceCore):
    """Lists models, which are ready, and those without a signature, which are not; keeps what it is told to load."""

    def __init__(self, models: Mapping[tuple[str, str], ModelSignature | None]) -> None:
        self.models = dict(models)
        self.loaded: list[tuple[str, dict[str, Any]]] = []

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        entries = [
            IndexEntry(*key, "READY" if found else "UNAVAILABLE", "" if found else "no file")
            for key, found in self.models.items()
        ]
        return [entry for entry in entries if not ready_only or entry.state == "READY"]

    def config(self, name: str, version: str) -> ModelConfig:
        found = self.models.get((name, version))
        if found is None:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return config_of_signature(found)

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        if not any(name == known for known, _ in self.models):
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        self.loaded.append((name, dict(parameters)))


@contextmanager
def serving(
    core: InferenceCore,
    extension: Extension | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
    port: int = 0,
) -> Iterator[str]:
    """Address of a server that answers from ``core``, on an event loop of its own, as long as the block lasts."""
    loop = loop or asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = make_server()
        add_services(server, core, "fake", extension or Extension())
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, bound

    server, bound = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
