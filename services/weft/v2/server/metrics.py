"""Prometheus metrics, derived from the V2 counters at scrape time, so that requests update one set of counters.

Names and labels ``nv_*`` are those of Triton Inference Server, without the ``_total`` that the Python client would add
to a counter, so that its dashboards work unchanged. They are of type ``counter`` in the text format; OpenMetrics allows
no counter of such a name, so they are ``unknown`` there. ``weft_*`` histograms carry exemplars (trace ids) in the
OpenMetrics format.
"""

import argparse
import contextlib
import gzip
import re
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, UnknownMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample
from typing_extensions import override

from weft.base.observing import logs
from weft.base.observing.logs import get_logger
from weft.base.statistics import LatencyHistogram, ModelStatistics
from weft.v2.security.tls import ServerTls

_COUNTERS: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    ("nv_inference_request_success", "Requests answered", lambda s: s.success.count),
    ("nv_inference_count", "Rows inferred", lambda s: s.inference_count),
    ("nv_inference_exec_count", "Batches executed", lambda s: s.execution_count),
    ("nv_inference_request_duration_us", "End-to-end time in this service", lambda s: s.success.total_ns / 1e3),
    ("nv_inference_queue_duration_us", "Time in the queue", lambda s: s.queue.total_ns / 1e3),
    ("nv_inference_compute_input_duration_us", "Time to gather inputs", lambda s: s.compute_input.total_ns / 1e3),
    ("nv_inference_compute_infer_duration_us", "Time in the model", lambda s: s.compute_infer.total_ns / 1e3),
    ("nv_inference_compute_output_duration_us", "Time to scatter outputs", lambda s: s.compute_output.total_ns / 1e3),
    ("nv_cache_num_hits_per_model", "Requests answered from the cache", lambda s: s.cache_hit.count),
    ("nv_cache_num_misses_per_model", "Requests whose answer was not in the cache", lambda s: s.cache_miss.count),
    ("nv_cache_hit_duration_per_model", "Time of answers from the cache, us", lambda s: s.cache_hit.total_ns / 1e3),
    ("nv_cache_miss_duration_per_model", "Time to look up in vain, us", lambda s: s.cache_miss.total_ns / 1e3),
)
#: Connections to ``/metrics`` at once.
MAX_SCRAPES = 32
#: Timeout of idle clients of ``/metrics``, in seconds; each occupies a thread.
SCRAPE_TIMEOUT_S = 30.0

#: A family that is no sum over workers.
CERTIFICATE_EXPIRY = "weft_tls_certificate_expiry_timestamp_seconds"

_log = get_logger("weft.metrics")

_UNTYPED = re.compile(rb"^(# TYPE \S+) untyped$", re.MULTILINE)
_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelStatistics], dict[int, LatencyHistogram]]], ...] = (
    ("weft_request_latency_seconds", "End-to-end latency by priority level", lambda s: s.request_latency),
    ("weft_queue_latency_seconds", "Time in the queue by priority level", lambda s: s.queue_latency),
    ("weft_compute_latency_seconds", "Execution time by priority level", lambda s: s.compute_latency),
)


