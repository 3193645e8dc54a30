"""Clients of gRPC are tested on both wires."""

from collections.abc import Iterator

import pytest
from tests.wire.echo_process import EchoService, wires


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What grpcio's clients make of grpcio's server is asked only with ``WEFT_TEST_WIRES=weft,grpcio``."""
    if "grpcio" not in wires():
        items[:] = [item for item in items if not is_grpcio_alone(item)]


def is_grpcio_alone(item: pytest.Item) -> bool:
    """Whether none of our own code is at either end."""
    calls = getattr(item, "callspec", None)
    is_theirs = calls is not None and calls.params.get("wire") == "grpcio" and item.path.parent.name == "clients"
    return is_theirs and (item.path.name in ("test_grpcio.py", "test_pings.py") or calls.params.get("kind") == "aio")


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
