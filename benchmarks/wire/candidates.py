"""The servers that are compared, all running at once: Triton Inference Server, Weft in its arrangements, bare ones."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.floor import running_floor
from benchmarks.servers import Server, mesh_server
from benchmarks.tis import NAME as TIS
from benchmarks.tis import running_tis
from benchmarks.wire.workloads import Repository
from weft.mesh.running import running_mesh
from weft.v2.client.wires import WireName

WIRES = tuple(map(str, WireName))
#: Arrangements of a server.
ONE_PROCESS, PROCESSES, BARE = "one process", "processes", "bare"


class Candidate(NamedTuple):
    """A server that runs.

    Attributes:
        server: Where it is.
        arrangement: One of the constants above, or ``TIS``.
        wire: What Weft's and bare servers stand on; "" of Triton Inference Server.
    """

    server: Server
    arrangement: str
    wire: str = ""

    @property
    def name(self) -> str:
        """Of the server."""
        return self.server.name


@contextlib.contextmanager
def running_candidates(
    repository: Repository, wires: Sequence[str], logs: Path, *, with_tis: bool = True, with_floors: bool
) -> Iterator[list[Candidate]]:
    """Every server over the same models, ended with the block. Raises MeshError or RuntimeError where one fails."""
    with contextlib.ExitStack() as stack:
        log: Any = stack.enter_context((logs / "mesh.log").open("w"))
        found: list[Candidate] = []
        if with_tis:
            tis_log = stack.enter_context((logs / "tis.log").open("w"))
            found.append(Candidate(stack.enter_context(running_tis(repository.tis, tis_log)), TIS))
        for wire in wires:
            for arrangement, arguments in ((ONE_PROCESS, ["--in-process"]), (PROCESSES, [])):
                mesh = running_mesh(repository.weft, [*arguments, "--wire", wire], log=log)
                endpoints = stack.enter_context(mesh)
                server = mesh_server(f"Weft, {arrangement}, {wire}", endpoints)
                found.append(Candidate(server, arrangement, wire))
        for wire in wires if with_floors else ():
            floor = stack.enter_context(running_floor("--wire", wire))
            found.append(Candidate(_floor_server(wire, floor.grpc, floor.pid), BARE, wire))
        yield found


def _floor_server(wire: str, address: str, pid: int) -> Server:
    return Server(f"bare echo, {wire}", address, lambda: [pid])
