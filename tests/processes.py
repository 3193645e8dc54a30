"""Processes that a test ends."""

import os
import signal
import time
from pathlib import Path

_WAIT_S = 30.0


def kill_and_wait(pid: int) -> None:
    """Kill a process, which has then ended, with all of its threads; its parent may have yet to learn of it."""
    os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + _WAIT_S
    while not _has_ended(pid):
        assert time.monotonic() < end_s, f"process {pid} still runs"
        time.sleep(0.01)


def _has_ended(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, num_threads = fields[0], int(fields[17])
    return state in "ZX" and num_threads <= 1
