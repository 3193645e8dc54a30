"""What the figures depend on: hardware, versions, and the CPU time of processes."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "weft-mesh",
    "grpcio",
    "protobuf",
    "uvloop",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "transformers",
    "tokenizers",
)


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU time, user and system, that each process has used since it started; seconds, in steps of one clock tick.

    Source:
        proc(5): fields 14 (utime) and 15 (stime) of ``/proc/<pid>/stat``.
    """
    return {name: _cpu_seconds(pid) for name, pid in pids.items()}


def _cpu_seconds(pid: int) -> float:
    # The second field is the command in parentheses and may hold spaces; what follows it starts with field 3.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, object]:
    """Hardware, system and versions."""
    return {
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _gpu(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _gpu() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
