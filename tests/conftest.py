"""Fixtures for every test."""

import atexit
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import hypothesis
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from weft.v2.client.wires import default_wire

pytest.register_assert_rewrite("tests.case_files")

#: pytest keeps the asserts that it has rewritten as bytecode: collecting all tests takes 10 s with it, 23 s without.
#: Models that tests write and load are another matter.
_WRITES_NO_BYTECODE, sys.dont_write_bytecode = sys.dont_write_bytecode, False


#: A busy machine makes single examples take seconds; what must be quick has a test of its own.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


def pytest_report_header() -> str:
    """Services, and clients in tests, use this implementation of gRPC unless a test says otherwise."""
    return f"wire: {default_wire()}"


#: Workers of pytest-xdist that died. A worker that takes over the tests of a dead one may run the same test again, or
#: make the run wait for ever (pytest-xdist 3.8), so `make test` replaces none, and what had no result is no success.
_DEAD_WORKERS: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Note that a worker died, with the test that it was at."""
    if error is not None:
        _DEAD_WORKERS.append(node.gateway.id)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that lost a worker ends as one with an internal error, since tests have no result."""
    if _DEAD_WORKERS:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers get files that wait for processes and files that compute in turn, and so keep the cores busy."""
    if hasattr(config, "workerinput"):
        items[:] = in_turn(items)


#: The tests and their modules are 860,000 objects and none of them is garbage. The collector of reference cycles would
#: take a third of the time of collecting them, and later look through all of them whenever a test calls it.
gc.disable()


def pytest_collection_finish() -> None:
    """From now on garbage is collected, that of the tests alone; bytecode is written if the environment allows it."""
    sys.dont_write_bytecode = _WRITES_NO_BYTECODE
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # or some libraries complain of leaks


def in_turn(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests file by file: those of services and meshes among the others, the last of them well before the end."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    computing = [file for file in files if file.startswith(("tests/unit/", "tests/kernels/"))]
    waiting = [file for file in files if file not in set(computing)]
    place = {file: index / len(computing) for index, file in enumerate(computing)}
    place |= {file: 0.85 * index / len(waiting) for index, file in enumerate(waiting)}
    place |= {file: -1.0 for file in files if file.startswith(EARLY)}
    return [item for file in sorted(files, key=place.__getitem__) for item in files[file]]


SAMPLES, BROWSER = "tests/integration/samples/", "tests/browser/"
#: What waits longest, so that it is not what is waited for at the end.
EARLY = (SAMPLES, BROWSER, "tests/integration/test_stream_brokers", "tests/unit/jobs/test_kafka")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is run by one worker; so are all the files that share a mesh of the samples."""
    from xdist.scheduler import LoadFileScheduling  # a plugin that a run of one process does without

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = next((folder for folder in (SAMPLES, BROWSER) if nodeid.startswith(folder)), None)
            return shared or super()._split_scope(nodeid)

    return Scheduling(config, log)


@dataclass(frozen=True)
class CollectedSpan:
    """One exported span; ids are hex digits, times Unix nanoseconds."""

    name: str
    kind: str  # INTERNAL, SERVER or CLIENT
    trace_id: str
    span_id: str
    parent_span_id: str  # "" for a root
    trace_state: str
    status: str  # UNSET, OK or ERROR
    status_message: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str]]  # (trace id, span id)
    resource: dict[str, Any]
    start_unix_ns: int
    end_unix_ns: int


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP/gRPC trace collector in this process that keeps what it is sent, in order of arrival."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.metrics: list[Any] = []
        self.endpoint = ""
        self._arrived = threading.Condition()

    def Export(self, request, context):  # noqa: N802  # the protocol's name
        """Keep the spans and wake who waits."""
        with self._arrived:
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                self.spans += [_collected(span, resource) for scope in group.scope_spans for span in scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, predicate: Callable[[list[CollectedSpan]], Any], timeout_s: float = 10.0) -> list[CollectedSpan]:
        """The spans, once ``predicate`` holds for them; blocks, so call it with ``asyncio.to_thread`` in async tests.

        Raises:
            AssertionError: It did not hold in time; the message lists the names that came.
        """
        with self._arrived:
            if not self._arrived.wait_for(lambda: predicate(self.spans), timeout_s):
                raise AssertionError(f"not in {timeout_s} s; spans: {[span.name for span in self.spans]}")
            return list(self.spans)


class _MetricsService(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps metrics, in the form of OTLP, for a collector."""

    def __init__(self, collector: OtlpCollector) -> None:
        self._collector = collector

    def Export(self, request, context):  # noqa: N802  # the protocol's name
        """Keep the metrics."""
        for group in request.resource_metrics:
            self._collector.metrics += [metric for scope in group.scope_metrics for metric in scope.metrics]
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collecting(environment: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    """A running collector; this process and those it starts are told by the environment to export to it."""
    collector = OtlpCollector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_MetricsService(collector), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield collector
    server.stop(None).wait()


@pytest.fixture
def otlp_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    """A collector for one test."""
    with collecting(monkeypatch) as collector:
        yield collector


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _collected(span: Any, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        status_message=span.status.message,
        attributes=_attributes(span.attributes),
        events=[(event.name, _attributes(event.attributes)) for event in span.events],
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        resource=resource,
        start_unix_ns=span.start_time_unix_nano,
        end_unix_ns=span.end_time_unix_nano,
    )
