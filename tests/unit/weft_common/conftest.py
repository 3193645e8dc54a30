"""A real server on a real socket with a scripted core behind it."""

import importlib.util
from pathlib import Path

import grpc
import pytest

from weft_common.client.channels import open_channel, server_options
from weft_common.server.server import add_services, set_serving
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

_spec = importlib.util.spec_from_file_location("scripted_core", Path(__file__).with_name("scripted_core.py"))
_scripted_core = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_scripted_core)


@pytest.fixture
async def core():
    """What the server asks."""
    return _scripted_core.ScriptedCore()


@pytest.fixture
async def server():
    """A server without services that has not been started."""
    server = grpc.aio.server(options=server_options())
    server.port = server.add_insecure_port("127.0.0.1:0")
    yield server
    await server.stop(None)


@pytest.fixture
async def services(server, core):
    """The V2 service and health of the server, which is started and SERVING."""
    services = add_services(server, core, "weft.test")
    await server.start()
    await set_serving(services, True)
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


@pytest.fixture
def make_request():
    """Makes a request with one raw INT32 input ``x`` of shape [1, 2]; strings and integers become parameters."""

    def make(model_name="echo", request_id="", data=b"\x01\0\0\0\x02\0\0\0", **parameters):
        request = pb.ModelInferRequest(model_name=model_name, id=request_id, raw_input_contents=[data])
        request.inputs.add(name="x", datatype="INT32", shape=[1, len(data) // 4])
        for key, value in parameters.items():
            field = "string_param" if isinstance(value, str) else "int64_param"
            setattr(request.parameters[key], field, value)
        return request

    return make
