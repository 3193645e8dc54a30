"""Settings of logs and traces that clients change while a mesh runs: two replicas, two workers, a gateway."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tests.conftest import OtlpCollector, collecting
from tests.integration.talking import running_gateway
from tests.processes import WAIT_S, running, wait_until
from tritonclient.utils import InferenceServerException

from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.long

MODEL = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_verbose("said verbose")
        pb_utils.Logger.log_info("said info")
        pb_utils.Logger.log_error("said error")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
ASKER = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        asked = [pb_utils.InferenceRequest(model_name="talker", requested_output_names=["Y"], inputs=r.inputs())
                 for r in requests]
        return [pb_utils.InferenceResponse(one.exec().output_tensors()) for one in asked]
"""
CONFIG = """backend: "python"
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
GRAPH = """platform: "graph"
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
node { name: "root" sequence { step { name: "talk" model_name: "talker" } } }
"""


class Mesh(NamedTuple):
    """Where its processes listen, what the replicas log, and the spans of all."""

    router: str
    gateway: str
    replicas: list[str]
    logs: list[Path]
    spans: OtlpCollector

    def infer(self, model: str = "graph", number: int = 1) -> None:
        with tritonclient.grpc.InferenceServerClient(self.router) as client:
            tensor = tritonclient.grpc.InferInput("X", [1], "INT32")
            tensor.set_data_from_numpy(np.ones(1, np.int32))
            for _ in range(number):
                client.infer(model, [tensor], client_timeout=WAIT_S)

    def each_logs(self, text: str) -> bool:
        """Send one more request; whether each replica has logged the text, as the router may prefer one of them."""
        self.infer()
        return all(text in log.read_text() for log in self.logs)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("settings")
    for name, text in (("talker", MODEL), ("asker", ASKER)):
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(CONFIG)
        (folder / "models" / name / "1/model.py").write_text(text)
    (folder / "graphs/graph/1").mkdir(parents=True)
    (folder / "graphs/graph/1/graph.pbtxt").write_text(GRAPH)
    logs = [folder / "a.log", folder / "b.log"]
    serve = ("weft.services.model", "--repository", str(folder / "models"))
    with (
        pytest.MonkeyPatch.context() as environment,
        collecting(environment) as spans,
        logs[0].open("w") as a_log,
        logs[1].open("w") as b_log,
        running(*serve, log=a_log) as a,
        running(*serve, log=b_log) as b,
        running(
            "weft.services.router", "--repository", str(folder / "graphs"), "--workers", "2",
            "--target", f"model={a.grpc},{b.grpc}",
        ) as router,
        running_gateway(router.grpc) as gateway,
    ):  # fmt: skip
        yield Mesh(router.grpc, gateway.address, [a.grpc, b.grpc], logs, spans)


def log_settings(address: str) -> dict[str, Any]:
    """The log settings of a service."""
    with grpc.insecure_channel(address) as channel:
        answer = GRPCInferenceServiceStub(channel).LogSettings(pb.LogSettingsRequest(), timeout=WAIT_S)
        return {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in answer.settings.items()}


def trace_settings(address: str, model: str = "") -> dict[str, list[str]]:
    """The trace settings of a service."""
    with grpc.insecure_channel(address) as channel:
        request = pb.TraceSettingRequest(model_name=model)
        answer = GRPCInferenceServiceStub(channel).TraceSetting(request, timeout=WAIT_S)
        return {name: list(one.value) for name, one in answer.settings.items()}


def test_log_levels_change_at_each_replica_worker_and_model_process(mesh: Mesh) -> None:
    """What is on is logged from then on, what is off no more, by models in processes of their own too; all by HTTP."""
    quiet = {"log_info": False, "log_verbose_level": 0, "log_format": "default"}
    with tritonclient.http.InferenceServerClient(mesh.gateway) as client:
        before = client.get_log_settings()
        assert {"log_file": "", "log_error": True, "log_format": "default"}.items() <= before.items()
        assert {**before, **quiet} == client.update_log_settings(quiet)
        wait_until(lambda: mesh.each_logs("said error"), "a request at each replica")
        assert not any("said info" in log.read_text() or "said verbose" in log.read_text() for log in mesh.logs)
        loud = {"log_verbose_level": 3, "log_format": "ISO8601"}
        changed = client.update_log_settings(loud)
        assert {**before, **quiet, **loud} == changed
        assert [changed] * 6 == [log_settings(address) for address in (*mesh.replicas, *[mesh.router] * 4)]
        wait_until(lambda: mesh.each_logs(" DEBUG weft.python: said verbose"), "verbose")
        assert not any("said info" in log.read_text() for log in mesh.logs)
        del before["log_file"]
        client.update_log_settings(before)


def test_a_service_asked_directly_changes_alone(mesh: Mesh) -> None:
    """The other replica and the router keep their settings."""
    with tritonclient.grpc.InferenceServerClient(mesh.replicas[0]) as client:
        client.update_log_settings({"log_warning": False})
        assert [False, True, True] == [log_settings(at)["log_warning"] for at in (*mesh.replicas, mesh.router)]
        client.update_log_settings({"log_warning": True})


def test_traces_stop_start_and_are_sampled(mesh: Mesh) -> None:
    """OFF records nothing at any service; a count of one graph records so many of it; null clears both."""
    with tritonclient.grpc.InferenceServerClient(mesh.router) as client:
        mesh.infer()
        mesh.spans.wait_for(lambda spans: any(span.name == "weft.model/talker" for span in spans))
        client.update_trace_settings(settings={"trace_level": ["OFF"]})
        for address in (*mesh.replicas, *[mesh.router] * 4):
            assert ["OFF"] == trace_settings(address)["trace_level"]
        client.update_trace_settings("graph", {"trace_level": ["TIMESTAMPS"], "trace_count": "2"})
        assert ["2"] == trace_settings(mesh.router, "graph")["trace_count"]
        assert ["-1"] == trace_settings(mesh.router)["trace_count"]
        since_ns = time.time_ns()
        mesh.infer("talker", 6)  # OFF
        mesh.infer("graph", 12)  # each worker may record two
        client.update_trace_settings("graph", {"trace_level": None, "trace_count": None})
        assert trace_settings(mesh.router, "graph") == trace_settings(mesh.router)
        client.update_trace_settings(settings={"trace_level": None})
        assert ["TIMESTAMPS"] == trace_settings(mesh.replicas[1])["trace_level"]
        mesh.infer("talker")
        ends = {"weft.router/talker", "weft.model/talker"}
        spans = mesh.spans.wait_for(
            lambda spans: ends <= {span.name for span in spans if span.start_unix_ns > since_ns}
        )
    names = [span.name for span in spans if span.start_unix_ns > since_ns]
    assert 2 <= names.count("weft.router/graph") <= 4
    assert [1, 1] == [names.count(name) for name in ends]


@pytest.mark.parametrize("model", ["graph", "asker"])
def test_what_has_no_traces_has_none_of_the_models_that_it_calls(mesh: Mesh, model: str) -> None:
    """OFF for a graph, or a model that calls another: no trace starts in what is called; others are traced on."""
    with tritonclient.grpc.InferenceServerClient(mesh.router) as client:
        client.update_trace_settings(model, {"trace_level": ["OFF"]})
        since_ns = time.time_ns()
        mesh.infer(model, 4)
        client.update_trace_settings(model, {"trace_level": None})
        after_ns = time.time_ns()
        for _ in mesh.replicas:
            mesh.infer("talker", 4)
    spans = mesh.spans.wait_for(
        lambda spans: 8 == sum(span.name == "weft.model/talker" and span.start_unix_ns > after_ns for span in spans)
    )
    assert not [span.name for span in spans if since_ns < span.start_unix_ns < after_ns]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("log", {"log_file": "x"}, "log file location can not be updated through network protocol"),
        ("log", {"log_info": 1}, "'log_info' must be true or false, got 1"),
        ("log", {"log_verbose_level": True}, "'log_verbose_level' must be 0 or more, got True"),
        ("log", {"log_format": "xml"}, "'log_format' must be one of default, ISO8601, got 'xml'"),
        ("log", {"log_inof": True}, "unknown log setting 'log_inof'; use one of: log_error,"),
        ("trace", {"trace_file": "x"}, "trace file location can not be updated through network protocol"),
        ("trace", {"trace_level": ["OFF", "TIMESTAMPS"]}, "must be 'OFF' alone"),
        ("trace", {"trace_level": ["LOUD"]}, "must be of OFF, TIMESTAMPS, TENSORS, got 'LOUD'"),
        ("trace", {"trace_rate": "-1"}, "'trace_rate' must be one whole number from 0 to 2147483647, got '-1'"),
        ("trace", {"trace_rate": "1e3"}, "got '1e3'"),
        ("trace", {"trace_count": "9" * 5000}, "'trace_count' must be one whole number from -1"),
        ("trace", {"trace_speed": "1"}, "unknown trace setting 'trace_speed'"),
    ],
)
def test_a_wrong_setting_changes_nothing(mesh: Mesh, kind: str, settings: dict[str, Any], message: str) -> None:
    """The message has what is allowed, and right settings of the same request are not taken."""
    found = log_settings if kind == "log" else trace_settings
    right: dict[str, Any] = {"log_warning": False} if kind == "log" else {"log_frequency": "7"}
    before = [found(address) for address in (mesh.router, *mesh.replicas)]
    with tritonclient.http.InferenceServerClient(mesh.gateway) as client:
        change: Any = getattr(client, f"update_{kind}_settings")
        with pytest.raises(InferenceServerException) as caught:
            change(settings=right | settings)
    assert message in caught.value.message()
    assert before == [found(address) for address in (mesh.router, *mesh.replicas)]


def test_settings_of_an_unknown_model_are_refused(mesh: Mesh) -> None:
    """For a model that nothing serves there are none."""
    with (
        tritonclient.http.InferenceServerClient(mesh.gateway) as client,
        pytest.raises(InferenceServerException, match="Request for unknown model : nobody"),
    ):
        client.update_trace_settings("nobody", {"trace_rate": "2"})
