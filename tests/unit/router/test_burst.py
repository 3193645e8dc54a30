"""More calls at once than the router takes: refused by its own limit, on either implementation of gRPC."""

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest
from tests.messages import request_from_call
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering

from weft.router.admission.controller import AdmissionSettings
from weft.v2.client.channels import channel_options
from weft.v2.client.wires import WireName
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


@pytest.mark.parametrize(("wire", "num_calls"), [("weft", 500), ("grpcio", 3100)])
async def test_calls_beyond_the_limit_are_refused_with_a_hint(tmp_path: Path, wire: WireName, num_calls: int) -> None:
    """RESOURCE_EXHAUSTED with `retry-after-ms`; gRPC's own limits of 1,000 and 3,000 pending calls cancel none."""
    target = FakeTarget(double=answering(after_ms=50))
    make.serve(target, "double")
    async with make.started(tmp_path, target, admission=AdmissionSettings(max_inflight=20)) as s:
        server = make_server(wire=wire)
        add_services(server, s.core, "weft.router")
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        request = request_from_call(make.request("double"))
        outcomes: Counter[str] = Counter()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            infer = GRPCInferenceServiceStub(channel).ModelInfer

            async def ask() -> None:
                try:
                    await infer(request, timeout=60)
                except grpc.aio.AioRpcError as error:
                    keys = {key for key, _ in error.trailing_metadata() or ()}
                    outcomes[f"{error.code().name} {'retry-after-ms' in keys}"] += 1
                else:
                    outcomes["OK"] += 1

            await asyncio.gather(*(ask() for _ in range(num_calls)))
        await server.stop(None)
    assert outcomes.keys() == {"OK", "RESOURCE_EXHAUSTED True"}
    assert num_calls == outcomes.total()
