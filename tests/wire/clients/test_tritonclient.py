"""tritonclient, on threads and on asyncio, with a model service on either wire."""

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.wire.clients.echo_model import running_echo_model
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def address(wire: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model service with the model ``echo``."""
    with running_echo_model(wire, tmp_path_factory.mktemp("repository")) as served:
        yield served


def given(array: np.ndarray[Any, Any], module: Any = triton) -> list[Any]:
    tensor = module.InferInput("INPUT0", list(array.shape), "UINT8")
    tensor.set_data_from_numpy(array)
    return [tensor]


def filled(value: int, length: int = 16) -> np.ndarray[Any, Any]:
    return np.full(length, value, np.uint8)


def test_the_threaded_client(address: str) -> None:
    """Metadata, calls, compressed ones, 40 MB, calls in the background, a stream, errors and a deadline."""
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_model_ready("echo")
        assert "INPUT0" == client.get_model_metadata("echo").inputs[0].name
        for length, compression in ((16, None), (16, "gzip"), (16, "deflate"), (40_000_000, None), (100_000, "gzip")):
            result = client.infer("echo", given(filled(7, length)), compression_algorithm=compression)
            np.testing.assert_array_equal(filled(7, length), result.as_numpy("OUTPUT0"))
        arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        for value in range(50):
            client.async_infer("echo", given(filled(value)), lambda result, error: arrived.put((result, error)))
        values = {int(arrived.get(timeout=TIMEOUT_S)[0].as_numpy("OUTPUT0")[0]) for _ in range(50)}
        assert set(range(50)) == values
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for value in range(20):
            client.async_stream_infer("echo", given(filled(value)))
        answers = [arrived.get(timeout=TIMEOUT_S)[0].as_numpy("OUTPUT0")[0] for _ in range(20)]
        assert list(range(20)) == sorted(answers)
        client.async_stream_infer("nobody", given(filled(1)))
        assert "nobody" in str(arrived.get(timeout=TIMEOUT_S)[1])
        client.stop_stream()
        for name, code in (("nobody", "NOT_FOUND"), ("echo", "INVALID_ARGUMENT")):
            with pytest.raises(InferenceServerException) as caught:
                client.infer(name, given(filled(1)), outputs=[triton.InferRequestedOutput("NOTHING")])
            assert f"StatusCode.{code}" == caught.value.status()
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            client.infer("echo", given(filled(1, 4_000_000)), client_timeout=0.0001)
        assert client.is_server_live()


async def test_the_asyncio_client(address: str) -> None:
    """Calls at once, 40 MB, compressed ones, a stream, and an error."""
    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_server_live()
        results = await asyncio.gather(
            *(client.infer("echo", given(filled(value), triton_aio)) for value in range(100))
        )
        assert list(range(100)) == [int(result.as_numpy("OUTPUT0")[0]) for result in results]
        for length, compression in ((40_000_000, None), (100_000, "gzip")):
            infer = partial(client.infer, "echo", given(filled(7, length), triton_aio))
            result = await infer(compression_algorithm=compression)
            np.testing.assert_array_equal(filled(7, length), result.as_numpy("OUTPUT0"))

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for value in range(20):
                yield {"model_name": "echo", "inputs": given(filled(value), triton_aio)}

        stream = client.stream_infer(requests())
        answers = [int(result.as_numpy("OUTPUT0")[0]) async for result, error in stream if error is None]
        assert list(range(20)) == sorted(answers)
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("nobody", given(filled(1), triton_aio))
        assert "StatusCode.NOT_FOUND" == caught.value.status()


def test_health_and_reflection(address: str) -> None:
    """Check, Watch and the services that reflection lists are what clients of gRPC expect."""
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
            assert health_pb2.HealthCheckResponse.SERVING == answer.status
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=TIMEOUT_S)
        assert grpc.StatusCode.NOT_FOUND is caught.value.code()
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert health_pb2.HealthCheckResponse.SERVING == next(watch).status
        watch.cancel()
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S)
        names = {service.name for service in listed.list_services_response.service}
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
        (described,) = stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S)
        assert described.file_descriptor_response.file_descriptor_proto
