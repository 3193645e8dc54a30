"""Figures of GPUs, from what NVML says."""

import sys
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from weft.serving.metrics import GpuCollector, gpu_collectors


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
