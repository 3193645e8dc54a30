"""The health of a server is known as soon as it changes; names lead to all their addresses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from grpc_health.v1 import health_pb2_grpc

from weft.router.targets.connect import resolve, watch_health
from weft.router.targets.replicas import Health
from weft.v2.client.channels import open_channel
from weft.v2.server.health import HealthServicer
from weft.v2.server.make_server import make_server


@asynccontextmanager
async def server(*services: str, port: int = 0) -> AsyncIterator[tuple[int, HealthServicer]]:
    """A server with a health service for these services; without any it has none."""
    running, health = make_server(), HealthServicer(services)
    if services:
        health_pb2_grpc.add_HealthServicer_to_server(health, running)
    bound = running.add_insecure_port(f"127.0.0.1:{port}")
    await running.start()
    try:
        yield bound, health
    finally:
        await running.stop(None)


class Told:
    """What a watch has told, to be waited for."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Health] = asyncio.Queue()

    async def until(self, health: Health) -> None:
        async with asyncio.timeout(10):
            while await self.told.get() is not health:
                pass


@asynccontextmanager
async def watched(port: int) -> AsyncIterator[Told]:
    told = Told()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        task = asyncio.create_task(watch_health(channel, told.told.put_nowait))
        try:
            yield told
        finally:
            task.cancel()
            await asyncio.wait((task,))


async def test_every_change_is_told() -> None:
    """Serving, not serving, gone, and back."""
    async with server("inference.GRPCInferenceService") as (port, health), watched(port) as told:
        await told.until(Health.NOT_SERVING)
        health.set_serving(True)
        await told.until(Health.SERVING)
        health.set_serving(False)
        await told.until(Health.NOT_SERVING)
    async with watched(port) as told:
        await told.until(Health.UNREACHABLE)
        async with server("inference.GRPCInferenceService", port=port) as (_, health):
            health.set_serving(True)
            await told.until(Health.SERVING)
        await told.until(Health.UNREACHABLE)


@pytest.mark.parametrize("services", [(), ("another.Service",)])
async def test_a_server_without_a_word_on_the_service_is_unknown(services: tuple[str, ...]) -> None:
    """It may serve all the same: its answers to discovery decide."""
    async with server(*services) as (port, _), watched(port) as told:
        await told.until(Health.UNKNOWN)


async def test_a_name_leads_to_all_its_addresses() -> None:
    """In a form that can be called; a name that there is not is an error."""
    assert ["127.0.0.1:8021"] == await resolve("127.0.0.1:8021")
    assert ["[::1]:8021"] == await resolve("[::1]:8021")
    assert "127.0.0.1:8021" in await resolve("localhost:8021")
    for name in ("nowhere.invalid:1", f"{'x' * 64}.invalid:1"):
        with pytest.raises(OSError, match=r"(?i)name"):
            await resolve(name)
