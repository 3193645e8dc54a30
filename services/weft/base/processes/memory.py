"""Memory that this process can still take, of the machine and of its container."""

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """The smaller of what the kernel estimates and what a container's limit leaves; None where neither is known."""
    known: list[int] = []
    if found := re.search(r"^MemAvailable:\s+(\d+) kB$", _text(meminfo), re.MULTILINE):
        known.append(int(found[1]) << 10)
    limit, used = (_text(cgroup / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():  # "max": no limit
        known.append(max(int(limit) - int(used), 0))
    return min(known, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
