"""Limits of one request, and a limit on requests in flight that adapts to latency.

Those of a request are checked before memory is allocated for it. The message size bounds most things; these bound what
a small message could expand to: an empty string takes 4 bytes on the wire and more than 40 in memory. They are fixed
and a retry cannot help, so exceeding one is INVALID_ARGUMENT: RESOURCE_EXHAUSTED would be retried, and taken for
overload.
"""

import math
from dataclasses import dataclass
from enum import Enum

from weft.base.core import InferCall, Parameters
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import num_elements

#: Requests that may be in flight before anything is known, at the least, and at the most.
INITIAL_LIMIT, MIN_LIMIT, MAX_LIMIT = 20, 2.0, 2048
_MIN_WINDOW_NS = 100_000_000
#: A window lasts as long as this many mean requests.
_MIN_WINDOW_LATENCIES = 4
_MIN_SAMPLES, _MAX_SAMPLES = 20, 400
#: Standard error of the mean latency, by the mean, at which a window has seen enough.
_PRECISION = 0.05
#: What may wait behind, by what is in work there.
_HEADROOM = 0.1
#: Every so many windows in which the limit was used, so much of it is tried.
_PROBE_PERIOD, _PROBE_SHARE = 20, 0.75
#: The limit falls to this share at most in one window.
_MAX_CUT = 0.5
#: Of the requests of a window; if more are refused behind, the limit falls.
_MAX_REFUSED = 0.05
_REFUSED_CUT = 0.9
#: A window shows what a cut did if this share or less is in flight of what was before.
_VISIBLE_CUT = 0.93
#: Weight of the newest window in the latency without a queue, while the limit is not used, and while it is.
_SMOOTHING, _RISE = 0.2, 0.07


class Outcome(Enum):
    """How an admitted request ended."""

    ANSWERED = "answered"
    #: Cancelled, or its deadline passed: it would have taken longer than it did.
    WITHDRAWN = "withdrawn"
    #: Whoever was called had too much to do.
    REFUSED = "refused"
    #: Any other error; says nothing of the load.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Cut:
    """The limit, and what was measured, before a cut."""

    limit: float
    num_inflight: float
    latency_ns: float
    is_probe: bool


class AdaptiveLimit:
    """Keeps as many requests in flight as the servers behind process at once, and a tenth more.

    Up to that concurrency latency does not depend on how many are in flight; beyond, it grows in proportion, because
    only a queue grows. So the limit is multiplied by ``empty_latency_ns / latency``, and a tenth is added. The latency
    without a queue can only be learnt under less load: each cut, and an occasional deliberate one (a probe), is an
    experiment. If the remaining requests became faster, they had queued, and a probe goes on; if not, the requests
    themselves take that long, and the cut is undone. So neither more expensive requests nor slower servers make the
    limit collapse.

    Mean latency is the time spent in flight by all, divided by the requests that ended (Little's law): the mean over
    those that ended would miss the expensive ones in short windows.

    Attributes:
        limit: Requests in flight.
        empty_latency_ns: Estimated mean latency without a queue; 0 before the first window.

    Source:
        The gradient: Netflix, concurrency-limits, ``Gradient2Limit``. Probing the unloaded latency: Envoy, adaptive
        concurrency filter,
        https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/adaptive_concurrency_filter
    """

    def __init__(self, maximum: int = 0) -> None:
        self.limit = INITIAL_LIMIT
        self._exact = float(INITIAL_LIMIT)
        self.set_maximum(maximum)
        self.empty_latency_ns = 0.0
        self._cut: _Cut | None = None
        self._num_until_probe = 2  # what the first windows see may be a queue already
        self._num_inflight = self._peak = 0
        self._since_ns = self._last_ns = self._inflight_ns = 0
        self._begin(0)

    def set_maximum(self, maximum: int) -> None:
        """The limit is never above ``maximum``; 0 means 2048."""
        self._maximum = float(maximum or MAX_LIMIT)
        self._set(self._exact)

    def enter(self, now_ns: int) -> None:
        """Count a request as in flight; ``leave`` must follow."""
        self._advance(now_ns)
        self._num_inflight += 1
        self._peak = max(self._peak, self._num_inflight)

    def leave(self, duration_ns: int, now_ns: int, outcome: Outcome) -> None:
        """Count the end of a request that was in flight for ``duration_ns``."""
        self._advance(now_ns)
        self._num_inflight -= 1
        window_ns = now_ns - self._since_ns
        if window_ns <= 0:
            return
        is_late = outcome is Outcome.WITHDRAWN and duration_ns > self.empty_latency_ns > 0
        if outcome is Outcome.ANSWERED or is_late:
            self._num_ended += 1
            self._sum += duration_ns
            self._sum_of_squares += duration_ns * duration_ns
            if self._num_ended >= _MIN_SAMPLES and window_ns >= _MIN_WINDOW_NS:
                self._end_window(now_ns, window_ns)
        else:  # as if it had not been there
            self._inflight_ns -= min(duration_ns, window_ns)
            self._num_refused += outcome is Outcome.REFUSED

    def _advance(self, now_ns: int) -> None:
        if now_ns > self._last_ns:
            self._inflight_ns += self._num_inflight * (now_ns - self._last_ns)
            self._last_ns = now_ns

    def _begin(self, since_ns: int) -> None:
        self._since_ns = self._last_ns = since_ns
        self._peak = self._num_inflight
        self._num_ended = self._num_refused = self._inflight_ns = self._sum = self._sum_of_squares = 0

    def _end_window(self, now_ns: int, window_ns: int) -> None:
        """Adapt the limit to the window's measurements, if there are enough."""
        num_ended = self._num_ended
        latency_ns = max(self._inflight_ns, 1) / num_ended
        if window_ns < _MIN_WINDOW_LATENCIES * latency_ns:
            return
        mean_ns = self._sum / num_ended
        variance = self._sum_of_squares / num_ended - mean_ns * mean_ns
        if num_ended < _MAX_SAMPLES and variance > num_ended * (_PRECISION * mean_ns) ** 2:
            return
        before = self.limit
        self._follow(latency_ns, latency_ns * num_ended / window_ns)
        # After a cut those in flight have to become fewer first.
        self._begin(now_ns + int(latency_ns) if self.limit < before else now_ns)

    def _follow(self, latency_ns: float, num_inflight: float) -> None:
        limit, cut = self._exact, self._cut
        empty_ns = self.empty_latency_ns or latency_ns
        self._cut = None
        if self._peak < limit / 2:  # nobody asks for more, so it says nothing of more
            self.empty_latency_ns = min(latency_ns, empty_ns + _SMOOTHING * (latency_ns - empty_ns))
            return
        is_probing = False
        if cut is not None and num_inflight < _VISIBLE_CUT * cut.num_inflight:
            # 1 where all of the latency is a queue, 0 where nothing of it is.
            elasticity = math.log(latency_ns / cut.latency_ns) / math.log(num_inflight / cut.num_inflight)
            if elasticity < 0.5:
                empty_ns, limit = latency_ns, cut.limit
            else:
                is_probing = cut.is_probe
        # The least of many means is below the mean; it rises until a probe says otherwise.
        self.empty_latency_ns = empty_ns = min(empty_ns + _RISE * (latency_ns - empty_ns), latency_ns)
        self._num_until_probe -= 1
        if is_probing or self._num_until_probe <= 0:
            self._num_until_probe = _PROBE_PERIOD
            self._cut = _Cut(limit, num_inflight, latency_ns, is_probe=True)
            self._set(_PROBE_SHARE * limit)
            return
        gradient = empty_ns / latency_ns
        if self._num_refused > _MAX_REFUSED * self._num_ended:
            gradient = min(gradient, _REFUSED_CUT) - _HEADROOM
        target = max(_MAX_CUT * limit, gradient * limit + max(1.0, _HEADROOM * limit))
        if target < _VISIBLE_CUT * limit:
            self._cut = _Cut(limit, num_inflight, latency_ns, is_probe=False)
        self._set(target)

    def _set(self, limit: float) -> None:
        self._exact = min(max(MIN_LIMIT, limit), self._maximum)
        self.limit = round(self._exact)


