"""Clients of other languages, and the services that they call. Collected by ``make foreign-clients`` alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.foreign.clients import LANGUAGES, ForeignClient, MissingToolError, built
from tests.wire.clients.echo_model import running_echo_model
from tests.wire.echo_process import EchoService

collect_ignore_glob = [] if os.environ.get("WEFT_FOREIGN") else ["test_*.py"]


@pytest.fixture(scope="session", params=["grpcio", "weft"])
def wire(request: pytest.FixtureRequest) -> str:
    """The wire of the services."""
    return str(request.param)


@pytest.fixture(scope="session", params=LANGUAGES)
def client(request: pytest.FixtureRequest) -> ForeignClient:
    """A client in each language whose tools are installed."""
    try:
        return built(request.param)
    except MissingToolError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def echo(wire: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoService]:
    """The echo service with limits of the default, on a port and a Unix socket; it must not fail in silence."""
    folder = tmp_path_factory.mktemp("echo")
    with EchoService(wire, folder / "log", f"--unix={folder}/socket") as service:
        yield service
    told = [line for line in service.log_lines() if not line.endswith(" seconds")]  # of asyncio in development mode
    assert wire == "grpcio" or not told


@pytest.fixture(scope="session")
def model_address(wire: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model service with the model ``echo``: OUTPUT0 is INPUT0, UINT8 of any length."""
    with running_echo_model(wire, tmp_path_factory.mktemp("repository")) as address:
        yield address


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Certificates."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of an authority that nobody here trusts."""
    return Authority(tmp_path_factory.mktemp("other"), "other").ca
