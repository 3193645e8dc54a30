"""How a service is kept running: scripts that say they listen where the test does, in the place of services."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.unit.mesh.serving import ListingCore

from weft.base.processes.process import MAX_DEATHS, Endpoint, RestartPolicy
from weft.mesh.preflight import MeshError
from weft.mesh.supervised import SupervisedService, Supervision
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services

ANNOUNCE = """
import signal
print('{"service": "s", "grpc": "%s", "metrics": "127.0.0.1:2"}', flush=True)
signal.pause()
"""
WAIT_S = 20.0


class Reports(logging.Handler):
    """What is logged of the mesh; ``seen`` waits for a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._changed = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._changed.set()

    async def seen(self, part: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not any(part in text for text in self.texts):
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def supervised(
    reports: Reports, policy: RestartPolicy, *, is_restarting: bool = True
) -> AsyncIterator[tuple[SupervisedService, Endpoint]]:
    """A service that serves and is kept running until the block ends, and where it was first."""
    server = make_server()
    services = add_services(server, ListingCore({}), "fake", is_ready=lambda: True)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    services.health.set_serving(True)
    service = SupervisedService(
        "fake",
        [sys.executable, "-c", ANNOUNCE % address],
        Supervision(WAIT_S, 1.0, is_restarting),
        lambda name, pid, line: None,
        policy=policy,
    )
    log = logging.getLogger("weft.mesh")
    log.addHandler(reports)
    log.setLevel(logging.INFO)
    endpoint = await service.start(asyncio.get_running_loop().time() + WAIT_S)
    running = asyncio.create_task(service.run())
    try:
        yield service, endpoint
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for process in service.processes:
            process.kill()
            await process.wait()
        services.health.stop()
        log.removeHandler(reports)
        await server.stop(None)


async def test_a_wish_ends_the_pause_before_the_next_attempt() -> None:
    """Who has mended what a service died of need not wait until it is tried again."""
    policy, reports = RestartPolicy(draw=lambda: 1.0), Reports()
    async with supervised(reports, policy) as (service, endpoint):
        for _ in range(MAX_DEATHS):
            policy.died()
        os.kill(endpoint.pid, signal.SIGKILL)
        await reports.seen("is started again in 30.0 s")
        async with asyncio.timeout(WAIT_S):
            await service.replace()
        assert service.is_running
        await reports.seen("fake serves again after")


async def test_what_is_not_started_again_is_not_replaced() -> None:
    """The wish is refused at once, so that the other services have their turn."""
    reports = Reports()
    async with supervised(reports, RestartPolicy(), is_restarting=False) as (service, endpoint):
        os.kill(endpoint.pid, signal.SIGKILL)
        await reports.seen("fake was ended by SIGKILL")
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(MeshError, match="fake does not run, and is not started again"):
                await service.replace()
