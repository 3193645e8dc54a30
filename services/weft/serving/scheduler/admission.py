"""Estimates from recent executions: refuses deadlines that cannot be met, and computes ``retry_after_ms``."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import unquote

from weft.base.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor
from weft.serving.queues.queue import RequestQueue
from weft.serving.queues.settings import LengthBuckets, SchedulerSettings
from weft.serving.request.request import InferenceRequest

BatchKey = Callable[[Mapping[str, WireTensor]], object]

CALL_PATH_HEADER = "x-weft-call-path"
#: Calls within calls; a path that is longer is taken for a loop.
MAX_CALL_DEPTH = 16

_SEPARATOR = ">"


def path_of(headers: Mapping[str, str]) -> list[str]:
    """Entries of a request's path of nested calls, the outermost first."""
    text = headers.get(CALL_PATH_HEADER, "")
    return text.split(_SEPARATOR) if text else []


def callers_of(headers: Mapping[str, str]) -> set[str]:
    """Tokens (``InstanceContext.token``) of the instances that wait for a nested request."""
    return {entry.rpartition(".")[2] for entry in path_of(headers)}


def longer_path(paths: Iterable[list[str]], origin: str, model: str) -> str:
    """The path header for a call of ``model`` by ``origin``. Raises InvalidArgumentError if calls nest too deeply."""
    path = [*max(paths, key=len, default=[]), origin]
    if len(path) > MAX_CALL_DEPTH:
        names = [unquote(entry.rsplit(".", 2)[0]) for entry in path]
        raise InvalidArgumentError(
            f"models call one another more than {MAX_CALL_DEPTH} deep: {' > '.join([*names, model])}; a model that "
            "calls itself, directly or through others, must come to an end"
        )
    return _SEPARATOR.join(path)


def check_self_call(
    model: str, origins: frozenset[str], request: InferenceRequest, queued: Iterable[InferenceRequest]
) -> None:
    """Raise ResourceExhaustedError if all instances, its ``origins``, wait for this request or a queued one."""
    held = origins.intersection(path_of(request.context.headers))
    if not held:
        return
    for other in queued:
        if CALL_PATH_HEADER in other.context.headers:
            held |= origins.intersection(path_of(other.context.headers))
    if held == origins:
        instances = "its only instance waits" if len(held) == 1 else f"all of its {len(held)} instances wait"
        raise ResourceExhaustedError(
            f"model '{model}' calls itself, directly or through others, while {instances} for the answer; "
            "raise the count in instance_group, or do not call it"
        )


#: With fewer measurements the median is unknown.
MIN_MEASUREMENTS = 16
#: Older measurements are dropped, so that a model that has become faster is noticed.
MAX_AGE_NS = 10_000_000_000
_MAX_MEASUREMENTS = 64
#: Hint before anything was measured, and the least for stateful sequences, whose end is not known.
DEFAULT_RETRY_AFTER_MS = 100
#: Weight of the newest execution in the running mean of the time that a request takes.
_NEWEST_WEIGHT = 0.1


class ExecutionTimes:
    """Durations of a model's recent executions, and estimates for requests that arrive or wait.

    Sizes up to 1, 2, 4, 8, ... rows share one median. Every estimate is optimistic: running batches end at once,
    batches before it are full, and with too few measurements nothing is refused.
    """

    def __init__(self, settings: SchedulerSettings, num_instances: int = 1, num_at_once: int = 1) -> None:
        self._is_batching = settings.is_batching
        self._num_instances = num_instances
        self._max_rows = max(settings.max_batch_size, 1)
        self._windows: dict[int, _DurationWindow] = {}
        self._num_at_once = num_at_once
        self._least_ms = 1 if settings.sequences is None else DEFAULT_RETRY_AFTER_MS
        self._request_ns = 0.0

    def add(self, num_rows: int, duration_ns: int, now_ns: int) -> None:
        """Add a batch of ``num_rows`` that took ``duration_ns`` and ended at ``now_ns``."""
        size_class = (num_rows - 1).bit_length()
        window = self._windows.get(size_class)
        if window is None:
            window = self._windows[size_class] = _DurationWindow()
        window.added.append((now_ns, duration_ns))

    def median_ns(self, num_rows: int, now_ns: int) -> int:
        """Median of the latest executions of about ``num_rows``; 0 if there are too few."""
        window = self._windows.get((num_rows - 1).bit_length())
        return 0 if window is None else window.median_ns(now_ns)

    def check(self, request: InferenceRequest, queue: RequestQueue, now_ns: int) -> None:
        """Set ``expected_ns`` of a request with a deadline. Raises DeadlineExceededError if it is unlikely to fit."""
        deadline_ns = request.context.deadline_ns
        if deadline_ns is None or deadline_ns <= now_ns:  # the queue refuses the latter
            return
        num_before = queue.num_rows_before(request)
        num_full, num_left = divmod(num_before, self._max_rows)
        num_rows = request.num_rows
        if self._is_batching and num_left + num_rows <= self._max_rows:
            num_rows += num_left
        expected_ns = request.expected_ns = self.median_ns(num_rows, now_ns)
        num_rounds = num_full // self._num_instances
        wait_ns = num_rounds and num_rounds * self.median_ns(self._max_rows, now_ns)
        left_ns = deadline_ns - now_ns
        if expected_ns + wait_ns > left_ns:
            raise DeadlineExceededError(
                f"cannot finish inside its deadline: {left_ns / 1e6:.1f} ms are left, and by the median of the latest "
                f"executions it takes {(expected_ns + wait_ns) / 1e6:.1f} ms, of which {wait_ns / 1e6:.1f} ms go to "
                f"the {num_before} rows that wait before it; allow more time, or send it when less is waiting"
            )

    def measured(self, num_requests: int, duration_ns: int) -> None:
        """Add an execution of at least one request to the mean that ``retry_after_ms`` uses."""
        request_ns = duration_ns / num_requests
        self._request_ns += (request_ns - self._request_ns) * (_NEWEST_WEIGHT if self._request_ns else 1.0)

    def retry_after_ms(self, num_queued: int) -> int:
        """Estimated milliseconds until ``num_queued`` requests have been executed."""
        if not self._request_ns:
            return DEFAULT_RETRY_AFTER_MS
        return max(self._least_ms, math.ceil(num_queued * self._request_ns / self._num_at_once / 1e6))


