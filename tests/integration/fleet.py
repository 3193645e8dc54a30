"""Replicas of a model service as processes, a router over them, and load that counts what came of each request."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tests.integration.routing import running_router
from tests.messages import request_from_call, result_from_response
from tests.ports import free_port
from tests.processes import Running
from tests.repositories import NUMBER_BATCHES, write_graph, write_model

from weft.base.core import InferCall
from weft.base.tensors import encode
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

MODEL = '''
"""Adds 1, after a pause of 2 ms."""
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.002)
        arrays = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("Y", a + 1)]) for a in arrays]
'''
GRAPH = """
name: "%s" platform: "graph" max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
node { name: "root" sequence { step { name: "only" model_name: "work" %s } } }
"""
RETRY = "policy { retry { attempts: 3 } }"


def write_repository(root: Path) -> Path:
    """The model `work`, and the graphs `plain` and `retrying` over it."""
    write_model(root / "model", "work", MODEL, NUMBER_BATCHES)
    for name, policy in (("plain", ""), ("retrying", RETRY)):
        write_graph(root / "graphs", name, GRAPH % (name, policy))
    return root


class Service:
    """One model service on a fixed port, which may be started again; more ``arguments`` win."""

    def __init__(self, repository: Path, *arguments: str) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._command = [
            sys.executable, "-P", "-m", "weft.services.model", "--repository", str(repository / "model"),
            "--grpc-port", str(port), "--metrics-port", "0", "--stop-with-stdin", *arguments,
        ]  # fmt: skip
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """It serves."""
        self.begin()
        assert self.process is not None
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), "the service ended before it served"

    def begin(self) -> None:
        """The process runs; it need not serve yet."""
        if self.process is None:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
            )

    def end(self, number: signal.Signals) -> int:
        """The process has ended by a signal; its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        ended, self.process = self.process, None
        status = ended.wait(30)
        ended.communicate()
        return status


@contextlib.contextmanager
def services(repository: Path, count: int) -> Iterator[list[Service]]:
    """Replicas that serve; what runs at the end is killed."""
    replicas = [Service(repository) for _ in range(count)]
    try:
        for replica in replicas:
            replica.begin()
        for replica in replicas:
            replica.start()
        yield replicas
    finally:
        for replica in replicas:
            if replica.process is not None:
                replica.end(signal.SIGKILL)


def router_over(repository: Path, address: str, *arguments: str) -> contextlib.AbstractContextManager[Running]:
    """A router process with one target, `model`."""
    return running_router(repository / "graphs", address, arguments)


class Load:
    """Requests in a closed loop, each with a number of its own, until the block is left.

    `outcomes` counts statuses; `errors` has the texts; `wrong` counts answers to another request; `num_clients` are in
    flight.
    """

    def __init__(self, address: str, model: str, num_clients: int = 16, **parameters: Any) -> None:
        self._address = address
        self._model = model
        self.num_clients = num_clients
        self._parameters = parameters
        self._number = 0
        self._is_over = False
        self.outcomes: Counter[str] = Counter()
        self.errors: list[str] = []
        self.wrong = 0
        self._moved = asyncio.Event()

    async def __aenter__(self) -> "Load":
        self._channel = grpc.aio.insecure_channel(self._address)
        self._infer = GRPCInferenceServiceStub(self._channel).ModelInfer
        self._clients = [asyncio.create_task(self._client()) for _ in range(self.num_clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._clients)
        await self._channel.close()

    async def answered(self, count: int) -> None:
        """So many more requests were answered, well or not."""
        wanted = self.outcomes.total() + count
        async with asyncio.timeout(30):
            while self.outcomes.total() < wanted:
                self._moved.clear()
                await self._moved.wait()

    async def _client(self) -> None:
        while not self._is_over:
            self._number += 1
            await self._ask(float(self._number))

    async def _ask(self, number: float) -> None:
        call = InferCall(
            self._model, parameters=self._parameters, inputs={"X": encode(np.array([[number]], np.float32))}
        )
        try:
            response = await self._infer(request_from_call(call), timeout=20)
        except grpc.aio.AioRpcError as error:
            self.outcomes[error.code().name] += 1
            self.errors.append(error.details() or "")
        else:
            self.outcomes["OK"] += 1
            answer = np.frombuffer(result_from_response(response).outputs["Y"].data, np.float32)
            self.wrong += int(answer[0] != np.float32(number + 1))
        self._moved.set()
