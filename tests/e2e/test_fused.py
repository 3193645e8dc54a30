"""Services in the router's process: what a client sees is what it sees of services in processes of their own."""

import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from tests.chain import write_repository
from tests.integration.routing import Client
from tests.messages import request_from_call, result_from_response
from tests.processes import running, scrape, wait_until
from tests.repositories import NUMBER_BATCHES, NUMBERS, THREAD, write_graph, write_model

from weft.base.core import InferCall
from weft.base.processes.process import Endpoint
from weft.base.tensors import decode, encode
from weft.mesh.running import running_mesh
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.long

Start = Callable[..., "Up"]  # noqa: F821  # of conftest.py

OK, RAISES, REFUSES, CALLS_GRAPH, CALLS_NOBODY, HANGS = 1.0, -1.0, -2.0, -3.0, -4.0, -5.0
MOODY = f'''
"""Does what its input says; `HANGS` goes on when somebody has opened the FIFO beside this file."""
import pathlib

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        source = pb_utils.get_input_tensor_by_name(request, "X")
        value = float(source.as_numpy().ravel()[0])
        if value == {RAISES}:
            raise ValueError("a secret of the model")
        if value == {REFUSES}:
            error = pb_utils.TritonError("no such customer", pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=error)
        if value in ({CALLS_GRAPH}, {CALLS_NOBODY}):
            graph = "chain" if value == {CALLS_GRAPH} else "nobody"
            nested = pb_utils.InferenceRequest(model_name=graph, requested_output_names=["Y"], inputs=[source]).exec()
            if nested.has_error():
                return pb_utils.InferenceResponse(error=nested.error())
            return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(nested, "Y")])
        if value == {HANGS}:
            pathlib.Path(__file__).with_name("fifo").open("w").close()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", source.as_numpy() * 2)])
'''
MOODY_CONFIG = NUMBER_BATCHES + "dynamic_batching { priority_levels: 2 default_priority_level: 2 }"
COUNT = '''
"""Sends 0, 1, ... up to its input; after 3 comes an error."""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            last = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])
            for number in range(last + 1):
                if number == 4:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("enough")))
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([number], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
COUNT_CONFIG = THREAD + NUMBERS + "model_transaction_policy { decoupled: true }"
RISKY = """
name: "%s"
platform: "graph"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
node { name: "root" sequence { step { name: "run" model_name: "moody" policy { %s } } } }
"""

#: Requests of a model that were given up.
CANCELED = "nv_inference_request_failure", 'reason="CANCELED",'


def add_models(repository: Path) -> None:
    """The models `moody` and `count`, and two graphs around the first."""
    for name, program, config in (("moody", MOODY, MOODY_CONFIG), ("count", COUNT, COUNT_CONFIG)):
        write_model(repository / "model", name, program, config)
    os.mkfifo(repository / "model" / "moody" / "1" / "fifo")
    for name, policy in (("risky", 'retry { attempts: 3 on: "INTERNAL" }'), ("brief", "timeout_ms: 150")):
        write_graph(repository / "graphs", name, RISKY % (name, policy))


class Mesh(NamedTuple):
    """A running mesh, its repository and its log."""

    endpoints: dict[str, Endpoint]
    repository: Path
    log: Path


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Mesh]]:
    """The same repository in four processes, and in one."""
    root = tmp_path_factory.mktemp("fused")
    started: dict[str, Mesh] = {}
    with ExitStack() as stack:
        for name, arguments in (("separate", ()), ("fused", ("--in-process",))):
            repository, log = write_repository(root / name), root / f"{name}.log"
            add_models(repository)
            endpoints = stack.enter_context(running_mesh(repository, arguments, log=stack.enter_context(log.open("w"))))
            started[name] = Mesh(endpoints, repository, log)
        yield started


@pytest.fixture
def fused(meshes: dict[str, Mesh]) -> Mesh:
    """The mesh in one process; a test must leave it as it found it."""
    return meshes["fused"]


def request(model: str, value: float, **parameters: int) -> pb.ModelInferRequest:
    """A request of one number."""
    shape = (1,) if model == "count" else (1, 1)
    return request_from_call(
        InferCall(model, parameters=parameters, inputs={"X": encode(np.full(shape, value, np.float32))})
    )


@contextmanager
def stub_of(mesh: Mesh) -> Iterator[GRPCInferenceServiceStub]:
    """A stub on the router."""
    with grpc.insecure_channel(mesh.endpoints["router"].grpc) as channel:
        yield GRPCInferenceServiceStub(channel)


def neutral(text: str) -> str:
    """The text without what differs from call to call and from mesh to mesh: error ids, times, addresses."""
    text = re.sub(r"\b[0-9a-f]{12}\b", "ID", re.sub(r"\d+ ms", "N ms", text))
    return re.sub(r"\((in-process|127\.0\.0\.1:\d+|unix:[^)]*)\)", "(ADDRESS)", text)


def told(mesh: Mesh, model: str, value: float) -> list[Any]:
    """What a client sees: the answer and its path, or status, text and metadata."""
    with stub_of(mesh) as stub:
        try:
            response, call = stub.ModelInfer.with_call(request(model, value), timeout=20)
        except grpc.RpcError as error:
            metadata = dict(error.trailing_metadata())
            own = [f"{key}={metadata[key]}" for key in metadata if key.startswith("x-")]
            return [neutral(" | ".join([error.code().name, error.details(), *own]))]
        metadata = dict(call.trailing_metadata())
        outputs = result_from_response(response).outputs
        return [{name: decode(tensor).tolist() for name, tensor in outputs.items()}, metadata["x-graph-path"]]


@pytest.mark.parametrize(
    ("model", "value", "part"),
    [
        ("chain", OK, "4.0"),
        ("risky", OK, "2.0"),
        ("moody", OK, "2.0"),
        ("risky", CALLS_GRAPH, "'Y': [[0.0]]"),
        ("risky", RAISES, "INTERNAL"),
        ("risky", REFUSES, "no such customer"),
        ("risky", CALLS_NOBODY, "'nobody'"),
        ("moody", RAISES, "x-error-id=ID"),
        ("nobody", OK, "NOT_FOUND"),
        ("count", OK, "decoupled"),
    ],
)
def test_answers_and_errors_are_those_of_separate_processes(
    meshes: dict[str, Mesh],
    model: str,
    value: float,
    part: str,
) -> None:
    """Outputs, path, status, text and trailing metadata; also of retries, and of models that call others."""
    expected, got = (told(meshes[name], model, value) for name in ("separate", "fused"))
    assert expected == got
    assert part in str(got)


def test_an_error_of_user_code_keeps_its_id_and_its_secret(fused: Mesh) -> None:
    """The client has the id in text and metadata, the log has it with the traceback, and the text has no more."""
    with stub_of(fused) as stub, pytest.raises(grpc.RpcError) as failure:
        stub.ModelInfer(request("moody", RAISES), timeout=20)
    error_id = dict(failure.value.trailing_metadata())["x-error-id"]
    assert f"(error id {error_id})" in failure.value.details()
    assert "secret" not in failure.value.details()

    def logged() -> list[str]:
        lines = fused.log.read_text().splitlines()
        return [line for line in lines if error_id in line and "a secret of the model" in line]

    wait_until(lambda: bool(logged()))  # it comes through a pipe
    (line,) = logged()
    assert json.loads(line)["error_id"] == error_id


def test_a_model_that_blocks_holds_up_nobody_else(meshes: dict[str, Mesh]) -> None:
    """Others are answered; a queued request that is cancelled is gone at once; a step that is late says so alike."""
    texts = []
    for mesh in meshes.values():
        fifo = mesh.repository / "model/moody/1/fifo"
        with stub_of(mesh) as stub:
            hanging = stub.ModelInfer.future(request("moody", HANGS), timeout=20)
            texts.append(late(stub))
            assert told(mesh, "chain", OK)[0] == {"Y": [[4.0]]}
            cancelled = figure(mesh, *CANCELED)
            queued = stub.ModelInfer.future(request("moody", OK), timeout=20)
            wait_until(lambda mesh=mesh: figure(mesh, "nv_inference_pending_request_count") == 1)
            queued.cancel()
            wait_until(lambda mesh=mesh: figure(mesh, "nv_inference_pending_request_count") == 0)
            assert figure(mesh, *CANCELED) == cancelled + 1
            fifo.open().close()
            assert decode(result_from_response(hanging.result()).outputs["Y"]).tolist() == [[2 * HANGS]]
    assert texts[0] == texts[1]
    assert "DEADLINE_EXCEEDED" in texts[1]
    assert "did not answer within the N ms that were left" in texts[1]


def test_streams_are_those_of_separate_processes(meshes: dict[str, Mesh]) -> None:
    """Responses, their order, the flag of the last, and an error after some of them."""
    seen = []
    for mesh in meshes.values():
        with stub_of(mesh) as stub:
            responses = [r for n in (2, 6) for r in stub.ModelStreamInfer(iter([request("count", n)]), timeout=20)]
        seen.append(
            [
                neutral(r.error_message) or (r.infer_response.raw_output_contents[0], is_final(r.infer_response))
                for r in responses
            ]
        )
    assert seen[0] == seen[1]
    assert 3 + 5 == len(seen[1])
    assert "enough (error id ID)" == seen[1][-1]


def test_every_figure_is_there_once_and_of_the_model_itself(fused: Mesh) -> None:
    """One /metrics page has graphs and models, no sample twice, and queue times, which only a model's service knows."""
    with stub_of(fused) as stub:
        stub.ModelInfer(request("risky", OK, priority=1), timeout=20)
        (counted,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name="moody")).model_stats
    with urllib.request.urlopen(f"http://{fused.endpoints['router'].metrics}/metrics", timeout=10) as page:
        names = [line.rpartition(" ")[0] for line in page.read().decode().splitlines() if line[0] != "#"]
    assert len(names) == len(set(names))
    samples = scrape(fused.endpoints["router"].metrics)
    of_moody = 'model="moody",version="1"'
    assert 0 < samples[f"nv_inference_queue_duration_us{{{of_moody}}}"]
    assert samples[f"nv_inference_count{{{of_moody}}}"] == counted.inference_count > 0
    assert 0 < counted.inference_stats.queue.ns
    assert 0 < samples['weft_compute_latency_seconds_count{model="moody",priority="1",version="1"}']
    assert all(any(f'model="{name}"' in key for key in samples) for name in ("risky", "chain", "prepare", "finish"))


def test_models_are_told_of_as_in_separate_processes(meshes: dict[str, Mesh]) -> None:
    """Index, configurations and metadata that the router gives are the same."""
    seen = []
    for mesh in meshes.values():
        with stub_of(mesh) as stub:
            index = {model.name: model.state for model in stub.RepositoryIndex(pb.RepositoryIndexRequest()).models}
            configs = [stub.ModelConfig(pb.ModelConfigRequest(name=name)) for name in sorted(index)]
            metadata = [stub.ModelMetadata(pb.ModelMetadataRequest(name=name)) for name in sorted(index)]
            seen.append((index, configs, metadata))
    assert seen[0] == seen[1]


def test_a_fused_mesh_ends_cleanly_under_load(up: Start) -> None:
    """Every request is answered or refused as unavailable; one process, status 0, nothing left."""
    mesh = up("--in-process")
    assert ["router", "preprocess", "model", "postprocess"] == list(mesh.endpoints)
    assert 1 == len({(e["pid"], e["grpc"], e["metrics"]) for e in mesh.endpoints.values()})
    status, outcomes = mesh.stop_under_load("chain")
    assert status == 0, mesh.log()
    assert mesh.running() == set()
    assert set(outcomes) == {"OK", "UNAVAILABLE"}


def test_some_services_may_be_fused_and_each_hop_is_traced(up: Start, otlp_collector: Any) -> None:
    """Two processes answer together; a call within one is a CLIENT and a SERVER span too, under the router's name."""
    mesh = up("--in-process", "preprocess,postprocess")
    pids = {name: endpoint["pid"] for name, endpoint in mesh.endpoints.items()}
    assert pids["router"] == pids["preprocess"] == pids["postprocess"] != pids["model"]
    assert decode(mesh.call("chain").outputs["Y"]).tolist() == [[4.0]]
    assert mesh.stop() == 0
    spans = otlp_collector.wait_for(lambda spans: {"weft.router/chain", "compute"} <= {span.name for span in spans})
    by_name = {span.name: span for span in spans}
    for step, server, resource, system in (
        ("step root/pre", "weft.preprocess/prepare", "weft.router", "in-process"),
        ("step root/run", "weft.model/work", "weft.model", "grpc"),
    ):
        called = by_name[server]
        assert ("CLIENT", "SERVER") == (by_name[step].kind, called.kind)
        assert by_name[step].span_id == called.parent_span_id
        assert (resource, system) == (called.resource["service.name"], called.attributes["rpc.system"])
        assert {"queue", "batch", "compute"} <= {s.name for s in spans if s.parent_span_id == called.span_id}


def test_a_model_that_cannot_be_loaded_ends_a_fused_start(up: Start, tmp_path: Path) -> None:
    """With `--exit-on-error`; the model and the reason are named beside the graph that needs it."""
    broken = write_repository(tmp_path / "repository")
    (broken / "model/work/1/model.py").write_text("import nothing_of_that_name\n")
    mesh = up("--in-process", "--exit-on-error", repository=broken, must_serve=False)
    assert mesh.process.wait(30) == 1
    assert "work/1 is UNAVAILABLE: " in mesh.log()
    assert "nothing_of_that_name" in mesh.log()


def test_models_of_a_fused_router_are_loaded_and_unloaded_through_it(repository: Path) -> None:
    """A model serves as soon as its load is answered and not any longer when its unload is; graphs go with it."""
    options = "--model-control-mode explicit --load-on-demand"
    arguments = ["--repository", str(repository / "graphs"), "--model-control-mode", "explicit"]
    for service in ("preprocess", "model"):
        arguments += ["--in-process", f"{service} --repository '{repository}/{service}' {options}"]
    with running("weft.mesh.fused", *arguments) as router, grpc.insecure_channel(router.grpc) as channel:
        client = Client(channel)

        def outcome() -> str:
            try:
                client.v2.ModelInfer(request("prepare", OK), timeout=20)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        assert "NOT_FOUND" == outcome()
        client.load("prepare")
        assert "OK" == outcome()
        client.unload("prepare")
        assert outcome() in ("NOT_FOUND", "UNAVAILABLE")
        with pytest.raises(grpc.RpcError) as unknown:
            client.load("nobody")
        assert grpc.StatusCode.NOT_FOUND == unknown.value.code()
        warm = {key: value for key, value in router.scrape().items() if key.startswith("weft_warm_models{")}
        assert {'weft_warm_models{service="model"}': 0, 'weft_warm_models{service="preprocess"}': 0} == warm


def is_final(response: pb.ModelInferResponse) -> bool:
    """Whether no response of the stream follows."""
    return response.parameters["triton_final_response"].bool_param


def late(stub: GRPCInferenceServiceStub) -> str:
    """Status and text of a step that waits for longer than it may; the request before it need not be in work yet."""
    for _ in range(100):
        try:
            stub.ModelInfer(request("brief", OK), timeout=20)
        except grpc.RpcError as error:
            return neutral(f"{error.code().name} {error.details()}")
    raise AssertionError("it was never late")


def figure(mesh: Mesh, name: str, labels: str = "") -> float:
    """A figure of `moody`, as the model service has it."""
    of_moody = f'{name}{{model="moody",{labels}version="1"}}'
    return scrape(mesh.endpoints["model"].metrics).get(of_moody, 0.0)
