"""The same rate in two ways: requests that come 32 at once, and one after another in even steps."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import table
from benchmarks.wire.candidates import Candidate
from benchmarks.wire.workloads import IDENTITY
from weft.capacity.tuning.load import CALL_TIMEOUT_S, caller
from weft.v2.client.channels import open_channel
from weft.v2.client.wires import WireName
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

RATE_PER_S, AT_ONCE = 960, (32, 1)


@dataclass(frozen=True, slots=True)
class PaceRow:
    """One server at ``RATE_PER_S``, open loop.

    Attributes:
        num_at_once: Requests that are sent in one turn of the sender's loop; the pauses between are even.
        cpu_s_per_1000, num_sleeps: CPU time of all processes of the server for 1000 requests; how often one of their
            threads went to sleep for each request.
        rows_per_batch: Requests that the model executed together.
    """

    server: str
    num_at_once: int
    num_requests: int
    num_errors: int
    cpu_s_per_1000: float
    num_sleeps: float
    rows_per_batch: float
    p50_ms: float


async def run_pace(candidate: Candidate, num_at_once: int, duration_s: float) -> PaceRow:
    """Send at the rate, whatever becomes of the requests before. Raises AioRpcError if the model has no statistics."""
    (payload,) = IDENTITY.make_payloads()
    latencies_s: list[float] = []
    num_turns = max(round(RATE_PER_S * duration_s / num_at_once), 1)
    async with open_channel(candidate.server.address, wire=WireName.WEFT) as channel:
        call = caller(channel)

        async def one() -> None:
            start_s = time.perf_counter()
            await call(payload.data)
            latencies_s.append(time.perf_counter() - start_s)

        await asyncio.gather(*(one() for _ in range(2 * AT_ONCE[0])))
        latencies_s.clear()
        before = await _counts(candidate, channel)
        tasks, loop = [], asyncio.get_running_loop()
        start_s = loop.time()
        for turn in range(num_turns):
            await asyncio.sleep(start_s + turn * num_at_once / RATE_PER_S - loop.time())
            tasks += [asyncio.create_task(one()) for _ in range(num_at_once)]
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await asyncio.gather(*tasks, return_exceptions=True)
        after = await _counts(candidate, channel)
    used_s, sleeps, rows, batches = (b - a for a, b in zip(before, after, strict=True))
    number = len(tasks)
    return PaceRow(
        candidate.name, num_at_once, number, number - len(latencies_s), round(used_s / number * 1000, 4),
        round(sleeps / number, 2), round(rows / max(batches, 1), 1), round(statistics.median(latencies_s) * 1e3, 2),
    )  # fmt: skip


async def _counts(candidate: Candidate, channel: object) -> tuple[float, int, int, int]:
    """CPU time, context switches, rows and executions so far."""
    stub: Any = GRPCInferenceServiceStub(channel)
    answer = await stub.ModelStatistics(pb.ModelStatisticsRequest(name=IDENTITY.model))
    (model,) = answer.model_stats
    return candidate.server.cpu_s(), _num_sleeps(candidate), model.inference_count, model.execution_count


def _num_sleeps(candidate: Candidate) -> int:
    threads = [thread for pid in candidate.server.pids() for thread in Path(f"/proc/{pid}/task").iterdir()]
    texts = [(thread / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2] for thread in threads]
    return sum(int(text.split()[0]) for text in texts)


def pace_table(rows: Sequence[PaceRow]) -> str:
    """One line for each server and way."""
    lines = [["at once", f"server, {RATE_PER_S}/s", "CPU-s per 1000", "sleeps", "rows a batch", "p50 ms", "errors"]]
    for row in sorted(rows, key=lambda row: (row.server, row.num_at_once)):
        figures = (
            f"{row.cpu_s_per_1000:.3f}",
            f"{row.num_sleeps:.2f}",
            f"{row.rows_per_batch:.1f}",
            f"{row.p50_ms:.2f}",
        )
        lines.append([str(row.num_at_once), row.server, *figures, str(row.num_errors)])
    return table(lines, left_columns=(1,))
