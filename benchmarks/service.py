"""A model service of its own for the length of a ``with`` block."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.base.processes.process import Endpoint


@contextmanager
def running_model_service(repository: Path) -> Iterator[Endpoint]:
    """A model service process with every model of a repository; it is ready, and ended when the block is left."""
    command = [
        sys.executable, "-P", "-m", "weft.services.model", "--repository", str(repository), "--grpc-port", "0",
        "--metrics-port", "0", "--stop-with-stdin", "--log-level", "error",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            endpoints = json.loads(process.stdout.readline() if process.stdout is not None else "")
            yield Endpoint(endpoints["grpc"], endpoints["metrics"], process.pid)
        finally:
            process.terminate()
