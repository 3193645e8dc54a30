"""Requests of a trial, serialized before it begins, and when they arrive."""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.base.core import InferCall
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import INTEGERS, NUMPY_BY_DATATYPE, Array, WireTensor, encode
from weft.capacity.tuning.load import Bounds, arrivals_s
from weft.v2.protocol.encoding import serialize_call

if TYPE_CHECKING:
    from weft.jobs.dataset import Dataset

#: Column of recorded requests: when each arrived, seconds from any moment.
ARRIVAL_COLUMN = "at_s"
#: Most different requests, and most bytes of them; a longer data set is used as far as that.
MAX_REQUESTS = 4096
MAX_BYTES = 256 << 20
_NUM_GENERATED = 256
_MAX_WORDS = 64
_MAX_LENGTH = 64
_WORDS = "a the of to in is that for you all we order parcel invoice refund account engine battery station garden"


@dataclass(frozen=True)
class RequestSet:
    """Requests in their order.

    Attributes:
        payloads: Serialized ``ModelInferRequest``, at least one.
        arrivals_s: When each arrived, from 0, not falling; empty where that was not recorded.
        source: Where they are from, for the report.
    """

    payloads: tuple[bytes, ...]
    arrivals_s: tuple[float, ...]
    source: str


def generated(signature: ModelSignature, *, rows: int, seed: int) -> RequestSet:
    """Requests of random values: words, numbers from 0 to 1, small whole numbers; sizes that are open vary to 64.

    Optional inputs are left out; ``rows`` of each request count where there is a batch dimension.
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
    """The data set that an option names.

    Raises:
        NotFoundError, InvalidArgumentError: There is none, or it has no format that is known.
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
    """Requests of the rows of a data set, read as ``weft batch`` reads it.

    Args:
        signature: Of the graph or model.
        path: Parquet, JSON Lines or CSV.
        column_of: Column of an input, where it has another name.
        rows: Of each request; adjacent rows of one shape go together.
        recorded: Each row arrives on its own, when its column ``at_s`` says.

    Raises:
        InvalidArgumentError: A column is missing, no row fits the inputs, or arrivals are no rising seconds.
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
    """Arrival time, seconds from 0, and request, until the duration is over.

    Recorded arrivals are repeated when they end, and come at ``rate_per_s`` if that is not 0; others are a Poisson
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
    """Runs of rows with an equal key, of at most so many."""
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
