"""Reads batching settings: ``dynamic_batching``, ``sequence_batching``, ragged inputs, length buckets, parameters."""

import math
from collections.abc import Iterator, Sequence
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
_AGING, _SPLIT, _LIMIT = "priority_aging_us", "split_large_requests", "execution_timeout_us"
_LOAD_LIMIT, _QUEUE_POLICY = "load_timeout_s", "queue_policy"
#: Sequences that may wait for a slot.
_MAX_BACKLOG = "max_sequence_backlog"
SCHEDULING_PARAMETERS = (_AGING, _SPLIT, _LIMIT, _LOAD_LIMIT, _QUEUE_POLICY, _MAX_BACKLOG)
_MAX_LOAD_S = 86_400.0
_MAX_SLOTS = 1 << 16
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def batch_layout(config: ModelConfig, report: ConfigReport, *, has_tensor_backend: bool) -> BatchLayout:
    """Read the layout of batches; ``has_tensor_backend``: a batch runs as one array for each input."""
    ragged = [f"input[{i}].allow_ragged_batch" for i, tensor in enumerate(config.input) if tensor.allow_ragged_batch]
    buckets = [f"parameters[{key}]" for key in LAYOUT_PARAMETERS if key in config.parameters]
    mixed = [*(kind for kind in ("batch_input", "batch_output") if getattr(config, kind)), *buckets]
    for path in [*ragged, *mixed]:
        report.refuse(not config.max_batch_size, path, f"{path} needs max_batch_size > 0")
    for path in mixed:
        fault = f"backend '{config.backend}' gets each request by itself and has no use for {path}; remove it"
        report.refuse(not has_tensor_backend, path, fault)
    if buckets and (ragged or config.batch_input or config.batch_output):
        report.error(buckets[0], f"{buckets[0]} and ragged batches exclude each other; a length is padded or it is not")
    return BatchLayout(
        buckets=_buckets(config, report) if buckets else None,
        batch_inputs=tuple(_batch_inputs(config, report)),
        scattered=dict(_scattered(config, report)),
    )


def _batch_inputs(config: ModelConfig, report: ConfigReport) -> Iterator[BatchInput]:
    taken = {tensor.name for tensor in config.input}
    for i, message in enumerate(config.batch_input):
        path = f"batch_input[{i}]"
        datatype = datatype_name(message.data_type)
        fault = f"batch input must be TYPE_INT32 or TYPE_FP32, got {datatype}"
        report.refuse(datatype not in ("INT32", "FP32"), f"{path}.data_type", fault)
        fault = "batch input must specify 'target_name', the input of the model that gets it"
        report.refuse(not message.target_name, path, fault)
        for name in message.target_name:
            fault = f"batch input '{name}' is an input already; its name must differ"
            report.refuse(name in taken, f"{path}.target_name", fault)
            taken.add(name)
        if source := _source("input", path, message.source_input, config, report):
            kind = BatchInputMessage.Kind.Name(message.kind)
            yield BatchInput(kind, tuple(message.target_name), datatype, source)


def _scattered(config: ModelConfig, report: ConfigReport) -> Iterator[tuple[str, str]]:
    """Outputs that are split, and the input that says how."""
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    for i, message in enumerate(config.batch_output):
        path = f"batch_output[{i}]"
        if not (source := _source("output", path, message.source_input, config, report)):
            continue
        fault = "batch output must specify 'target_name', the output that is cut"
        report.refuse(not message.target_name, path, fault)
        for name in message.target_name:
            if name not in outputs:
                fault = f"the model has no output '{name}'{suggestion(name, list(outputs))}"
                report.error(f"{path}.target_name", fault)
            elif (given := len(model_dims(outputs[name]))) != (wanted := len(model_dims(inputs[source]))):
                fault = f"output '{name}' has {given} dims, its source '{source}' has {wanted}; they must be as many"
                report.error(f"{path}.target_name", fault)
            else:
                yield name, source


def _source(kind: str, path: str, sources: Sequence[str], config: ModelConfig, report: ConfigReport) -> str:
    """The single input that a batch input or output describes; "" after an error."""
    inputs = [tensor.name for tensor in config.input]
    if len(sources) == 1 and sources[0] in inputs:
        return sources[0]
    got = ", ".join(sources) or "none"
    fault = f"batch {kind} must have one of the inputs as 'source_input', got {got}{suggestion(got, inputs)}"
    report.error(f"{path}.source_input", fault)
    return ""


