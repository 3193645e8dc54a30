"""Services, queues, rates and latencies from two scrapes of metrics pages: for ``weft top`` and the gateway's page."""

import http.client
import ssl
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

#: How long one page may take.
TIMEOUT_S = 2.0
_MAX_PAGE_BYTES = 64 << 20
_LATENCY = "weft_request_latency_seconds_bucket"
_QUEUE = "weft_queue_latency_seconds_bucket"
_LAG = "weft_event_loop_lag_seconds_bucket"
_RANK, _TRANSFER, _ROLE = "weft_llm_rank", "weft_llm_kv_transfer", "weft_llm_role"
_KEYS = ("model", "version", "priority")
_Samples = Iterable[tuple[Mapping[str, str], float]]


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics page of one service.

    Attributes:
        at_s: Time of the scrape, on ``time.monotonic``.
        samples: By name: labels and value of each.
        error: Why there are none; "" if there are.
    """

    at_s: float
    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]] = field(default_factory=dict)
    error: str = ""

    def values(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Samples of a name that have at least these labels."""
        for given, value in self.samples.get(name, ()):
            if labels.items() <= given.items():
                yield given, value

    def value(self, name: str, **labels: str) -> float:
        """Sum of these samples; 0 if there are none."""
        return sum(value for _, value in self.values(name, **labels))


def scrape(addresses: Mapping[str, str], tls: ssl.SSLContext | None = None) -> dict[str, Page]:
    """Fetch the pages of all services (``host:port`` or URL) at once, over https with ``tls``; errors are recorded."""
    with ThreadPoolExecutor(max_workers=max(len(addresses), 1)) as pool:
        return dict(zip(addresses, pool.map(partial(_page, tls=tls), addresses.values()), strict=True))


def _page(address: str, tls: ssl.SSLContext | None) -> Page:
    try:
        url = address if "://" in address else f"http://{address}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=tls) as response:  # noqa: S310  # the user's own
            text = response.read(_MAX_PAGE_BYTES).decode(errors="replace")
        samples: defaultdict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # The parser adds the suffix to counters that have none, as those of Triton Inference Server.
                name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
                samples[name].append((sample.labels, sample.value))
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return Page(time.monotonic(), error=getattr(reason, "strerror", None) or str(reason) or type(error).__name__)
    return Page(time.monotonic(), samples)


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """One service; if it did not answer, ``error`` says why and the rest is None.

    Attributes:
        cpu_cores: CPU time per wall time.
        loop_lag_p99_ms: Lag of its event loop; None if not measured.
        num_stalls, num_dropped_log_lines: Since its start.
    """

    name: str
    address: str
    is_up: bool
    error: str = ""
    cpu_cores: float | None = None
    rss_mib: float | None = None
    loop_lag_p99_ms: float | None = None
    num_stalls: int | None = None
    num_dropped_log_lines: int | None = None


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One graph or model at one priority, as one service counts it.

    Attributes:
        kind: ``"graph"``, ``"model"``, or ``"call"``: a model of a target as the router sees it.
        requests_per_s: Successful requests.
        failures_per_s: Failed requests, of all priorities together.
        queue_size: Waiting requests; None without a queue.
        num_inflight: Requests in flight, of all priorities; None if not counted.
        p50_ms, p99_ms: From arrival to answer; None if nothing was answered.
        queue_p99_ms: Time in the queue.
        batch_rows: Mean rows of an execution; None if there was none.
    """

    service: str
    kind: str
    model: str
    version: str
    priority: str
    requests_per_s: float
    failures_per_s: float
    queue_size: int | None
    num_inflight: int | None
    p50_ms: float | None
    p99_ms: float | None
    queue_p99_ms: float | None
    is_degraded: bool = False
    batch_rows: float | None = None


class RankRow(NamedTuple):
    """One rank of an instance of a language model; ``step_ms`` is the mean, None if no step has ended.

    ``num_restarts`` is of the instance, since its start.
    """

    service: str
    model: str
    instance: str
    rank: str
    steps_per_s: float
    step_ms: float | None
    rss_mib: float
    kv_mib: float
    num_restarts: int


class RoleRow(NamedTuple):
    """One instance of a language model that computes prompts, or tokens, for others; transfers are of blocks.

    ``num_leases``: Open now.
    """

    service: str
    model: str
    instance: str
    role: str
    complete_per_s: float
    failed_per_s: float
    mib_per_s: float
    num_leases: int


class RolloutRow(NamedTuple):
    """One rollout at one router; the rates are of the candidate's runs."""

    service: str
    graph: str
    node: str
    candidate: str
    phase: str
    percent: float
    requests_per_s: float
    errors_per_s: float


