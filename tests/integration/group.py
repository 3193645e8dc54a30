"""A router of several workers: its processes, channels to one of them, and deaths."""

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from tests.processes import WAIT_S, Running, wait_until

#: Channels that share no connection with others.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
_ESTABLISHED = "01"


def workers_of(parent: int) -> dict[int, int]:
    """Process ids of the workers by index."""
    found: dict[int, int] = {}
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:  # it has ended
        return found
    for child in children:
        with contextlib.suppress(OSError):
            worker = re.search(r"--worker=(\d+)/", Path(f"/proc/{child}/cmdline").read_text())
            if worker is not None:
                found[int(worker[1])] = int(child)
    return found


def num_connections(pid: int, port: int) -> int:
    """Connections on a port that a process has accepted."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    tables = (Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    ours = (row for row in rows if row[3] == _ESTABLISHED and int(row[1].rpartition(":")[2], 16) == port)
    return sum(row[9] in inodes for row in ours)


@contextmanager
def channel_to(router: Running, worker: int) -> Iterator[grpc.Channel]:
    """A channel whose one connection the worker has; others that come up on the way are closed with it."""
    pid = workers_of(router.process.pid)[worker]
    port = int(router.grpc.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            before = num_connections(pid, port)
            channel = stack.enter_context(grpc.insecure_channel(router.grpc, options=OWN_CONNECTION))
            grpc.channel_ready_future(channel).result(WAIT_S)
            if num_connections(pid, port) > before:
                yield channel
                return
        raise AssertionError(f"no connection of 100 reached worker {worker}")


def end_worker(router: Running, worker: int, number: int) -> None:
    """One worker gets a signal; another has taken its place, and answers."""
    pid = workers_of(router.process.pid)[worker]
    os.kill(pid, number)
    wait_for_another(router, worker, pid)


def wait_for_another(router: Running, worker: int, pid: int) -> None:
    """Another process has taken the place of a worker, and answers."""
    wait_until(lambda: workers_of(router.process.pid).get(worker, pid) != pid, "another worker")
    wait_until(lambda: router.scrape()[f'weft_worker_up{{worker="{worker}"}}'] == 1, "an answer of it")
