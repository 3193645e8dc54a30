"""Rates, queues and latencies from two readings of the metrics; no I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.tools.top.scrape import Page

_LATENCY = "weft_request_latency_seconds_bucket"
_QUEUE = "weft_queue_latency_seconds_bucket"
_LAG = "weft_event_loop_lag_seconds_bucket"
_KEYS = ("model", "version", "priority")


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """One service.

    Attributes:
        is_up: Whether it answered; if not, ``error`` says why and the rest is None.
        cpu_cores: CPU time per wall time.
        rss_mib: Memory.
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
        queue_size: Requests that wait now; None where there is no queue.
        num_inflight: Requests in work now, of all priorities; None where that is not counted.
        p50_ms, p99_ms: From arrival to answer; None if nothing was answered.
        queue_p99_ms: Time in the queue.
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


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of the mesh; rates and latencies are of the last ``interval_s``."""

    interval_s: float
    services: Sequence[ServiceRow]
    models: Sequence[ModelRow]


def frame_of(addresses: Mapping[str, str], before: Mapping[str, Page], now: Mapping[str, Page]) -> Frame:
    """The frame between two readings.

    Args:
        addresses: Of the services, in the order in which they are shown.
        before: Pages by service name.
        now: The next pages. A service that restarted in between counts from its start, one that did not answer before
            not at all.
    """
    services: list[ServiceRow] = []
    models: list[ModelRow] = []
    intervals = [1e-3]
    for name, address in addresses.items():
        old, new = before[name], now[name]
        if new.error:
            services.append(ServiceRow(name, address, False, new.error))
            continue
        if old.error:
            old = new  # whether its counters are of this interval cannot be told
        seconds = max(new.at_s - before[name].at_s, 1e-3)
        intervals.append(seconds)
        lag = quantiles_ms(_deltas(old.values(_LAG), new.values(_LAG)), (0.99,))
        services.append(
            ServiceRow(
                name,
                address,
                True,
                cpu_cores=_delta(old, new, "process_cpu_seconds_total") / seconds,
                rss_mib=new.value("process_resident_memory_bytes") / (1 << 20),
                loop_lag_p99_ms=lag[0],
                num_stalls=int(new.value("weft_event_loop_stalls_total")),
                num_dropped_log_lines=int(new.value("weft_log_lines_dropped_total")),
            )
        )
        models += _model_rows(name, old, new, seconds)
    models.sort(key=lambda row: (-row.requests_per_s, row.service, row.model, row.priority))
    return Frame(max(intervals), services, models)


def quantiles_ms(buckets: Mapping[float, float], shares: Iterable[float]) -> list[float | None]:
    """Quantiles of latencies, by linear interpolation within a bucket.

    Args:
        buckets: Cumulative counts by upper bound in seconds, infinity among them.
        shares: 0 to 1.

    Returns:
        Milliseconds, at most the last finite bound; None without observations.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    found: list[float | None] = []
    for share in shares:
        if total <= 0:
            found.append(None)
            continue
        wanted, low_s, low_count = share * total, 0.0, 0.0
        value_s = bounds[-2] if len(bounds) > 1 else 0.0
        for bound_s in bounds[:-1]:
            if buckets[bound_s] >= wanted:
                part = (wanted - low_count) / max(buckets[bound_s] - low_count, 1e-12)
                value_s = low_s + (bound_s - low_s) * part
                break
            low_s, low_count = bound_s, buckets[bound_s]
        found.append(value_s * 1e3)
    return found


def _model_rows(service: str, old: Page, new: Page, seconds: float) -> list[ModelRow]:
    graphs = {labels["graph"] for labels, _ in new.values("weft_graph_load_failures_total")}
    is_router = bool(new.samples.get("weft_graph_load_failures_total"))
    keys = dict.fromkeys(tuple(labels[key] for key in _KEYS) for labels, _ in new.values(_LATENCY))
    seen = {(model, version) for model, version, _ in keys}
    for labels, _ in new.values("nv_inference_count"):
        if (labels["model"], labels["version"]) not in seen:
            keys[labels["model"], labels["version"], ""] = None
    rows = []
    for model, version, priority in keys:
        labels = {"model": model, "version": version}
        at_level = {**labels, "priority": priority}
        latency = _deltas(old.values(_LATENCY, **at_level), new.values(_LATENCY, **at_level))
        p50_ms, p99_ms = quantiles_ms(latency, (0.5, 0.99))
        waited = _deltas(old.values(_QUEUE, **at_level), new.values(_QUEUE, **at_level))
        is_graph = is_router and model in graphs
        has_inflight = is_graph and any(new.values("weft_admission_inflight", graph=model))
        degraded = new.value("weft_graph_degraded", graph=model, version=version) if is_graph else 0
        rows.append(
            ModelRow(
                service,
                "graph" if is_graph else "call" if is_router else "model",
                model,
                version,
                priority,
                latency.get(float("inf"), 0.0) / seconds,
                _delta(old, new, "nv_inference_request_failure", **labels) / seconds,
                None if is_router else int(_queue_size(new, labels, priority)),
                int(new.value("weft_admission_inflight", graph=model)) if has_inflight else None,
                p50_ms,
                p99_ms,
                None if is_router else quantiles_ms(waited, (0.99,))[0],
                bool(degraded),
            )
        )
    return rows


def _queue_size(page: Page, labels: Mapping[str, str], priority: str) -> float:
    if priority and any(page.values("weft_queue_size", **labels)):
        return page.value("weft_queue_size", **labels, priority=priority)
    return page.value("nv_inference_pending_request_count", **labels)


def _delta(old: Page, new: Page, name: str, **labels: str) -> float:
    """Growth of a counter; one that fell has restarted at 0."""
    value, earlier = new.value(name, **labels), old.value(name, **labels)
    return value - earlier if value >= earlier else value


def _deltas(
    old: Iterable[tuple[Mapping[str, str], float]], new: Iterable[tuple[Mapping[str, str], float]]
) -> dict[float, float]:
    """Growth of the buckets of one histogram, by upper bound."""
    earlier = {float(labels["le"]): value for labels, value in old}
    buckets = {float(labels["le"]): value for labels, value in new}
    if any(value < earlier.get(bound, 0.0) for bound, value in buckets.items()):
        return buckets
    return {bound: value - earlier.get(bound, 0.0) for bound, value in buckets.items()}
