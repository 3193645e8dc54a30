"""SIGTERM to a service with every kind of work in it: what was begun is answered within the grace, the status is 0."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.messages import request_from_call, result_from_response
from tests.repositories import THREAD, write_model

from weft.base.core import InferCall
from weft.base.tensors import decode, encode
from weft.v2.client.frames import scrape
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

WAIT_S = 60.0

SOURCE = '''
"""Adds 1 when the FIFO `go` beside this file was opened by the test; says first that it has begun."""
import pathlib
import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path(__file__).parent


def wait(name):
    if (FOLDER / name).exists():
        (FOLDER / name).open("w").close()


class TritonPythonModel:
    def initialize(self, args):
        self.is_decoupled = "decoupled" in args["model_config"]
        wait("load")
        wait("loaded")

    def execute(self, requests):
        if self.is_decoupled:
            for request in requests:
                sender = request.get_response_sender()
                for _ in range(64):  # 64 MB, more than all buffers hold
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros((1, 250_000), np.float32))]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return None
        wait("begun")
        wait("go")
        arrays = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array + 1)]) for array in arrays]
'''
CONFIG = """max_batch_size: 1
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
KINDS = {
    "plain": "",
    "talk": "sequence_batching { max_sequence_idle_microseconds: 600000000 }",
    "flood": "model_transaction_policy { decoupled: true }",
}


