"""Sequences on a real model service process, seen by real clients: order, state, ends of every kind."""

import asyncio
import os
import queue
import shutil
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.batching import TIMEOUT_S, Service, running_service
from tests.processes import Running
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from weft_protos import grpc_service_pb2 as pb

NUM_CLIENTS = 20
LENGTH = 12

#: OUT is the sum of the sequence's IN so far, kept in the model by id; ROWS the rows that the model was given.
SUMMING = """
import numpy as np
import triton_python_backend_utils as pb_utils


def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            number, sequence = value(request, "IN"), value(request, "CORRID")
            if value(request, "READY"):
                assert request.correlation_id() == sequence, (request.correlation_id(), sequence)
                if value(request, "START"):
                    self.sums[sequence] = 0
                if sequence not in self.sums:
                    responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"no {sequence}")))
                    continue
                self.sums[sequence] += number
                number = self.sums[sequence]
                if value(request, "END"):
                    del self.sums[sequence]
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", np.full((1, 1), number, np.int32)),
                pb_utils.Tensor("ROWS", np.full((1, 1), len(requests), np.int32)),
            ]))
        return responses
"""
#: The same, kept by the server; a negative number fails, 1000 waits until the pipes are used.
STATEFUL = """
import pathlib
import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path(__file__).parent.parent


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            number, total = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "SUM_IN")
            )
            if number.min() < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
                continue
            if number.max() == 1000:
                (FOLDER / "running").write_text("x")
                (FOLDER / "go").read_text()
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", (number + total).astype(np.int32)),
                pb_utils.Tensor("SUM_OUT", (number + total).astype(np.int32)),
                pb_utils.Tensor("ROWS", np.full((1, 1), len(requests), np.int32)),
            ]))
        return responses
"""
#: Each request has two responses: its number, and the sum; kept in the model by row.
DECOUPLED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = [0] * 4

    def execute(self, requests):
        for row, request in enumerate(requests):
            number, start, ready = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0] for name in ("IN", "START", "READY")
            )
            sender = request.get_response_sender()
            if ready:
                self.sums[row] = number + (0 if start else self.sums[row])
            for value, flags in ((number, 0), (self.sums[row], pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)):
                sender.send(pb_utils.InferenceResponse([
                    pb_utils.Tensor("OUT", np.full((1, 1), value, np.int32)),
                    pb_utils.Tensor("ROWS", np.full((1, 1), len(requests), np.int32)),
                ]), flags=flags)
"""
MODELS = {
    "direct": SUMMING,
    "oldest": SUMMING,
    "process": SUMMING,
    "stateful": STATEFUL,
    "single": STATEFUL,
    "decoupled": DECOUPLED,
}
#: The configuration of each.
CONFIGS = Path(__file__).with_name("data") / "sequences"


def write_onnx(root: Path) -> None:
    """``onnx``: OUT = SUM_OUT = IN + SUM_IN, where SUM_IN counts for nothing at the START of a sequence."""
    from onnx import TensorProto, helper, save

    shape = ["N", 1]
    number, flag = TensorProto.INT32, TensorProto.FLOAT
    nodes = [
        helper.make_node("Cast", ["START"], ["IS_START"], to=TensorProto.BOOL),
        helper.make_node("Sub", ["SUM_IN", "SUM_IN"], ["ZERO"]),
        helper.make_node("Where", ["IS_START", "ZERO", "SUM_IN"], ["BEFORE"]),
        helper.make_node("Add", ["IN", "BEFORE"], ["OUT"]),
        helper.make_node("Identity", ["OUT"], ["SUM_OUT"]),
    ]
    inputs = [
        helper.make_tensor_value_info(*spec, shape) for spec in (("IN", number), ("START", flag), ("SUM_IN", number))
    ]
    outputs = [helper.make_tensor_value_info(name, number, shape) for name in ("OUT", "SUM_OUT")]
    graph = helper.make_graph(nodes, "sums", inputs, outputs)
    (root / "onnx" / "1").mkdir(parents=True)
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        root / "onnx" / "1" / "model.onnx",
    )
    shutil.copyfile(CONFIGS / "onnx.pbtxt", root / "onnx" / "config.pbtxt")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of ``MODELS``."""
    root: Path = tmp_path_factory.mktemp("sequences")
    for name, code in MODELS.items():
        folder = root / name
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(code)
        shutil.copyfile(CONFIGS / f"{name}.pbtxt", folder / "config.pbtxt")
        for pipe in ("running", "go"):
            os.mkfifo(folder / pipe)
    write_onnx(root)
    return root


