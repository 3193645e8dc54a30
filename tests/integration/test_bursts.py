"""Thousands of calls at once: a service answers them all, on either wire, whoever makes them."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from tests.messages import request_from_call, result_from_response
from tests.processes import Running, running
from tests.repositories import NUMBERS, THREAD, write_model

from weft.base.core import InferCall
from weft.base.tensors import decode, encode
from weft.v2.client.channels import channel_options
from weft.wire.client import Channel
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

NUM_CALLS = 2000
#: A hundred connections at once, made while others call already, may take seconds on a busy machine.
PATIENT = {"grpc.min_reconnect_backoff_ms": 60_000}
MODEL = '''
"""Answers with what it is given."""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("Y", array)]) for array in arrays]
'''
CONFIG = THREAD + NUMBERS + "max_batch_size: 64 dynamic_batching {}"


@pytest.fixture(scope="module", params=["weft", "grpcio"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model service on one of the wires, with limits of the default."""
    repository = tmp_path_factory.mktemp("bursts")
    write_model(repository, "same", MODEL, CONFIG)
    with running("weft.services.model", "--repository", str(repository), f"--wire={request.param}") as started:
        yield started


def _request(number: int) -> pb.ModelInferRequest:
    return request_from_call(InferCall("same", inputs={"X": encode(np.array([[number]], np.float32))}))


async def _ask(stub: GRPCInferenceServiceStub, number: int) -> str:
    """What became of one call: OK, WRONG, or the name of a status."""
    try:
        response = await stub.ModelInfer(_request(number), timeout=120)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    (answer,) = decode(result_from_response(response).outputs["Y"]).ravel().tolist()
    return "OK" if answer == number else "WRONG"


@pytest.mark.parametrize("num_channels", [1, 100])
@pytest.mark.parametrize("client", ["weft", "grpcio"])
async def test_a_burst(service: Running, client: str, num_channels: int) -> None:
    """2,000 calls that begin in one turn of the loop, over one channel or a hundred, are all answered right."""
    channels: list[grpc.aio.Channel] = []
    for _ in range(num_channels):
        if client == "weft":
            channels.append(Channel(service.grpc))
        else:
            options = dict(channel_options()) | {"grpc.use_local_subchannel_pool": 1} | PATIENT
            channels.append(grpc.aio.insecure_channel(service.grpc, options=[*options.items()]))
    stubs = [GRPCInferenceServiceStub(channel) for channel in channels]
    calls = [asyncio.ensure_future(_ask(stubs[i % num_channels], i)) for i in range(NUM_CALLS)]
    done, lost = await asyncio.wait(calls, timeout=150)
    assert not lost, f"{len(lost)} calls have no end"
    assert {"OK": NUM_CALLS} == Counter(task.result() for task in done)
    for channel in channels:
        await channel.close()
