"""A model service that is measured: its memory, its CPU time, and how long its answers take."""

import asyncio
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from weft.base.core import InferCall
from weft.base.errors import UnavailableError
from weft.base.tensors import Array, encode
from weft.v2.client.v2_client import V2Client

_TIMEOUT_S = 120.0
_ROUNDS, _ROUND_S = 8, 0.08


class Answered(NamedTuple):
    """Requests one after another.

    Attributes:
        wall_s: From request to answer.
        cpu_s: CPU time of the service for one.
    """

    wall_s: float
    cpu_s: float

    def best(self, other: "Answered") -> "Answered":
        """The lesser of each figure."""
        return Answered(min(self.wall_s, other.wall_s), min(self.cpu_s, other.cpu_s))


class ModelService(NamedTuple):
    """A running service.

    Attributes:
        address: ``host:port`` of its V2 service.
        pid: Of its process.
        num_threads: That a model computes on.
    """

    address: str
    pid: int
    num_threads: int = 1

    def rss_bytes(self) -> int:
        """Resident memory of its process."""
        found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else 0

    def cpu_s(self) -> float:
        """CPU time of its threads so far, of a clock in nanoseconds where the kernel has one."""
        return sum(_thread_cpu_s(thread) for thread in Path(f"/proc/{self.pid}/task").iterdir())

    def answered(self, call: InferCall, *, num_at_once: int = 1) -> Answered:
        """Send a request again and again; figures of the best of some rounds, per request of each caller.

        Raises:
            WeftError: It failed.
        """
        with self._apart():
            return asyncio.run(self._answered(call, num_at_once))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Client and service on processors of their own for as long as the block lasts.

        Where the operating system places them, a request of 0.2 ms takes from 0.18 to 0.30 ms, from one start of the
        service to the next; apart 0.22 (2 cores). If a model computes on all processors, only the thread that talks
        to the client keeps away from it.
        """
        before = os.sched_getaffinity(0)
        *others, last = sorted(before)
        if not others:
            yield
            return
        threads = [path.name for path in Path(f"/proc/{self.pid}/task").iterdir()]
        kept = threads if self.num_threads <= len(others) else [str(self.pid)]
        try:
            for thread in kept:
                _set_processors(int(thread), others)
            os.sched_setaffinity(0, {last})
            yield
        finally:
            os.sched_setaffinity(0, before)
            for thread in kept:
                _set_processors(int(thread), before)

    async def _answered(self, call: InferCall, num_at_once: int) -> Answered:
        async with V2Client(self.address) as client:

            async def together() -> None:
                async with asyncio.TaskGroup() as group:
                    for _ in range(num_at_once):
                        group.create_task(client.infer(call, timeout_s=_TIMEOUT_S))

            start = time.perf_counter()
            await together()
            await together()
            once_s = (time.perf_counter() - start) / 2
            runs = max(math.ceil(_ROUND_S / once_s), 2)
            best = Answered(math.inf, math.inf)
            for _ in range(_ROUNDS if once_s < 1 else 2):
                walls, before = [], self.cpu_s()
                for _ in range(runs):
                    start = time.perf_counter()
                    await together()
                    walls.append(time.perf_counter() - start)
                cpu_s = (self.cpu_s() - before) / runs
                best = best.best(Answered(sorted(walls)[len(walls) // 2], cpu_s))
        return best


@contextmanager
def running_service(
    repository: Path, environment: Mapping[str, str] | None = None, *, num_threads: int = 1
) -> Iterator[ModelService]:
    """A model service with every model of a folder, on a free port; it ends with the block.

    Args:
        repository: The folder.
        environment: Variables of the process beside those of this one.
        num_threads: That its models compute on.

    Raises:
        UnavailableError: It did not start; its log, on standard error, says why.
    """
    command = [
        sys.executable, "-P", "-m", "weft.services.model", "--repository", str(repository), "--grpc-port", "0",
        "--metrics-port", "0", "--stop-with-stdin", "--log-level", "error",
    ]  # fmt: skip
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, **(environment or {})},
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise UnavailableError(f"the model service ended with exit status {process.wait(_TIMEOUT_S)}")
            endpoints = json.loads(line)
            yield ModelService(endpoints["grpc"], process.pid, num_threads)
        finally:
            process.terminate()
            try:
                process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def call_of(model: str, inputs: Mapping[str, Array], parameters: Mapping[str, int | str] | None = None) -> InferCall:
    """A request for a model; the first dimension of every input is the batch."""
    tensors = {name: encode(array) for name, array in inputs.items()}
    rows = next(iter(tensors.values())).shape[0] if tensors else 1
    return InferCall(model, inputs=tensors, parameters=dict(parameters or {}), num_rows=int(rows))


def _set_processors(thread: int, processors: Iterable[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(thread, processors)


def _thread_cpu_s(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError, ValueError):  # it ended, or the kernel keeps no such statistics
        return 0.0


def settled_rss_bytes(service: ModelService, seconds: Sequence[float] = (0.1, 0.1, 0.1)) -> int:
    """Its memory once nothing changes any more: the least of some looks."""
    looks = []
    for pause in seconds:
        time.sleep(pause)
        looks.append(service.rss_bytes())
    return min(looks)
