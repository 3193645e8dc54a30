"""Thousands of calls started at once: how many come back with which status, and how soon."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from benchmarks.report import table
from benchmarks.wire.candidates import BARE, Candidate
from benchmarks.wire.senders import OWN_CONNECTION
from benchmarks.wire.workloads import IDENTITY
from weft.capacity.tuning.load import CALL_TIMEOUT_S, Call, caller
from weft.v2.client.channels import open_channel
from weft.v2.client.wires import WireName
from weft_protos import grpc_service_pb2 as pb

WRONG = "WRONG ANSWER"
#: A server may refuse what it has no room for, and say so.
_ALLOWED = {"OK", "RESOURCE_EXHAUSTED"}


class Burst(NamedTuple):
    """So many calls over so many channels."""

    num_calls: int
    num_channels: int


BURSTS = (Burst(5000, 1), Burst(5000, 100))


@dataclass(frozen=True, slots=True)
class BurstRow:
    """One burst.

    Attributes:
        server: Who got it.
        num_calls, num_channels: The burst.
        statuses: Calls by status name; right answers are OK.
        duration_s: From the first call to the last answer.
        cpu_s_per_1000: Of all processes of the server.
    """

    server: str
    num_calls: int
    num_channels: int
    statuses: dict[str, int]
    duration_s: float
    cpu_s_per_1000: float

    @property
    def is_good(self) -> bool:
        """Whether every call was answered rightly, or refused for want of room."""
        return self.statuses.keys() <= _ALLOWED


async def run_burst(candidate: Candidate, burst: Burst) -> BurstRow:
    """Start every call at once; each has ``CALL_TIMEOUT_S``."""
    (payload,) = IDENTITY.make_payloads()
    expected = payload.inputs["INPUT0"].tobytes()
    is_bare = candidate.arrangement == BARE
    statuses: Counter[str] = Counter()

    async def one(call: Call) -> None:
        try:
            answer = await call(payload.data)
        except grpc.aio.AioRpcError as error:
            statuses[error.code().name] += 1
        else:
            outputs = [answer] if is_bare else pb.ModelInferResponse.FromString(answer).raw_output_contents
            statuses["OK" if list(outputs) == [payload.data if is_bare else expected] else WRONG] += 1

    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                open_channel(candidate.server.address, options=[OWN_CONNECTION], wire=WireName.GRPCIO)
            )
            for _ in range(burst.num_channels)
        ]
        calls = [caller(channel) for channel in channels]
        before_s, start_s = candidate.server.cpu_s(), time.perf_counter()
        async with asyncio.timeout(2 * CALL_TIMEOUT_S):
            await asyncio.gather(*(one(calls[number % len(calls)]) for number in range(burst.num_calls)))
        duration_s, used_s = time.perf_counter() - start_s, candidate.server.cpu_s() - before_s
    return BurstRow(
        candidate.name, *burst, dict(statuses), round(duration_s, 2), round(used_s / burst.num_calls * 1000, 4)
    )


def burst_table(rows: Sequence[BurstRow]) -> str:
    """One line for each burst."""
    lines = [["calls at once", "channels", "server", "by status", "s", "CPU-s per 1000", ""]]
    for row in sorted(rows, key=lambda row: row.num_channels):
        statuses = ", ".join(f"{count} {name}" for name, count in sorted(row.statuses.items()))
        figures = (f"{row.duration_s:.1f}", f"{row.cpu_s_per_1000:.2f}", "" if row.is_good else "calls failed")
        lines.append([str(row.num_calls), str(row.num_channels), row.server, statuses, *figures])
    return table(lines, left_columns=(2, 3, 6))
