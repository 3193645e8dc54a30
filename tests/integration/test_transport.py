"""Calls between services over a Unix socket, through the death of one of them."""

import asyncio
import contextlib
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.processes import WAIT_S, Running, running

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.base.tensors import encode
from weft.router.targets.grpc_target import GrpcTarget
from weft.v2.server.unix_socket import address_of
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


def model_service(repository: Path, path: Path) -> contextlib.AbstractContextManager[Running]:
    """A model service with `identity` alone, on a Unix socket too."""
    arguments = ("--repository", str(repository / "model"), "--unix-socket", str(path), "--load-model", "identity")
    return running("weft.services.model", *arguments, "--model-control-mode", "explicit", "--log-level", "error")


def call(value: float, name: str = "identity") -> InferCall:
    return InferCall(name, request_id=str(value), inputs={"INPUT0": encode(np.full((1, 16), value, np.float32))})


async def answering(target: GrpcTarget) -> None:
    """The target answers."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(RemoteError):
                await target.infer(call(0), CallContext())
                return
            await asyncio.sleep(0.01)


async def test_a_service_is_called_killed_and_called_again(repository: Path, tmp_path: Path) -> None:
    """Calls at once over a Unix socket are all answered; kill -9 gives UNAVAILABLE; the socket is used again."""
    path = tmp_path / "model.sock"
    target = GrpcTarget("model", address_of(path))
    try:
        with model_service(repository, path) as service:
            await answering(target)
            results = await asyncio.gather(*(target.infer(call(i), CallContext()) for i in range(100)))
            assert [await target.infer(call(i), CallContext()) for i in range(100)] == results
            with pytest.raises(RemoteError) as caught:
                await target.infer(call(1, "nobody"), CallContext())
            assert "NOT_FOUND" == caught.value.code
            async with grpc.aio.insecure_channel(service.grpc) as channel:
                request = pb.ModelStatisticsRequest(name="identity")
                statistics = await GRPCInferenceServiceStub(channel).ModelStatistics(request)
            assert statistics.model_stats[0].inference_stats.success.count >= 200
            service.kill()
        with pytest.raises(RemoteError, match=r"cannot be reached") as caught:
            await target.infer(call(1), CallContext())
        assert "UNAVAILABLE" == caught.value.code
        with model_service(repository, path):
            await answering(target)
            assert results[7] == await target.infer(call(7), CallContext())
    finally:
        await target.close()
