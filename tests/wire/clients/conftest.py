"""Clients of gRPC are tested on both wires."""

import pytest


@pytest.fixture(scope="session", params=["weft", "grpcio"])
def wire(request: pytest.FixtureRequest) -> str:
    """The wire of the service."""
    return str(request.param)
