"""A whole service process: from its first line to its exit status."""

import contextlib
import gzip
import json
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.ports import free_port

from weft.v2.server.health import LIVENESS
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

SCRIPT = Path(__file__).with_name("scripted_service.py")
SERVICE = "inference.GRPCInferenceService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LIMIT_BYTES = 100_000


class Service:
    """A running service process; killed after 30 s whatever happens."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._watchdog = threading.Timer(30, self.process.kill)
        self._watchdog.start()
        self.lines = []
        self._told = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            is_ours = line.startswith("{")  # gRPC's own lines are no JSON
            self._told.put(json.loads(line) if is_ours else {"grpc": line})
        self._told.put(None)

    def endpoints(self):
        """The line on standard output; fails with the log if there is none."""
        line = self.process.stdout.readline()
        assert line, self.rest()
        return json.loads(line)

    def until(self, **fields):
        """The first log line that has these fields; fails if the log ends without it."""
        while (line := self._told.get(timeout=30)) is not None:
            self.lines.append(line)
            if fields.items() <= line.items():
                return line
        raise AssertionError(f"no line with {fields} in {self.lines}")

    def rest(self):
        """Every log line, once the process has ended."""
        self._reader.join(30)
        while not self._told.empty():
            self.lines.append(self._told.get())
        return [line for line in self.lines if line]

    def exit_status(self):
        """Exit status, once the process has ended."""
        return self.process.wait(30)

    def close(self):
        self.process.kill()
        self.process.wait()
        self._watchdog.cancel()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


@pytest.fixture
def start():
    """Starts service processes that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(contextlib.closing(Service(*arguments)))


@pytest.fixture(scope="module")
def service():
    """One service for the tests that only look at it."""
    with contextlib.closing(Service("--max-message-bytes", str(LIMIT_BYTES))) as service:
        yield service


@pytest.fixture(scope="module")
def endpoints(service):
    """Endpoints of that service."""
    return service.endpoints()


@contextlib.contextmanager
def stub_of(endpoints):
    with grpc.insecure_channel(endpoints["grpc"]) as channel:
        yield GRPCInferenceServiceStub(channel)


def outcome_of(stub, request):
    """Status of one request."""
    try:
        stub.ModelInfer(request, timeout=5)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def hang_request():
    return pb.ModelInferRequest(model_name="hang", id="7")


