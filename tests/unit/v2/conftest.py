"""A real server on a real socket with a scripted core behind it."""

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.v2.scripted_core import ScriptedCore
from tritonclient.grpc import aio

from weft.base.observing import settings
from weft.v2.client.channels import open_channel
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

SCRIPT = Path(__file__).with_name("scripted_service.py")


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    """Changes of log and trace settings end with the test, and leave the root logger alone."""
    monkeypatch.setattr(settings, "LOG", settings.LogSettings(logging.getLogger("weft.test-settings")))
    monkeypatch.setattr(settings, "TRACE", settings.TraceSettings())


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


@contextlib.contextmanager
def started_at():
    """Starts processes with a scripted core that listen on a path; each has printed ``line``, that it serves."""
    processes = []

    def start(path, *arguments):
        command = [sys.executable, SCRIPT, "--grpc-port", "0", "--metrics-port", "0", "--unix-socket", path, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        process.line = process.stdout.readline()  # type: ignore[attr-defined]
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def start_at():
    """As ``started_at``, for one test."""
    with started_at() as start:
        yield start


@pytest.fixture
async def client(server, core, memory):
    """Tritonclient's of a server that allows shared memory, as the test's ``memory`` has it."""
    services = add_services(server, core, "weft.test", memory=memory)
    await server.start()
    services.health.set_serving(True)
    async with aio.InferenceServerClient(f"127.0.0.1:{server.port}") as connected:
        yield connected
