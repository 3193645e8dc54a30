"""A target by its name in xDS: gRPC asks the control plane where it is."""

import contextlib
import json
from pathlib import Path

import grpc
import pytest
from tests.integration.control_plane import control_plane
from tests.integration.routing import NamingCore, graph, message, naming_service, running_router, write

from weft.base.core import CallContext, InferCall, InferResult
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


class CountingCore(NamingCore):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        self.num_calls += 1
        return await super().infer(call, context)


def test_calls_are_spread_as_the_control_plane_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over both replicas."""
    write(tmp_path, graph("g", "alpha"), "g")
    cores = CountingCore(), CountingCore()
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(naming_service(core)) for core in cores]
        address = stack.enter_context(control_plane("models", replicas))
        servers = [{"server_uri": address, "channel_creds": [{"type": "insecure"}]}]
        monkeypatch.setenv("GRPC_XDS_BOOTSTRAP_CONFIG", json.dumps({"xds_servers": servers, "node": {"id": "router"}}))
        with running_router(tmp_path, "xds:///models") as router, grpc.insecure_channel(router.grpc) as channel:
            infer = GRPCInferenceServiceStub(channel).ModelInfer
            for _ in range(20):
                assert infer(message("g"), timeout=10).raw_output_contents[0].endswith(b"x,alpha")
    assert min(core.num_calls for core in cores) >= 5
