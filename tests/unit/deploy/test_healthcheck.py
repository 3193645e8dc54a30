"""The health check of the container images."""

import asyncio

import pytest

from weft.base.core import IndexEntry, InferenceCore
from weft.v2 import healthcheck
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services


class _Core(InferenceCore):
    """Only its health is asked."""

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return []


@pytest.mark.parametrize(("is_serving", "status"), [(True, 0), (False, 1)])
async def test_the_status_says_whether_the_service_serves(is_serving: bool, status: int) -> None:
    """0 for SERVING, 1 for NOT_SERVING, 1 when nobody answers any more."""
    server = make_server()
    health = add_services(server, _Core(), "fake")
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    health.health.set_serving(is_serving)
    await server.start()
    assert await asyncio.to_thread(healthcheck.main, [address]) == status
    await server.stop(None)
    assert await asyncio.to_thread(healthcheck.main, [address]) == 1


def test_without_an_address_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and one line that says how."""
    assert healthcheck.main([]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_an_address_that_needs_what_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and what installs it."""
    monkeypatch.setattr("weft.v2.client.channels.HAS_GRPCIO", False)
    assert healthcheck.main(["xds:///router"]) == 2
    assert "pip install 'weft-mesh[grpcio]'" in capsys.readouterr().err
