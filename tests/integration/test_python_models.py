"""Python models of a real mesh: streams, processes, and models that call models through the router."""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import numpy as np
import pytest
from tests.processes import scrape
from tests.repositories import THREAD, write_model
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from weft.base.processes.process import Endpoint
from weft.mesh.running import running_mesh
from weft.v2.client.channels import channel_options
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

TIMEOUT_S = 60.0
#: Responses of this many values fill the buffers of a connection soon.
WIDE = 65_536

HEAD = """
import os, pathlib, signal, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path(pb_utils.get_model_dir()).parent


def value_of(request):
    return float(request.inputs()[0].as_numpy().flat[0])


def out(value, columns=1):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, columns), value, np.float32))])


def called(model, value, **options):
    tensor = pb_utils.Tensor("IN", np.full((1, 1), value, np.float32))
    request = pb_utils.InferenceRequest(model_name=model, inputs=[tensor], requested_output_names=["OUT"], **options)
    return request.exec()


def passed_on(answer):
    return pb_utils.InferenceResponse(answer.output_tensors(), error=answer.error())


class TritonPythonModel:
"""
#: As many responses as IN says; -1: without end, until the client leaves; -2: an error after one; -3: as -1, wide.
COUNT = """
    def execute(self, requests):
        for request in requests:
            self.answer(request.get_response_sender(), value_of(request))

    def answer(self, sender, count):
        if count == -2:
            sender.send(out(1))
            error = pb_utils.TritonError("no more", pb_utils.TritonError.NOT_FOUND)
            sender.send(pb_utils.InferenceResponse(error=error), flags=1)
            return
        number = 0
        while (number < count or count in (-1, -3)) and not sender.is_cancelled():
            sender.send(out(number, 65_536 if count == -3 else 1))
            number += 1
            if count == -3:
                (FOLDER / "sent").write_text(str(number))
        if count in (-1, -3):
            (FOLDER / "left").write_text(str(number))  # a pipe: returns when somebody reads
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
EXECUTE = """
    def execute(self, requests):
        return [self.answer(request, value_of(request)) for request in requests]
"""
DOUBLE = (
    EXECUTE
    + """
    def answer(self, request, value):
        return out(2 * value)
"""
)
#: OUT is the priority that it was asked with.
PRIORITY = (
    EXECUTE
    + """
    def answer(self, request, value):
        return out(request.priority())
"""
)
#: Waits until its client has left.
WAITS = (
    EXECUTE
    + """
    def answer(self, request, value):
        while not request.is_cancelled():
            time.sleep(0.001)
        (FOLDER / "left").write_text("x")  # a pipe
        return out(0)
"""
)
#: Calls the model or graph that its parameter names.
CALLS = (
    EXECUTE
    + """
    def answer(self, request, value):
        import json
        return passed_on(called(json.loads(request.parameters())["model"], value))
"""
)
#: Calls itself for ever.
LOOPS = (
    EXECUTE
    + """
    def answer(self, request, value):
        return passed_on(called("loops", value))
"""
)
#: 1 ends the process.
DIES = (
    EXECUTE
    + """
    def answer(self, request, value):
        if value == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return out(os.getpid() % 65536)