def _buckets(config: ModelConfig, report: ConfigReport) -> LengthBuckets | None:
    text = {key: config.parameters[key].string_value for key in LAYOUT_PARAMETERS if key in config.parameters}

    def refuse(is_fault: object, key: str, fault: str) -> None:
        report.refuse(is_fault, f"parameters[{key}]", fault)

    if _BOUNDS not in text:
        for key in text:
            refuse(True, key, f"parameter '{key}' needs parameter '{_BOUNDS}'")
        return None
    refuse(not config.HasField("dynamic_batching"), _BOUNDS, f"parameter '{_BOUNDS}' needs dynamic_batching")
    parts = [part.strip() for part in text[_BOUNDS].split(",")]
    bounds = tuple(int(part) if part.isdecimal() else 0 for part in parts)
    fault = f"parameter '{_BOUNDS}' must be lengths that rise, such as '16,32,64', got '{text[_BOUNDS]}'"
    refuse(bounds[0] < 1 or any(low >= high for low, high in pairwise(bounds)), _BOUNDS, fault)
    pad_values: dict[str, float] = dict(_pad_values(config, text.get(_PAD, ""), report)) if text.get(_PAD) else {}
    mask = text.get(_MASK, "")
    if mask and (tensor := _varying_input(config, _MASK, mask, report)) is not None:
        padding = pad_values.setdefault(mask, 0)
        refuse(padding != 0, _PAD, f"the mask '{mask}' is padded with 0, got {padding}")
        refuse(tensor.data_type == TYPE_STRING, _MASK, f"the mask '{mask}' must hold numbers")
    fault = f"parameter '{_BOUNDS}' needs the inputs to pad, as '{_PAD}': 'input=value,...'"
    refuse(not pad_values, _BOUNDS, fault)
    most = text.get(_MAX_ELEMENTS, "0")
    if most.isdecimal():
        return LengthBuckets(bounds, pad_values, mask, int(most))
    refuse(True, _MAX_ELEMENTS, f"parameter '{_MAX_ELEMENTS}' must be a whole number of at least 0, got '{most}'")
    return None


def _pad_values(config: ModelConfig, text: str, report: ConfigReport) -> Iterator[tuple[str, float]]:
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        tensor = _varying_input(config, _PAD, name, report)
        if tensor is None:
            continue
        datatype = datatype_name(tensor.data_type)
        number = _number(value, datatype)
        if number is not None:
            yield name, number
            continue
        fault = f"input '{name}' is {datatype} and cannot be padded with '{value}'"
        report.error(f"parameters[{_PAD}]", f"{fault}; write '{name}=0' or another value of that type")


def _varying_input(config: ModelConfig, key: str, name: str, report: ConfigReport) -> ModelInput | None:
    """The input that a parameter names, if it has a -1 to pad."""
    path, inputs = f"parameters[{key}]", {tensor.name: tensor for tensor in reversed(config.input)}
    if name not in inputs:
        near = suggestion(name, [tensor.name for tensor in config.input])
        report.error(path, f"parameter '{key}': the model has no input '{name}'{near}")
    elif -1 not in inputs[name].dims:
        report.error(path, f"input '{name}' has no -1 in its dims {list(inputs[name].dims)}; nothing to pad")
    else:
        return inputs[name]
    return None


def _number(text: str, datatype: str) -> float | None:
    """Parse ``text`` as a value of the datatype; None if invalid."""
    dtype = NUMPY_BY_DATATYPE.get(datatype)
    if dtype is None or dtype == np.object_:
        return None
    try:
        if datatype == "BOOL":
            return int(text) if int(text) in (0, 1) else None
        if np.issubdtype(dtype, np.integer):
            limits = np.iinfo(dtype)
            return int(text) if limits.min <= int(text) <= limits.max else None
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


def scheduler_settings(config: ModelConfig, report: ConfigReport) -> SchedulerSettings:
    """Read the settings of the scheduler; ``max_batch_size`` must be complete."""
    execution_timeout_us, load_timeout_s = _whole(config, _LIMIT, report), _load_timeout_s(config, report)
    if config.HasField("sequence_batching"):
        for key in (_AGING, _SPLIT, _QUEUE_POLICY):
            fault = f"parameter '{key}' is not possible with sequence_batching; remove it"
            report.refuse(key in config.parameters, f"parameters[{key}]", fault)
        sequences = _sequence_settings(config, report)
        oldest, most = config.sequence_batching.oldest, config.max_batch_size
        delay_us = sequences.max_queue_delay_us if sequences.is_direct else oldest.max_queue_delay_microseconds
        return SchedulerSettings(
            max_batch_size=most,
            is_batching=True,
            preferred_batch_sizes=tuple(s for s in dict.fromkeys(oldest.preferred_batch_size) if 1 <= s <= most),
            max_queue_delay_us=delay_us,
            execution_timeout_us=execution_timeout_us,
            load_timeout_s=load_timeout_s,
            sequences=sequences,
        )
    fault = f"parameter '{_MAX_BACKLOG}' needs sequence_batching; elsewhere a queue policy has max_queue_size"
    report.refuse(_MAX_BACKLOG in config.parameters, f"parameters[{_MAX_BACKLOG}]", fault)
    can_split = config.parameters[_SPLIT].string_value if _SPLIT in config.parameters else "false"
    fault = f"parameter '{_SPLIT}' must be true or false, got '{can_split}'"
    report.refuse(can_split.lower() not in _FLAGS, f"parameters[{_SPLIT}]", fault)
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
        execution_timeout_us=execution_timeout_us,
        load_timeout_s=load_timeout_s,
        can_split=_FLAGS.get(can_split.lower(), False),
        queue_policy=_queue_policy(config, report),
    )
    for path, message in settings.faults():
        report.error(path, f"{path}: {message}")
    return settings


