"""A server that a benchmark loads: where it listens, its processes, their CPU time, and what it answers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import machine
from weft.base.processes.process import Endpoint
from weft.base.tensors import Array, decode
from weft.capacity.tuning.load import caller
from weft.v2.client.channels import open_channel
from weft.v2.client.wires import WireName
from weft.v2.protocol.codec import deserialize_response
from weft.v2.protocol.wire import result_of

#: Largest difference of two answers that counts as equal: batches of other sizes add up in another order.
TOLERANCE = 1e-5


class Server(NamedTuple):
    """A server that runs.

    Attributes:
        name: For the table.
        address: ``host:port`` of its V2 service.
        pids: Its processes; read for each measurement.
    """

    name: str
    address: str
    pids: Callable[[], list[int]]

    def cpu_s(self) -> float:
        """CPU time that its processes have used since they started, seconds."""
        return sum(machine.cpu_seconds({str(pid): pid for pid in self.pids()}).values())


def mesh_server(name: str, endpoints: Mapping[str, Endpoint]) -> Server:
    """A mesh that ``running_mesh`` started, reached through its router: every process, ``weft up`` itself too."""
    router = endpoints["router"]
    supervisor = int(Path(f"/proc/{router.pid}/stat").read_text().rpartition(")")[2].split()[1])
    return Server(name, router.grpc, lambda: process_tree(supervisor))


def process_tree(pid: int) -> list[int]:
    """A process and everything below it."""
    found = [pid]
    for parent in found:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


async def answers(address: str, payloads: Sequence[bytes]) -> list[dict[str, Array]]:
    """Outputs for some serialized requests, which are sent one after another. Raises AioRpcError."""
    async with open_channel(address, wire=WireName.GRPCIO) as channel:
        call = caller(channel)
        responses = [result_of(deserialize_response(await call(data))) for data in payloads]
    return [{name: decode(tensor) for name, tensor in response.outputs.items()} for response in responses]


def differences(mine: Sequence[Mapping[str, Array]], theirs: Sequence[Mapping[str, Array]]) -> list[str]:
    """How answers of two servers to the same requests differ; empty where they are equal."""
    found = []
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.keys() != other.keys():
            found.append(f"request {number}: outputs {sorted(one)} and {sorted(other)}")
            continue
        found += [
            f"request {number}: output {name} differs"
            for name in one
            if one[name].dtype != other[name].dtype
            or one[name].shape != other[name].shape
            or not np.allclose(one[name], other[name], rtol=TOLERANCE, atol=TOLERANCE)
        ]
    return found
