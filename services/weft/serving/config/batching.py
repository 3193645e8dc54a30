"""The arrays of a batch as configured: ragged inputs, batch inputs and outputs, length buckets."""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from weft.base.signature import datatype_name
from weft.base.tensors import NUMPY_BY_DATATYPE
from weft.base.text.pbtxt import suggestion
from weft.serving.backends.layout import BatchInput, BatchLayout
from weft.serving.config.checks import ConfigReport, model_dims
from weft.serving.config.given_inputs import id_datatype
from weft.serving.queues import QUEUES
from weft.serving.queues.settings import (
    DEFAULT_LOAD_TIMEOUT_S,
    DEFAULT_MAX_IDLE_US,
    LengthBuckets,
    SchedulerSettings,
    SequenceSettings,
    WaitPolicy,
)
from weft_protos.model_config_pb2 import TYPE_STRING, ModelConfig, ModelInput, ModelQueuePolicy
from weft_protos.model_config_pb2 import BatchInput as BatchInputMessage

_BOUNDS, _PAD, _MASK = "batch_buckets", "batch_buckets_pad", "batch_buckets_mask"
_MAX_ELEMENTS = "batch_buckets_max_elements"
LAYOUT_PARAMETERS = (_BOUNDS, _PAD, _MASK, _MAX_ELEMENTS)


def batch_layout(config: ModelConfig, report: ConfigReport, *, has_tensor_backend: bool) -> BatchLayout:
    """The layout of batches as configured; ``has_tensor_backend``: a batch runs as one array for each input."""
    ragged = [f"input[{i}].allow_ragged_batch" for i, tensor in enumerate(config.input) if tensor.allow_ragged_batch]
    buckets = [f"parameters[{key}]" for key in LAYOUT_PARAMETERS if key in config.parameters]
    mixed = [
        *(["batch_input"] if config.batch_input else []),
        *(["batch_output"] if config.batch_output else []),
        *buckets,
    ]
    if not config.max_batch_size:
        for path in [*ragged, *mixed]:
            report.error(path, f"{path} needs max_batch_size > 0")
    if not has_tensor_backend:
        for path in mixed:
            report.error(
                path, f"backend '{config.backend}' gets each request by itself and has no use for {path}; remove it"
            )
    if buckets and (ragged or config.batch_input or config.batch_output):
        report.error(buckets[0], f"{buckets[0]} and ragged batches exclude each other; a length is padded or it is not")
    return BatchLayout(
        buckets=_buckets(config, report) if buckets else None,
        batch_inputs=tuple(_batch_inputs(config, report)),
        scattered=dict(_scattered(config, report)),
    )


def _batch_inputs(config: ModelConfig, report: ConfigReport) -> Iterator[BatchInput]:
    inputs = [tensor.name for tensor in config.input]
    taken = set(inputs)
    for i, message in enumerate(config.batch_input):
        path = f"batch_input[{i}]"
        kind = BatchInputMessage.Kind.Name(message.kind)
        datatype = datatype_name(message.data_type)
        if datatype not in ("INT32", "FP32"):
            report.error(f"{path}.data_type", f"batch input must be TYPE_INT32 or TYPE_FP32, got {datatype}")
        if not message.target_name:
            report.error(path, "batch input must specify 'target_name', the input of the model that gets it")
        for name in message.target_name:
            if name in taken:
                report.error(f"{path}.target_name", f"batch input '{name}' is an input already; its name must differ")
            taken.add(name)
        if len(message.source_input) != 1 or message.source_input[0] not in inputs:
            got = ", ".join(message.source_input) or "none"
            near = suggestion(got, inputs)
            report.error(
                f"{path}.source_input", f"batch input must have one of the inputs as 'source_input', got {got}{near}"
            )
            continue
        yield BatchInput(kind, tuple(message.target_name), datatype, message.source_input[0])