class StatisticsCollector(Collector):
    """Metric families of every model, collected on scrape, on the metrics server's thread."""

    def __init__(self, statistics: Callable[[], Iterable[ModelStatistics]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Every family, with one sample per model version."""
        entries = list(self._statistics())
        for name, text, value in _COUNTERS:
            counter = UnknownMetricFamily(name, text, labels=("model", "version"))
            for entry in entries:
                counter.add_metric((entry.name, entry.version), value(entry))
            yield counter
        restarts = CounterMetricFamily(
            "weft_instance_restarts", "Instances that were lost and loaded again", labels=("model", "version")
        )
        failure = UnknownMetricFamily(
            "nv_inference_request_failure", "Requests failed", labels=("model", "version", "reason")
        )
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count", "Requests in the queue", labels=("model", "version")
        )
        queue_size = GaugeMetricFamily(
            "weft_queue_size", "Requests in the queue by priority level", labels=("model", "version", "priority")
        )
        for entry in entries:
            for level, count in entry.count_pending_by_level().items():
                queue_size.add_metric((entry.name, entry.version, str(level)), count)
            for reason in _REASONS:
                failure.add_metric((entry.name, entry.version, reason), entry.failures_by_reason.get(reason, 0))
            pending.add_metric((entry.name, entry.version), entry.pending_count)
            restarts.add_metric((entry.name, entry.version), entry.restart_count)
        yield failure
        yield pending
        yield queue_size
        yield restarts
        for name, text, histograms in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=("model", "version", "priority"))
            for entry in entries:
                for priority, histogram in list(histograms(entry).items()):
                    family.add_metric(
                        (entry.name, entry.version, str(priority)), cumulative_buckets(histogram), histogram.sum_s
                    )
            yield family


class DroppedLogsCollector(Collector):
    """Metric of dropped log lines."""

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        dropped = CounterMetricFamily("weft_log_lines_dropped", "Log lines that could not be written")
        dropped.add_metric((), logs.num_dropped())
        yield dropped


class CertificateCollector(Collector):
    """When the certificates among the options of a program expire; read anew each time, as files are replaced."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._paths = [path for name, path in vars(options).items() if name.endswith("tls_cert") and path]

    def collect(self) -> Iterator[Metric]:
        """The one family; a file that cannot be read has no sample."""
        expiry = GaugeMetricFamily(CERTIFICATE_EXPIRY, "When the certificate expires, Unix time", labels=("file",))
        for path in self._paths:
            with contextlib.suppress(OSError, ssl.SSLError):
                found = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]  # what ssl itself has
                expiry.add_metric((str(path),), ssl.cert_time_to_seconds(found["notAfter"]))
        yield expiry


def cumulative_buckets(histogram: LatencyHistogram) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Cumulative buckets with their exemplars."""
    return [
        bucket if exemplar is None else (*bucket, Exemplar({"trace_id": exemplar[0]}, *exemplar[1:]))
        for bucket, exemplar in zip(histogram.cumulative(), histogram.exemplars, strict=True)
    ]


def make_registry(
    statistics: Callable[[], Iterable[ModelStatistics]], collectors: Iterable[Collector] = ()
) -> CollectorRegistry:
    """Registry of a service's metrics: counters of all models, and ``collectors``; read on the scrape's thread."""
    registry = CollectorRegistry()
    registry.register(StatisticsCollector(statistics))
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    return registry


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, tls: ServerTls | None = None, *, shares_port: bool = False
) -> int:
    """Serve ``/metrics`` on a thread and return the port (chosen by the system if ``port`` is 0). Raises OSError.

    With ``shares_port`` other processes may listen on the port with the same setting.
    """
    slots = threading.Semaphore(MAX_SCRAPES)

    class Handler(WSGIRequestHandler):
        timeout = SCRAPE_TIMEOUT_S

        @override
        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingWSGIServer):
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        allow_reuse_port = shares_port

        @override
        def verify_request(self, request: Any, client_address: Any) -> bool:
            return slots.acquire(blocking=False)  # each connection has a thread

        @override
        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                slots.release()

        @override
        def handle_error(self, request: Any, client_address: Any) -> None:
            # In place of a traceback on standard error for failed handshakes of clients.
            _log.debug("a scrape from %s broke off", client_address[0], exc_info=True)

    server = make_server(
        host, port, _typed_counters(make_wsgi_app(registry, disable_compression=True)), Server, Handler
    )
    if tls is not None:
        # Handshakes are not done where connections are accepted, on one thread: a silent client would block all others.
        context = tls.http_context()
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)


def _typed_counters(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """The page with untyped families typed as counters, which they all are; compressed if the client accepts it."""

    def page(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        begun: list[tuple[str, list[tuple[str, str]]]] = []
        body = b"".join(app(environ, lambda status, headers: begun.append((status, headers))))
        status, headers = begun[0]
        body = _UNTYPED.sub(rb"\1 counter", body)
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            headers.append(("Content-Encoding", "gzip"))
            body = gzip.compress(body, 1)
        start_response(status, headers)
        return [body]

    return page


_SUMMED_FOR_EVER = ("counter", "histogram", "summary", "unknown")
_PROCESS = "process_"
_LABEL = "worker"

#: Name of a sample and its labels.
Key: TypeAlias = tuple[str, frozenset[tuple[str, str]]]


@dataclass(slots=True)
class _Total:
    documentation: str
    kind: str
    samples: dict[Key, Sample] = field(default_factory=dict)


class MetricSums:
    """Merges the latest metrics of several workers into those of one service.

    Counters and histograms are summed, including those of workers that have ended, so that a sum never falls; series of
    a model version that no worker has any more are dropped. For families in ``greatest``, which each worker reports in
    full, the greatest value counts. ``process_*`` is not merged and gets the label ``worker``.
    """

    def __init__(self, greatest: Collection[str] = ()) -> None:
        self._greatest = frozenset(greatest)
        self._latest: dict[int, list[Metric]] = {}
        self._ended: dict[str, _Total] = {}

    def update(self, worker: int, families: list[Metric]) -> None:
        """Replace the metrics of a worker."""
        self._latest[worker] = families

    def end(self, worker: int) -> None:
        """Note that a worker has ended; its last counters stay in the sums."""
        for family in self._latest.pop(worker, ()):
            is_sum = family.type in _SUMMED_FOR_EVER and family.name not in self._greatest
            if is_sum and not family.name.startswith(_PROCESS):
                self._add(self._ended, family)

    def families(self) -> Iterator[Metric]:
        """The merged metrics."""
        sums: dict[str, _Total] = {}
        live = {_version_of(s) for families in self._latest.values() for family in families for s in family.samples}
        for name, ended in self._ended.items():
            kept = {key: s for key, s in ended.samples.items() if live <= {None} or _version_of(s) in {*live, None}}
            sums[name] = _Total(ended.documentation, ended.kind, kept)
        for worker, families in sorted(self._latest.items()):
            for family in families:
                more = {_LABEL: str(worker)} if family.name.startswith(_PROCESS) else {}
                self._add(sums, family, more)
        for name, total in sums.items():
            metric = Metric(name, total.documentation, total.kind)
            metric.samples = list(total.samples.values())
            yield metric

    def _add(self, sums: dict[str, _Total], family: Metric, more: Mapping[str, str] = {}) -> None:
        total = sums.setdefault(family.name, _Total(family.documentation, family.type))
        for sample in family.samples:
            labels = {**sample.labels, **more}
            key = sample.name, frozenset(labels.items())
            known = total.samples.get(key)
            if known is None:
                total.samples[key] = sample._replace(labels=labels)
            else:
                is_greatest = family.name in self._greatest
                value = max(known.value, sample.value) if is_greatest else known.value + sample.value
                total.samples[key] = known._replace(value=value, exemplar=_newer(known.exemplar, sample.exemplar))


def _version_of(sample: Sample) -> tuple[str | None, str] | None:
    """Name and version of the model or graph in the labels; None if there is neither."""
    labels = sample.labels
    return (labels.get("graph", labels.get("model")), labels["version"]) if "version" in labels else None


def _newer(one: Exemplar | None, other: Exemplar | None) -> Exemplar | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda exemplar: exemplar.timestamp or 0)