"""
)
DECOUPLED = "model_transaction_policy { decoupled: true } "
PROCESS = THREAD.replace("thread", "process")
MODELS = {
    "count": (COUNT, DECOUPLED + "instance_group { count: 2 kind: KIND_CPU }"),
    "count_process": (COUNT, DECOUPLED + PROCESS),
    "double": (DOUBLE, ""),
    "priority": (PRIORITY, "dynamic_batching { priority_levels: 3 default_priority_level: 3 }"),
    "waits": (WAITS, ""),
    "calls": (CALLS, ""),
    "calls_process": (CALLS, PROCESS),
    "loops": (LOOPS, "instance_group { count: 20 kind: KIND_CPU }"),
    "dies": (DIES, PROCESS),
}
CONFIG = """max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the models and graphs above."""
    root = tmp_path_factory.mktemp("repository")
    for name, (source, config) in MODELS.items():
        way = "" if PROCESS in config else THREAD
        version = write_model(root / "model", name, HEAD + source, CONFIG + config + way)
        os.mkfifo(version.parent / "left")
    shutil.copytree(Path(__file__).with_name("data") / "python_models", root / "graphs")
    return root


@pytest.fixture(scope="module")
def endpoints(folder: Path) -> Iterator[Mapping[str, Endpoint]]:
    """Endpoints of their mesh by service."""
    with running_mesh(folder) as endpoints:
        yield endpoints


def _input(value: float) -> triton.InferInput:
    tensor = triton.InferInput("IN", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
    return tensor


def _stream(address: str, model: str, value: float) -> list[Any]:
    """Responses, or at last the error, of one request to a decoupled model: what the callback got."""
    got: Queue[Any] = Queue()
    answers = []
    with triton.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: got.put(error or result))
        client.async_stream_infer(model, [_input(value)], request_id="r", enable_empty_final_response=True)
        while True:
            answers.append(got.get(timeout=TIMEOUT_S))
            if isinstance(answers[-1], InferenceServerException):
                return answers
            if answers[-1].get_response().parameters["triton_final_response"].bool_param:
                return answers


def _values(answers: list[Any]) -> list[float]:
    return [float(answer.as_numpy("OUT").flat[0]) for answer in answers if answer.as_numpy("OUT") is not None]


def _ask(address: str, model: str, value: float, **options: Any) -> float:
    with triton.InferenceServerClient(address) as client:
        return _values([client.infer(model, [_input(value)], **options)])[0]


@pytest.mark.parametrize(("service", "model"), [("model", "count_process"), ("router", "count")])
@pytest.mark.parametrize("count", [0, 100])
def test_decoupled_model_streams(endpoints: Mapping[str, Endpoint], service: str, model: str, count: int) -> None:
    """Any number of responses come, from the model's service and through the router, the last one marked."""
    answers = _stream(endpoints[service].grpc, model, count)
    assert list(range(count)) == _values(answers)
    assert {"r"} == {answer.get_response().id for answer in answers}
    assert count + 1 == len(answers)


def test_graph_over_a_decoupled_model_streams(endpoints: Mapping[str, Endpoint]) -> None:
    """What follows a decoupled Python model in a graph runs for each of its responses."""
    assert [0.0, 2.0, 4.0, 6.0] == _values(_stream(endpoints["router"].grpc, "count_doubled", 4))


def test_error_after_responses(endpoints: Mapping[str, Endpoint]) -> None:
    """The response before the error arrives, then the model's text, from the model and through a graph."""
    for service, model in (("model", "count"), ("model", "count_process"), ("router", "count_doubled")):
        *answers, error = _stream(endpoints[service].grpc, model, -2)
        assert 1 == len(answers)
        assert "no more" in str(error)


def test_unary_call_of_a_decoupled_model_is_refused(endpoints: Mapping[str, Endpoint]) -> None:
    """ModelInfer answers UNIMPLEMENTED with the text that clients know, on every way."""
    for service, model in (("model", "count"), ("router", "count"), ("router", "count_doubled")):
        with pytest.raises(InferenceServerException) as error:
            _ask(endpoints[service].grpc, model, 1)
        assert "StatusCode.UNIMPLEMENTED" == error.value.status()
        assert "ModelInfer RPC doesn't support models with decoupled transaction policy" in error.value.message()


@pytest.mark.parametrize(
    ("service", "model", "served"),
    [
        ("model", "count", "count"),
        ("model", "count_process", "count_process"),
        ("router", "count", "count"),
        ("router", "count_doubled", "count"),
    ],
)
def test_client_that_leaves_stops_the_model(
    endpoints: Mapping[str, Endpoint], folder: Path, service: str, model: str, served: str
) -> None:
    """A stream that is cancelled ends a model that would never finish, wherever the client is connected."""
    got: Queue[Any] = Queue()
    with triton.InferenceServerClient(endpoints[service].grpc) as client:
        client.start_stream(callback=lambda result, error: got.put(error or result))
        client.async_stream_infer(model, [_input(-1)])
        assert [0.0] == _values([got.get(timeout=TIMEOUT_S)])
        client.stop_stream(cancel_requests=True)
        assert int((folder / "model" / served / "left").read_text()) > 0


def _settled(path: Path) -> str:
    """What a file says when it does not change any more: its writer, in another process, has stopped."""
    text, before = "", ""
    while text != before or not text:
        time.sleep(0.5)
        text, before = path.read_text() if path.exists() else "", text
    return text