def _scattered(config: ModelConfig, report: ConfigReport) -> Iterator[tuple[str, str]]:
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    for i, message in enumerate(config.batch_output):
        path = f"batch_output[{i}]"
        sources = [name for name in message.source_input if name in inputs]
        if len(message.source_input) != 1 or not sources:
            got = ", ".join(message.source_input) or "none"
            near = suggestion(got, list(inputs))
            report.error(
                f"{path}.source_input", f"batch output must have one of the inputs as 'source_input', got {got}{near}"
            )
            continue
        if not message.target_name:
            report.error(path, "batch output must specify 'target_name', the output that is cut")
        for name in message.target_name:
            if name not in outputs:
                report.error(
                    f"{path}.target_name", f"the model has no output '{name}'{suggestion(name, list(outputs))}"
                )
            elif (given := len(model_dims(outputs[name]))) != (wanted := len(model_dims(inputs[sources[0]]))):
                report.error(
                    f"{path}.target_name",
                    f"output '{name}' has {given} dims, its source '{sources[0]}' has {wanted}; they must be as many",
                )
            else:
                yield name, sources[0]


def _buckets(config: ModelConfig, report: ConfigReport) -> LengthBuckets | None:
    text = {key: config.parameters[key].string_value for key in LAYOUT_PARAMETERS if key in config.parameters}
    if _BOUNDS not in text:
        for key in text:
            report.error(f"parameters[{key}]", f"parameter '{key}' needs parameter '{_BOUNDS}'")
        return None
    if not config.HasField("dynamic_batching"):
        report.error(f"parameters[{_BOUNDS}]", f"parameter '{_BOUNDS}' needs dynamic_batching")
    parts = [part.strip() for part in text[_BOUNDS].split(",")]
    bounds = tuple(int(part) if part.isdecimal() else 0 for part in parts)
    if bounds[0] < 1 or any(low >= high for low, high in pairwise(bounds)):
        report.error(
            f"parameters[{_BOUNDS}]",
            f"parameter '{_BOUNDS}' must be lengths that rise, such as '16,32,64', got '{text[_BOUNDS]}'",
        )
    pad_values: dict[str, float] = dict(_pad_values(config, text.get(_PAD, ""), report)) if text.get(_PAD) else {}
    mask = text.get(_MASK, "")
    if mask and (tensor := _varying_input(config, _MASK, mask, report)) is not None:
        if pad_values.setdefault(mask, 0) != 0:
            report.error(f"parameters[{_PAD}]", f"the mask '{mask}' is padded with 0, got {pad_values[mask]}")
        if tensor.data_type == TYPE_STRING:
            report.error(f"parameters[{_MASK}]", f"the mask '{mask}' must hold numbers")
    if not pad_values:
        report.error(
            f"parameters[{_BOUNDS}]", f"parameter '{_BOUNDS}' needs the inputs to pad, as '{_PAD}': 'input=value,...'"
        )
    max_elements = text.get(_MAX_ELEMENTS, "0")
    if not max_elements.isdecimal():
        report.error(
            f"parameters[{_MAX_ELEMENTS}]",
            f"parameter '{_MAX_ELEMENTS}' must be a whole number of at least 0, got '{max_elements}'",
        )
        return None
    return LengthBuckets(bounds, pad_values, mask, int(max_elements))


def _pad_values(config: ModelConfig, text: str, report: ConfigReport) -> Iterator[tuple[str, float]]:
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        tensor = _varying_input(config, _PAD, name, report)
        if tensor is None:
            continue
        number = _number(value, datatype_name(tensor.data_type))
        if number is None:
            report.error(
                f"parameters[{_PAD}]",
                f"input '{name}' is {datatype_name(tensor.data_type)} and cannot be padded with '{value}'; write "
                f"'{name}=0' or another value of that type",
            )
        else:
            yield name, number


def _varying_input(config: ModelConfig, key: str, name: str, report: ConfigReport) -> ModelInput | None:
    for tensor in config.input:
        if tensor.name == name:
            if -1 in tensor.dims:
                return tensor
            report.error(
                f"parameters[{key}]", f"input '{name}' has no -1 in its dims {list(tensor.dims)}; nothing to pad"
            )
            return None
    near = suggestion(name, [tensor.name for tensor in config.input])
    report.error(f"parameters[{key}]", f"parameter '{key}': the model has no input '{name}'{near}")
    return None


def _number(text: str, datatype: str) -> float | None:
    dtype = NUMPY_BY_DATATYPE.get(datatype)
    if dtype is None or dtype == np.object_:
        return None
    try:
        if datatype == "BOOL" or np.issubdtype(dtype, np.integer):
            number = int(text)
            limits = np.iinfo(dtype) if datatype != "BOOL" else np.iinfo(np.uint8)
            return number if limits.min <= number <= (1 if datatype == "BOOL" else limits.max) else None
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


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