def scrape(endpoints, accept="text/plain"):
    request = urllib.request.Request(f"http://{endpoints['metrics']}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def test_line_means_serving(endpoints):
    """When the line with the endpoints is out, health says SERVING for the server and for the V2 service."""
    assert {"service", "grpc", "metrics"} == set(endpoints)
    assert "scripted" == endpoints["service"]
    assert endpoints["grpc"] != endpoints["metrics"]
    with grpc.insecure_channel(endpoints["grpc"]) as channel:
        for service in ("", SERVICE):
            answer = HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert SERVING == answer.status


def test_what_is_loaded_is_not_collected_again(service):
    """When a service serves, the garbage collector leaves alone what was there before: collections do not stall it."""
    assert service.until(message="serving")["num_frozen_objects"] > 10_000


def test_reflection_lists_the_services(endpoints):
    """Reflection names the V2 service, health and itself, and can describe the V2 service's messages."""
    with grpc.insecure_channel(endpoints["grpc"]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        reflections = {f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")}
        names = {SERVICE, "grpc.health.v1.Health"} | reflections
        assert names == set(database.get_services())
        assert pb.DESCRIPTOR.serialized_pb == database.FindFileContainingSymbol(SERVICE).SerializeToString()
        newer = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", bytes, bytes)
        assert SERVICE.encode() in next(iter(newer(iter((b":\x00",)))))  # list_services


TIS_COUNTERS = {
    "nv_inference_request_success": lambda s: s.success.count,
    "nv_inference_count": lambda s: s.inference_count,
    "nv_inference_exec_count": lambda s: s.execution_count,
    "nv_inference_request_duration_us": lambda s: s.success.total_ns / 1000,
    "nv_inference_queue_duration_us": lambda s: s.queue.total_ns / 1000,
    "nv_inference_compute_input_duration_us": lambda s: s.compute_input.total_ns / 1000,
    "nv_inference_compute_infer_duration_us": lambda s: s.compute_infer.total_ns / 1000,
    "nv_inference_compute_output_duration_us": lambda s: s.compute_output.total_ns / 1000,
    "nv_cache_num_hits_per_model": lambda s: s.cache_hit.count,
    "nv_cache_num_misses_per_model": lambda s: s.cache_miss.count,
    "nv_cache_hit_duration_per_model": lambda s: s.cache_hit.total_ns / 1000,
    "nv_cache_miss_duration_per_model": lambda s: s.cache_miss.total_ns / 1000,
    "nv_inference_pending_request_count": lambda s: s.pending_count,
}


async def test_metrics_equal_the_statistics(endpoints, core):
    """Each TIS figure has labels model and version, and the value of its counter; so has ``ModelStatistics``.

    Names have no suffix, as other counters have, and no type in OpenMetrics; every reason of a failure is a series.
    """
    families = {family.name: family for family in parse_text(scrape(endpoints))}
    for name, value in TIS_COUNTERS.items():
        assert ("gauge" if "pending" in name else "counter") == families[name].type
        samples = {sample.labels["model"]: sample for sample in families[name].samples}
        for entry in core.counters:
            sample = samples[entry.name]
            assert ({"model": entry.name, "version": "3"}, value(entry)) == (sample.labels, sample.value), name
    assert "untyped" not in scrape(endpoints)
    assert "# TYPE nv_inference_count unknown" in scrape(endpoints, "application/openmetrics-text; version=1.0.0")
    failures = {
        (sample.labels["model"], sample.labels["reason"]): sample.value
        for sample in families["nv_inference_request_failure"].samples
    }
    reasons = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    assert {("fail", reason): float(reason == "REJECTED") for reason in reasons}.items() <= failures.items()
    assert "process_resident_memory_bytes" in families
    with stub_of(endpoints) as stub:
        stats = stub.ModelStatistics(pb.ModelStatisticsRequest()).model_stats
    counts = {sample.labels["model"]: sample.value for sample in families["nv_inference_count"].samples}
    assert {entry.name: entry.inference_count for entry in stats} == counts


def test_metrics_are_compressed_for_those_that_take_it(endpoints):
    """With gzip, as Prometheus asks for it."""
    url = f"http://{endpoints['metrics']}/metrics"
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert "gzip" == answer.headers["Content-Encoding"]
        assert b"# TYPE nv_inference_count counter" in gzip.decompress(answer.read())


def test_latency_histogram_has_exemplars(endpoints):
    """In the OpenMetrics format a bucket carries the trace id of a request in it; buckets are cumulative."""
    text = scrape(endpoints, "application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(text)}
    samples = families["weft_request_latency_seconds"].samples
    assert {("echo", "3", "2")} == {(s.labels["model"], s.labels["version"], s.labels["priority"]) for s in samples}
    buckets = {s.labels["le"]: s for s in samples if s.name.endswith("_bucket")}
    assert (0, 2, 2, 3) == tuple(buckets[bound].value for bound in ("0.0025", "0.005", "10.0", "+Inf"))
    assert [("0.005", {"trace_id": "ab" * 16}, 0.003, 1700000000)] == [
        (bound, s.exemplar.labels, s.exemplar.value, float(s.exemplar.timestamp))
        for bound, s in buckets.items()
        if s.exemplar
    ]
    totals = {s.name: s.value for s in samples}
    assert (3, pytest.approx(99.007)) == (
        totals["weft_request_latency_seconds_count"],
        totals["weft_request_latency_seconds_sum"],
    )


@pytest.mark.parametrize("rpc", ["ModelInfer", "ModelStreamInfer"])
def test_too_large_message_is_refused_with_both_numbers(endpoints, rpc):
    """A message over the limit is RESOURCE_EXHAUSTED with its size and the limit; one below it is answered."""

    def request_of(num_bytes):
        request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(num_bytes)])
        request.inputs.add(name="x", datatype="UINT8", shape=[num_bytes])
        return request

    def send(request):
        with stub_of(endpoints) as stub:
            return stub.ModelInfer(request) if rpc == "ModelInfer" else next(stub.ModelStreamInfer(iter([request])))

    assert send(request_of(LIMIT_BYTES - 1000))
    too_large = request_of(LIMIT_BYTES)
    with pytest.raises(grpc.RpcError) as caught:
        send(too_large)
    assert "RESOURCE_EXHAUSTED" == caught.value.code().name
    assert f"({too_large.ByteSize()} vs. {LIMIT_BYTES})" in caught.value.details()


def test_stop_finishes_what_is_in_work(start):
    """At a signal health turns NOT_SERVING, new calls end, the call in work is answered, the status is 0."""
    service = start("--grace-s", "25")
    endpoints = service.endpoints()
    with stub_of(endpoints) as stub, grpc.insecure_channel(endpoints["grpc"]) as channel:
        watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert SERVING == next(watch).status
        in_work = stub.ModelInfer.future(hang_request())
        service.until(core="hanging")
        service.process.terminate()
        assert NOT_SERVING == next(watch).status
        assert [] == list(watch)
        late = set()
        while late <= {"OK"}:  # first it is answered, for it may have been on its way; then nobody listens
            with stub_of(endpoints) as other:
                late.add(outcome_of(other, pb.ModelInferRequest(model_name="echo")))
        assert late <= {"OK", "UNAVAILABLE"}
        assert service.process.poll() is None
        service.process.send_signal(signal.SIGUSR1)
        assert "7" == in_work.result(10).id
    assert 0 == service.exit_status()
    lines = [line for line in service.rest() if "core" in line]
    assert ["loading", "hanging", "closed"] == [line["core"] for line in lines]
    assert 0 < lines[-1]["grace_s"] < 25


def test_grace_ends_what_does_not_finish(start):
    """A call that outlasts the grace is cancelled, the models get no second grace, the status is 0; SIGINT stops."""
    service = start("--grace-s", "0.2")
    with stub_of(service.endpoints()) as stub:
        in_work = stub.ModelInfer.future(hang_request())
        service.until(core="hanging")
        service.process.send_signal(signal.SIGINT)
        assert in_work.exception(10).code().name in ("UNAVAILABLE", "CANCELLED")
    assert 0 == service.exit_status()
    lines = service.rest()
    assert {"core": "cancelled"} in lines
    assert {"core": "closed", "grace_s": 0.0} in lines


def test_second_signal_ends_at_once(start):
    """Whoever signals twice does not wait for the grace; the status is 1."""
    service = start("--grace-s", "25")
    with stub_of(service.endpoints()) as stub:
        in_work = stub.ModelInfer.future(hang_request())
        service.until(core="hanging")
        service.process.terminate()
        service.until(message="stopping")
        service.process.terminate()
        assert 1 == service.exit_status()
        assert in_work.exception(10) is not None


def test_stop_while_loading(start):
    """Until everything was tried nothing is ready; a signal cancels the load, closes the core, and the status is 0."""
    service = start("--hold-load", "--strict-readiness=false", "--grpc-port", str(port := free_port()))
    service.until(core="loading")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert NOT_SERVING == HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status
    service.process.terminate()
    assert 0 == service.exit_status()
    assert "" == service.process.stdout.read()
    assert ["loading", "loading cancelled", "closed"] == [line["core"] for line in service.rest() if "core" in line]


@pytest.mark.parametrize(("flag", "is_ready"), [("true", False), ("false", True)])
def test_strict_readiness(start, flag, is_ready):
    """A service that lacks a model lives, but is not ready (health, ServerReady) unless readiness is not strict."""
    endpoints = start("--lack-model", f"--strict-readiness={flag}").endpoints()
    with grpc.insecure_channel(endpoints["grpc"]) as channel:
        status = HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status
        assert (SERVING if is_ready else NOT_SERVING) == status
        assert SERVING == HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=5).status
        assert is_ready == GRPCInferenceServiceStub(channel).ServerReady(pb.ServerReadyRequest(), timeout=5).ready


@pytest.fixture
def port():
    """A port that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield str(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--fail-load", "^cannot serve: model repository '/nowhere' does not exist$"),
        ("--grpc-port PORT", "^cannot listen on 127.0.0.1:PORT: .*; choose another --grpc-port$"),
        ("--metrics-port PORT", "^cannot listen on 127.0.0.1:PORT: .*; choose another --metrics-port$"),
        ("--tls-cert FILE --tls-key FILE", "FILE"),
        ("--auth-keys FILE", "FILE"),
    ],
)
def test_what_cannot_serve_says_why(start, port, tmp_path, arguments, message):
    """A core that fails, a taken port, or a file of no use: one line without a traceback, and status 1."""
    (file := tmp_path / "file").write_text("nothing of that kind")
    service = start(*arguments.replace("PORT", port).replace("FILE", str(file)).split())
    assert 1 == service.exit_status()
    (line,) = [line for line in service.rest() if line.get("level") == "error"]
    assert re.search(message.replace("PORT", port).replace("FILE", str(file)), line["message"])
    assert "exception" not in line
    assert "" == service.process.stdout.read()


@pytest.mark.parametrize(("host", "num_warnings"), [("0.0.0.0", 2), ("::1", 0)])
def test_exposed_port_is_warned_of(start, host, num_warnings):
    """Ports that other machines reach without TLS and keys are warned of; with ``--stop-with-stdin`` its end stops."""
    service = start("--host", host, "--stop-with-stdin")
    endpoints = service.endpoints()
    assert endpoints["grpc"].startswith("[::1]:" if host == "::1" else f"{host}:")
    service.process.stdin.write("not the end\n")
    service.process.stdin.flush()
    assert service.process.poll() is None
    service.process.stdin.close()
    assert 0 == service.exit_status()
    warnings = [line["message"] for line in service.rest() if line.get("level") == "warning"]
    assert num_warnings == sum("which other machines can reach" in message for message in warnings)


def test_spans_are_exported_before_the_end(start, otlp_collector, monkeypatch):
    """Spans that are not yet exported when the process is told to stop are exported before it ends."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    service = start()
    with stub_of(service.endpoints()) as stub:
        stub.ModelInfer(pb.ModelInferRequest(model_name="echo"))
    service.process.terminate()
    assert 0 == service.exit_status()
    (span,) = otlp_collector.spans
    assert ("weft.scripted/echo", "SERVER", "weft.scripted") == (span.name, span.kind, span.resource["service.name"])
