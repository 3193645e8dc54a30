"""Servers that have metadata and no configurations, as MLServer and others: found, called, and taken at their word."""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.router import make

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError
from weft.router.core import RouterCore
from weft.router.targets.grpc_target import GrpcTarget
from weft.v2.server.make_server import make_server
from weft_protos import grpc_service_pb2 as pb

#: What such a server offers; calls of anything else are UNIMPLEMENTED.
RPCS = ("RepositoryIndex", "ModelMetadata", "ModelInfer")

BATCHED = """name: "batched" platform: "graph" max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ] output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
node { name: "root" sequence { step { model_name: "double" } } }
"""
WHOLE = """name: "whole" platform: "graph"
input  [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
node { name: "root" sequence { step { model_name: "double" } } }
"""


class PlainServer:
    """Serves `double`, without a version: [n, 2] times two, in typed contents."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def RepositoryIndex(self, request: Any, context: Any) -> pb.RepositoryIndexResponse:  # noqa: N802
        entry = pb.RepositoryIndexResponse.ModelIndex(name="double", state="READY")
        return pb.RepositoryIndexResponse(models=[entry])

    async def ModelMetadata(self, request: Any, context: Any) -> pb.ModelMetadataResponse:  # noqa: N802
        self.asked.append(request.name)
        x, y = (pb.ModelMetadataResponse.TensorMetadata(name=n, datatype="FP32", shape=[-1, 2]) for n in "XY")
        return pb.ModelMetadataResponse(name="double", platform="plain", inputs=[x], outputs=[y])

    async def ModelInfer(self, request: Any, context: Any) -> pb.ModelInferResponse:  # noqa: N802
        values = [2 * value for (value,) in struct.iter_unpack("<f", request.raw_input_contents[0])]
        response = pb.ModelInferResponse(model_name="double", id=request.id)
        shape = [len(values)] if request.id == "flat" else request.inputs[0].shape
        response.outputs.add(name="Y", datatype="FP32", shape=shape).contents.fp32_contents.extend(values)
        return response


@asynccontextmanager
async def routed(server: PlainServer, graphs: Path) -> AsyncIterator[RouterCore]:
    """A router over the server, reached by a socket."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    handlers = {}
    for name in RPCS:
        request = getattr(pb, f"{name}Request")
        serialize = getattr(pb, f"{name}Response").SerializeToString
        handlers[name] = grpc.unary_unary_rpc_method_handler(getattr(server, name), request.FromString, serialize)
    listener = make_server()
    listener.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    router = RouterCore(graphs, [GrpcTarget("model", f"127.0.0.1:{port}")])
    await router.start()
    try:
        yield router
    finally:
        await router.close(grace_s=0)
        await listener.stop(None)


@pytest.mark.parametrize("text", [BATCHED, WHOLE])
async def test_a_graph_calls_a_model_known_by_its_metadata(tmp_path: Path, text: str) -> None:
    """With a batch dimension or without; rows go and come as they are, typed contents as bytes."""
    name = text.split('"')[1]
    make.write(tmp_path, text, name)
    async with routed(PlainServer(), tmp_path) as router:
        assert router.is_ready()
        call = InferCall(name, inputs={"X": make.tensor(1, 2, 3, 4, shape=(2, 2))})
        result = await router.infer(call, CallContext())
        assert {"Y": make.tensor(2, 4, 6, 8, shape=(2, 2))} == result.outputs


async def test_a_model_known_by_its_metadata_is_listed_and_called_by_name(tmp_path: Path) -> None:
    """It has no version; the router makes a configuration of what is known, for those who ask for one."""
    server = PlainServer()
    async with routed(server, tmp_path) as router:
        assert [("double", "", "READY", "")] == [tuple(entry) for entry in router.index(ready_only=False)]
        assert router.is_model_ready("double", "")
        config = router.config("double", "")
        assert ("plain", 0, [-1, 2]) == (config.platform, config.max_batch_size, list(config.output[0].dims))
        result = await router.infer(InferCall("double", inputs={"X": make.tensor(1, 2, shape=(1, 2))}), CallContext())
        assert {"Y": make.tensor(2, 4, shape=(1, 2))} == result.outputs
    assert ["double"] == server.asked


async def test_a_graph_holds_it_to_its_metadata_and_a_client_gets_what_it_says(tmp_path: Path) -> None:
    """A graph promises its own types; by its own name the model may be as vague as it likes."""
    make.write(tmp_path, WHOLE, "whole")
    async with routed(PlainServer(), tmp_path) as router:
        inputs = {"X": make.tensor(1, 2, shape=(1, 2))}
        result = await router.infer(InferCall("double", request_id="flat", inputs=inputs), CallContext())
        assert {"Y": make.tensor(2, 4, shape=(2,))} == result.outputs
        with pytest.raises(InternalError, match=r"output 'Y' of model 'double' .* its shape is \[2\], declared as"):
            await router.infer(InferCall("whole", request_id="flat", inputs=inputs), CallContext())
