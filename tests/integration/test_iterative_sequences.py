"""Iterative sequences on a real model service: a request is executed again and again until its model lets it go."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.batching import TIMEOUT_S, Service, running_service
from tests.processes import Running
from tests.repositories import THREAD, write_model
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from weft_protos import grpc_service_pb2 as pb

#: OUT counts from IN down to 0, one number an execution; LOG has the START input and the flags of each. For an IN below
#: 0, OUT is the number of requests that are held.
MODEL = """
import gc
import numpy as np
import triton_python_backend_utils as pb_utils
from weft.serving.request.request import InferenceRequest


class TritonPythonModel:
    def initialize(self, args):
        self.is_decoupled = '"decoupled": true' in args["model_config"]
        self.left, self.log = {}, {}

    def execute(self, requests):
        responses = []
        for request in requests:
            key, start = request.correlation_id(), pb_utils.get_input_tensor_by_name(request, "START").as_numpy()[0, 0]
            asked = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0, 0])
            if start:
                self.left[key] = asked
                self.log[key] = ""
            self.log[key] += f"{start}{request.flags()} "
            self.left[key] -= 1
            if asked < 0:
                gc.collect()
                self.left[key] = sum(isinstance(held, InferenceRequest) for held in gc.get_objects())
            response = pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", np.full((1, 1), self.left[key], np.int32)),
                pb_utils.Tensor("LOG", np.array([[self.log[key]]], object)),
            ])
            is_over = self.left[key] <= 0 or asked < 0
            if not is_over:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if self.is_decoupled:
                request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL * is_over)
            else:
                responses.append(response if is_over or self.left[key] == 1000 else None)
        return None if self.is_decoupled else responses
