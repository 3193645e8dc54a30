"""A repository of a few samples, and the processes of a mesh or job that runs it."""

import contextlib
import os
import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SAMPLES = ROOT / "model_repository"
#: Folders of what each graph or model of the samples needs.
PARTS = {
    "simple": ("model/simple",),
    "embed": ("graphs/embed", "preprocess/tokenize_minilm", "model/minilm", "postprocess/mean_pool"),
}


def write_repository(repository: Path, *names: str) -> Path:
    """A repository with these samples alone, as links, so that a mesh of it starts in little time."""
    for folder in ("graphs", "model", "preprocess", "postprocess"):
        (repository / folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        for part in PARTS[name]:
            (repository / part).symlink_to(_SAMPLES / part)
    return repository


def parent(pid: int) -> int:
    """Process that started a running process."""
    return int(_fields(pid)[1])


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that these started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            child = int(path.parent.name)
            children.setdefault(parent(child), []).append(child)
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def kill(pids: list[int]) -> None:
    """SIGKILL each that still runs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that ended and was not waited for has."""
    try:
        return _fields(pid)[0] != "Z"
    except OSError:
        return False


def _fields(pid: int) -> list[str]:
    """Fields of proc(5)'s ``stat`` from the third, the state, on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
