"""Waiting for a service, against a V2 server in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from weft.base.core import IndexEntry, InferenceCore
from weft.mesh import readiness
from weft.mesh.preflight import MeshError
from weft.mesh.readiness import dialable, wait_ready
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services


class _Core(InferenceCore):
    """Ready when told so."""

    def __init__(self, *entries: IndexEntry) -> None:
        self.is_up = False
        self.entries = list(entries)

    def is_ready(self) -> bool:
        return self.is_up

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return self.entries


@asynccontextmanager
async def serving(core: _Core, *, is_healthy: bool) -> AsyncIterator[str]:
    """A V2 server of ``core`` on a free port; its address."""
    server = make_server()
    health = add_services(server, core, "fake")
    port = server.add_insecure_port("127.0.0.1:0")
    health.health.set_serving(is_healthy)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def in_s(seconds: float) -> float:
    """A deadline."""
    return asyncio.get_running_loop().time() + seconds


async def test_it_waits_until_the_service_is_ready() -> None:
    """Health SERVING alone is not enough: `ServerReady` must agree, and is asked until it does."""
    core = _Core(IndexEntry("m", "1", "LOADING", ""))
    async with serving(core, is_healthy=True) as address:
        waiting = asyncio.create_task(wait_ready("model", address, deadline_s=in_s(30)))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        core.is_up = True
        await asyncio.wait_for(waiting, 10)


async def test_a_deadline_names_the_service_and_its_models() -> None:
    """The message has every model that is not ready, with its state."""
    core = _Core(IndexEntry("slow", "1", "LOADING", ""), IndexEntry("fine", "1", "READY", ""))
    async with serving(core, is_healthy=False) as address:
        with pytest.raises(MeshError) as failure:
            await wait_ready("model", address, deadline_s=in_s(0.2))
    assert str(failure.value) == f"model at {address} is not ready:\n  slow/1 is LOADING"


async def test_failed_models_end_the_wait_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that failed for good are reported with their reasons long before the deadline."""
    monkeypatch.setattr(readiness, "_SETTLED_S", 0.1)
    core = _Core(IndexEntry("b", "2", "UNAVAILABLE", "no model.onnx"), IndexEntry("a", "", "UNAVAILABLE", "bad config"))
    async with serving(core, is_healthy=False) as address:
        with pytest.raises(MeshError, match=r"a is UNAVAILABLE: bad config\n  b/2 is UNAVAILABLE: no model.onnx"):
            await wait_ready("model", address, deadline_s=in_s(60))


async def test_a_service_that_does_not_answer_is_not_ready() -> None:
    """Without a server there is an error at the deadline, not a traceback of gRPC."""
    async with serving(_Core(), is_healthy=True) as address:
        pass
    with pytest.raises(MeshError, match="does not answer SERVING"):
        await wait_ready("router", address, deadline_s=in_s(0.2))


@pytest.mark.parametrize(
    ("address", "expected"),
    [("0.0.0.0:8001", "127.0.0.1:8001"), ("[::]:8001", "[::1]:8001"), ("10.0.0.1:8001", "10.0.0.1:8001")],
)
def test_an_unspecified_host_is_dialled_on_loopback(address: str, expected: str) -> None:
    """A service that listens everywhere is asked on this machine's own address."""
    assert dialable(address) == expected
