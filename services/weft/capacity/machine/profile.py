"""The profile of this machine: measured on demand, kept in a file with the date.

``python -m weft.capacity.machine.profile SECTION THREADS`` measures and prints the figures as JSON.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import UnsupportedError
from weft.jobs.atomic_files import replace_file

_FORMAT = 3
_PACKAGES = ("weft-mesh", "onnxruntime-gpu", "onnxruntime", "torch", "numpy")
#: Variables that hold torch, oneDNN, MKL and numba to older instructions than this CPU has.
_INSTRUCTIONS = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES",
)  # fmt: skip
_TIMEOUT_S = 600

#: Bytes of all weights of a model where products are measured side by side.
RESIDENT_BYTES = 4 << 20


class Times(NamedTuple):
    """ONNX Runtime: seconds of one node.

    Attributes:
        families: By family, pairs of bytes moved and seconds, by size.
        products: Rows, side of the square weight, seconds.
        matmuls: Side of the square result, seconds of one product with an inner dimension of 32.
        convs: Rows (pixels), inputs, outputs, seconds.
        streamed: Bytes of all weights of a model, rows, operations per second: weights too large for the caches.
        node_s: A node that does nothing.
        run_s: A call of ``run`` without its nodes and tensors.
        tensor_s: An input or output of a call.
    """

    families: dict[str, list[tuple[float, float]]]
    products: list[tuple[float, float, float]]
    matmuls: list[tuple[float, float]]
    convs: list[tuple[float, float, float, float]]
    streamed: list[tuple[float, float, float]]
    node_s: float
    run_s: float
    tensor_s: float


class TorchTimes(NamedTuple):
    """Exported torch programs: seconds.

    Attributes:
        products: Rows, side of the square weight, seconds.
        node_s: An operator on a few numbers.
        run_s: A call of a program without its operators, a tensor in and one out.
        shares: Time of a product of another type of numbers, over that of float32: much above 1 where it is emulated.
    """

    products: list[tuple[float, float, float]]
    node_s: float
    run_s: float
    shares: dict[str, float]


class LinearTimes(NamedTuple):
    """Rates of the engine's kernels.

    Attributes:
        products: By kind of weight, points of bytes of all weights, rows, and weights multiplied per second.
        decode: Tokens of context, and bytes of keys and values read per second by a sequence of one new token.
        prefill: Tokens of a prompt, and operations of its attention per second.
    """

    products: dict[str, list[tuple[float, float, float]]]
    decode: list[tuple[float, float]]
    prefill: list[tuple[float, float]]


class Runtimes(NamedTuple):
    """A service with one model.

    Attributes:
        memory_bytes: By backend, resident memory of the process with a tiny model; ``""``: without a model.
        request_s, request_cpu_s: A request by backend, in wall time and in CPU time of the service, without the call of
            ONNX Runtime or of the program.
    """

    memory_bytes: dict[str, int]
    request_s: dict[str, float]
    request_cpu_s: dict[str, float]
    byte_s: float


class EngineTimes(NamedTuple):
    """The language-model engine: seconds, without products with weights.

    Attributes:
        request_s: A request, without its steps.
        next_request_s: Each further request that is sent at the same time.
        memory_bytes: Resident memory of a service with an engine with a tiny model.
    """

    step_s: float
    layer_s: float
    sequence_s: float
    request_s: float
    next_request_s: float
    memory_bytes: int


class GpuFigures(NamedTuple):
    """A GPU in torch: bytes per second of a copy, large products by type, an almost empty kernel."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: dict[str, float]
    kernel_s: float


#: Kinds of figures: the module and function that measure one with so many threads, and what they give.
SECTIONS: Mapping[str, tuple[str, str, Callable[..., Any]]] = {
    (ONNX := "onnx"): ("onnx_times", "measure_times", Times),
    (TORCH := "torch"): ("torch_times", "measure_torch_times", TorchTimes),
    (LINEAR := "linear"): ("torch_times", "measure_linear_times", LinearTimes),
    (RUNTIMES := "runtimes"): ("runtimes", "measure_runtimes", Runtimes),
    (ENGINE := "engine"): ("runtimes", "measure_engine", EngineTimes),
    (GPU := "gpu"): ("torch_times", "measure_gpu", GpuFigures),
}


def default_file() -> Path:
    """Where the profile is kept: ``weft/machine.json`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "machine.json"


class MachineProfile:
    """The measured figures of this machine.

    Args:
        file: Where they are kept. A file of another processor, other versions or another format is ignored.
        announce: Called with a sentence before a measurement, which takes up to a minute.
    """

    def __init__(self, file: Path, announce: Callable[[str], None] = lambda _: None) -> None:
        self._file = file
        self._announce = announce
        self._sections = self._read()

    @property
    def num_cores(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0))

    @property
    def memory_bytes(self) -> int:
        """Memory of the machine, or of its container."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        text = limit.read_text().strip() if limit.is_file() else ""
        return min(total, int(text)) if text.isdecimal() else total

    @property
    def measured(self) -> str:
        """Day of the oldest figure; "" if there is none."""
        return min((section["measured"] for section in self._sections.values()), default="")

    def section(self, name: str, num_threads: int = 1) -> Any:
        """Figures of one of ``SECTIONS``, measured now if unknown.

        Raises:
            UnsupportedError: A package is missing, or the measurement failed.
        """
        key = f"{name}/{num_threads}"
        if key not in self._sections:
            self._announce(f"measuring this machine once: {name}, {num_threads} threads ({self._file})")
            self._sections[key] = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", "values": _measured(name, num_threads)}
            content = json.dumps({"of": _identity(), "sections": self._sections}, indent=1)
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self._file, content.encode(), writer=str(os.getpid()))
            except OSError as error:
                self._announce(f"the figures cannot be kept, and are measured again next time: {error}")
        return SECTIONS[name][2](**self._sections[key]["values"])

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self._file.read_text(encoding="utf-8"))
            return dict(document["sections"]) if document["of"] == _identity() else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}


def cpu_model() -> str:
    """Model of the processor as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "unknown")


def _identity() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    num_cores = len(os.sched_getaffinity(0))
    held_to = {name: os.environ[name] for name in _INSTRUCTIONS if name in os.environ}
    return {
        "format": _FORMAT, "cpu": cpu_model(), "held_to": held_to, "num_cores": num_cores, "packages": packages,
    }  # fmt: skip


def _measured(name: str, num_threads: int) -> Any:
    """Measure in a separate process, undisturbed by this one and without leaving anything behind."""
    command = [sys.executable, "-m", "weft.capacity.machine.profile", name, str(num_threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"this machine could not be measured ({name}): no end after {_TIMEOUT_S} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnsupportedError(
            f"this machine could not be measured ({name}): {reason}; it takes pip install 'weft-mesh[plan,torch]'"
        )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    module, measure, _ = SECTIONS[sys.argv[1]]
    measured = getattr(import_module(f"weft.capacity.machine.{module}"), measure)(int(sys.argv[2]))
    print(json.dumps(measured._asdict()))
