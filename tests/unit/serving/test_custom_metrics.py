"""Metrics of models, without a model."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.case_files import Case, cases

from weft.base.errors import ResourceExhaustedError, WeftError
from weft.serving.backends.custom_metrics import COUNTER, GAUGE, MAX_FAMILIES, MAX_METRICS, CustomMetrics
from weft.serving.metrics import ExportedMetrics, attach_gpus, gpu_metrics


@pytest.fixture
def metrics():
    """No metrics yet."""
    return CustomMetrics()


def _lines(metrics):
    registry = CollectorRegistry()
    registry.register(metrics)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("# HELP")]


@cases(Path(__file__).with_name("custom_metrics.txt"))
def test_metrics(metrics, case: Case):
    """Metrics are made, counted, shown and refused as the case says."""
    keys = {}

    def call(verb, *given):
        if verb == "show":
            return _lines(metrics)
        if verb == "family":
            owner, name, kind, *text = given
            return metrics.add_family(owner, name, text[0] if text else name, kind)
        if verb == "metric":
            keys[given[1], str(given[2])] = metrics.add_metric(*given)
            return None
        if verb == "release":
            return metrics.release(*given)
        name, labels, *value = given
        key = keys[name, str(labels)]
        return [metrics.value(name, key)] if verb == "value" else metrics.record(name, key, verb, *value)

    def do(line):
        try:
            return call(*json.loads(line)) or []
        except WeftError as error:
            return [f"{type(error).__name__}: {error.message}"]

    case.check_script(do)


def test_a_total_beside_its_like(metrics):
    """A gauge x and a counter x_total are two families, also in OpenMetrics, where a counter's is named without it."""
    for name, kind in (("x", GAUGE), ("x_total", COUNTER), ("y_total", COUNTER)):
        metrics.add_family("a", name, "X", kind)
        metrics.add_metric("a", name, {}, None)
    registry = CollectorRegistry()
    registry.register(metrics)
    families = list(text_string_to_metric_families(generate_openmetrics(registry).decode()))
    assert [("x", "gauge"), ("x_total", "unknown"), ("y", "counter")] == [(f.name, f.type) for f in families]


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


def scraped(nvml):
    """Sample lines."""
    exports = ExportedMetrics()
    exports.attach("gpus", lambda: gpu_metrics(nvml))
    lines = generate_latest(exports).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_figures_have_the_names_and_units_of_triton_inference_server(nvml):
    """Shares, bytes, watts and joules by GPU; what a GPU does not tell is left out."""
    got = scraped(nvml)
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
    assert {} == scraped(nvml)


def test_nothing_without_package_or_driver(monkeypatch, nvml):
    """Where the package is missing, or NVML does not start, there are no such metrics."""
    for module, start, num_families in ((nvml, nvml.nvmlInit, 6), (nvml, refuse, 0), (None, refuse, 0)):
        nvml.nvmlInit = start
        monkeypatch.setitem(sys.modules, "pynvml", module)
        attach_gpus(exports := ExportedMetrics())
        assert num_families == len(list(exports.collect()))
