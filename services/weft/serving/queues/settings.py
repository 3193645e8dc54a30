"""Queue and batching settings of one model, from ``dynamic_batching`` and ``sequence_batching``."""

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from weft.base.core import Parameters
from weft.base.errors import InvalidArgumentError

#: Longest wait for the next request of a sequence, where the configuration names none, in microseconds.
DEFAULT_MAX_IDLE_US = 1_000_000
#: Longest name of a sequence in bytes.
MAX_ID_BYTES = 128

_ID_RANGES = {
    "INT32": (-(2**31), 2**31 - 1),
    "UINT32": (0, 2**32 - 1),
    "INT64": (-(2**63), 2**63 - 1),
    "UINT64": (0, 2**64 - 1),
}
_HOLD_VARIABLES = ("WEFT_DELAY_SCHEDULER", "TRITONSERVER_DELAY_SCHEDULER")
#: Longest load of an instance, in seconds.
DEFAULT_LOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Settings of ``ModelSequenceBatching``.

    Attributes:
        num_slots: Sequences in progress on one instance; for ``is_direct``, rows of a batch.
        minimum_slot_utilization: Direct only: share of the rows, 0 to 1, that ends the wait of ``max_queue_delay_us``.
        id_datatype: Of the input that gets the sequence id; "": there is none, and any id is accepted.
        has_varying_state: States may differ in shape; only those of one shape share a batch.
        is_iterative: Each request is a sequence, executed until the model releases it.
        max_backlog: Sequences that may wait for a slot; 0: any number.
    """

    is_direct: bool = True
    num_slots: int = 1
    max_idle_us: int = DEFAULT_MAX_IDLE_US
    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0
    id_datatype: str = ""
    has_varying_state: bool = False
    is_iterative: bool = False
    max_backlog: int = 0


def sequence_parameters(parameters: Parameters, model: str, id_datatype: str) -> tuple[int | str, bool, bool]:
    """A request's sequence id, and whether it starts and ends the sequence. Raises InvalidArgumentError."""
    given = parameters.get("sequence_id", 0)
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise InvalidArgumentError(
            f"invalid value type for 'sequence_id' parameter, expected int64_param or string_param, got {given!r}"
        )
    if not given:
        raise InvalidArgumentError(
            f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID; send parameter "
            "'sequence_id'"
        )
    _check_id(given, model, id_datatype)
    return given, _flag(parameters, "sequence_start"), _flag(parameters, "sequence_end")


def _check_id(given: int | str, model: str, id_datatype: str) -> None:
    if isinstance(given, str):
        num_bytes = len(given.encode())
        if num_bytes > MAX_ID_BYTES:
            raise InvalidArgumentError(
                f"string correlation ID cannot be longer than {MAX_ID_BYTES} characters, got {num_bytes} bytes"
            )
        if id_datatype not in ("", "BYTES"):
            raise InvalidArgumentError(
                f"model '{model}' takes its correlation ID as {id_datatype}, got the string {given!r}; send a number "
                "as 'sequence_id'"
            )
        return
    if id_datatype == "BYTES":
        raise InvalidArgumentError(
            f"model '{model}' takes its correlation ID as a string, got the number {given}; send a string as "
            "'sequence_id'"
        )
    low, high = _ID_RANGES.get(id_datatype, (-(2**63), 2**64 - 1))
    if not low <= given <= high:
        raise InvalidArgumentError(
            f"model '{model}' takes its correlation ID as {id_datatype or 'UINT64'}, {low} to {high}, got {given}"
        )


