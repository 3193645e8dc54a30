"""Load generator for one method: a closed loop (fixed concurrency) and an open loop (planned arrivals), with bounds.

Requests, from a data set or of random values, are serialized before a run begins.
"""

import asyncio
import itertools
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import grpc
import numpy as np

from weft.base.core import InferCall
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import INTEGERS, NUMPY_BY_DATATYPE, Array, WireTensor, encode
from weft.v2.protocol.encoding import serialize_call

if TYPE_CHECKING:
    from weft.jobs.dataset import Dataset

#: Sends one serialized request and gives the serialized answer.
Call = Callable[[bytes], Awaitable[bytes]]
Request = TypeVar("Request")

#: Requests of an open loop without an answer yet; the next counts as failed, so that a stalled server ends the run.
MAX_OPEN_INFLIGHT = 2048
CALL_TIMEOUT_S = 30.0
#: A closed loop goes on for so many times its duration until it has the answers that a percentile needs.
_MAX_STRETCH = 3.0
_METHOD = "/inference.GRPCInferenceService/ModelInfer"

#: Column of recorded requests: when each arrived, seconds from any moment.
ARRIVAL_COLUMN = "at_s"
#: Most different requests, and most bytes of them; a longer data set is used as far as that.
MAX_REQUESTS = 4096
MAX_BYTES = 256 << 20
_NUM_GENERATED = 256
_MAX_WORDS = 64
_MAX_LENGTH = 64
_WORDS = "a the of to in is that for you all we order parcel invoice refund account engine battery station garden"


class Bounds(NamedTuple):
    """When to stop sending: after a count of requests or a time in seconds, whichever is met first."""

    num_requests: int
    duration_s: float


@dataclass(slots=True)
class Load:
    """Measurements of one run.

    Attributes:
        latencies_s: Of answered requests, in order of completion; in an open loop from the planned arrival.
        duration_s: From the first request to the last answer.
        num_planned: Arrivals of an open loop.
    """

    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    first_error: str = ""
    duration_s: float = 0.0
    num_planned: int = 0

    @property
    def rate_per_s(self) -> float:
        """Answered requests per second; 0 where none was."""
        return len(self.latencies_s) / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def mean_ms(self) -> float:
        """Mean latency, milliseconds; nan without answers."""
        return sum(self.latencies_s) / len(self.latencies_s) * 1e3 if self.latencies_s else math.nan

    def percentile_ms(self, percent: float) -> float:
        """Smallest latency that ``percent`` of the answers do not exceed, milliseconds; nan without answers."""
        if not self.latencies_s:
            return math.nan
        ordered = sorted(self.latencies_s)
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] * 1e3

    def _fail(self, status: str, message: str) -> None:
        self.errors[status] += 1
        self.first_error = self.first_error or message


def caller(channel: grpc.aio.Channel) -> Call:
    """A call from bytes to bytes, so that the load generator spends nothing on protobuf."""
    method = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)

    async def call(request: bytes) -> bytes:
        answer: bytes = await method(request, timeout=CALL_TIMEOUT_S)
        return answer

    return call


