"""Metrics of models, without a model."""

import sys
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError, UnsupportedError
from weft.serving.backends.custom_metrics import COUNTER, GAUGE, HISTOGRAM, MAX_FAMILIES, MAX_METRICS, CustomMetrics
from weft.serving.metrics import ExportedMetrics, GpuCollector, gpu_collectors


@pytest.fixture
def metrics():
    """No metrics yet."""
    return CustomMetrics()


def _lines(metrics):
    registry = CollectorRegistry()
    registry.register(metrics)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("# HELP")]


def test_owners_share_and_the_last_one_takes_it_along(metrics):
    """Two owners of one counter count together; it goes with the second, and what one alone made with that one."""
    for owner in ("a", "b"):
        metrics.add_family(owner, "calls", "Calls", COUNTER)
        key = metrics.add_metric(owner, "calls", {"of": "all"}, None)
        metrics.record("calls", key, "increment", 2)
    own = metrics.add_metric("a", "calls", {"of": "a"}, None)
    assert ["# TYPE calls untyped", 'calls{of="all"} 4.0', 'calls{of="a"} 0.0'] == _lines(metrics)
    metrics.release("a")
    assert ["# TYPE calls untyped", 'calls{of="all"} 4.0'] == _lines(metrics)
    metrics.record("calls", own, "increment", 1)  # a thread of the model that is gone
    metrics.release("b")
    assert [] == _lines(metrics)
    with pytest.raises(InvalidArgumentError, match="'calls' is gone: the model that made it was unloaded"):
        metrics.value("calls", key)


def test_histograms_count_in_buckets(metrics):
    """A value on a bound is in its bucket; one above all bounds is in +Inf alone."""
    metrics.add_family("a", "sizes", "Sizes", HISTOGRAM)
    key = metrics.add_metric("a", "sizes", {}, [1, 2])
    for size in (1, 1.5, 9):
        metrics.record("sizes", key, "observe", size)
    assert [
        "# TYPE sizes histogram", 'sizes_bucket{le="1.0"} 1.0', 'sizes_bucket{le="2.0"} 2.0',
        'sizes_bucket{le="+Inf"} 3.0', "sizes_sum 11.5", "sizes_count 3.0",
    ] == _lines(metrics)  # fmt: skip
    with pytest.raises(UnsupportedError, match="HISTOGRAM does not support Value"):
        metrics.value("sizes", key)


@pytest.mark.parametrize(
    ("kind", "labels", "buckets", "expected"),
    [
        (COUNTER, {"__own": "x"}, None, "must be strings by name, got '__own': 'x'"),
        (COUNTER, {"a": 1}, None, "must be strings by name, got 'a': 1"),
        (COUNTER, {"a": "\udc80"}, None, "must be strings by name, got 'a'"),
        (HISTOGRAM, {"le": "x"}, [1], "has label 'le', which its buckets have"),
        (COUNTER, {}, [1], "which is a COUNTER, takes no buckets"),
        (HISTOGRAM, {}, None, "which is a HISTOGRAM, needs buckets"),
        (HISTOGRAM, {}, [2, 1], r"must be finite numbers that rise, got \[2.0, 1.0\]"),
        (HISTOGRAM, {}, [float("nan")], "must be finite numbers"),
    ],
)
def test_faults(metrics, kind, labels, buckets, expected):
    """Labels and buckets that cannot be are named with what is allowed, and leave nothing behind."""
    metrics.add_family("a", "m", "M", kind)
    with pytest.raises(InvalidArgumentError, match=expected):
        metrics.add_metric("a", "m", labels, buckets)
    assert not [line for line in _lines(metrics) if not line.startswith("#")]


@pytest.mark.parametrize("name", ["", "1a", "a b", "nv_x", "weft_x"])
def test_names_that_cannot_be(metrics, name):
    """A name is what Prometheus takes, and not one of the server's."""
    with pytest.raises(InvalidArgumentError, match="metric name"):
        metrics.add_family("a", name, "M", GAUGE)


@pytest.mark.parametrize("suffix", ["_bucket", "_count", "_sum"])
def test_no_two_families_have_samples_of_one_name(metrics, suffix):
    """Not a histogram and what is called like a part of it, whichever came first; a scrape would have both."""
    metrics.add_family("a", "size", "S", HISTOGRAM)
    metrics.add_family("a", f"late{suffix}", "L", COUNTER)
    for name, kind in ((f"size{suffix}", GAUGE), ("late", HISTOGRAM)):
        with pytest.raises(InvalidArgumentError, match="would both have samples of one name; rename one"):
            metrics.add_family("b", name, "N", kind)
    metrics.add_family("b", "late", "L", GAUGE)


def test_a_total_beside_its_like(metrics):
    """A gauge x and a counter x_total are two families, also in OpenMetrics, where a counter's is named without it."""
    for name, kind in (("x", GAUGE), ("x_total", COUNTER), ("y_total", COUNTER)):
        metrics.add_family("a", name, "X", kind)
        metrics.add_metric("a", name, {}, None)
    registry = CollectorRegistry()
    registry.register(metrics)
    families = list(text_string_to_metric_families(generate_openmetrics(registry).decode()))
    assert [("x", "gauge"), ("x_total", "unknown"), ("y", "counter")] == [(f.name, f.type) for f in families]


def test_a_description_that_cannot_be_sent(metrics):
    """One family that no scrape could hold would take all the others along."""
    with pytest.raises(InvalidArgumentError, match="the description of metric family 'm' must be text that UTF-8"):
        metrics.add_family("a", "m", "\udc80", GAUGE)
    assert [] == _lines(metrics)


