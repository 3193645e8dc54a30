"""Load on one graph: a closed loop of a fixed concurrency, or an open loop of planned arrivals; bounded."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import grpc

#: Sends one serialized request.
Call = Callable[[bytes], Awaitable[object]]

#: Requests of an open loop without an answer yet; the next counts as failed, so that a stalled mesh ends the run.
_MAX_OPEN_INFLIGHT = 2048
_CALL_TIMEOUT_S = 20.0
#: A closed loop goes on for so many times its duration until it has the answers that a percentile needs.
_MAX_STRETCH = 3.0
#: A closed loop ends after so many failed requests.
_MAX_ERRORS = 100
_METHOD = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(slots=True)
class Traffic:
    """What was sent and came back.

    Attributes:
        latencies_s: Of answered requests, seconds; of an open loop from the planned arrival.
        errors: Failed requests by gRPC status.
        first_error: Message of the first of them.
        duration_s: From the first request to the last answer, seconds.
        num_planned: Arrivals of an open loop.
    """

    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    first_error: str = ""
    duration_s: float = 0.0
    num_planned: int = 0

    def percentile_ms(self, percent: float) -> float:
        """Smallest latency that ``percent`` of the answers do not exceed, milliseconds; nan without answers."""
        if not self.latencies_s:
            return math.nan
        ordered = sorted(self.latencies_s)
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] * 1e3


def caller(channel: grpc.aio.Channel) -> Call:
    """Bytes in, bytes out: the client spends nothing on tensors."""
    method = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)

    async def call(request: bytes) -> object:
        return await method(request, timeout=_CALL_TIMEOUT_S)

    return call


async def closed_loop(
    call: Call, payloads: Sequence[bytes], *, concurrency: int, duration_s: float, min_answers: int
) -> Traffic:
    """Keep ``concurrency`` requests in work for ``duration_s``, or longer until there are ``min_answers``."""
    traffic = Traffic()
    start_s = time.perf_counter()
    supply = _supply(payloads, traffic, start_s, duration_s, min_answers)

    async def worker() -> None:
        for payload in supply:
            await _send(call, payload, traffic, time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    traffic.duration_s = time.perf_counter() - start_s
    return traffic


async def open_loop(call: Call, planned: Iterable[tuple[float, bytes]]) -> Traffic:
    """Send each request at its time, seconds from 0, whatever the answers do."""
    traffic = Traffic()
    running: set[asyncio.Task[None]] = set()
    start_s = time.perf_counter()
    for offset_s, payload in planned:
        arrival_s = start_s + offset_s
        if (wait_s := arrival_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        traffic.num_planned += 1
        if len(running) >= _MAX_OPEN_INFLIGHT:
            _fail(traffic, "CLIENT_LIMIT", f"more than {_MAX_OPEN_INFLIGHT} requests without an answer")
            continue
        task = asyncio.create_task(_send(call, payload, traffic, arrival_s))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    traffic.duration_s = time.perf_counter() - start_s
    return traffic


def _supply(
    payloads: Sequence[bytes], traffic: Traffic, start_s: float, duration_s: float, min_answers: int
) -> Iterator[bytes]:
    """Requests in turn; shared by the workers, which each take the next."""
    for payload in cycle(payloads):
        elapsed_s = time.perf_counter() - start_s
        has_enough = len(traffic.latencies_s) >= min_answers
        if traffic.errors.total() >= _MAX_ERRORS or elapsed_s >= duration_s * (1.0 if has_enough else _MAX_STRETCH):
            return
        yield payload


async def _send(call: Call, payload: bytes, traffic: Traffic, start_s: float) -> None:
    try:
        await call(payload)
    except grpc.aio.AioRpcError as error:
        _fail(traffic, error.code().name, error.details() or "")
        await asyncio.sleep(0)  # a mesh that refuses at once is not asked in a loop that nothing else enters
    else:
        traffic.latencies_s.append(time.perf_counter() - start_s)


def _fail(traffic: Traffic, status: str, message: str) -> None:
    traffic.errors[status] += 1
    traffic.first_error = traffic.first_error or message
