"""A real server on a real socket with a scripted core behind it."""

import pytest
from tests.unit.v2.scripted_core import ScriptedCore

from weft.v2.client.channels import open_channel
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


@pytest.fixture
async def core():
    """What the server asks."""
    return ScriptedCore()


@pytest.fixture
async def server():
    """A server without services that has not been started."""
    server = make_server()
    server.port = server.add_insecure_port("127.0.0.1:0")  # type: ignore[attr-defined]
    yield server
    await server.stop(None)


@pytest.fixture
async def services(server, core):
    """The V2 service and health of the server, which is started and SERVING."""
    services = add_services(server, core, "weft.test")
    await server.start()
    services.health.set_serving(True)
    return services


@pytest.fixture
async def address(server, services):
    """``host:port`` of the server."""
    return f"127.0.0.1:{server.port}"


@pytest.fixture
async def channel(address):
    """A channel to the server."""
    async with open_channel(address) as channel:
        yield channel


@pytest.fixture
async def stub(channel):
    """A stub for the V2 service."""
    return GRPCInferenceServiceStub(channel)