class Service:
    """A service over a repository with one model of each kind; ``go`` lets executions that wait go on."""

    def __init__(self, root: Path, *arguments: str, fifos: tuple[str, ...]) -> None:
        self.root = root
        self.fifos = fifos
        for name, more in KINDS.items():
            write_model(root, name, SOURCE, THREAD + CONFIG + more)
        for name in fifos:
            os.mkfifo(root / "plain" / "1" / name)
        command = [sys.executable, "-m", "weft.services.preprocess", "--repository", str(root), "--grpc-port", "0"]
        self.process = subprocess.Popen(
            [*command, "--metrics-port", "0", "--stop-with-stdin", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        endpoints = json.loads(self.process.stdout.readline())
        self.address, self._metrics = endpoints["grpc"], endpoints["metrics"]

    def meet(self, name: str) -> None:
        """The model is at this point, and goes on."""
        (self.root / "plain" / "1" / name).open().close()

    def abolish(self, name: str) -> None:
        """Nobody stops at this point any more."""
        path = self.root / "plain" / "1" / name
        path.rename(path.with_suffix(".passed"))

    def num_queued(self) -> float:
        """Requests in the queue of `plain`."""
        page = scrape({"service": self._metrics})["service"]
        return page.value("nv_inference_pending_request_count", model="plain")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts a service, which is killed after the test."""
    services: list[Service] = []

    def make(*arguments: str, fifos: tuple[str, ...] = ()) -> Service:
        services.append(Service(tmp_path, *arguments, fifos=fifos))
        return services[-1]

    yield make
    for service in services:
        service.close()


def request(model: str, value: float = 1.0, **parameters: Any) -> pb.ModelInferRequest:
    inputs = {"X": encode(np.array([[value]], np.float32))}
    return request_from_call(InferCall(model, inputs=inputs, parameters=parameters))


def value_of(response: pb.ModelInferResponse) -> float:
    return float(decode(result_from_response(response).outputs["Y"])[0, 0])


def test_queued_requests_streams_and_sequences_are_answered(start: Callable[..., Service]) -> None:
    """Those in the queue and on a stream too; the stream then ends, and an open sequence holds nothing up."""
    service = start("--grace-s", "50", fifos=("begun", "go"))
    with grpc.insecure_channel(service.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        talk = stub.ModelInfer(request("talk", 5.0, sequence_id=7, sequence_start=True), timeout=WAIT_S)
        assert value_of(talk) == 6.0
        sent: queue.SimpleQueue[pb.ModelInferRequest] = queue.SimpleQueue()
        stream = stub.ModelStreamInfer(iter(sent.get, None), timeout=WAIT_S)
        sent.put(request("talk", 1.0, sequence_id=7))
        assert value_of(next(stream).infer_response) == 2.0
        in_work = stub.ModelInfer.future(request("plain", 10.0), timeout=WAIT_S)
        service.meet("begun")
        queued = [stub.ModelInfer.future(request("plain", 20.0 + n), timeout=WAIT_S) for n in range(3)]
        sent.put(request("plain", 30.0))
        while service.num_queued() < 4:
            assert service.process.poll() is None
        service.process.send_signal(signal.SIGTERM)
        service.abolish("begun")
        service.abolish("go")
        service.meet("go.passed")
        assert [11.0, 21.0, 22.0, 23.0] == [value_of(answer.result(WAIT_S)) for answer in (in_work, *queued)]
        assert value_of(next(stream).infer_response) == 31.0
        with pytest.raises(grpc.RpcError) as end:
            next(stream)
        assert end.value.code() is grpc.StatusCode.UNAVAILABLE
    assert service.process.wait(20) == 0


def test_calls_that_keep_coming_at_a_stop_leave_time_to_answer_them(start: Callable[..., Service]) -> None:
    """However many come, the stop waits for their end for a part of the grace: those it took are answered."""
    service = start("--grace-s", "1")
    with grpc.insecure_channel(service.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        sent = []
        while service.process.poll() is None:
            sent.append(stub.ModelInfer.future(request("plain", 1.0), timeout=WAIT_S))
            if len(sent) == 50:
                sent[0].result(WAIT_S)
                service.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(grpc.FutureTimeoutError, grpc.RpcError):
                sent[-1].result(0.02)  # a new one every 20 ms, whether it is answered or not
        assert service.process.wait(20) == 0
        outcomes = Counter("OK" if call.exception() is None else call.exception().details() for call in sent)
    assert outcomes["OK"] >= 50
    assert outcomes["Cancelling all calls"] <= 3, outcomes  # one may come just then


def test_a_model_that_loads_on_demand_answers_who_waits_for_it(start: Callable[..., Service]) -> None:
    """A request whose model is being loaded at the signal is answered when it is."""
    service = start("--grace-s", "50", "--load-on-demand", fifos=("load", "loaded"))
    with grpc.insecure_channel(service.address) as channel:
        waiting = GRPCInferenceServiceStub(channel).ModelInfer.future(request("plain", 1.0), timeout=WAIT_S)
        service.meet("load")
        service.process.send_signal(signal.SIGTERM)
        service.meet("loaded")
        assert value_of(waiting.result(WAIT_S)) == 2.0
    assert service.process.wait(20) == 0


def test_a_client_that_does_not_read_holds_a_stop_up_no_longer_than_the_grace(start: Callable[..., Service]) -> None:
    """A stream of a decoupled model with more responses than all buffers hold, of which one was read."""
    service = start("--grace-s", "2")
    fixed_window = [("grpc.http2.bdp_probe", 0)]  # else the client's buffer grows with what the machine can carry
    with grpc.insecure_channel(service.address, fixed_window) as channel:
        stream = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request("flood")]), timeout=WAIT_S)
        next(stream)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        with pytest.raises(grpc.RpcError):
            list(stream)


def test_a_stop_whose_losses_nobody_reads_ends_as_ever(start: Callable[..., Service]) -> None:
    """A call is cut off after the grace; a parent that has closed the pipe, and is not told so, changes nothing."""
    service = start("--grace-s", "1", fifos=("begun", "go"))
    with grpc.insecure_channel(service.address) as channel:
        cut_off = GRPCInferenceServiceStub(channel).ModelInfer.future(request("plain"), timeout=WAIT_S)
        service.meet("begun")
        assert service.process.stdout is not None
        service.process.stdout.close()
        service.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError):
            cut_off.result(WAIT_S)
        service.meet("go")
    assert service.process.wait(20) == 0