@pytest.fixture(scope="module")
def endpoints(repository: Path) -> Iterator[Running]:
    """A running service with every model loaded."""
    with running_service(repository) as started, triton.InferenceServerClient(started.grpc) as client:
        for name in (*MODELS, "onnx"):
            client.load_model(name)
        yield started


@pytest.fixture
def client(endpoints: Running) -> Iterator[triton.InferenceServerClient]:
    """A tritonclient."""
    with triton.InferenceServerClient(endpoints.grpc) as connected:
        yield connected


@pytest.fixture
async def service(endpoints: Running, repository: Path) -> AsyncIterator[Service]:
    """The service with an asynchronous stub."""
    started = Service(endpoints, repository)
    yield started
    await started.channel.close()


def tensor(number: int) -> triton.InferInput:
    """IN."""
    made = triton.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.full((1, 1), number, np.int32))
    return made


def send(
    client: triton.InferenceServerClient, model: str, sequence: int | str, number: int, flags: str = "", **options: Any
) -> int:
    """OUT of one request; flags: s start, e end."""
    result = client.infer(
        model, [tensor(number)], sequence_id=sequence, sequence_start="s" in flags, sequence_end="e" in flags, **options
    )
    return int(result.as_numpy("OUT")[0, 0])


def flags_of(i: int) -> str:
    """Of request ``i`` of a sequence of ``LENGTH``."""
    return "s" * (i == 0) + "e" * (i == LENGTH - 1)


def message(model: str, sequence: int, number: int, flags: str = "") -> pb.ModelInferRequest:
    """A request for a raw stub."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="IN", datatype="INT32", shape=(1, 1))
    request.raw_input_contents.append(np.int32(number).tobytes())
    request.parameters["sequence_id"].int64_param = sequence
    request.parameters["sequence_start"].bool_param = "s" in flags
    request.parameters["sequence_end"].bool_param = "e" in flags
    return request


def out(response: pb.ModelInferResponse) -> int:
    """OUT."""
    return int(np.frombuffer(response.raw_output_contents[0], np.int32)[0])


def expected_sums(first: int) -> list[int]:
    """Of a sequence of the numbers from ``first``."""
    return [sum(range(first, first + i + 1)) for i in range(LENGTH)]


@pytest.mark.parametrize("model", ["direct", "process", "onnx"])
def test_sequences_of_many_clients_do_not_mix(endpoints: Running, model: str) -> None:
    """Twenty clients send one request after another, more than there are slots; each gets the sums of its numbers."""

    def run(client_id: int) -> list[int]:
        with triton.InferenceServerClient(endpoints.grpc) as client:
            return [send(client, model, 100 + client_id, client_id + i, flags_of(i)) for i in range(LENGTH)]

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        assert [expected_sums(i) for i in range(NUM_CLIENTS)] == list(pool.map(run, range(NUM_CLIENTS)))


def streamed(
    client: triton.InferenceServerClient, model: str, num_sequences: int, num_responses: int
) -> dict[str, Any]:
    """OUT of each response by "SEQUENCE REQUEST"; all requests go out over one stream before any answer is read."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for i in range(LENGTH):
        for j in range(num_sequences):
            client.async_stream_infer(
                model, [tensor(j + i)], request_id=f"{j} {i}", sequence_id=200 + j, sequence_start=i == 0,
                sequence_end=i == LENGTH - 1,
            )  # fmt: skip
    values: dict[str, list[int]] = {f"{j} {i}": [] for j in range(num_sequences) for i in range(LENGTH)}
    for _ in range(num_responses * LENGTH * num_sequences):
        result, error = answers.get(timeout=TIMEOUT_S)
        assert error is None, error
        values[result.get_response().id].append(int(result.as_numpy("OUT")[0, 0]))
    client.stop_stream()
    return values


@pytest.mark.parametrize("model", ["oldest", "stateful"])
def test_a_stream_sends_without_waiting(client: triton.InferenceServerClient, model: str) -> None:
    """Requests of twenty sequences go out interleaved over one stream; each sequence's answers are its sums."""
    expected = {f"{j} {i}": [expected_sums(j)[i]] for j in range(NUM_CLIENTS) for i in range(LENGTH)}
    assert expected == streamed(client, model, NUM_CLIENTS, 1)


def test_decoupled_sequences(client: triton.InferenceServerClient) -> None:
    """Each request of each sequence gets all its responses; a model may keep its state by row."""
    expected = {f"{j} {i}": [j + i, expected_sums(j)[i]] for j in range(8) for i in range(LENGTH)}
    assert expected == streamed(client, "decoupled", 8, 2)