#: Inputs of a request, and requested outputs.
MAX_TENSORS = 1024
#: Dimensions of a tensor, the limit of numpy.
MAX_DIMS = 64
#: Elements of a BYTES tensor.
MAX_STRINGS = 1 << 22
#: Elements that lie in ``contents`` of the message, where protobuf makes an object of each before anything is checked.
MAX_TYPED_STRINGS = 1 << 20
#: Parameters of a request, or of one tensor.
MAX_PARAMETERS = 256
#: Characters of the names and strings of all parameters of a request, or of one tensor.
MAX_PARAMETER_CHARS = 1 << 20
#: Characters of a name or an id.
MAX_NAME_CHARS = 1024


def share(limit: int, num_workers: int) -> int:
    """The part of a limit for one of several workers, rounded up; 0, no limit, stays 0."""
    return -(-limit // num_workers)


def divided(num_workers: int) -> str:
    """Suffix for messages about a limit that ``share`` has divided."""
    return f", divided among {num_workers} workers," if num_workers > 1 else ""


def check_count(what: str, count: int, limit: int, unit: str) -> None:
    """Check ``count`` against ``limit``. Raises InvalidArgumentError with both numbers."""
    if count > limit:
        raise InvalidArgumentError(f"{what} has {count} {unit}; at most {limit} are allowed")


def check_call(call: InferCall) -> None:
    """Check names, shapes and requested outputs of a call; parameters are checked by ``check_parameters``.

    Raises:
        InvalidArgumentError: A limit is exceeded; the message has both numbers. Or a name has unprintable characters,
            or an output is requested twice.
    """
    check_name("the model's name", call.model_name)
    check_count("the model's version", len(call.model_version), MAX_NAME_CHARS, "characters")
    check_count("the request id", len(call.request_id), MAX_NAME_CHARS, "characters")
    for name, (datatype, shape, _) in call.inputs.items():
        check_name("the name of an input", name)
        if len(shape) > MAX_DIMS:
            check_count(f"the shape of input '{name}'", len(shape), MAX_DIMS, "dimensions")
        if datatype == "BYTES":
            check_count(f"input '{name}'", num_elements(shape), MAX_STRINGS, "strings")
    names = [output.name for output in call.outputs]
    for name in names:
        check_name("the name of a requested output", name)
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InvalidArgumentError(f"output '{twice}' already exists in request; ask for it once")


def check_parameters(what: str, parameters: Parameters) -> None:
    """Check names and sizes of parameters. Raises like ``check_call``."""
    num_chars = 0
    for key, value in parameters.items():
        if len(key) > MAX_NAME_CHARS or not key.isprintable():  # a request has many
            check_name(f"the name of a parameter of {what}", key)
        num_chars += len(key)
        if isinstance(value, str):
            num_chars += len(value)
    check_count(f"the parameters of {what}", num_chars, MAX_PARAMETER_CHARS, "characters")


def check_name(what: str, name: str) -> None:
    """Check that a name is short and can be shown. Raises InvalidArgumentError."""
    if len(name) > MAX_NAME_CHARS:
        check_count(what, len(name), MAX_NAME_CHARS, "characters")
    if not name.isprintable():
        raise InvalidArgumentError(f"{what} has characters that cannot be shown: {name[:80]!a}; leave them out")
