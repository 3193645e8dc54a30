"""``InferenceRequest``: one request inside the server, from admission to answer."""

import threading
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.base.core import CallContext, InferCall, InferResult, Parameters
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.tensors import Array, WireTensor, decode, num_elements
from weft.serving.request.stream import ResponseStream

if TYPE_CHECKING:
    from weft.base.observing.work_span import WorkSpan

#: A request of more parts is refused: each waits in the queue on its own.
MAX_PARTS = 1024

_LENGTH = Struct("<I")


def split_call(call: InferCall, num_rows: int, max_rows: int) -> list[InferCall]:
    """Split a call into parts of at most ``max_rows`` rows; copies bytes. Raises InvalidArgumentError for too many."""
    bounds = [*range(0, num_rows, max_rows), num_rows]
    if len(bounds) - 1 > MAX_PARTS:
        raise InvalidArgumentError(
            f"inference request batch-size must be <= {MAX_PARTS * max_rows} for '{call.model_name}', which splits "
            f"requests into at most {MAX_PARTS} parts of {max_rows} rows, got {num_rows}; send fewer rows"
        )
    rows = {name: list(_cut(tensor, bounds)) for name, tensor in call.inputs.items()}
    parts = range(len(bounds) - 1)
    return [replace(call, inputs={name: tensors[i] for name, tensors in rows.items()}, num_rows=1) for i in parts]


