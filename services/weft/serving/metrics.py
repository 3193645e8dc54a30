"""Prometheus metrics of a serving process, read at scrape time: backends, inline models, loads on demand, GPUs."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.base.observing.logs import get_logger
from weft.base.statistics import ModelStatistics
from weft.serving.lifecycle.warm_pool import WarmPool
from weft.v2.server.metrics import cumulative_buckets

_log = get_logger("weft.serving.metrics")
_FIGURES: Sequence[tuple[str, str, type[Metric], Callable[[Any, Any], float]]] = (
    ("nv_gpu_utilization", "Share of time that it computed, 0 to 1", GaugeMetricFamily,
     lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
    ("nv_gpu_memory_total_bytes", "Memory", GaugeMetricFamily,
     lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ("nv_gpu_memory_used_bytes", "Memory in use", GaugeMetricFamily,
     lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ("nv_gpu_power_usage", "Power drawn, watts", GaugeMetricFamily,
     lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
    ("nv_gpu_power_limit", "Power allowed, watts", GaugeMetricFamily,
     lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3),
    ("nv_energy_consumption", "Energy drawn, joules", UnknownMetricFamily,
     lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3),
)  # fmt: skip


class ExportedMetrics(Collector):
    """The families that a service and its backends export; thread-safe.

    A family of several backends is exported once. Samples with equal labels, as of an old and a new load while the old
    one drains, are added for counters and histograms; of a gauge the latest attached counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, Callable[[], Iterable[Metric]]] = {}

    def attach(self, owner: str, read: Callable[[], Iterable[Metric]]) -> None:
        """Call ``read`` at every scrape; it replaces the owner's earlier one."""
        with self._lock:
            self._sources.pop(owner, None)
            self._sources[owner] = read

    def detach(self, owner: str) -> None:
        """Remove the owner's metrics."""
        with self._lock:
            self._sources.pop(owner, None)

    def collect(self) -> Iterator[Metric]:
        """Every family once; a source that fails does not affect the others."""
        with self._lock:
            sources = list(self._sources.items())
        families: dict[str, Metric] = {}
        for owner, read in sources:
            try:
                for family in read():
                    empty = Metric(family.name, family.documentation, family.type, family.unit)
                    _merge(families.setdefault(family.name, empty), family)
            except Exception:  # one source must not fail the scrape
                _log.exception("the metrics of %s cannot be read", owner)
        return iter(families.values())


def _merge(shown: Metric, family: Metric) -> None:
    places = {(sample.name, tuple(sorted(sample.labels.items()))): i for i, sample in enumerate(shown.samples)}
    for sample in family.samples:
        place = places.get((sample.name, tuple(sorted(sample.labels.items()))))
        if place is None:
            shown.samples.append(sample)
        elif family.type == "gauge":
            shown.samples[place] = sample
        else:
            shown.samples[place] = sample._replace(value=shown.samples[place].value + sample.value)


def inline_metrics(entries: Iterable[ModelStatistics]) -> Iterator[Metric]:
    """How often inline models blocked the event loop for too long."""
    overruns = CounterMetricFamily(
        "weft_inline_overruns", "Inline executions that took longer than they may", labels=("model", "version")
    )
    for entry in entries:
        if entry.inline_overrun_count is not None:
            overruns.add_metric((entry.name, entry.version), entry.inline_overrun_count)
    yield overruns


def load_metrics(failures: Mapping[str, bool]) -> Iterator[Metric]:
    """Whether the last load of each model failed, which may serve what was loaded before."""
    failed = GaugeMetricFamily("weft_model_load_failed", "1: the last load of it failed", labels=("model",))
    for name, has_failed in failures.items():
        failed.add_metric((name,), has_failed)
    yield failed


def warm_pool_metrics(pool: WarmPool) -> Iterator[Metric]:
    """Loaded models, durations of loads, and reasons of unloads."""
    yield GaugeMetricFamily("weft_warm_models", "Model versions that are loaded", value=pool.num_warm)
    yield GaugeMetricFamily("weft_warm_model_bytes", "Size of their files", value=pool.num_warm_bytes)
    starts = HistogramMetricFamily(
        "weft_cold_start_seconds", "Loads because a request asked for the model", labels=("model", "version")
    )
    failures = CounterMetricFamily("weft_cold_start_failures", "Such loads that failed", labels=("model", "version"))
    unloads = CounterMetricFamily(
        "weft_warm_model_unloads", "Unloads to make room, or after idle time", labels=("model", "version", "reason")
    )
    for labels, counters in list(pool.cold_starts.items()):
        starts.add_metric(labels, cumulative_buckets(counters.seconds), counters.seconds.sum_s)
        failures.add_metric(labels, counters.num_failed)
        unloads.add_metric((*labels, "evicted"), counters.num_evicted)
        unloads.add_metric((*labels, "idle"), counters.num_idled)
    yield from (starts, failures, unloads)


def gpu_metrics(nvml: Any) -> Iterator[Metric]:
    """Figures of each GPU, as far as it has them; ``nvml`` is an initialised pynvml."""
    with suppress(nvml.NVMLError):  # a driver that is gone takes no other figures along
        gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        for name, text, family, value in _FIGURES:
            metric: Any = family(name, text, labels=("gpu_uuid",))  # type: ignore[call-arg]  # those of the families
            for gpu in gpus:
                with suppress(nvml.NVMLError):
                    metric.add_metric((nvml.nvmlDeviceGetUUID(gpu),), value(nvml, gpu))
            yield metric


def attach_gpus(exports: ExportedMetrics) -> None:
    """Export the figures of GPUs if ``nvidia-ml-py`` and NVIDIA's driver are installed."""
    with suppress(Exception):  # not installed, or the driver is not
        import pynvml  # noqa: PLC0415  # optional

        pynvml.nvmlInit()
        exports.attach("gpus", partial(gpu_metrics, pynvml))
