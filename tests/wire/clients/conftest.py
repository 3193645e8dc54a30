"""Clients of gRPC are tested on both wires."""

from collections.abc import Iterator

import pytest
from tests.wire.echo_process import EchoService


@pytest.fixture(scope="session", params=["weft", "grpcio"])
def wire(request: pytest.FixtureRequest) -> str:
    """The wire of the service."""
    return str(request.param)


# One of its own: that of the folder above would be kept, and be what the tests there get for theirs.
@pytest.fixture(scope="session")
def echo(wire: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoService]:
    """An echo service on a port and a Unix socket, with limits of the default; a test leaves it as it found it."""
    folder = tmp_path_factory.mktemp("echo")
    with EchoService(wire, folder / "log", f"--unix={folder}/socket") as service:
        yield service
