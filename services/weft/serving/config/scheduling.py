"""``SchedulerSettings`` from ``dynamic_batching``, ``sequence_batching`` and their parameters."""

import math

from weft.serving.config.report import ConfigReport
from weft.serving.config.sequence_inputs import id_datatype
from weft.serving.queues import QUEUES
from weft.serving.queues.settings import (
    DEFAULT_LOAD_TIMEOUT_S,
    DEFAULT_MAX_IDLE_US,
    SchedulerSettings,
    SequenceSettings,
    WaitPolicy,
)
from weft_protos.model_config_pb2 import ModelConfig, ModelQueuePolicy

_AGING, _SPLIT, _LIMIT = "priority_aging_us", "split_large_requests", "execution_timeout_us"
_LOAD_LIMIT, _QUEUE_POLICY = "load_timeout_s", "queue_policy"
#: Sequences that may wait for a slot.
_MAX_BACKLOG = "max_sequence_backlog"
SCHEDULING_PARAMETERS = (_AGING, _SPLIT, _LIMIT, _LOAD_LIMIT, _QUEUE_POLICY, _MAX_BACKLOG)
_MAX_LOAD_S = 86_400.0
_MAX_SLOTS = 1 << 16
_SEQUENCES = "sequence_batching"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def scheduler_settings(config: ModelConfig, report: ConfigReport) -> SchedulerSettings:
    """The settings of the scheduler as configured; ``max_batch_size`` must be complete."""
    if config.HasField("sequence_batching"):
        return _by_sequence(config, report)
    if _MAX_BACKLOG in config.parameters:
        report.error(
            f"parameters[{_MAX_BACKLOG}]",
            f"parameter '{_MAX_BACKLOG}' needs sequence_batching; elsewhere a queue policy has max_queue_size",
        )
    batching = config.dynamic_batching
    settings = SchedulerSettings(
        max_batch_size=config.max_batch_size,
        is_batching=config.HasField("dynamic_batching"),
        preferred_batch_sizes=tuple(dict.fromkeys(batching.preferred_batch_size)),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_policy=_policy(batching.default_queue_policy),
        policies={level: _policy(policy) for level, policy in sorted(batching.priority_queue_policy.items())},
        priority_aging_us=_whole(config, _AGING, report),
        execution_timeout_us=_whole(config, _LIMIT, report),
        load_timeout_s=_load_timeout_s(config, report),
        can_split=_can_split(config, report),
        queue_policy=_queue_policy(config, report),
    )
    for path, message in settings.faults():
        report.error(path, f"{path}: {message}")
    return settings


def _by_sequence(config: ModelConfig, report: ConfigReport) -> SchedulerSettings:
    for key in (_AGING, _SPLIT, _QUEUE_POLICY):
        if key in config.parameters:
            report.error(f"parameters[{key}]", f"parameter '{key}' is not possible with sequence_batching; remove it")
    sequences = _sequence_settings(config, report)
    oldest = config.sequence_batching.oldest
    return SchedulerSettings(
        max_batch_size=config.max_batch_size,
        is_batching=True,
        preferred_batch_sizes=tuple(
            size for size in dict.fromkeys(oldest.preferred_batch_size) if 1 <= size <= config.max_batch_size
        ),
        max_queue_delay_us=sequences.max_queue_delay_us if sequences.is_direct else oldest.max_queue_delay_microseconds,
        execution_timeout_us=_whole(config, _LIMIT, report),
        load_timeout_s=_load_timeout_s(config, report),
        sequences=sequences,
    )


def _whole(config: ModelConfig, key: str, report: ConfigReport, cure: str = "") -> int:
    if key not in config.parameters:
        return 0
    text = config.parameters[key].string_value
    if not text.isdecimal() or not int(text):
        fault = f"parameter '{key}' must be a whole number of at least 1, got '{text}'{cure}"
        report.error(f"parameters[{key}]", fault)
        return 0
    return int(text)


