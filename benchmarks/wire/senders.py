"""What sends the load: h2load, tritonclient, or bytes over grpc.aio where h2load is missing."""

import asyncio
import re
import shutil
import struct
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
from tritonclient import grpc as triton
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from benchmarks.floor import METHOD, SERVICE
from benchmarks.wire.workloads import Payload, Shape
from weft.capacity.tuning.load import CALL_TIMEOUT_S, Bounds, Load, Request, caller, closed_loop
from weft.v2.client.channels import open_channel
from weft.v2.client.wires import WireName

H2LOAD, TRITONCLIENT, OWN = "h2load", "tritonclient", "grpc.aio"
#: Compression flag and length before a message.
PREFIX_BYTES = 5
#: Without it, channels of one process to one address share a connection.
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
_CHANNEL_ARGUMENTS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    OWN_CONNECTION,
]
_SEND_TIMEOUT_S = 120.0
_OUTCOMES = re.compile(r"requests: (\d+) total.* (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout")
_BODIES = re.compile(r"traffic: .* \((\d+)\) data")
_DURATION = re.compile(r"finished in ([0-9.]+)(us|ms|s|m)?,")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}


class Sent(NamedTuple):
    """What a sender saw.

    Attributes:
        load: Latencies and errors. h2load does not know the status of a call: it may count a refused one as answered.
        num_body_bytes: Of all answers' messages, each with its prefix; None where the sender reads the statuses.
    """

    load: Load
    num_body_bytes: int | None = None


class Sender(Protocol):
    """Sends so many requests and waits for every answer."""

    @property
    def name(self) -> str:
        """For the table."""

    async def send(self, address: str, payloads: Sequence[Payload], shape: Shape, num_requests: int) -> Sent:
        """Send them, in closed loops. Raises RuntimeError if the program fails as a whole."""


@dataclass(frozen=True, slots=True)
class H2Load:
    """nghttp2's load generator, a program in C; it sends the first payload alone."""

    name: str = H2LOAD

    async def send(self, address: str, payloads: Sequence[Payload], shape: Shape, num_requests: int) -> Sent:
        """As ``Sender.send``."""
        data = payloads[0].data
        with tempfile.TemporaryDirectory(prefix="weft-h2load-") as name:
            body, log = Path(name) / "body", Path(name) / "log"
            body.write_bytes(struct.pack(">BI", 0, len(data)) + data)
            command = [
                "h2load", "-n", str(num_requests), "-c", str(shape.num_connections), "-m", str(shape.num_streams),
                "-t", "1", "-d", str(body), "-H", "content-type: application/grpc", "-H", "te: trailers",
                "-H", "user-agent: h2load", f"--log-file={log}", "-N", f"{CALL_TIMEOUT_S:.0f}",
                f"http://{address}/{SERVICE}/{METHOD}",
            ]  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            try:
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    output, _ = await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()
                raise RuntimeError(f"h2load did not end in {_SEND_TIMEOUT_S:g} s at {address}, {shape}") from None
            return read_h2load(output.decode(), log.read_text() if log.exists() else "")


def read_h2load(output: str, log: str) -> Sent:
    """Its report and its log of requests. Raises RuntimeError where it gave no report."""
    outcomes, bodies, duration = (pattern.search(output) for pattern in (_OUTCOMES, _BODIES, _DURATION))
    if outcomes is None or bodies is None or duration is None:
        raise RuntimeError(f"h2load gave no report:\n{output[-2000:]}")
    load = Load(duration_s=float(duration[1]) * _SECONDS[duration[2]])
    for line in log.splitlines():
        _, status, latency_us = line.split()[:3]
        if status == "200":
            load.latencies_s.append(int(latency_us) / 1e6)
    if missing := int(outcomes[1]) - len(load.latencies_s):
        load.errors["NO_ANSWER"] = missing
    return Sent(load, int(bodies[1]))


@dataclass(frozen=True, slots=True)
class TritonClient:
    """The asyncio client of Triton Inference Server; each answer's status is read."""

    name: str = TRITONCLIENT

    async def send(self, address: str, payloads: Sequence[Payload], shape: Shape, num_requests: int) -> Sent:
        """As ``Sender.send``."""
        model = payloads[0].model
        inputs = [_tensors(payload) for payload in payloads]
        async with AsyncExitStack() as stack:
            calls = []
            for _ in range(shape.num_connections):
                client = triton_aio.InferenceServerClient(address, channel_args=_CHANNEL_ARGUMENTS)
                stack.push_async_callback(client.close)
                calls.append(_triton_call(client, model))
            return Sent(await _spread(calls, inputs, shape, num_requests))


@dataclass(frozen=True, slots=True)
class GrpcAio:
    """Bytes over ``grpc.aio``: nothing is spent on tensors. What sends where h2load is missing."""

    name: str = OWN

    async def send(self, address: str, payloads: Sequence[Payload], shape: Shape, num_requests: int) -> Sent:
        """As ``Sender.send``."""
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(open_channel(address, options=[OWN_CONNECTION], wire=WireName.GRPCIO))
                for _ in range(shape.num_connections)
            ]
            calls = [caller(channel) for channel in channels]
            return Sent(await _spread(calls, [payload.data for payload in payloads], shape, num_requests))


def available_senders() -> list[Sender]:
    """The raw one, h2load where it is installed, and the client of Triton Inference Server."""
    return [H2Load() if shutil.which("h2load") else GrpcAio(), TritonClient()]


async def _spread(
    calls: Sequence[Callable[[Request], Awaitable[object]]],
    requests: Sequence[Request],
    shape: Shape,
    num_requests: int,
) -> Load:
    """One closed loop for each connection; each begins at another place among the requests."""
    shares = [len(range(number, num_requests, len(calls))) for number in range(len(calls))]
    starts = [number * len(requests) // len(calls) for number in range(len(calls))]
    loops = [
        closed_loop(
            call, [*requests[start:], *requests[:start]], Bounds(share, _SEND_TIMEOUT_S), concurrency=shape.num_streams
        )
        for call, share, start in zip(calls, shares, starts, strict=True)
    ]
    loads = await asyncio.gather(*loops)
    merged = Load(duration_s=max(load.duration_s for load in loads))
    for load in loads:
        merged.latencies_s += load.latencies_s
        merged.errors += load.errors
    return merged


def _tensors(payload: Payload) -> list[Any]:
    tensors = []
    for name, array in payload.inputs.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def _triton_call(client: Any, model: str) -> Callable[[list[Any]], Awaitable[object]]:
    async def call(tensors: list[Any]) -> object:
        try:
            return await client.infer(model, tensors, client_timeout=CALL_TIMEOUT_S)
        except InferenceServerException as error:
            code = getattr(grpc.StatusCode, (error.status() or "").rpartition(".")[2], grpc.StatusCode.UNKNOWN)
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), error.message()) from error

    return call
