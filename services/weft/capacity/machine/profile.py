"""What is known of this machine: measured when it is first needed, kept in a file with the date."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from weft.base.errors import UnsupportedError
from weft.base.processes.memory import available_bytes
from weft.capacity.machine.sections import ENGINE, GPU, LINEAR, ONNX, RUNTIMES, SECTIONS, TORCH

__all__ = ["ENGINE", "GPU", "LINEAR", "ONNX", "RUNTIMES", "TORCH", "MachineProfile", "default_file"]

_FORMAT = 2
_PACKAGES = ("weft-mesh", "onnxruntime-gpu", "onnxruntime", "torch", "numpy")
_TIMEOUT_S = 600
T = TypeVar("T")


def default_file() -> Path:
    """Where the profile is kept: ``weft/machine.json`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "machine.json"


class MachineProfile:
    """The measured figures of this machine.

    Args:
        file: Where they are kept. A file of another processor, of other versions or of another format is not used.
        announce: Called with a sentence before something is measured, which takes up to a minute.
    """

    def __init__(self, file: Path, announce: Callable[[str], None] = lambda _: None) -> None:
        self._file = file
        self._announce = announce
        self._sections = self._read()

    @property
    def cpu(self) -> str:
        """Model of the processor."""
        return cpu_model()

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
    def available_bytes(self) -> int:
        """What is free of it now."""
        return available_bytes() or self.memory_bytes

    @property
    def measured(self) -> str:
        """Day of the oldest figure; "" where there is none."""
        return min((section["measured"] for section in self._sections.values()), default="")

    def section(self, name: str, num_threads: int = 1) -> Any:
        """Figures of one kind, measured now if they are not known: what ``sections.SECTIONS[name]`` gives.

        Raises:
            UnsupportedError: A package is missing, or the measurement failed.
        """
        key = f"{name}/{num_threads}"
        if key not in self._sections:
            self._announce(f"measuring this machine once: {name}, {num_threads} threads ({self._file})")
            self._sections[key] = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", "values": _measured(name, num_threads)}
            try:
                self._write()
            except OSError as error:
                self._announce(f"the figures cannot be kept, and are measured again next time: {error}")
        return SECTIONS[name].parse(self._sections[key]["values"])

    def forget(self) -> None:
        """Measure everything anew when it is next needed."""
        self._sections = {}

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self._file.read_text(encoding="utf-8"))
            return dict(document["sections"]) if document["of"] == _identity() else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"of": _identity(), "sections": self._sections}, indent=1), encoding="utf-8")
        temporary.replace(self._file)


def cpu_model() -> str:
    """Model of the processor as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "unknown")


def _identity() -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "cpu": cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _measured(name: str, num_threads: int) -> Any:
    """Measured by a process of its own, so that nothing of this one disturbs it, and it leaves nothing behind."""
    command = [sys.executable, "-m", "weft.capacity.machine", name, str(num_threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"this machine could not be measured ({name}): no end after {_TIMEOUT_S} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnsupportedError(
            f"this machine could not be measured ({name}): {reason}; it takes pip install 'weft-mesh[model,plan]'"
        )
    return json.loads(done.stdout.splitlines()[-1])