def test_direct_fills_the_rows_before(client: triton.InferenceServerClient) -> None:
    """With rows 0 and 1 owned, a batch of row 1 alone has two rows for the model."""
    for sequence in (1, 2, 3):  # two instances: the third has row 1 of the first
        send(client, "direct", sequence, 0, "s")
    result = client.infer("direct", [tensor(5)], sequence_id=3)
    assert (5, 2) == tuple(int(result.as_numpy(name)[0, 0]) for name in ("OUT", "ROWS"))
    for sequence in (1, 2, 3):
        send(client, "direct", sequence, 0, "e")


def test_a_request_without_its_sequence(client: triton.InferenceServerClient) -> None:
    """It is told what is missing, in the words of Triton Inference Server."""
    expected = "inference request for sequence 77 to model 'stateful' must specify the START flag on the first"
    with pytest.raises(InferenceServerException, match=expected) as caught:
        send(client, "stateful", 77, 1)
    assert "StatusCode.INVALID_ARGUMENT" == caught.value.status()


def test_a_request_that_fails_leaves_the_state(client: triton.InferenceServerClient) -> None:
    """The sequence goes on from where it was."""
    send(client, "stateful", 9, 4, "s")
    with pytest.raises(InferenceServerException, match="negative"):
        send(client, "stateful", 9, -1)
    assert 10 == send(client, "stateful", 9, 6, "e")


async def test_a_client_that_vanishes_frees_the_slot(service: Service) -> None:
    """Its sequence, of which one request runs and one waits, ends; the next one runs, with its own state."""
    stream = service.stub.ModelStreamInfer(iter_forever([message("single", 1, 1000, "s"), message("single", 1, 1)]))
    reading = asyncio.ensure_future(stream.read())
    await asyncio.to_thread((service.repository / "single" / "running").read_text)
    waiting = service.call(message("single", 2, 2, "se"))
    await service.queued("single", 2)
    stream.cancel()
    await service.queued("single", 1)
    await service.release("single")
    assert 2 == out(await waiting)
    reading.cancel()
    with pytest.raises(grpc.aio.AioRpcError, match="START flag"):
        await service.call(message("single", 1, 1))


async def iter_forever(requests: list[pb.ModelInferRequest]) -> AsyncIterator[pb.ModelInferRequest]:
    """The requests, and then nothing."""
    for request in requests:
        yield request
    await asyncio.Event().wait()


async def test_a_reload_lets_sequences_end_where_they_began(service: Service) -> None:
    """Requests of a sequence that has started go to the version that it started on; others to the new one."""
    assert 1 == out(await service.call(message("stateful", 1, 1, "s")))
    await service.load("stateful")
    assert 5 == out(await service.call(message("stateful", 2, 5, "s")))
    assert 3 == out(await service.call(message("stateful", 1, 2)))
    assert [10, 11] == [
        out(await service.call(message("stateful", 2, 5, "e"))),
        out(await service.call(message("stateful", 1, 8, "e"))),
    ]
    with pytest.raises(grpc.aio.AioRpcError, match="START flag"):
        await service.call(message("stateful", 1, 2))


async def test_what_clients_read(service: Service) -> None:
    """perf_analyzer asks for configuration and statistics; the sums are those of the requests, and of rows."""
    config = (await service.stub.ModelConfig(pb.ModelConfigRequest(name="oldest"))).config
    assert ("oldest", 6) == (
        config.sequence_batching.WhichOneof("strategy_choice"),
        config.sequence_batching.oldest.max_candidate_sequences,
    )
    await service.load("direct")
    for flags in ("s", "", "e"):
        await service.call(message("direct", 1, 1, flags))
    with pytest.raises(grpc.aio.AioRpcError):
        await service.call(message("direct", 1, 1))
    answer = await service.stub.ModelStatistics(pb.ModelStatisticsRequest(name="direct"))
    statistics = answer.model_stats[0]
    counted = statistics.inference_stats
    assert (3, 3, 3, 1) == (
        statistics.inference_count, statistics.execution_count, counted.success.count, counted.fail.count,
    )  # fmt: skip
    assert counted.success.ns >= counted.queue.ns + counted.compute_infer.ns
    metadata = await service.stub.ModelMetadata(pb.ModelMetadataRequest(name="direct"))
    assert ["IN"] == [spec.name for spec in metadata.inputs]
