"""``running_mesh``: a mesh for a ``with`` block, for demos, benchmarks and tests."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from weft.base.processes.process import Endpoint, running_child
from weft.mesh.preflight import MeshError

_STOP_TIMEOUT_S = 40.0
_MAX_ERROR_CHARACTERS = 400


@contextmanager
def running_mesh(
    repository: Path, arguments: Sequence[str] = (), *, log: IO[str] | int | None = None
) -> Iterator[dict[str, Endpoint]]:
    """Run a mesh on free ports within the block; it ends with the block, even if this process is killed.

    Args:
        arguments: More arguments of ``weft up``.
        log: Log of the services, as ``subprocess`` takes it; None is this process's standard error.

    Yields:
        Endpoints by service.

    Raises MeshError: the mesh did not come up; ``log`` says why.
    """
    command = [
        sys.executable, "-P", "-m", "weft.cli", "up", "--json", "--stop-with-stdin",
        "--router-port", "0", "--repository", str(repository), *arguments,
    ]  # fmt: skip

    def ended(status: int) -> MeshError:
        return MeshError(f"`weft up` ended with exit status {status}; its log says why")

    with running_child(command, ended, timeout_s=_STOP_TIMEOUT_S, log=log) as (endpoints, _):
        yield {name: Endpoint(**endpoint) for name, endpoint in endpoints.items()}


def last_error(log: Path, start: int = 0) -> str:
    """The last error that a service logged, else the last message of ``weft up``; at most 400 characters.

    Args:
        log: The file given to ``running_mesh``.
        start: Offset from which to read, bytes.
    """
    with log.open("rb") as stream:
        stream.seek(start)
        lines = stream.read().decode(errors="replace").splitlines()
    error, told = "", []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            record = {"service": "weft", "level": "error", "message": line.removeprefix("weft: ").strip()}
        if isinstance(record, dict) and record.get("level") in ("error", "critical"):
            if record.get("service") == "weft":
                told.append(str(record.get("message", "")))
            else:
                error = str(record.get("message", ""))
    return (error or "; ".join(told))[:_MAX_ERROR_CHARACTERS] or "it logged nothing"
