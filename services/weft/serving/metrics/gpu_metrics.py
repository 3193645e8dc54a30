"""Prometheus metrics of the GPUs of this machine, named as in Triton Inference Server; from NVIDIA's NVML."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

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


class GpuCollector(Collector):
    """Reads the metrics of each GPU at scrape time, without those that a GPU does not have.

    Args:
        nvml: The package ``pynvml``, initialised.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def collect(self) -> Iterator[Metric]:
        """Every family, each with one sample a GPU."""
        nvml = self._nvml
        with suppress(nvml.NVMLError):  # a driver that is gone takes no other figures along
            yield from self._families([nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())])

    def _families(self, gpus: Sequence[Any]) -> Iterator[Metric]:
        nvml = self._nvml
        for name, text, family, value in _FIGURES:
            metric = family(name, text, labels=("gpu_uuid",))  # type: ignore[call-arg]  # those of the families
            for gpu in gpus:
                with suppress(nvml.NVMLError):
                    metric.add_metric((nvml.nvmlDeviceGetUUID(gpu),), value(nvml, gpu))  # type: ignore[attr-defined]
            yield metric


def gpu_collectors() -> tuple[Collector, ...]:
    """One collector where the package ``nvidia-ml-py`` and NVIDIA's driver are installed; else none."""
    try:
        import pynvml  # noqa: PLC0415  # optional

        pynvml.nvmlInit()
    except Exception:  # not installed, or the driver is not
        return ()
    return (GpuCollector(pynvml),)
