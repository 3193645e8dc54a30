"""Settings of the scheduler from ``sequence_batching``."""

from weft.serving.config.report import ConfigReport
from weft.serving.config.sequence_inputs import id_datatype
from weft.serving.queues.sequence_settings import DEFAULT_MAX_IDLE_US, SequenceSettings
from weft_protos.model_config_pb2 import ModelConfig

_PATH = "sequence_batching"
_MAX_SLOTS = 1 << 16
#: Parameter: sequences that may wait for a slot.
MAX_BACKLOG = "max_sequence_backlog"


def sequence_settings(config: ModelConfig, report: ConfigReport) -> SequenceSettings:
    """How stateful sequences share the instances; for a configuration with ``sequence_batching``."""
    batching = config.sequence_batching
    oldest, direct = batching.oldest, batching.direct
    is_direct = batching.WhichOneof("strategy_choice") != "oldest"
    num_slots = max(config.max_batch_size, 1)
    slots_path, slots = "max_batch_size", "with sequence_batching max_batch_size"
    if not is_direct and oldest.max_candidate_sequences:
        num_slots = oldest.max_candidate_sequences
        slots_path, slots = f"{_PATH}.oldest.max_candidate_sequences", "max_candidate_sequences"
    if not 1 <= num_slots <= _MAX_SLOTS:
        report.error(slots_path, f"{slots} must be between 1 and {_MAX_SLOTS}, got {num_slots}")
        num_slots = 1
    if not is_direct:
        for size in oldest.preferred_batch_size:
            if not 1 <= size <= config.max_batch_size:
                report.error(
                    f"{_PATH}.oldest.preferred_batch_size",
                    "sequence batching preferred batch size must be positive and no larger than max_batch_size "
                    f"({config.max_batch_size}), got {size}",
                )
    if not 0 <= direct.minimum_slot_utilization <= 1:
        report.error(
            f"{_PATH}.direct.minimum_slot_utilization",
            f"minimum_slot_utilization must be in range [0.0, 1.0], got {direct.minimum_slot_utilization:g}",
        )
    if batching.iterative_sequence and batching.state:
        report.error(
            f"{_PATH}.state",
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
        max_backlog=_max_backlog(config, report),
        has_varying_state=any(-1 in state.dims for state in batching.state),
        id_datatype=id_datatype(batching),
    )


def _max_backlog(config: ModelConfig, report: ConfigReport) -> int:
    text = config.parameters[MAX_BACKLOG].string_value if MAX_BACKLOG in config.parameters else "0"
    if not text.isdecimal() or (MAX_BACKLOG in config.parameters and not int(text)):
        report.error(
            f"parameters[{MAX_BACKLOG}]",
            f"parameter '{MAX_BACKLOG}' must be a whole number of at least 1, got '{text}'; without it any number of "
            "sequences may wait",
        )
        return 0
    return int(text)