def _whole(config: ModelConfig, key: str, report: ConfigReport, cure: str = "") -> int:
    text = config.parameters[key].string_value if key in config.parameters else "0"
    number = int(text) if text.isdecimal() else 0
    fault = f"parameter '{key}' must be a whole number of at least 1, got '{text}'{cure}"
    report.refuse(key in config.parameters and not number, f"parameters[{key}]", fault)
    return number


def _load_timeout_s(config: ModelConfig, report: ConfigReport) -> float:
    if _LOAD_LIMIT not in config.parameters:
        return DEFAULT_LOAD_TIMEOUT_S
    text = config.parameters[_LOAD_LIMIT].string_value
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = math.nan
    fault = f"parameter '{_LOAD_LIMIT}' must be seconds from 0 (no limit) to {_MAX_LOAD_S:.0f}, got '{text[:80]}'"
    report.refuse(not 0 <= limit_s <= _MAX_LOAD_S, f"parameters[{_LOAD_LIMIT}]", fault)
    return limit_s


def _queue_policy(config: ModelConfig, report: ConfigReport) -> str:
    default, *_ = QUEUES
    name = config.parameters[_QUEUE_POLICY].string_value if _QUEUE_POLICY in config.parameters else default
    if name not in QUEUES:
        fault = f"parameter '{_QUEUE_POLICY}' must be one of {', '.join(QUEUES)}, got '{name[:80]}'"
        report.error(f"parameters[{_QUEUE_POLICY}].string_value", fault)
        return default
    fault = f"{_QUEUE_POLICY} '{name}' has no levels; remove priority_levels, or the parameter '{_QUEUE_POLICY}'"
    has_fault = config.dynamic_batching.priority_levels and not QUEUES[name].has_levels
    report.refuse(has_fault, "dynamic_batching.priority_levels", fault)
    return name


def _policy(policy: ModelQueuePolicy) -> WaitPolicy:
    return WaitPolicy(
        timeout_action=ModelQueuePolicy.TimeoutAction.Name(policy.timeout_action),
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _sequence_settings(config: ModelConfig, report: ConfigReport) -> SequenceSettings:
    batching, most = config.sequence_batching, config.max_batch_size
    oldest, direct = batching.oldest, batching.direct
    is_direct = batching.WhichOneof("strategy_choice") != "oldest"
    num_slots, path, what = max(most, 1), "max_batch_size", "with sequence_batching max_batch_size"
    if not is_direct and oldest.max_candidate_sequences:
        num_slots, what = oldest.max_candidate_sequences, "max_candidate_sequences"
        path = "sequence_batching.oldest.max_candidate_sequences"
    fault = f"{what} must be between 1 and {_MAX_SLOTS}, got {num_slots}"
    report.refuse(not 1 <= num_slots <= _MAX_SLOTS, path, fault)
    for size in () if is_direct else oldest.preferred_batch_size:
        fault = f"sequence batching preferred batch size must be positive and no larger than max_batch_size ({most})"
        path = "sequence_batching.oldest.preferred_batch_size"
        report.refuse(not 1 <= size <= most, path, f"{fault}, got {size}")
    utilization = direct.minimum_slot_utilization
    fault = f"minimum_slot_utilization must be in range [0.0, 1.0], got {utilization:g}"
    report.refuse(not 0 <= utilization <= 1, "sequence_batching.direct.minimum_slot_utilization", fault)
    if batching.iterative_sequence and batching.state:
        report.error(
            "sequence_batching.state",
            "state is not possible with iterative_sequence, where a request gives outputs once, at the end; keep it in "
            "the model",
        )
    return SequenceSettings(
        is_direct=is_direct,
        num_slots=num_slots if 1 <= num_slots <= _MAX_SLOTS else 1,
        max_idle_us=batching.max_sequence_idle_microseconds or DEFAULT_MAX_IDLE_US,
        max_queue_delay_us=direct.max_queue_delay_microseconds,
        minimum_slot_utilization=utilization,
        is_iterative=batching.iterative_sequence,
        max_backlog=_whole(config, _MAX_BACKLOG, report, "; without it any number of sequences may wait"),
        has_varying_state=any(-1 in state.dims for state in batching.state),
        id_datatype=id_datatype(batching),
    )
