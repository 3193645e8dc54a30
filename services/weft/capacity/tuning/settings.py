"""Settings of one model that a search may change: ``KINDS`` is the only table of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from weft.capacity.tuning.config_text import Edit
from weft.serving.config.placement import EXECUTION, INLINE, THREAD, execution_of
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

#: Of a setting: a number, or text.
Value = int | str

#: Value of ``queue_delay_us`` of a model without ``dynamic_batching``.
OFF = "off"
_BUCKETS, _ELEMENTS = "batch_buckets", "batch_buckets_max_elements"
_DELAYS_US = (0, 100, 250, 500, 1000, 2000, 5000, 10_000)
_PREFERRED = (2, 4, 8, 16, 32, 64)
_MAX_BATCH = 256
#: Share of a latency limit that requests may wait for others.
_MAX_DELAY_SHARE = 0.25
#: Parameter with the threads of an operator, by backend, and its default.
_THREADS = {"onnxruntime": ("intra_op_thread_count", 1), "pytorch": ("INTRA_OP_THREAD_COUNT", 0)}


@dataclass(frozen=True)
class TunedModel:
    """A model whose settings are searched.

    Attributes:
        name: Of the model.
        service: Its service, as the folder of the repository is called.
        folder: Of the model, in the repository.
        text: Content of its ``config.pbtxt``.
        config: The same, parsed; what the file leaves out is left out.
        execution_modes: Values of ``EXECUTION`` that its backend allows.
        min_batch_size: Rows of the largest request that a graph or client may send.
    """

    name: str
    service: str
    folder: Path
    text: str
    config: ModelConfig
    execution_modes: tuple[str, ...]
    min_batch_size: int

    @property
    def is_batching(self) -> bool:
        """Whether requests share batches."""
        return self.config.HasField("dynamic_batching")

    def parameter(self, name: str, default: str) -> str:
        """Value of a parameter as text."""
        return self.config.parameters[name].string_value if name in self.config.parameters else default


@dataclass(frozen=True)
class Machine:
    """What bounds the values.

    Attributes:
        num_cores: That this process may use.
        limit_ms: The smallest latency that is to be kept, milliseconds.
    """

    num_cores: int
    limit_ms: float


class SettingKind(Protocol):
    """A setting that models have."""

    name: str

    def shipped(self, model: TunedModel) -> Value | None:
        """What the configuration says; None: the model has no such setting."""

    def choices(self, model: TunedModel, machine: Machine) -> Iterable[Value]:
        """Values to try beside the shipped one, in an order in which neighbours differ least."""

    def edits(self, model: TunedModel, value: Value) -> Sequence[Edit]:
        """What sets a value that is not the shipped one."""


class _Instances:
    name = "instances"

    def shipped(self, model: TunedModel) -> Value | None:
        groups = model.config.instance_group
        if len(groups) > 1 or (groups and (groups[0].HasField("rate_limiter") or len(groups[0].gpus) > 1)):
            return None
        return max(groups[0].count, 1) if groups else 1

    def choices(self, model: TunedModel, machine: Machine) -> Iterable[Value]:
        return _doubling(1, machine.num_cores)

    def edits(self, model: TunedModel, value: Value) -> Sequence[Edit]:
        return [Edit(("instance_group", "count"), str(value))]


class _Execution:
    name = "execution"

    def shipped(self, model: TunedModel) -> Value | None:
        if not {THREAD, INLINE} <= set(model.execution_modes):
            return None
        mode = execution_of(model.config, model.execution_modes)
        groups = model.config.instance_group
        has_obstacle = (
            any(group.kind == ModelInstanceGroup.KIND_GPU or group.HasField("rate_limiter") for group in groups)
            or "execution_timeout_us" in model.config.parameters
        )
        return mode if mode in (THREAD, INLINE) and not has_obstacle else None

    def choices(self, model: TunedModel, machine: Machine) -> Iterable[Value]:
        return (THREAD, INLINE)

    def edits(self, model: TunedModel, value: Value) -> Sequence[Edit]:
        return [Edit(("parameters", EXECUTION), str(value))]


class _QueueDelay:
    name = "queue_delay_us"

    def shipped(self, model: TunedModel) -> Value | None:
        if model.config.max_batch_size < 2:
            return None
        return model.config.dynamic_batching.max_queue_delay_microseconds if model.is_batching else OFF

    def choices(self, model: TunedModel, machine: Machine) -> Iterable[Value]:
        batching = model.config.dynamic_batching
        needs_queue = _BUCKETS in model.config.parameters or "priority_aging_us" in model.config.parameters
        others = {field.name for field, _ in batching.ListFields()}
        if not needs_queue and others <= {"preferred_batch_size", "max_queue_delay_microseconds"}:
            yield OFF
        yield from (delay for delay in _DELAYS_US if delay <= machine.limit_ms * 1000 * _MAX_DELAY_SHARE)

    def edits(self, model: TunedModel, value: Value) -> Sequence[Edit]:
        if value == OFF:
            return [Edit(("dynamic_batching",), None)]
        edits = [Edit(("dynamic_batching",), "{ }")] * (not model.is_batching)
        field = ("dynamic_batching", "max_queue_delay_microseconds")
        if value or model.config.dynamic_batching.max_queue_delay_microseconds:
            edits.append(Edit(field, str(value)))
        return edits


class _PreferredBatchSize:
    name = "preferred_batch_size"

    def shipped(self, model: TunedModel) -> Value | None:
        if model.config.max_batch_size < 2:
            return None
        return ",".join(map(str, model.config.dynamic_batching.preferred_batch_size)) or "none"

    def choices(self, model: TunedModel, machine: Machine) -> Iterable[Value]:
        return ("none", *(str(size) for size in _PREFERRED if size < model.config.max_batch_size))

    def edits(self, model: TunedModel, value: Value) -> Sequence[Edit]:
        sizes = None if value == "none" else f"[ {', '.join(str(value).split(','))} ]"
        return [Edit(("dynamic_batching", "preferred_batch_size"), sizes)]


class _MaxBatchSize:
    name = "max_batch_size"

    def shipped(self, model: TunedModel) -> Value | None:
        return model.config.max_batch_size or None

    def choices(self, model: TunedModel, machine: Machine) -> Iterable[Value]:
        shipped = model.config.max_batch_size
        yield from _doubling(max(model.min_batch_size, shipped // 4, 1), shipped)
        yield from (size for size in (2 * shipped, 4 * shipped) if size <= _MAX_BATCH)

    def edits(self, model: TunedModel, value: Value) -> Sequence[Edit]:
        return [Edit(("max_batch_size",), str(value))]


class _Buckets:
    """Bounds of the length buckets: every second one, all, or one more between each two."""

    name = _BUCKETS

    def shipped(self, model: TunedModel) -> Value | None:
        return _plain(model.parameter(_BUCKETS, "")) or None

    def choices(self, model: TunedModel, machine: Machine) -> Iterable[Value]:
        bounds = [int(bound) for bound in _plain(model.parameter(_BUCKETS, "")).split(",")]
        halves = [(low + high) // 2 for low, high in pairwise(bounds)]
        for chosen in (bounds[::-1][::4][::-1], bounds[::-1][::2][::-1], bounds, sorted({*bounds, *halves})):
            yield ",".join(map(str, chosen))

    def edits(self, model: TunedModel, value: Value) -> Sequence[Edit]:
        return [Edit(("parameters", _BUCKETS), str(value))]


class _BucketElements:
    name = _ELEMENTS

    def shipped(self, model: TunedModel) -> Value | None:
        return int(model.parameter(_ELEMENTS, "0")) if _BUCKETS in model.config.parameters else None

    def choices(self, model: TunedModel, machine: Machine) -> Iterable[Value]:
        shipped = int(model.parameter(_ELEMENTS, "0"))
        return (
            (shipped // 4, shipped // 2, shipped, shipped * 2, shipped * 4) if shipped else (0, 512, 1024, 2048, 4096)
        )

    def edits(self, model: TunedModel, value: Value) -> Sequence[Edit]:
        return [Edit(("parameters", _ELEMENTS), str(value))]


class _OperatorThreads:
    name = "threads"

    def shipped(self, model: TunedModel) -> Value | None:
        if model.config.backend not in _THREADS:
            return None
        name, default = _THREADS[model.config.backend]
        text = model.parameter(name, str(default))
        return int(text) if text.isdecimal() else None

    def choices(self, model: TunedModel, machine: Machine) -> Iterable[Value]:
        return _doubling(1, machine.num_cores)

    def edits(self, model: TunedModel, value: Value) -> Sequence[Edit]:
        return [Edit(("parameters", _THREADS[model.config.backend][0]), str(value))]


#: Every kind of setting, by name, in the order in which it is edited: batching is put up before its fields.
KINDS: Mapping[str, SettingKind] = {
    kind.name: kind
    for kind in (
        _Instances(),
        _Execution(),
        _OperatorThreads(),
        _MaxBatchSize(),
        _QueueDelay(),
        _PreferredBatchSize(),
        _Buckets(),
        _BucketElements(),
    )
}


def process_wide(model: TunedModel) -> tuple[str, ...]:
    """Kinds of settings that act on the whole process for as long as it lives: threads are set for all of torch."""
    return (_OperatorThreads.name,) if model.config.backend == "pytorch" else ()


def _doubling(least: int, most: int) -> tuple[int, ...]:
    """Powers of two times ``least`` below ``most``, and ``most``."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return (*sizes, most)


def _plain(bounds: str) -> str:
    return ",".join(part.strip() for part in bounds.split(",") if part.strip().isdecimal())