"""
CONFIG = """max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "LOG" data_type: TYPE_STRING dims: [ 1 ] }
sequence_batching {
  iterative_sequence: true
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  oldest { max_candidate_sequences: 4 }
}
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
BOUNDED = 'parameters { key: "max_sequence_backlog" value { string_value: "1" } }'
MODELS = {
    "plain": THREAD,
    "process": "",
    "stream": DECOUPLED + THREAD,
    "stream_process": DECOUPLED,
    "bounded": BOUNDED + THREAD,
}


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with a model for each way to run one."""
    repository = tmp_path_factory.mktemp("iterative")
    for name, options in MODELS.items():
        slots = "max_candidate_sequences: 1" if name == "bounded" else "max_candidate_sequences: 4"
        config = CONFIG.replace("max_candidate_sequences: 4", slots)
        if name == "bounded":
            config = config.replace("iterative_sequence: true", "max_sequence_idle_microseconds: 60000000")
        write_model(repository, name, MODEL, config + options)
    with running_service(repository, "--load-model", "*") as started:
        yield started


@pytest.fixture
def client(endpoints: Running) -> Iterator[triton.InferenceServerClient]:
    """A tritonclient."""
    with triton.InferenceServerClient(endpoints.grpc) as connected:
        yield connected


def _input(number: int) -> triton.InferInput:
    made = triton.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.full((1, 1), number, np.int32))
    return made


@pytest.mark.parametrize("model", ["plain", "process"])
def test_a_request_goes_round_until_it_is_done(client: triton.InferenceServerClient, model: str) -> None:
    """Three executions give one answer; START and its flag are there in the first alone, and no id need be sent."""
    before = client.get_inference_statistics(model).model_stats[0]
    result = client.infer(model, [_input(3)])
    assert (0, b"11 00 00 ") == (result.as_numpy("OUT")[0, 0], result.as_numpy("LOG")[0, 0])
    after = client.get_inference_statistics(model).model_stats[0]
    assert 3 == after.execution_count - before.execution_count
    assert 1 == after.inference_stats.success.count - before.inference_stats.success.count


def test_requests_that_go_round_share_batches(client: triton.InferenceServerClient) -> None:
    """Four requests of different length end on their own, and take far fewer executions than they have steps."""
    before = client.get_inference_statistics("plain").model_stats[0].execution_count
    answers: queue.Queue[Any] = queue.Queue()
    for number in (200, 150, 90, 50):
        client.async_infer("plain", [_input(number)], lambda result, error: answers.put((result, error)))
    for _ in range(4):
        result, error = answers.get(timeout=TIMEOUT_S)
        assert error is None
        assert 0 == result.as_numpy("OUT")[0, 0]
    assert client.get_inference_statistics("plain").model_stats[0].execution_count - before < 400


def test_a_response_to_what_is_scheduled_again_is_an_error(client: triton.InferenceServerClient) -> None:
    """A model that returns a response for a request that it schedules again fails it, as in TIS; the slot is free."""
    with pytest.raises(InferenceServerException, match="Expected a None object in the execute function return list"):
        client.infer("plain", [_input(1001)])
    assert 0 == client.infer("plain", [_input(2)]).as_numpy("OUT")[0, 0]


@pytest.mark.parametrize("model", ["stream", "stream_process"])
def test_each_execution_of_a_decoupled_model_may_answer(client: triton.InferenceServerClient, model: str) -> None:
    """Forty steps give forty responses in order, more than may wait unread; the next request finds a free slot."""
    for _ in range(5):
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error, answers=answers: answers.put((result, error)))
        client.async_stream_infer(model, [_input(40)])
        got = []
        for _ in range(40):
            result, error = answers.get(timeout=TIMEOUT_S)
            assert error is None
            got.append(int(result.as_numpy("OUT")[0, 0]))
        assert list(reversed(range(40))) == got
        client.stop_stream()


@pytest.mark.parametrize("model", ["stream", "stream_process"])
def test_clients_that_leave_stop_the_rounds(client: triton.InferenceServerClient, model: str) -> None:
    """A request of a million steps ends with its client; its process keeps none, and all slots are free again."""
    for _ in range(5):
        first = threading.Event()
        client.start_stream(lambda result, error, first=first: first.set())
        client.async_stream_infer(model, [_input(1_000_000)])
        assert first.wait(TIMEOUT_S)
        client.stop_stream(cancel_requests=True)
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, [_input(-1)])
    result, error = answers.get(timeout=TIMEOUT_S)
    assert error is None
    if model == "stream_process":
        assert 1 == result.as_numpy("OUT")[0, 0]
    client.stop_stream()


def test_an_unload_waits_for_a_request_that_goes_round(client: triton.InferenceServerClient) -> None:
    """It is executed until its model lets it go, and answered; then there is no model any more."""
    model = "plain"
    before = client.get_inference_statistics(model).model_stats[0].execution_count
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer(model, [_input(900)], lambda result, error: answers.put((result, error)))
    while client.get_inference_statistics(model).model_stats[0].execution_count == before:
        assert answers.empty()
    client.unload_model(model)
    result, error = answers.get(timeout=TIMEOUT_S)
    assert error is None
    assert (0, 900) == (result.as_numpy("OUT")[0, 0], result.as_numpy("LOG")[0, 0].count(b" "))
    with pytest.raises(InferenceServerException, match="has no available versions"):
        client.infer(model, [_input(1)])
    client.load_model(model)


def test_a_deadline_ends_the_rounds(client: triton.InferenceServerClient) -> None:
    """A request of a million steps fails when its time is over, wherever it is then, and leaves its slot."""
    for _ in range(5):
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            client.infer("process", [_input(1_000_000)], client_timeout=0.1)
    assert 0 == client.infer("process", [_input(2)]).as_numpy("OUT")[0, 0]


async def test_a_full_backlog_refuses_with_a_time_to_come_back(endpoints: Running, tmp_path: Path) -> None:
    """One sequence has the slot and one waits; the next is RESOURCE_EXHAUSTED and says when to try again."""

    def message(sequence: int, *, is_end: bool = False) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name="bounded")
        request.inputs.add(name="IN", datatype="INT32", shape=(1, 1))
        request.raw_input_contents.append(bytes(4))
        request.parameters["sequence_id"].int64_param = sequence
        request.parameters["sequence_start" if not is_end else "sequence_end"].bool_param = True
        return request

    service = Service(endpoints, tmp_path)
    await service.call(message(1))
    waiting = service.call(message(2))
    await service.queued("bounded", 1)
    with pytest.raises(grpc.aio.AioRpcError, match="1 sequences of model 'bounded' wait for a slot, 1 may") as refused:
        await service.call(message(3))
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is refused.value.code()
    assert int(dict(refused.value.trailing_metadata())["retry-after-ms"]) >= 100
    await service.call(message(1, is_end=True))
    await waiting
    await service.channel.close()