def _flag(parameters: Parameters, key: str) -> bool:
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"invalid value type for '{key}' parameter, expected bool_param, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """``ModelQueuePolicy``: how long requests of a level wait, and how many; 0: no limit."""

    timeout_action: str = "REJECT"
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0

    def timeout_us(self, asked_us: int) -> int:
        """Longest wait in microseconds (0 = no limit) of a request with timeout ``asked_us`` (0 = none)."""
        if self.allow_timeout_override and 0 < asked_us < self.default_timeout_us:
            return asked_us
        return self.default_timeout_us


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Queue and batching of one model; field meanings and load-time rules are those of ``ModelDynamicBatching``.

    Attributes:
        max_batch_size: Most rows in one execution; 0 for a model without batch dimension.
        is_batching: ``dynamic_batching`` is present; otherwise each request is executed alone.
        priority_levels: Number of levels, 1 is served first; 0 means that priorities are not used.
        default_policy: Policy of each level that ``policies`` does not name.
        execution_timeout_us: An instance that executes for longer counts as hung; 0: never.
        load_timeout_s: An instance that loads for longer is given up; 0: never.
        priority_aging_us: A request is served as one of the next better level that came so much later; 0: levels are
            strict.
        can_split: A request of more than ``max_batch_size`` rows is executed in parts.
        queue_policy: Order of service; a name of ``QUEUES``.
    """

    max_batch_size: int
    is_batching: bool = False
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_policy: WaitPolicy = field(default_factory=WaitPolicy)
    policies: Mapping[int, WaitPolicy] = field(default_factory=dict)
    priority_aging_us: int = 0
    execution_timeout_us: int = 0
    load_timeout_s: float = DEFAULT_LOAD_TIMEOUT_S
    can_split: bool = False
    queue_policy: str = "priority_levels"
    sequences: SequenceSettings | None = None

    def level_of(self, priority: int) -> int:
        """The level for a request's ``priority``; 0 if the model has no levels."""
        if not self.priority_levels:
            return 0
        return priority if 1 <= priority <= self.priority_levels else self.default_priority_level

    @property
    def background_level(self) -> int:
        """The level whose requests may run in the background; 0: none.

        It is the lowest of several, unless it is the default. Not with ``priority_aging_us``, which promises progress,
        nor with ``execution_timeout_us``, under which waiting for a processor would count as hanging.
        """
        is_apart = self.is_batching and 0 < self.default_priority_level < self.priority_levels
        is_limited = self.priority_aging_us or self.execution_timeout_us or self.sequences is not None
        return self.priority_levels if is_apart and not is_limited else 0

    @property
    def is_plain(self) -> bool:
        """Whether requests are executed alone, in order of arrival, and nothing limits their wait or execution."""
        has_limits = self.default_policy != WaitPolicy() or self.policies or self.execution_timeout_us
        has_order = self.queue_policy != "priority_levels" or self.priority_levels or self.sequences
        return not (self.is_batching or self.can_split or has_limits or has_order)

    def policy_of(self, level: int) -> WaitPolicy:
        """Policy of a level."""
        return self.policies.get(level, self.default_policy)

    def validate(self, model_name: str) -> None:
        """Raise InvalidArgumentError with all faults and the allowed values, if there are any."""
        faults = [f"{path}: {message}" for path, message in self.faults()]
        if faults:
            raise InvalidArgumentError(f"model '{model_name}': {'; '.join(faults)}")

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield every fault: field of ``config.pbtxt``, and message."""
        if self.max_batch_size < 0:
            yield "max_batch_size", f"must be at least 0, got {self.max_batch_size}"
        if self.can_split and not self.max_batch_size:
            yield "parameters[split_large_requests]", "needs max_batch_size > 0: without rows there is nothing to split"
        if self.priority_aging_us and not (self.is_batching and self.priority_levels > 1):
            yield (
                "parameters[priority_aging_us]",
                f"needs dynamic_batching with priority_levels > 1, got {self.priority_levels}",
            )
        if not self.is_batching:
            return
        if self.max_queue_delay_us < 0:
            yield "dynamic_batching.max_queue_delay_microseconds", f"must be at least 0, got {self.max_queue_delay_us}"
        for size in self.preferred_batch_sizes:
            if not 1 <= size <= self.max_batch_size:
                yield (
                    "dynamic_batching.preferred_batch_size",
                    f"dynamic batching preferred size must be in 1..max_batch_size ({self.max_batch_size}), got {size}",
                )
        levels = self.priority_levels
        if levels and not 1 <= self.default_priority_level <= levels:
            yield (
                "dynamic_batching.default_priority_level",
                f"default priority level must be provided and in range [1, {levels}], "
                f"got {self.default_priority_level}",
            )
        for level in self.policies:
            if not 1 <= level <= levels:
                allowed = f"must be in range [1, {levels}]" if levels else "needs priority_levels > 0"
                yield "dynamic_batching.priority_queue_policy", f"priority level {allowed}, got {level}"
        if self.preserve_ordering and levels > 1:
            yield (
                "dynamic_batching.preserve_ordering",
                f"Only one priority level is allowed when 'preserve_ordering' is true, got {levels}",
            )
        policies = {"default_queue_policy": self.default_policy}
        policies |= {f"priority_queue_policy[{level}]": policy for level, policy in self.policies.items()}
        for name, policy in policies.items():
            path = f"dynamic_batching.{name}"
            if policy.timeout_action not in ("REJECT", "DELAY"):
                yield f"{path}.timeout_action", f"must be REJECT or DELAY, got {policy.timeout_action!r}"
            if policy.default_timeout_us < 0 or policy.max_queue_size < 0:
                yield path, f"default_timeout_microseconds and max_queue_size must be at least 0, got {policy}"
            if self.preserve_ordering and policy.timeout_action == "DELAY" and policy.default_timeout_us:
                why = "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
                yield path, f"{why}; use REJECT"


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Lets requests of similar length share batches; shorter ones are padded to the longest of their batch.

    Attributes:
        bounds: Largest length of each bucket, rising. Longer requests share batches with those of their own length.
        pad_values: Padding value by input. Every -1 in the dims of these inputs is the length.
        mask: The padded input that marks real positions (1) and padding (0); the server adds it if missing.
        max_elements: Most rows times largest length of the bucket in one batch; 0: no limit.
    """

    bounds: tuple[int, ...]
    pad_values: Mapping[str, float]
    mask: str = ""
    max_elements: int = 0

    def bound_of(self, length: int) -> int:
        """The bound of a length's bucket; the length itself beyond the last bucket."""
        index = bisect_left(self.bounds, length)
        return self.bounds[index] if index < len(self.bounds) else length

    def max_rows(self, key: object, max_batch_size: int) -> int:
        """Most rows of a batch with this key, possibly 0; a single request may have more."""
        bound = bound_in(key)
        if not self.max_elements or bound is None:
            return max_batch_size
        return min(max_batch_size, self.max_elements // max(bound, 1))


def bound_in(key: object) -> int | None:
    """The bound of a batch key's bucket; None if it has none."""
    bound = key[0] if isinstance(key, tuple) and key else key
    return bound if isinstance(bound, int) else None


def num_to_hold(environment: Mapping[str, str] = os.environ) -> int:
    """Requests queued before the first batch of each model, by ``WEFT_DELAY_SCHEDULER`` or Triton's name; 0: off."""
    for name in _HOLD_VARIABLES:
        value = environment.get(name)
        if value:
            if not value.isdecimal():
                raise InvalidArgumentError(f"{name} must be a whole number of at least 0, got {value!r}")
            return int(value)
    return 0