def test_labels_and_families_are_bounded(metrics):
    """A label made of what clients send fails in the model after so many values; what is there counts on."""
    metrics.add_family("a", "m", "M", COUNTER)
    keys = [metrics.add_metric("a", "m", {"of": str(i)}, None) for i in range(MAX_METRICS)]
    with pytest.raises(ResourceExhaustedError, match="has 4096 metrics, the most allowed; use labels of few values"):
        metrics.add_metric("a", "m", {"of": "one more"}, None)
    assert keys[0] == metrics.add_metric("b", "m", {"of": "0"}, None)
    for i in range(MAX_FAMILIES - 1):
        metrics.add_family("a", f"m{i}", "M", COUNTER)
    with pytest.raises(ResourceExhaustedError, match="there are 1024 metric families"):
        metrics.add_family("a", "n", "N", COUNTER)
    metrics.add_family("b", "m", "M", COUNTER)


def _family(kind, name, **values):
    family = kind(name, "text", labels=("model",))
    for model, value in values.items():
        family.add_metric((model,), value)
    return family


def _shown(exported):
    return {
        family.name: {sample.labels["model"]: sample.value for sample in family.samples}
        for family in exported.collect()
    }


def test_families_of_all_are_shown_once():
    """With the samples of each owner, as they are when asked for."""
    exported = ExportedMetrics()
    totals = {"x": 1}
    exported.attach("1", lambda: [_family(CounterMetricFamily, "weft_a", **totals)])
    exported.attach(
        "2", lambda: [_family(CounterMetricFamily, "weft_a", y=2), _family(GaugeMetricFamily, "weft_b", y=3)]
    )
    totals["x"] = 5
    assert {"weft_a": {"x": 5, "y": 2}, "weft_b": {"y": 3}} == _shown(exported)
    exported.detach("2")
    assert {"weft_a": {"x": 5}} == _shown(exported)


def test_two_loads_of_a_model():
    """Counters add up; a gauge is that of the latest load."""
    exported = ExportedMetrics()
    for owner, value in (("old", 1), ("new", 2)):
        exported.attach(
            owner,
            lambda value=value: [
                _family(CounterMetricFamily, "weft_a", x=value),
                _family(GaugeMetricFamily, "weft_b", x=value),
            ],
        )
    assert {"weft_a": {"x": 3}, "weft_b": {"x": 2}} == _shown(exported)


def test_one_that_fails_costs_the_others_nothing():
    """What it gave before it failed is shown."""
    exported = ExportedMetrics()

    def read():
        yield _family(GaugeMetricFamily, "weft_b", x=1)
        raise RuntimeError

    exported.attach("bad", read)
    exported.attach("good", lambda: [_family(CounterMetricFamily, "weft_a", x=1)])
    assert {"weft_b": {"x": 1}, "weft_a": {"x": 1}} == _shown(exported)


class NvmlError(Exception):
    """What NVML raises."""


def refuse(*_arguments):
    """What a GPU does that lacks a figure."""
    raise NvmlError


@dataclass
class Utilization:
    gpu: int


@dataclass
class MemoryInfo:
    total: int
    used: int


class FakeNvml:
    """Two GPUs; the second one does not tell its power."""

    NVMLError = NvmlError

    def nvmlInit(self):  # noqa: N802  # these are NVML's names
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, gpu):  # noqa: N802
        return f"GPU-{gpu}"

    def nvmlDeviceGetUtilizationRates(self, gpu):  # noqa: N802
        return Utilization(25 * gpu)

    def nvmlDeviceGetMemoryInfo(self, gpu):  # noqa: N802
        return MemoryInfo(total=80 << 30, used=gpu << 30)

    def nvmlDeviceGetPowerUsage(self, gpu):  # noqa: N802
        return refuse() if gpu else 70500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):  # noqa: N802
        return 700000

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):  # noqa: N802
        return 1500


@pytest.fixture
def nvml():
    return FakeNvml()


def scraped(collector):
    """Sample lines."""
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_figures_have_the_names_and_units_of_triton_inference_server(nvml):
    """Shares, bytes, watts and joules by GPU; what a GPU does not tell is left out."""
    got = scraped(GpuCollector(nvml))
    assert {
        'nv_gpu_utilization{gpu_uuid="GPU-0"}': 0.0,
        'nv_gpu_utilization{gpu_uuid="GPU-1"}': 0.25,
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-0"}': 80 << 30,
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"}': 80 << 30,
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"}': 0,
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"}': 1 << 30,
        'nv_gpu_power_usage{gpu_uuid="GPU-0"}': 70.5,
        'nv_gpu_power_limit{gpu_uuid="GPU-0"}': 700,
        'nv_gpu_power_limit{gpu_uuid="GPU-1"}': 700,
        'nv_energy_consumption{gpu_uuid="GPU-0"}': 1.5,
        'nv_energy_consumption{gpu_uuid="GPU-1"}': 1.5,
    } == {name: float(value) for name, value in got.items()}


def test_a_driver_that_is_gone_leaves_the_other_figures(nvml):
    """A scrape does not fail when NVML does."""
    nvml.nvmlDeviceGetCount = refuse
    assert {} == scraped(GpuCollector(nvml))


def test_nothing_without_package_or_driver(monkeypatch, nvml):
    """Where the package is missing, or NVML does not start, there are no such metrics."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert 1 == len(gpu_collectors())
    nvml.nvmlInit = refuse
    assert () == gpu_collectors()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert () == gpu_collectors()
