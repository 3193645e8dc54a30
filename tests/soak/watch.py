"""What processes hold (memory, descriptors, threads, tasks) over time, and whether it grows."""

import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

_TASKS = re.compile(rb"^weft_event_loop_tasks(?:\{.*\})? (\S+)$", re.MULTILINE)


class Sample(NamedTuple):
    """What one process holds at one moment.

    Attributes:
        at_s: On the clock of ``time.monotonic``.
        rss_bytes: Resident memory.
        num_descriptors, num_threads, num_tasks: Open files and sockets; threads; tasks of the event loop.
    """

    at_s: float
    rss_bytes: int
    num_descriptors: int
    num_threads: int
    num_tasks: int


class Growth(NamedTuple):
    """How much one figure grew, and what is allowed."""

    figure: str
    first: float
    grown: float
    allowed: float

    @property
    def is_leak(self) -> bool:
        """Whether it grew by more than is allowed."""
        return self.grown > self.allowed


#: What each figure may grow by: a share of what it was at first, or a number, whichever is more. Memory is fragmented
#: and caches fill; descriptors, threads and tasks vary with the load of the moment.
ALLOWED = {
    "rss_bytes": (0.05, 12 << 20), "num_descriptors": (0.1, 12), "num_threads": (0.1, 6), "num_tasks": (0.25, 40),
}  # fmt: skip


def take(pid: int, metrics_address: str) -> Sample:
    """What a process holds now."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=20) as response:
        tasks = _TASKS.search(response.read())
    assert tasks is not None, "the service does not say how many tasks it has"
    return Sample(
        time.monotonic(),
        int(fields["VmRSS"].split()[0]) << 10,
        len(list(Path(f"/proc/{pid}/fd").iterdir())),
        int(fields["Threads"]),
        int(float(tasks[1])),
    )


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """What the line through all but the first third of the samples, in which caches fill, grows by from end to end."""
    kept = samples[len(samples) // 3 :]
    times = [sample.at_s for sample in kept]
    found = []
    for figure, (share, number) in ALLOWED.items():
        values = [float(getattr(sample, figure)) for sample in kept]
        slope, start = linear_regression(times, values)
        first = start + slope * times[0]
        found.append(Growth(figure, first, slope * (times[-1] - times[0]), max(share * first, number)))
    return found