@dataclass(slots=True)
class Frame:
    """One frame; rates and latencies are of the last ``interval_s``."""

    interval_s: float = 1e-3
    services: list[ServiceRow] = field(default_factory=list)
    models: list[ModelRow] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    roles: list[RoleRow] = field(default_factory=list)
    rollouts: list[RolloutRow] = field(default_factory=list)


def frame_of(addresses: Mapping[str, str], before: Mapping[str, Page], now: Mapping[str, Page]) -> Frame:
    """The frame between two scrapes, services in the order of ``addresses``.

    A service that restarted in between counts from its start, one that did not answer before not at all.
    """
    frame = Frame()
    for name, address in addresses.items():
        old, new = before[name], now[name]
        if new.error:
            frame.services.append(ServiceRow(name, address, False, new.error))
            continue
        seconds = max(new.at_s - old.at_s, 1e-3)
        if old.error:
            old = new  # whether its counters are of this interval cannot be told
        frame.interval_s = max(frame.interval_s, seconds)
        frame.services.append(
            ServiceRow(
                name,
                address,
                True,
                cpu_cores=_delta(old, new, "process_cpu_seconds_total") / seconds,
                rss_mib=new.value("process_resident_memory_bytes") / (1 << 20),
                loop_lag_p99_ms=quantiles_ms(_deltas(old.values(_LAG), new.values(_LAG)), (0.99,))[0],
                num_stalls=int(new.value("weft_event_loop_stalls_total")),
                num_dropped_log_lines=int(new.value("weft_log_lines_dropped_total")),
            )
        )
        frame.models += _model_rows(name, old, new, seconds)
        frame.ranks += _rank_rows(name, old, new, seconds)
        frame.roles += _role_rows(name, old, new, seconds)
        frame.rollouts += _rollout_rows(name, old, new, seconds)
    frame.models.sort(key=lambda row: (-row.requests_per_s, row.service, row.model, row.priority))
    return frame


def quantiles_ms(buckets: Mapping[float, float], shares: Iterable[float]) -> list[float | None]:
    """Quantiles of latencies, by linear interpolation within a bucket.

    Args:
        buckets: Cumulative counts by upper bound in seconds, infinity among them.
        shares: 0 to 1.

    Returns:
        Milliseconds, at most the last finite bound; None without observations.
    """
    *finite, total = sorted(buckets.items()) or [(0.0, 0.0)]
    if total[1] <= 0:
        return [None for _ in shares]
    points = [(0.0, 0.0), *finite]
    found: list[float | None] = []
    for share in shares:
        wanted = share * total[1]
        values_s = (
            low_s + (high_s - low_s) * (wanted - below) / max(count - below, 1e-12)
            for (low_s, below), (high_s, count) in pairwise(points)
            if count >= wanted
        )
        found.append(1e3 * next(values_s, points[-1][0]))
    return found