async def test_slow_client_slows_the_model_down(endpoints: Mapping[str, Endpoint], folder: Path) -> None:
    """A client that does not read holds up its own request alone: the model waits, and others are served."""
    request = pb.ModelInferRequest(model_name="count")
    request.inputs.add(name="IN", datatype="FP32", shape=(1, 1))
    request.raw_input_contents.append(np.float32([-3]).tobytes())
    async with grpc.aio.insecure_channel(endpoints["model"].grpc, options=channel_options()) as channel:
        rpc = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]), timeout=TIMEOUT_S)
        await rpc.read()
        sent = folder / "model" / "count" / "sent"
        before = await asyncio.to_thread(_settled, sent)
        assert int(before) < 400  # 256 KiB each: 16 MiB in the service, up to 38 in sockets, the rest in gRPC's buffers
        assert [0.0, 1.0] == _values(await asyncio.to_thread(_stream, endpoints["model"].grpc, "count", 2))
        assert before == sent.read_text()
        rpc.cancel()
    await asyncio.wait_for(asyncio.to_thread((folder / "model" / "count" / "left").read_text), TIMEOUT_S)


def test_statistics_tell_of_responses(endpoints: Mapping[str, Endpoint]) -> None:
    """A request counts once, and each response by its number."""
    address = endpoints["model"].grpc

    def read() -> tuple[int, dict[str, int]]:
        with triton.InferenceServerClient(address) as client:
            (entry,) = client.get_inference_statistics("count").model_stats
        return entry.inference_stats.success.count, {k: r.success.count for k, r in entry.response_stats.items()}

    before, responses_before = read()
    _stream(address, "count", 3)
    after, responses = read()
    assert 1 == after - before
    assert [1, 1, 1] == [responses[key] - responses_before.get(key, 0) for key in ("0", "1", "2")]


@pytest.mark.parametrize("model", ["calls", "calls_process"])
def test_models_call_graphs_through_the_router(endpoints: Mapping[str, Endpoint], model: str) -> None:
    """A graph, which only the router has, answers a model's call; the call has the request's priority."""
    for service in ("model", "router"):
        address = endpoints[service].grpc
        assert 10.0 == _ask(address, model, 5, parameters={"model": "doubled"})
        assert 2.0 == _ask(address, model, 5, priority=2, parameters={"model": "priority"})


@pytest.mark.parametrize("model", ["calls", "calls_process"])
def test_deadline_and_cancel_reach_the_model_that_was_called(
    endpoints: Mapping[str, Endpoint], folder: Path, model: str
) -> None:
    """When the client's deadline passes, the model that the model called sees it."""
    with pytest.raises(InferenceServerException) as error:
        _ask(endpoints["router"].grpc, model, 1, client_timeout=1.0, parameters={"model": "waits"})
    assert "StatusCode.DEADLINE_EXCEEDED" == error.value.status()
    assert "x" == (folder / "model" / "waits" / "left").read_text()


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [
        ("calls_process", "RESOURCE_EXHAUSTED", "'calls_process' calls itself, directly or through others, while its"),
        ("loops", "INVALID_ARGUMENT", "models call one another more than 16 deep: loops > loops > loops"),
    ],
)
def test_model_that_calls_itself_ends_in_an_error(
    endpoints: Mapping[str, Endpoint], model: str, status: str, text: str
) -> None:
    """A call that could never be answered is refused at once, though it goes through the router."""
    start_s = time.monotonic()
    with pytest.raises(InferenceServerException) as error:
        _ask(endpoints["router"].grpc, model, 1, parameters={"model": model})
    assert f"StatusCode.{status}" == error.value.status()
    assert text in error.value.message()
    assert time.monotonic() - start_s < TIMEOUT_S / 2


def test_process_that_dies_is_started_again(endpoints: Mapping[str, Endpoint]) -> None:
    """Its request is UNAVAILABLE and says how it died; the next is served by a new one, and a metric counts it."""
    address = endpoints["model"].grpc
    first = _ask(address, "dies", 0)
    with pytest.raises(InferenceServerException) as error:
        _ask(address, "dies", 1)
    assert "StatusCode.UNAVAILABLE" == error.value.status()
    assert "the process of instance dies_0_0 of model 'dies' was killed by SIGSEGV" in error.value.message()
    assert first != _ask(address, "dies", 0)
    assert 1 == scrape(endpoints["model"].metrics)['weft_instance_restarts_total{model="dies",version="1"}']