class _DurationWindow:
    """The latest durations, by time and by size."""

    def __init__(self) -> None:
        self.added: deque[tuple[int, int]] = deque(maxlen=_MAX_MEASUREMENTS)  # (end, duration), not yet in the others
        self._latest: deque[tuple[int, int]] = deque()
        self._sorted: list[int] = []

    def median_ns(self, now_ns: int) -> int:
        while self.added:  # sorted in here, as most models never have a deadline to hold a median against
            if len(self._latest) == _MAX_MEASUREMENTS:
                self._forget_first()
            measured = self.added.popleft()
            self._latest.append(measured)
            insort(self._sorted, measured[1])
        while self._latest and self._latest[0][0] < now_ns - MAX_AGE_NS:
            self._forget_first()
        count = len(self._sorted)
        return self._sorted[count // 2] if count >= MIN_MEASUREMENTS else 0

    def _forget_first(self) -> None:
        _, duration_ns = self._latest.popleft()
        del self._sorted[bisect_left(self._sorted, duration_ns)]


def make_batch_key(signature: ModelSignature, buckets: LengthBuckets | None = None) -> BatchKey | None:
    """Return a function from inputs to the batch key; None if any two requests may share a batch."""
    if signature.max_batch_size == 0:
        return None
    padded = () if buckets is None else tuple(spec for spec in signature.inputs if spec.name in buckets.pad_values)
    others = [spec for spec in signature.inputs if spec not in padded]
    exact = tuple(spec.name for spec in others if not spec.allow_ragged_batch and (spec.is_optional or -1 in spec.dims))
    present = tuple(spec.name for spec in others if spec.allow_ragged_batch and spec.is_optional)
    shapes = _shapes(exact) if not present else _shapes_and_presence(exact, present)
    if buckets is not None:
        return _bucketed(padded, buckets, shapes if exact or present else None)
    return shapes if exact or present else None


def _shapes(names: tuple[str, ...]) -> BatchKey:
    def key(inputs: Mapping[str, WireTensor]) -> object:
        return tuple([tensor.shape[1:] if (tensor := inputs.get(name)) is not None else None for name in names])

    return key


def _shapes_and_presence(exact: tuple[str, ...], present: tuple[str, ...]) -> BatchKey:
    shapes = _shapes(exact)

    def key(inputs: Mapping[str, WireTensor]) -> object:
        return shapes(inputs), tuple([name in inputs for name in present])

    return key


def _bucketed(padded: tuple[TensorSpec, ...], buckets: LengthBuckets, others: BatchKey | None) -> BatchKey:
    """The bound of the bucket; a request whose lengths disagree has its shapes as key, and is not padded."""
    axes = tuple(
        (spec.name, tuple(axis for axis, dim in enumerate(spec.dims, start=1) if dim == -1)) for spec in padded
    )
    optional = tuple(spec.name for spec in padded if spec.is_optional and spec.name != buckets.mask)
    exact = _shapes(tuple(spec.name for spec in padded))

    def key(inputs: Mapping[str, WireTensor]) -> object:
        lengths = {inputs[name].shape[axis] for name, positions in axes if name in inputs for axis in positions}
        bound = buckets.bound_of(lengths.pop()) if len(lengths) == 1 else exact(inputs)
        if others is None and not optional:
            return bound
        return bound, tuple([name in inputs for name in optional]), others and others(inputs)

    return key
