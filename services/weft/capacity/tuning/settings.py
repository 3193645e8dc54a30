"""Settings of one model that a search may change: ``KINDS`` is the only table of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

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


@dataclass(frozen=True)
class SettingKind:
    """A setting that models have.

    Attributes:
        name: Behind that of the model.
        shipped: What the configuration says; None: the model has no such setting.
        choices: Values to try beside the shipped one, in an order in which neighbours differ least.
        edits: What sets a value that is not the shipped one.
    """

    name: str
    shipped: Callable[[TunedModel], Value | None]
    choices: Callable[[TunedModel, Machine], Iterable[Value]]
    edits: Callable[[TunedModel, Value], Sequence[Edit]]


def _set(*path: str) -> Callable[[TunedModel, Value], Sequence[Edit]]:
    return lambda model, value: [Edit(path, str(value))]


def _up_to_cores(model: TunedModel, machine: Machine) -> Iterable[Value]:
    return _doubling(1, machine.num_cores)


def _shipped_instances(model: TunedModel) -> Value | None:
    groups = model.config.instance_group
    if len(groups) > 1 or (groups and (groups[0].HasField("rate_limiter") or len(groups[0].gpus) > 1)):
        return None
    return max(groups[0].count, 1) if groups else 1


def _shipped_execution(model: TunedModel) -> Value | None:
    if not {THREAD, INLINE} <= set(model.execution_modes):
        return None
    mode = execution_of(model.config, model.execution_modes)
    has_obstacle = "execution_timeout_us" in model.config.parameters or any(
        group.kind == ModelInstanceGroup.KIND_GPU or group.HasField("rate_limiter")
        for group in model.config.instance_group
    )
    return mode if mode in (THREAD, INLINE) and not has_obstacle else None


def _shipped_delay(model: TunedModel) -> Value | None:
    if model.config.max_batch_size < 2:
        return None
    return model.config.dynamic_batching.max_queue_delay_microseconds if model.is_batching else OFF


def _delays(model: TunedModel, machine: Machine) -> Iterable[Value]:
    needs_queue = _BUCKETS in model.config.parameters or "priority_aging_us" in model.config.parameters
    others = {field.name for field, _ in model.config.dynamic_batching.ListFields()}
    if not needs_queue and others <= {"preferred_batch_size", "max_queue_delay_microseconds"}:
        yield OFF
    yield from (delay for delay in _DELAYS_US if delay <= machine.limit_ms * 1000 * _MAX_DELAY_SHARE)


def _delay_edits(model: TunedModel, value: Value) -> Sequence[Edit]:
    if value == OFF:
        return [Edit(("dynamic_batching",), None)]
    edits = [Edit(("dynamic_batching",), "{ }")] * (not model.is_batching)
    if value or model.config.dynamic_batching.max_queue_delay_microseconds:
        edits.append(Edit(("dynamic_batching", "max_queue_delay_microseconds"), str(value)))
    return edits


def _shipped_preferred(model: TunedModel) -> Value | None:
    if model.config.max_batch_size < 2:
        return None
    return ",".join(map(str, model.config.dynamic_batching.preferred_batch_size)) or "none"


def _preferred_edits(model: TunedModel, value: Value) -> Sequence[Edit]:
    sizes = None if value == "none" else f"[ {', '.join(str(value).split(','))} ]"
    return [Edit(("dynamic_batching", "preferred_batch_size"), sizes)]


def _batch_sizes(model: TunedModel, machine: Machine) -> Iterable[Value]:
    shipped = model.config.max_batch_size
    yield from _doubling(max(model.min_batch_size, shipped // 4, 1), shipped)
    yield from (size for size in (2 * shipped, 4 * shipped) if size <= _MAX_BATCH)


def _buckets(model: TunedModel, machine: Machine) -> Iterable[Value]:
    """Every fourth and second bound, all, and one more between each two."""
    bounds = [int(bound) for bound in _plain(model.parameter(_BUCKETS, "")).split(",")]
    halves = [(low + high) // 2 for low, high in pairwise(bounds)]
    for chosen in (bounds[::-1][::4][::-1], bounds[::-1][::2][::-1], bounds, sorted({*bounds, *halves})):
        yield ",".join(map(str, chosen))


def _shipped_elements(model: TunedModel) -> Value | None:
    return int(model.parameter(_ELEMENTS, "0")) if _BUCKETS in model.config.parameters else None


def _elements(model: TunedModel, machine: Machine) -> Iterable[Value]:
    shipped = int(model.parameter(_ELEMENTS, "0"))
    return (shipped // 4, shipped // 2, shipped, shipped * 2, shipped * 4) if shipped else (0, 512, 1024, 2048, 4096)


def _shipped_threads(model: TunedModel) -> Value | None:
    if model.config.backend not in _THREADS:
        return None
    name, default = _THREADS[model.config.backend]
    text = model.parameter(name, str(default))
    return int(text) if text.isdecimal() else None


OPERATOR_THREADS = "threads"
#: Every kind of setting, by name, in the order in which it is edited: batching is put up before its fields.
KINDS: Mapping[str, SettingKind] = {
    kind.name: kind
    for kind in (
        SettingKind("instances", _shipped_instances, _up_to_cores, _set("instance_group", "count")),
        SettingKind("execution", _shipped_execution, lambda *_: (THREAD, INLINE), _set("parameters", EXECUTION)),
        SettingKind(
            OPERATOR_THREADS,
            _shipped_threads,
            _up_to_cores,
            lambda model, value: [Edit(("parameters", _THREADS[model.config.backend][0]), str(value))],
        ),
        SettingKind(
            "max_batch_size", lambda model: model.config.max_batch_size or None, _batch_sizes, _set("max_batch_size")
        ),
        SettingKind("queue_delay_us", _shipped_delay, _delays, _delay_edits),
        SettingKind(
            "preferred_batch_size",
            _shipped_preferred,
            lambda model, _: ("none", *(str(size) for size in _PREFERRED if size < model.config.max_batch_size)),
            _preferred_edits,
        ),
        SettingKind(
            _BUCKETS,
            lambda model: _plain(model.parameter(_BUCKETS, "")) or None,
            _buckets,
            _set("parameters", _BUCKETS),
        ),
        SettingKind(_ELEMENTS, _shipped_elements, _elements, _set("parameters", _ELEMENTS)),
    )
}


def _doubling(least: int, most: int) -> tuple[int, ...]:
    """Powers of two times ``least`` below ``most``, and ``most``."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return (*sizes, most)


def _plain(bounds: str) -> str:
    return ",".join(part.strip() for part in bounds.split(",") if part.strip().isdecimal())
