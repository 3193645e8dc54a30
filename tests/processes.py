"""Service processes of tests: how one is run, asked for its figures, awaited and ended."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

WAIT_S = 40.0
#: Of every service: any port, and an end with standard input.
_LISTEN = ("--grpc-port", "0", "--metrics-port", "0", "--stop-with-stdin")


class Running:
    """A process that has told where it listens; ``grpc``, ``metrics`` and ``http`` are "" where it does not."""

    def __init__(self, process: "subprocess.Popen[str]", told: dict[str, Any]) -> None:
        self.process = process
        self.grpc: str = told.get("grpc", "")
        self.metrics: str = told.get("metrics", "")
        self.http: str = told.get("http", "")
        self.was_killed = False

    def kill(self) -> None:
        """It has ended at once, as in a crash."""
        self.was_killed = True
        self.process.kill()
        self.process.wait(10)

    def scrape(self) -> dict[str, float]:
        """Every sample of ``/metrics`` by name and labels."""
        return scrape(self.metrics)


def scrape(address: str) -> dict[str, float]:
    """Every sample of a service's metrics by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@contextmanager
def running(
    module: str, *arguments: str, log: IO[str] | int | None = None, environment: dict[str, str] | None = None
) -> Iterator[Running]:
    """Run a module, or a file, on free ports; unless it was killed it ends by itself, with status 0, with the block."""
    program = [module] if module.endswith(".py") else ["-m", module]
    ports = () if module == "weft.gateway" else _LISTEN
    with subprocess.Popen(
        [sys.executable, "-P", *program, *ports, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | (environment or {}),
    ) as process:  # fmt: skip
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            assert line, f"{module} ended with exit status {process.wait(10)}"
            started = Running(process, json.loads(line))
            yield started
            process.terminate()
            assert process.wait(WAIT_S) == 0 or started.was_killed
        finally:
            process.kill()


def wait_until(holds: Callable[[], object], what: Callable[[], object] | str = "") -> None:
    """Poll until it holds; an OSError is as if it did not. Fails after ``WAIT_S``, with what was awaited."""
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        assert time.monotonic() < end_s, what() if callable(what) else f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.02)


def kill_and_wait(pid: int) -> None:
    """Kill a process, which has then ended, with all of its threads; its parent may have yet to learn of it."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _has_ended(pid), f"the end of {pid}")


def _has_ended(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, num_threads = fields[0], int(fields[17])
    return state in "ZX" and num_threads <= 1