async def closed_loop(
    call: Callable[[Request], Awaitable[object]],
    requests: Sequence[Request],
    bounds: Bounds,
    *,
    concurrency: int,
    min_answers: int = 0,
    max_errors: int = sys.maxsize,
) -> Load:
    """Keep ``concurrency`` requests in flight until a bound is met.

    Args:
        call: The call under load; a failure is an ``AioRpcError``.
        requests: Sent in turn, repeatedly.
        concurrency: Requests in flight; each waits for its answer before the next.
        min_answers: With fewer it continues, for up to three times the duration.
        max_errors: Stop after this many failed requests.
    """
    load = Load()
    start_s = time.perf_counter()

    def supply() -> Iterator[Request]:
        for _, request in zip(range(bounds.num_requests), itertools.cycle(requests), strict=False):
            stretch = 1.0 if len(load.latencies_s) >= min_answers else _MAX_STRETCH
            if time.perf_counter() - start_s >= bounds.duration_s * stretch or load.errors.total() >= max_errors:
                return
            yield request

    shared = supply()  # the workers each take the next

    async def worker() -> None:
        for request in shared:
            await _measure(call, request, load, time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    load.duration_s = time.perf_counter() - start_s
    return load


async def open_loop(call: Call, requests: Sequence[bytes], bounds: Bounds, *, rate_per_s: float, seed: int) -> Load:
    """Send requests in turn at Poisson arrival times of a mean rate, regardless of answers."""
    return await planned_loop(call, zip(arrivals_s(rate_per_s, bounds, seed), itertools.cycle(requests), strict=False))


async def planned_loop(call: Call, planned: Iterable[tuple[float, bytes]]) -> Load:
    """Send each request at its time, seconds from 0, regardless of answers."""
    load = Load()
    running: set[asyncio.Task[None]] = set()
    start_s = time.perf_counter()
    for offset_s, request in planned:
        arrival_s = start_s + offset_s
        await asyncio.sleep(max(0.0, arrival_s - time.perf_counter()))
        load.num_planned += 1
        if len(running) >= MAX_OPEN_INFLIGHT:
            load._fail("CLIENT_LIMIT", f"more than {MAX_OPEN_INFLIGHT} requests without an answer")
            continue
        task = asyncio.create_task(_measure(call, request, load, arrival_s))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    load.duration_s = time.perf_counter() - start_s
    return load


def arrivals_s(rate_per_s: float, bounds: Bounds, seed: int) -> Iterator[float]:
    """Arrival times of a Poisson process from 0, seconds; ends at either bound."""
    draw = random.Random(seed)  # noqa: S311
    arrival_s = 0.0
    for _ in range(bounds.num_requests):
        arrival_s += draw.expovariate(rate_per_s)
        if arrival_s > bounds.duration_s:
            return
        yield arrival_s


async def _measure(call: Callable[[Request], Awaitable[object]], request: Request, load: Load, start_s: float) -> None:
    try:
        await call(request)
    except grpc.aio.AioRpcError as error:
        load._fail(error.code().name, error.details() or "")
        await asyncio.sleep(0)  # what refuses at once is not asked in a loop that nothing else enters
    else:
        load.latencies_s.append(time.perf_counter() - start_s)


@dataclass(frozen=True)
class RequestSet:
    """Requests in order.

    Attributes:
        payloads: Serialized ``ModelInferRequest``, at least one.
        arrivals_s: When each arrived, from 0, ascending; empty if not recorded.
        source: Their origin, for the report.
    """

    payloads: tuple[bytes, ...]
    arrivals_s: tuple[float, ...]
    source: str


def generated(signature: ModelSignature, *, rows: int, seed: int) -> RequestSet:
    """Requests of random values: words, numbers from 0 to 1, small integers; variable sizes vary up to 64.

    Optional inputs are left out; each request has ``rows`` rows if there is a batch dimension.
    """
    numbers = np.random.default_rng(seed)
    payloads = []
    for _ in range(_NUM_GENERATED):
        length = int(numbers.integers(1, _MAX_LENGTH + 1))  # inputs of one request agree in what is open
        tensors = {}
        for spec in signature.inputs:
            if not spec.is_optional:
                shape = tuple(length if dim == -1 else dim for dim in spec.dims)
                shape = (rows, *shape) if signature.max_batch_size else shape
                tensors[spec.name] = encode(_random(spec, shape, numbers))
        payloads.append(_serialized(signature, tensors))
    return RequestSet(tuple(payloads), (), "random values")


def open_data(path: str, option: str) -> "Dataset":
    """The data set named by an option.

    Raises:
        NotFoundError, InvalidArgumentError: No such file, or its format is unknown.
        ModuleNotFoundError: pyarrow or fsspec is missing.
        OSError: A file cannot be read.
    """
    from weft.jobs.dataset import Dataset  # noqa: PLC0415  # pyarrow

    try:
        return Dataset(path)
    except (NotFoundError, InvalidArgumentError) as error:
        raise type(error)(error.message.replace("--input", option)) from None


def from_data(
    signature: ModelSignature, path: str, *, column_of: Mapping[str, str], rows: int, recorded: bool
) -> RequestSet:
    """Requests from the rows of a data set, read as by ``weft batch``.

    Args:
        path: Parquet, JSON Lines or CSV.
        rows: Of each request; adjacent rows of one shape go together.
        recorded: Each row arrives on its own, at the time in its column ``at_s``.

    Raises:
        InvalidArgumentError: A column is missing, no row fits the inputs, or arrivals are no ascending seconds.
        NotFoundError: There is no such file.
        ModuleNotFoundError: pyarrow or fsspec is missing.
        OSError: A file cannot be read.
    """
    from weft.jobs.layout import make_layout  # noqa: PLC0415  # pyarrow

    layout = make_layout(signature, column_of=column_of, rows_per_request=1 if recorded else rows)
    columns = [*layout.columns, ARRIVAL_COLUMN] if recorded else layout.columns
    payloads: list[bytes] = []
    arrivals_s: list[float] = []
    num_bytes, fault = 0, ""
    for shard in open_data(path, "--recorded" if recorded else "--data").shards(
        MAX_REQUESTS * layout.rows_per_request, columns
    ):
        values = {spec.name: layout.read(spec, shard.columns, is_text=shard.is_text) for spec in layout.inputs}
        faults = dict(shard.faults)
        for name, one in values.items():
            faults = {row: f"input '{name}': {message}" for row, message in one.faults.items()} | faults
        fault = fault or next((f"row {shard.first_row + row} of '{shard.file}': {faults[row]}" for row in faults), "")
        good = [row for row in range(shard.num_rows) if row not in faults]
        key = lambda row: [one.shape(row) for one in values.values()]  # noqa: B023, E731  # used within the turn
        for group in _adjacent(good, key, layout.rows_per_request):
            payloads.append(_serialized(signature, layout.tensors(values, group)))
            num_bytes += len(payloads[-1])
            if recorded:
                arrivals_s.append(_seconds(shard.columns[ARRIVAL_COLUMN][group[0]], shard.first_row + group[0]))
            if len(payloads) >= MAX_REQUESTS or num_bytes >= MAX_BYTES:
                return _request_set(payloads, arrivals_s, path)
    if not payloads:
        raise InvalidArgumentError(f"'{path}' has no row that '{signature.name}' takes; {fault or 'it has no rows'}")
    return _request_set(payloads, arrivals_s, path)


def arrivals(requests: RequestSet, rate_per_s: float, duration_s: float, seed: int) -> Iterator[tuple[float, bytes]]:
    """Yield arrival time, seconds from 0, and request, for the duration.

    Recorded arrivals are repeated when they end, and scaled to ``rate_per_s`` unless that is 0; others are a Poisson
    process of that rate.
    """
    if recorded_s := requests.arrivals_s:
        last_s, number = recorded_s[-1], len(recorded_s)
        # To the last arrival, and a mean gap more.
        period_s = last_s * number / (number - 1) if number > 1 and last_s > 0 else 1.0
        faster = rate_per_s * period_s / number if rate_per_s else 1.0
        times = (turn * period_s + at_s for turn in itertools.count() for at_s in recorded_s)
        planned: Iterator[float] = (at_s / faster for at_s in times)
    else:
        planned = arrivals_s(rate_per_s, Bounds(sys.maxsize, duration_s), seed)
    for at_s, payload in zip(planned, itertools.cycle(requests.payloads), strict=False):
        if at_s >= duration_s:
            return
        yield at_s, payload


def _request_set(payloads: Sequence[bytes], arrivals_s: Sequence[float], path: str) -> RequestSet:
    if any(later < earlier for earlier, later in itertools.pairwise(arrivals_s)):
        raise InvalidArgumentError(f"the column '{ARRIVAL_COLUMN}' of '{path}' falls; sort the rows by it")
    first_s = arrivals_s[0] if arrivals_s else 0.0
    return RequestSet(tuple(payloads), tuple(at_s - first_s for at_s in arrivals_s), path)


def _seconds(value: Any, row: int) -> float:
    plain = value.as_py() if hasattr(value, "as_py") else value
    try:
        seconds = float(plain)
    except (TypeError, ValueError):
        seconds = float("nan")
    if not np.isfinite(seconds):
        raise InvalidArgumentError(f"row {row}: the column '{ARRIVAL_COLUMN}' must be a time in seconds, got {plain!r}")
    return seconds


def _adjacent(rows: Sequence[int], key: Any, most: int) -> Iterator[list[int]]:
    """Runs of adjacent rows with equal keys, of limited length."""
    for _, run in itertools.groupby(rows, key):
        adjacent = list(run)
        yield from (adjacent[start : start + most] for start in range(0, len(adjacent), most))


def _serialized(signature: ModelSignature, tensors: Mapping[str, WireTensor]) -> bytes:
    return serialize_call(InferCall(signature.name, signature.version, inputs=dict(tensors)))


def _random(spec: TensorSpec, shape: tuple[int, ...], numbers: np.random.Generator) -> Array:
    if spec.datatype == "BYTES":
        texts = np.empty(shape, np.object_)
        for index in np.ndindex(shape):
            texts[index] = " ".join(numbers.choice(_WORDS.split(), numbers.integers(1, _MAX_WORDS + 1))).encode()
        return texts
    dtype = NUMPY_BY_DATATYPE[spec.datatype]
    if spec.datatype == "BOOL":
        return numbers.integers(0, 2, shape).astype(dtype)
    if spec.datatype in INTEGERS:
        return numbers.integers(0, 100, shape).astype(dtype)
    return numbers.random(shape).astype(dtype)
