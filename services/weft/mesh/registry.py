"""Registry of this user's running meshes: ``weft up`` publishes, ``weft top`` and ``weft restart`` look up.

Each ``weft up`` has a folder of its own among the system's temporary files.
"""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from weft.base.processes.owned_folder import owned_folder, remove_left
from weft.base.processes.process import Endpoint
from weft.mesh.readiness import dialable
from weft.mesh.service_names import ROUTER, is_public
from weft.mesh.supervised import Roll

_PREFIX = "weft-"
_FILE = "mesh.json"
_ROLLS = "rolls.json"


@dataclass
class Rolls:
    """The latest restart of a mesh: its number, from 1, and how each service was replaced so far."""

    number: int = 0
    is_over: bool = True
    rolls: list[Roll] = field(default_factory=list)


class RunningMesh(NamedTuple):
    """A running mesh; ``folder`` is its own, where it is published."""

    pid: int
    is_encrypted: bool
    endpoints: Mapping[str, Endpoint]
    folder: Path = Path()

    @property
    def router(self) -> str:
        """``host:port`` of the router."""
        return dialable(self.endpoints[ROUTER].grpc)

    @property
    def metrics(self) -> str:
        """``host:port`` of the router's metrics."""
        return dialable(self.endpoints[ROUTER].metrics)

    def rolls(self) -> Rolls:
        """Its latest restart; number 0 if there was none."""
        try:
            fields = json.loads((self.folder / _ROLLS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Rolls()
        return Rolls(fields["number"], fields["is_over"], [Roll(*roll) for roll in fields["rolls"]])

    def metrics_addresses(self) -> dict[str, str]:
        """Metrics address of each process, by service."""
        router = self.endpoints[ROUTER].metrics
        addresses = {ROUTER: self.metrics}
        addresses |= {name: dialable(end.metrics) for name, end in self.endpoints.items() if end.metrics != router}
        encrypted = [name for name in addresses if self.is_encrypted and is_public(name)]
        return addresses | {name: f"https://{addresses[name]}/metrics" for name in encrypted}


@contextlib.contextmanager
def mesh_folder() -> Iterator[Path]:
    """A folder for a mesh; those of killed meshes are removed before. Raises OSError."""
    remove_left(_PREFIX)
    with owned_folder(_PREFIX) as folder:
        yield folder


def publish(folder: Path, mesh: RunningMesh) -> None:
    """Make the mesh findable until its folder is removed or this process ends. Raises OSError."""
    endpoints = {name: endpoint.as_json() for name, endpoint in mesh.endpoints.items()}
    fields = {"pid": mesh.pid, "is_encrypted": mesh.is_encrypted, "endpoints": endpoints}
    (folder / _FILE).write_text(json.dumps(fields), encoding="utf-8")


def publish_rolls(folder: Path, rolls: Rolls) -> None:
    """Tell how a restart goes; a reader sees all of it or what was before. Raises OSError."""
    fresh = folder / f"{_ROLLS}.new"
    fresh.write_text(json.dumps(asdict(rolls)), encoding="utf-8")
    fresh.replace(folder / _ROLLS)


def running_meshes() -> list[RunningMesh]:
    """Every mesh of this user that runs and is published."""
    found = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError):  # not of weft up
            if _is_ours_and_held(folder):
                fields = json.loads((folder / _FILE).read_text(encoding="utf-8"))
                endpoints = {name: Endpoint(**one) for name, one in fields["endpoints"].items()}
                found.append(RunningMesh(fields["pid"], fields["is_encrypted"], endpoints, folder))
    return found


class SeveralMeshesError(Exception):
    """Several meshes run and the command names none."""


def the_mesh(address: str | None, address_of: Callable[[RunningMesh], str]) -> RunningMesh | None:
    """The running mesh with this address, or without an address the only one; None: there is none.

    Raises SeveralMeshesError if no address is given, and more than one runs.
    """
    meshes = [mesh for mesh in running_meshes() if address in (None, address_of(mesh))]
    if len(meshes) > 1:
        raise SeveralMeshesError(f"several meshes run; give --url one of {', '.join(map(address_of, meshes))}")
    return meshes[0] if meshes else None


def _is_ours_and_held(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False  # another user's: do not trust what it says
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
