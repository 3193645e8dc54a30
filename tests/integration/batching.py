"""A real model service process whose models show how they were batched, and a client that sends in a known order."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tests import repositories
from tests.processes import Running, running, wait_until

from weft.v2.client.channels import channel_options
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

TIMEOUT_S = 60.0
#: An execution with this value says that it runs, and waits until it is let go.
WAITS = 13.0

#: OUT is IN; COUNT the rows of the batch; NUMBER the number of the execution, from 0.
MODEL = f"""
import pathlib, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

NUMBERS = iter(range(10**9))
FOLDER = pathlib.Path(__file__).parent.parent


class TritonPythonModel:
    def execute(self, requests):
        number = next(NUMBERS)
        arrays = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        count = sum(len(array) for array in arrays)
        if any({WAITS} in array for array in arrays):
            (FOLDER / "running").write_text("x")  # a pipe: returns when somebody reads
            (FOLDER / "go").read_text()  # returns when somebody writes
        elif any(array.size and array.flat[0] < 0 for array in arrays):
            time.sleep(-float(min(array.min() for array in arrays)))
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", array),
                pb_utils.Tensor("COUNT", np.full((len(array), 1), count, np.int32)),
                pb_utils.Tensor("NUMBER", np.full((len(array), 1), number, np.int32)),
            ])
            for array in arrays
        ]
"""
CONFIG = """max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def write_model(repository: Path, name: str, config: str) -> None:
    """A model of ``MODEL`` with ``CONFIG`` and this."""
    version = repositories.write_model(repository, name, MODEL, repositories.THREAD + CONFIG + config)
    for pipe in ("running", "go"):
        os.mkfifo(version.parent / pipe)


def message(
    model: str, value: float = 0, rows: int = 1, columns: int = 1, outputs: tuple[str, ...] = (), **parameters: int
) -> pb.ModelInferRequest:
    """A request whose IN is filled with ``value``."""
    request = pb.ModelInferRequest(model_name=model, id=str(value))
    request.inputs.add(name="IN", datatype="FP32", shape=(rows, columns))
    request.raw_input_contents.append(np.full((rows, columns), value, np.float32).tobytes())
    for name in outputs:
        request.outputs.add(name=name)
    for key, number in parameters.items():
        request.parameters[key].int64_param = number
    return request


def arrays(response: pb.ModelInferResponse) -> dict[str, Any]:
    """Outputs by name."""
    dtypes = {"FP32": np.float32, "INT32": np.int32}
    return {
        output.name: np.frombuffer(raw, dtypes[output.datatype]).reshape(output.shape)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


class Service:
    """A running model service; its models are loaded by ``load``, which also resets counters and the hold."""

    def __init__(self, process: Running, repository: Path) -> None:
        self.repository = repository
        self._process = process
        self.channel = grpc.aio.insecure_channel(process.grpc, options=channel_options())
        self.stub: Any = GRPCInferenceServiceStub(self.channel)

    async def load(self, model: str) -> None:
        """The model serves with fresh counters."""
        await self.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=model))

    async def executions(self, model: str) -> dict[int, int]:
        """Number of executions by batch size."""
        statistics = await self.stub.ModelStatistics(pb.ModelStatisticsRequest(name=model))
        return {batch.batch_size: batch.compute_infer.count for batch in statistics.model_stats[-1].batch_stats}

    async def stream(self, *requests: pb.ModelInferRequest) -> list[pb.ModelInferResponse]:
        """Answers of requests that reach the queue in this order, one right after another."""

        async def supply() -> AsyncIterator[pb.ModelInferRequest]:
            for request in requests:
                yield request

        responses = []
        async for response in self.stub.ModelStreamInfer(supply(), timeout=TIMEOUT_S):
            assert not response.error_message, response.error_message
            responses.append(response.infer_response)
        return responses

    def call(self, request: pb.ModelInferRequest, timeout_s: float = TIMEOUT_S) -> Any:
        """A unary call that has begun."""
        return self.stub.ModelInfer(request, timeout=timeout_s)

    async def queued(self, model: str, count: int) -> None:
        """Return when that many requests of the model are queued, by its metrics."""
        await self.reached(f'nv_inference_pending_request_count{{model="{model}",version="1"}}', count)

    async def reached(self, sample: str, value: float) -> None:
        """Return when a sample of the metrics, given by name and labels, has a value."""
        await asyncio.to_thread(wait_until, lambda: self._process.scrape().get(sample) == value, f"{sample} {value}")

    async def metric(self, sample: str) -> float | None:
        """Value of a sample, by name and labels; None if there is none."""
        return (await asyncio.to_thread(self._process.scrape)).get(sample)

    async def block(self, model: str) -> Any:
        """A call that is executed and waits; ``release`` lets it go."""
        call = self.call(message(model, WAITS))
        await asyncio.to_thread((self.repository / model / "running").read_text)
        return call

    async def release(self, model: str) -> None:
        """The execution that waits goes on."""
        await asyncio.to_thread((self.repository / model / "go").write_text, "x")


@contextmanager
def running_service(repository: Path, *options: str, num_to_hold: int = 0) -> Iterator[Running]:
    """A model service process, whose models are loaded by request; it holds batches until so many are queued."""
    explicit = ("--model-control-mode", "explicit", "--grace-s", "1", "--log-level", "error")
    environment = {"WEFT_DELAY_SCHEDULER": str(num_to_hold)}
    arguments = ("--repository", str(repository), *explicit, *options)
    with running("weft.services.model", *arguments, environment=environment) as service:
        yield service