def _load_timeout_s(config: ModelConfig, report: ConfigReport) -> float:
    if _LOAD_LIMIT not in config.parameters:
        return DEFAULT_LOAD_TIMEOUT_S
    text = config.parameters[_LOAD_LIMIT].string_value
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = math.nan
    if not 0 <= limit_s <= _MAX_LOAD_S:
        report.error(
            f"parameters[{_LOAD_LIMIT}]",
            f"parameter '{_LOAD_LIMIT}' must be seconds from 0 (no limit) to {_MAX_LOAD_S:.0f}, got '{text[:80]}'",
        )
        return DEFAULT_LOAD_TIMEOUT_S
    return limit_s


def _can_split(config: ModelConfig, report: ConfigReport) -> bool:
    text = config.parameters[_SPLIT].string_value if _SPLIT in config.parameters else "false"
    if text.lower() not in _FLAGS:
        report.error(f"parameters[{_SPLIT}]", f"parameter '{_SPLIT}' must be true or false, got '{text}'")
    return _FLAGS.get(text.lower(), False)


def _queue_policy(config: ModelConfig, report: ConfigReport) -> str:
    default, *_ = QUEUES
    name = config.parameters[_QUEUE_POLICY].string_value if _QUEUE_POLICY in config.parameters else default
    if name not in QUEUES:
        report.error(
            f"parameters[{_QUEUE_POLICY}].string_value",
            f"parameter '{_QUEUE_POLICY}' must be one of {', '.join(QUEUES)}, got '{name[:80]}'",
        )
        return default
    if config.dynamic_batching.priority_levels and not QUEUES[name].has_levels:
        report.error(
            "dynamic_batching.priority_levels",
            f"{_QUEUE_POLICY} '{name}' has no levels; remove priority_levels, or the parameter '{_QUEUE_POLICY}'",
        )
    return name


def _policy(policy: ModelQueuePolicy) -> WaitPolicy:
    return WaitPolicy(
        timeout_action=ModelQueuePolicy.TimeoutAction.Name(policy.timeout_action),
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _sequence_settings(config: ModelConfig, report: ConfigReport) -> SequenceSettings:
    batching = config.sequence_batching
    oldest, direct = batching.oldest, batching.direct
    is_direct = batching.WhichOneof("strategy_choice") != "oldest"
    num_slots = max(config.max_batch_size, 1)
    slots_path, slots = "max_batch_size", "with sequence_batching max_batch_size"
    if not is_direct and oldest.max_candidate_sequences:
        num_slots = oldest.max_candidate_sequences
        slots_path, slots = f"{_SEQUENCES}.oldest.max_candidate_sequences", "max_candidate_sequences"
    if not 1 <= num_slots <= _MAX_SLOTS:
        report.error(slots_path, f"{slots} must be between 1 and {_MAX_SLOTS}, got {num_slots}")
        num_slots = 1
    if not is_direct:
        for size in oldest.preferred_batch_size:
            if not 1 <= size <= config.max_batch_size:
                report.error(
                    f"{_SEQUENCES}.oldest.preferred_batch_size",
                    "sequence batching preferred batch size must be positive and no larger than max_batch_size "
                    f"({config.max_batch_size}), got {size}",
                )
    if not 0 <= direct.minimum_slot_utilization <= 1:
        report.error(
            f"{_SEQUENCES}.direct.minimum_slot_utilization",
            f"minimum_slot_utilization must be in range [0.0, 1.0], got {direct.minimum_slot_utilization:g}",
        )
    if batching.iterative_sequence and batching.state:
        report.error(
            f"{_SEQUENCES}.state",
            "state is not possible with iterative_sequence, where a request gives outputs once, at the end; keep it in "
            "the model",
        )
    return SequenceSettings(
        is_direct=is_direct,
        num_slots=num_slots,
        max_idle_us=batching.max_sequence_idle_microseconds or DEFAULT_MAX_IDLE_US,
        max_queue_delay_us=direct.max_queue_delay_microseconds,
        minimum_slot_utilization=direct.minimum_slot_utilization,
        is_iterative=batching.iterative_sequence,
        max_backlog=_whole(config, _MAX_BACKLOG, report, "; without it any number of sequences may wait"),
        has_varying_state=any(-1 in state.dims for state in batching.state),
        id_datatype=id_datatype(batching),
    )
