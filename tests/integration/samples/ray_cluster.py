"""A cluster of Ray of two nodes on this machine, as a process that ends with its standard input."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_TIMEOUT_S = 60
_SCRIPT = """
import sys
from ray.cluster_utils import Cluster
options = {"num_cpus": 1, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={**options, "temp_dir": sys.argv[1]})
cluster.add_node(**options)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def running_cluster() -> Iterator[tuple[str, int]]:
    """Address of the cluster, and the id of the process that it descends from."""
    # A short path, since it becomes part of those of sockets.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()  # where Ray notes the address of the cluster
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
        with subprocess.Popen(
            [sys.executable, "-P", "-c", _SCRIPT, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        ) as process:
            try:
                address = process.stdout.readline().strip() if process.stdout is not None else ""
                assert address, f"the cluster ended with exit status {process.wait(_START_TIMEOUT_S)}"
                yield address, process.pid
            finally:
                process.communicate(timeout=_START_TIMEOUT_S)


def descendants(process_id: int, name: str) -> list[int]:
    """Ids of the processes under a process whose command line begins with a name."""
    found = []
    for child in _children(process_id):
        try:
            if Path(f"/proc/{child}/cmdline").read_text().startswith(name):
                found.append(child)
        except OSError:
            continue  # it has ended
        found += descendants(child, name)
    return found


def _children(process_id: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{process_id}/task").glob("*/children"):
        try:
            children += map(int, task.read_text().split())
        except OSError:
            continue
    return children
