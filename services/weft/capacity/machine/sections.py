"""Kinds of figures of a machine: how each is measured, and read back from JSON. Imports nothing heavy."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

ONNX, TORCH, LINEAR, RUNTIMES, ENGINE, GPU = "onnx", "torch", "linear", "runtimes", "engine", "gpu"


@dataclass(frozen=True)
class Section:
    """One kind of figures.

    Attributes:
        module: Module of this package with both functions.
        measure: Name of the function that measures with so many threads and gives what JSON can hold.
        parse: Makes the values of that.
    """

    module: str
    measure: str
    parse: Callable[[Any], Any]


def _tuple_of(module: str, name: str) -> Callable[[Any], Any]:
    def parse(values: Any) -> Any:
        return getattr(import_module(f"weft.capacity.machine.{module}"), name)(**values)

    return parse


SECTIONS = {
    ONNX: Section("onnx_times", "measure_times", _tuple_of("figures", "Times")),
    TORCH: Section("torch_times", "measure_torch_times", _tuple_of("figures", "TorchTimes")),
    LINEAR: Section("linear_times", "measure_linear_times", _tuple_of("figures", "LinearTimes")),
    RUNTIMES: Section("runtimes", "measure_runtimes", _tuple_of("figures", "Runtimes")),
    ENGINE: Section("runtimes", "measure_engine", _tuple_of("figures", "EngineTimes")),
    GPU: Section("gpu_times", "measure_gpu", _tuple_of("figures", "GpuFigures")),
}
