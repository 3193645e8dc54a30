"""What a Python model may do beside answering: metrics of its own, loads of other models, errors in mid-stream."""

from collections.abc import Iterator
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from tests.integration.batching import TIMEOUT_S, running_service
from tests.processes import Running
from tests.repositories import THREAD, write_model
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

CONFIG = """input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
PROCESS = THREAD.replace("thread", "process")
HEAD = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [np.array([self.done(request)], object) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]) for text in texts]

    def done(self, request):
        try:
            return self.do(request.inputs()[0].as_numpy()[0].decode())
        except pb_utils.TritonModelException as error:
            return error.message()
"""
METRICS = """
    def initialize(self, args):
        calls = pb_utils.MetricFamily("app_calls", "Calls of the app", pb_utils.MetricFamily.COUNTER)
        self.calls = calls.Metric(labels={"part": "x"})
        load = pb_utils.MetricFamily(name="app_load", description="Load", kind=pb_utils.MetricFamily.GAUGE)
        self.load = load.Metric(labels={"model": args["model_name"]})
        sizes = pb_utils.MetricFamily("app_sizes", "Sizes", pb_utils.MetricFamily.HISTOGRAM)
        self.sizes = sizes.Metric(buckets=[1, 2.5])

    def do(self, text):
        if text == "kind":
            pb_utils.MetricFamily("app_calls", "again", pb_utils.MetricFamily.GAUGE)
        if text == "own":
            pb_utils.MetricFamily("nv_inference_count", "mine", pb_utils.MetricFamily.COUNTER)
        if text == "falls":
            self.calls.increment(-1)
        if text == "set":
            self.calls.set(1)
        self.calls.increment(2)
        self.load.set(5)
        self.load.increment(-1.5)
        for size in (1, 2, 3):
            self.sizes.observe(size)
        return str(self.calls.value())
"""
CONTROL = """
    def do(self, text):
        action, _, name = text.partition(" ")
        if action == "files":
            pb_utils.load_model(name, files={"file:1/x": b""})
        if action in ("load", "unload"):
            getattr(pb_utils, action + "_model")(model_name=name)
        return str(pb_utils.is_model_ready(name))
"""
LOADS = """
    def initialize(self, args):
        pb_utils.load_model(%r)

    def do(self, text):
        return "True"
"""
LOADS_TWO = """
    def initialize(self, args):
        thread = threading.Thread(target=self.load, args=("back",))
        thread.start()
        self.load("helper")
        thread.join()

    def load(self, name):
        try:
            pb_utils.load_model(name)
        except pb_utils.TritonModelException as error:
            self.text = error.message()

    def do(self, text):
        return self.text
"""
UNLOADS = """
    def initialize(self, args):
        pb_utils.unload_model(%r)
"""
STREAM = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for text in (b"a", None, b"c"):
                error = None if text else pb_utils.TritonError("not this one", pb_utils.TritonError.NOT_FOUND)
                tensors = [pb_utils.Tensor("OUT", np.array([text], object))] if text else []
                sender.send(pb_utils.InferenceResponse(tensors, error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
MODELS = {
    "metrics": (METRICS, ""), "metrics_process": (METRICS, PROCESS), "control": (CONTROL, ""),
    "control_process": (CONTROL, PROCESS), "helper": (CONTROL, ""), "needs_helper": (LOADS % "helper", ""),
    "one": (LOADS % "two", ""), "two": (LOADS % "one", ""), "fork": (LOADS_TWO, ""), "back": (LOADS % "fork", ""),
    "loads_killer": (LOADS % "killer", ""), "killer": (UNLOADS % "loads_killer", ""),
    "stream": (STREAM, "model_transaction_policy { decoupled: true }"),
    "stream_process": (STREAM, "model_transaction_policy { decoupled: true }" + PROCESS),
}  # fmt: skip


class Service(NamedTuple):
    """A service, and a client of it."""

    client: triton.InferenceServerClient
    process: Running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service in explicit mode, with nothing loaded."""
    repository = tmp_path_factory.mktemp("features")
    for name, (body, options) in MODELS.items():
        write_model(repository, name, HEAD + body, CONFIG + options + ("" if PROCESS in options else THREAD))
    with running_service(repository) as process, triton.InferenceServerClient(process.grpc) as client:
        yield Service(client, process)


def _ask(service: Service, model: str, text: str) -> str:
    tensor = triton.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text], object))
    answer: bytes = service.client.infer(model, [tensor], client_timeout=TIMEOUT_S).as_numpy("OUT")[0]
    return answer.decode()


def _samples(service: Service) -> dict[str, float]:
    return {key: value for key, value in service.process.scrape().items() if key.startswith("app_")}


def test_metrics_of_models(service: Service) -> None:
    """Two models, one in a process, count together; a metric goes with the last model that has made it."""
    for model in ("metrics", "metrics_process"):
        service.client.load_model(model)
    assert ["2.0", "4.0"] == [_ask(service, model, "") for model in ("metrics", "metrics_process")]
    assert {
        'app_calls{part="x"}': 4,
        'app_load{model="metrics"}': 3.5,
        'app_load{model="metrics_process"}': 3.5,
        'app_sizes_bucket{le="1.0"}': 2,
        'app_sizes_bucket{le="2.5"}': 4,
        'app_sizes_bucket{le="+Inf"}': 6,
        "app_sizes_sum": 12,
        "app_sizes_count": 6,
    } == _samples(service)
    service.client.load_model("metrics")  # the new one makes its metrics before the old one goes
    service.client.unload_model("metrics_process")
    samples = _samples(service)
    assert (4, False) == (samples['app_calls{part="x"}'], 'app_load{model="metrics_process"}' in samples)
    service.client.unload_model("metrics")
    assert {} == _samples(service)


@pytest.mark.parametrize("model", ["metrics", "metrics_process"])
def test_wrong_metrics_are_errors_in_the_model(service: Service, model: str) -> None:
    """A name of another kind, a name of the server's, a counter that falls, and what a kind cannot do."""
    service.client.load_model(model)
    assert "Family name already exists with different type: 'app_calls' is COUNTER, got GAUGE" == _ask(
        service, model, "kind"
    )
    assert "are the server's; use another" in _ask(service, model, "own")
    assert "can only be incremented monotonically" in _ask(service, model, "falls")
    assert "TRITONSERVER_METRIC_KIND_COUNTER does not support Set" == _ask(service, model, "set")
    service.client.unload_model(model)


@pytest.mark.parametrize("model", ["control", "control_process"])
def test_a_model_loads_and_unloads_others(service: Service, model: str) -> None:
    """A load and an unload have happened when the call returns; what cannot be is an error in the model."""
    service.client.load_model(model)
    assert ["False", "True", "True", "False"] == [
        _ask(service, model, text) for text in ("ready helper", "load helper", "ready helper", "unload helper")
    ]
    assert not service.client.is_model_ready("helper")
    assert "False" == _ask(service, model, "ready nothing")
    assert "the repository has no folder 'nothing'" in _ask(service, model, "load nothing")
    assert "put them into the repository" in _ask(service, model, "files helper")
    assert "can load neither itself nor one that loads it" in _ask(service, model, f"load {model}")
    _ask(service, model, f"unload {model}")  # answered, though the unload waits for the answer


def test_a_model_may_load_what_it_needs(service: Service) -> None:
    """``initialize`` loads another model; two that load one another fail at once and say why."""
    service.client.load_model("needs_helper")
    assert service.client.is_model_ready("helper")
    with pytest.raises(InferenceServerException, match="would wait for itself"):
        service.client.load_model("one", client_timeout=TIMEOUT_S)


def test_loads_that_would_wait_for_one_another_fail(service: Service) -> None:
    """Where one of two loads that a model waits for comes back to it, and where a load unloads who waits for it."""
    service.client.load_model("fork", client_timeout=TIMEOUT_S)
    assert "failed to load 'fork': model 'back', which asks for it, would wait for itself" in _ask(service, "fork", "")
    with pytest.raises(InferenceServerException, match="failed to unload 'loads_killer': model 'killer', which asks"):
        service.client.load_model("loads_killer", client_timeout=TIMEOUT_S)


@pytest.mark.parametrize("model", ["stream", "stream_process"])
def test_a_stream_goes_on_after_an_error(service: Service, model: str) -> None:
    """An error response in the middle has the text and says that others follow; they do."""
    service.client.load_model(model)
    request = pb.ModelInferRequest(model_name=model, id="7")
    request.inputs.add(name="IN", datatype="BYTES", shape=(1,))
    request.raw_input_contents.append(b"\0\0\0\0")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    with grpc.insecure_channel(service.process.grpc) as channel:
        responses = list(GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]), timeout=TIMEOUT_S))
    assert ["", "not this one", "", ""] == [response.error_message for response in responses]
    assert [False, False, False, True] == [
        response.infer_response.parameters["triton_final_response"].bool_param for response in responses
    ]
    assert ["7"] * 4 == [response.infer_response.id for response in responses]