def _model_rows(service: str, old: Page, new: Page, seconds: float) -> Iterator[ModelRow]:
    graphs = {labels["graph"] for labels, _ in new.values("weft_graph_load_failures_total")}
    is_router = bool(new.samples.get("weft_graph_load_failures_total"))
    keys = dict.fromkeys(tuple(labels[key] for key in _KEYS) for labels, _ in new.values(_LATENCY))
    seen = {(model, version) for model, version, _ in keys}
    for labels, _ in new.values("nv_inference_count"):
        if (labels["model"], labels["version"]) not in seen:
            keys[labels["model"], labels["version"], ""] = None
    for model, version, priority in keys:
        labels = {"model": model, "version": version}
        at_level = {**labels, "priority": priority}
        num_batches = _delta(old, new, "nv_inference_exec_count", **labels)
        latency = _deltas(old.values(_LATENCY, **at_level), new.values(_LATENCY, **at_level))
        p50_ms, p99_ms = quantiles_ms(latency, (0.5, 0.99))
        waited = _deltas(old.values(_QUEUE, **at_level), new.values(_QUEUE, **at_level))
        is_graph = is_router and model in graphs
        has_inflight = is_graph and any(new.values("weft_admission_inflight", graph=model))
        has_queue = any(new.values("weft_queue_size", **labels))
        if priority and has_queue:
            queue_size = new.value("weft_queue_size", **at_level)
        else:
            queue_size = new.value("nv_inference_pending_request_count", **labels)
        yield ModelRow(
            service,
            "graph" if is_graph else "call" if is_router else "model",
            model,
            version,
            priority,
            latency.get(float("inf"), 0.0) / seconds,
            _delta(old, new, "nv_inference_request_failure", **labels) / seconds,
            None if is_router and not has_queue else int(queue_size),
            int(new.value("weft_admission_inflight", graph=model)) if has_inflight else None,
            p50_ms,
            p99_ms,
            None if is_router and not has_queue else quantiles_ms(waited, (0.99,))[0],
            is_graph and bool(new.value("weft_graph_degraded", graph=model, version=version)),
            _delta(old, new, "nv_inference_count", **labels) / num_batches if num_batches else None,
        )


def _rank_rows(service: str, old: Page, new: Page, seconds: float) -> Iterator[RankRow]:
    for labels, _ in new.values(f"{_RANK}_steps_total"):
        num_steps = _delta(old, new, f"{_RANK}_steps_total", **labels)
        steps_s = _delta(old, new, f"{_RANK}_step_seconds_total", **labels)
        instance = {key: text for key, text in labels.items() if key != "rank"}
        yield RankRow(
            service,
            labels["model"],
            labels["instance"],
            labels["rank"],
            num_steps / seconds,
            1e3 * steps_s / num_steps if num_steps else None,
            new.value(f"{_RANK}_resident_memory_bytes", **labels) / (1 << 20),
            new.value(f"{_RANK}_kv_cache_bytes", **labels) / (1 << 20),
            int(new.value(f"{_RANK}_restarts_total", **instance)),
        )


def _role_rows(service: str, old: Page, new: Page, seconds: float) -> Iterator[RoleRow]:
    for labels, _ in new.values(_ROLE):
        if labels["role"] == "both":
            continue
        own = {key: text for key, text in labels.items() if key != "role"}
        num_ended = _delta(old, new, f"{_TRANSFER}s_total", **own)
        num_complete = _delta(old, new, f"{_TRANSFER}s_total", outcome="complete", **own)
        yield RoleRow(
            service,
            labels["model"],
            labels["instance"],
            labels["role"],
            num_complete / seconds,
            (num_ended - num_complete) / seconds,
            _delta(old, new, f"{_TRANSFER}_bytes_total", **own) / seconds / (1 << 20),
            int(new.value("weft_llm_kv_leases", **own)),
        )


def _rollout_rows(service: str, old: Page, new: Page, seconds: float) -> Iterator[RolloutRow]:
    for labels, percent in new.values("weft_rollout_percent"):
        arm = {**labels, "arm": "candidate"}
        yield RolloutRow(
            service,
            labels["graph"],
            labels["node"],
            labels["candidate"],
            next((one["phase"] for one, is_so in new.values("weft_rollout_phase", **labels) if is_so), ""),
            percent,
            _delta(old, new, "weft_rollout_requests_total", **arm) / seconds,
            _delta(old, new, "weft_rollout_errors_total", **arm) / seconds,
        )


def _delta(old: Page, new: Page, name: str, **labels: str) -> float:
    """Growth of a counter; a lower value means a restart at 0."""
    value, earlier = new.value(name, **labels), old.value(name, **labels)
    return value - earlier if value >= earlier else value


def _deltas(old: _Samples, new: _Samples) -> dict[float, float]:
    """Growth of the buckets of one histogram, by upper bound."""
    earlier = {float(labels["le"]): value for labels, value in old}
    buckets = {float(labels["le"]): value for labels, value in new}
    if any(value < earlier.get(bound, 0.0) for bound, value in buckets.items()):
        return buckets
    return {bound: value - earlier.get(bound, 0.0) for bound, value in buckets.items()}