def _cut(tensor: WireTensor, bounds: Sequence[int]) -> Iterator[WireTensor]:
    datatype, shape, data = tensor
    offsets = _offsets(data, shape, bounds) if datatype == "BYTES" else [len(data) // shape[0] * row for row in bounds]
    for i in range(len(bounds) - 1):
        yield WireTensor(datatype, (bounds[i + 1] - bounds[i], *shape[1:]), data[offsets[i] : offsets[i + 1]])


def _offsets(data: bytes, shape: Sequence[int], bounds: Sequence[int]) -> list[int]:
    """Byte offsets, in the data of BYTES elements, of the rows of ``bounds``."""
    per_row = num_elements(shape[1:])
    offsets, offset, element = [], 0, 0
    for row in bounds:
        while element < row * per_row:
            offset += 4 + _LENGTH.unpack_from(data, offset)[0]
            element += 1
        offsets.append(offset)
    return offsets


def join_results(results: Sequence[InferResult]) -> InferResult:
    """Join the rows of all results. Raises InvalidArgumentError if outputs or the shapes of rows differ."""
    first = results[0]
    outputs: dict[str, WireTensor] = {}
    given = {name: tensor for result in reversed(results) for name, tensor in reversed(result.outputs.items())}
    for name, (datatype, shape, _) in reversed(given.items()):
        tensors = [result.outputs.get(name) for result in results]
        shapes = {None if tensor is None else (tensor.datatype, *tensor.shape[1:]) for tensor in tensors}
        if shapes != {(datatype, *shape[1:])} or not shape:
            raise InvalidArgumentError(
                f"the parts of the request cannot be joined: output '{name}' has rows of shapes "
                f"{sorted(map(str, shapes))}; send at most as many rows as the model's max_batch_size in one request"
            )
        joined = [tensor for tensor in tensors if tensor is not None]
        num_rows = sum(tensor.shape[0] for tensor in joined)
        outputs[name] = WireTensor(datatype, (num_rows, *shape[1:]), b"".join([tensor.data for tensor in joined]))
    return InferResult(first.model_name, first.model_version, first.request_id, first.parameters, outputs)


#: Guards the lists of callbacks, which are rare.
_callbacks_lock = threading.Lock()


class Work(NamedTuple):
    """A backend's description of its work on one request, for the span; event times are ``time.monotonic_ns``."""

    name: str
    attributes: Mapping[str, Any]
    events: Sequence[tuple[str, int, Mapping[str, Any]]] = ()


@dataclass(slots=True, eq=False)
class InferenceRequest:
    """A validated request from admission to answer.

    Times are on the clock of ``time.monotonic_ns``. The event loop owns the object; an instance thread reads it while
    it executes it, and writes only the decoded arrays and the inputs that the server adds for a stateful sequence.

    Attributes:
        call: The request as it came; inputs are checked against the model's signature.
        num_rows: Batch size, 1 for a model without batch dimension.
        priority: Level, 1 is highest; 0 where the model has no levels.
        queue_timeout_us: Longest time in the queue; 0 means no limit.
        enqueue_ns: When it entered the queue.
        start_ns: When its batch was formed; 0 while it waits.
        num_queued_at_arrival: Requests in the queue when it came.
        rank_ns: Place in the order of service, the least first; only of queue policies that rank requests by a time.
        send_by_ns: Until when it may be held back for others to join its batch.
        expected_ns: Expected duration of its execution, from measurements; 0: not known.
        batch_key: Requests share a batch only where this is equal; None where any two may.
        sequence: Order of arrival in its queue, from 0.
        is_cancelled: The caller has left; backends may check and stop early. Set by ``cancel``.
        answer: Receives the result or the error; None outside a served model.
        split: What the request is a part of, or was split into; None for the others.
        stream: Takes the responses of a decoupled model; None for others, and once it is closed.
        is_collected: The model is decoupled, and one response with everything is wanted.
        position: In its stateful sequence; None where the model has no ``sequence_batching``.
        describe: Set by a backend that has more to say of its work than how long it took; called at the request's end.
        span: Of its execution by user code; None where spans are not recorded, or the backend runs none.
    """

    call: InferCall
    context: CallContext
    num_rows: int = 1
    priority: int = 0
    queue_timeout_us: int = 0
    enqueue_ns: int = 0
    start_ns: int = 0
    num_queued_at_arrival: int = 0
    rank_ns: int = 0
    send_by_ns: int = 0
    expected_ns: int = 0
    batch_key: object = None
    sequence: int = -1
    is_cancelled: bool = False
    answer: "Future[InferResult | WeftError] | None" = None
    split: "SplitRequest | None" = None
    stream: "ResponseStream[Response] | None" = None
    is_collected: bool = False
    position: "SequencePosition | None" = None
    describe: Callable[[], Work] | None = None
    span: "WorkSpan | None" = None
    _arrays: dict[str, Array] = field(default_factory=dict)
    _on_cancel: list[Callable[[], None]] | None = None

    @property
    def is_withdrawn(self) -> bool:
        """Whether the caller has left or the deadline has passed."""
        deadline_ns = self.context.deadline_ns
        return self.is_cancelled or (deadline_ns is not None and time.monotonic_ns() >= deadline_ns)

    def has_left(self) -> bool:
        """As ``is_withdrawn``, also by what the service has told but nobody has read; for models that ask."""
        return self.is_withdrawn

    def cancel(self) -> None:
        """Mark the request as cancelled and call the callbacks of ``when_cancelled``. On the event loop."""
        self.is_cancelled = True
        if self._on_cancel is not None:
            self._call_back()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the caller leaves, or now if it has left; thread-safe, runs on any thread."""
        with _callbacks_lock:
            if self._on_cancel is None:
                self._on_cancel = []
        self._on_cancel.append(callback)
        if self.is_cancelled:
            self._call_back()

    def forget(self, callback: Callable[[], None]) -> None:
        """Undo ``when_cancelled``."""
        try:
            if self._on_cancel is not None:
                self._on_cancel.remove(callback)
        except ValueError:  # ``suppress`` costs three calls
            pass

    def _call_back(self) -> None:
        with suppress(IndexError):
            while self._on_cancel is not None:
                self._on_cancel.pop()()

    def add_inputs(self, inputs: Mapping[str, WireTensor]) -> None:
        """Add inputs, replacing earlier ones of the same names."""
        self.call = replace(self.call, inputs={**self.call.inputs, **inputs})
        for name in inputs:
            self._arrays.pop(name, None)

    def array(self, name: str) -> Array:
        """Input ``name`` as a read-only array, decoded once. Raises KeyError, or InvalidArgumentError."""
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = decode(self.call.inputs[name], name=name)
        return array

    def arrays(self) -> list[tuple[str, Array]]:
        """Names and arrays of the inputs, in the order sent; the arrays are the caller's to change."""
        arrays = []
        for name in self.call.inputs:
            array = self.array(name)
            arrays.append((name, array if array.flags.writeable else array.copy()))
        return arrays


class RequestSequence:
    """A stateful sequence: requests with one ``sequence_id``, up to the one with ``sequence_end``.

    It has a ``row``, its slot, of an ``instance``; None while it waits. ``idle_since_ns`` is when the latest request
    was answered, if none waits or runs. ``state`` is left by the latest request; only instance threads access it.
    """

    __slots__ = ("id", "idle_since_ns", "instance", "is_over", "row", "running", "state", "waiting")

    def __init__(self, sequence_id: int | str) -> None:
        self.id = sequence_id
        self.waiting: deque[InferenceRequest] = deque()
        self.running: InferenceRequest | None = None
        self.instance: Hashable = None
        self.row = -1
        self.idle_since_ns = 0
        self.state: dict[str, WireTensor] = {}
        self.is_over = False


@dataclass(frozen=True, slots=True, eq=False)
class SequencePosition:
    """The position of a request in its stateful sequence."""

    sequence: RequestSequence
    is_start: bool
    is_end: bool


class SplitRequest:
    """A large request, not queued itself, and its queued parts; each has its own ``answer``, and this as ``split``."""

    def __init__(self, whole: InferenceRequest, calls: Sequence[InferCall], max_rows: int) -> None:
        self.whole = whole
        self.parts = [
            InferenceRequest(
                call,
                whole.context,
                min(max_rows, whole.num_rows - i * max_rows),
                whole.priority,
                whole.queue_timeout_us,
                answer=whole.answer,
                split=self,
            )
            for i, call in enumerate(calls)
        ]
        whole.split = self
        self._results: dict[InferenceRequest, InferResult] = {}

    def add(self, part: InferenceRequest, outcome: InferResult | WeftError) -> InferResult | WeftError | None:
        """Add the answer of a part; return the whole answer once known: the first error, or the joined results."""
        if isinstance(outcome, WeftError):
            return self.error_of(part, outcome)
        self._results[part] = outcome
        if len(self._results) < len(self.parts):
            return None
        try:
            return join_results([self._results[other] for other in self.parts])
        except InvalidArgumentError as error:
            return error

    def error_of(self, part: InferenceRequest, error: WeftError) -> WeftError:
        """Turn the error of a part into that of the whole request, naming the rows that failed."""
        start = 0
        for other in self.parts:
            if other is part:
                last, num_rows = start + part.num_rows - 1, self.whole.num_rows
                return error.with_message(f"rows {start} to {last} of {num_rows}: {error.message}")
            start += other.num_rows
        return error

    def close(self) -> None:
        """Release the parts once the whole is answered, which breaks the reference cycle."""
        self.parts = []
        self.whole.split = None
        self._results.clear()


@dataclass(slots=True)
class InferenceResponse:
    """A backend's answer to one request: outputs by name, batch dimension included."""

    outputs: dict[str, Array]
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class EncodedResponse:
    """An ``InferenceResponse`` whose outputs a model of another process has encoded."""

    outputs: dict[str, WireTensor]
    parameters: Parameters = field(default_factory=dict)


Response = InferenceResponse | EncodedResponse
Outcome = Response | WeftError

#: The outcome of a request of an iterative sequence that is executed again; it is not answered yet.
RESCHEDULED = InferenceResponse({})

#: The outcome of a request of a decoupled model: its responses go through its stream.
STREAMED = InferenceResponse({})
