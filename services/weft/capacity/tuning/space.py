"""The settings of a graph's models: what may be tried, what it changes, and which changes are likely to help."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from weft.capacity.tuning.config_text import Edit, edited
from weft.serving.config.execution import EXECUTION, INLINE, THREAD, execution_of
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


#: Value of every setting, by ``MODEL.SETTING``; that of the mesh is ``IN_PROCESS``.
Configuration: TypeAlias = Mapping[str, Value]

IN_PROCESS = "in_process"
#: Value of ``IN_PROCESS``: each service is a process.
SEPARATE = "none"
_TRANSFORMS = ("preprocess", "postprocess")
#: A batch that takes no longer may run on the event loop, microseconds.
_MAX_INLINE_US = 1000.0
#: Stateful or streaming models; their settings are another search.
_UNTUNED_BACKENDS = frozenset({"llm"})


class Setting(NamedTuple):
    """One dimension of the search.

    Attributes:
        key: ``MODEL.SETTING``, or ``IN_PROCESS``.
        choices: Values, the shipped one among them; neighbours differ least.
        shipped: As configured.
    """

    key: str
    choices: tuple[Value, ...]
    shipped: Value


class Cost(NamedTuple):
    """What a model takes of the work of a graph.

    Attributes:
        execution_us: One batch, mean, microseconds.
        share: Of the time that all models compute.
    """

    execution_us: float
    share: float


@dataclass(frozen=True)
class SearchSpace:
    """Settings of a graph's models and of the mesh.

    Attributes:
        models: Whose ``config.pbtxt`` is edited, by name.
        settings: By key.
    """

    models: Mapping[str, TunedModel]
    settings: Mapping[str, Setting]

    @property
    def shipped(self) -> dict[str, Value]:
        """The configuration as it is in the repository."""
        return {key: setting.shipped for key, setting in self.settings.items()}

    def canonical(self, configuration: Configuration) -> dict[str, Value]:
        """The same with settings that have no effect beside the others as they are shipped."""
        plain = {key: configuration.get(key, setting.shipped) for key, setting in self.settings.items()}
        for name in self.models:
            idle = []
            if plain.get(f"{name}.queue_delay_us") == OFF:
                idle += ["preferred_batch_size"]
            if plain.get(f"{name}.execution") == INLINE:
                idle += ["instances"]
            for kind in idle:
                if (key := f"{name}.{kind}") in self.settings:
                    plain[key] = self.settings[key].shipped
        return plain

    def changes(self, configuration: Configuration) -> dict[str, tuple[Value, Value]]:
        """Settings that differ from the shipped ones: shipped and new value, by key."""
        plain = self.canonical(configuration)
        return {
            key: (setting.shipped, plain[key])
            for key, setting in self.settings.items()
            if plain[key] != setting.shipped
        }

    def edits(self, configuration: Configuration) -> dict[str, list[Edit]]:
        """What to edit in the ``config.pbtxt`` of each model that changes, by model."""
        changes = self.changes(configuration)
        found: dict[str, list[Edit]] = {}
        for name, model in self.models.items():
            for kind in KINDS.values():
                if (change := changes.get(f"{name}.{kind.name}")) is not None:
                    found.setdefault(name, []).extend(kind.edits(model, change[1]))
        return found

    def texts(self, configuration: Configuration) -> dict[str, str]:
        """The new ``config.pbtxt`` of each model that changes, by model. Raises UnsupportedError."""
        return {
            name: edited(self.models[name].text, edits, file=str(self.models[name].folder / "config.pbtxt"))
            for name, edits in self.edits(configuration).items()
        }

    def mesh_arguments(self, configuration: Configuration) -> list[str]:
        """Arguments of ``weft up``."""
        services = configuration.get(IN_PROCESS, SEPARATE)
        return [] if services == SEPARATE else ["--in-process", str(services)]

    def process_wide(self, configuration: Configuration) -> tuple[tuple[str, Value], ...]:
        """Settings that a process keeps when its models are loaded again, with their values."""
        keys = (f"{name}.{kind}" for name, model in self.models.items() for kind in process_wide(model))
        return tuple((key, configuration[key]) for key in keys if key in self.settings)

    def steps(self, incumbent: Configuration, costs: Mapping[str, Cost]) -> Iterator[dict[str, Value]]:
        """Changes of the incumbent, those first that most often help: of several models at once, then one by one.

        One by one, settings of the model that takes most of the work are the first, and small changes of all before
        greater ones of any.

        Args:
            incumbent: The best configuration so far.
            costs: Of the models, by name; one that is not there did nothing.
        """
        yield from ({**incumbent, **step} for step in self._joint_steps(incumbent, costs))
        dearest = sorted(costs, key=lambda name: costs[name].share, reverse=True)
        keys = [key for name in dearest for kind in KINDS if (key := f"{name}.{kind}") in self.settings] + [IN_PROCESS]
        for distance in range(1, max(map(len, map(self._choices, keys)))):
            for key in keys:
                yield from self._at_distance(incumbent, key, distance)

    def _joint_steps(self, incumbent: Configuration, costs: Mapping[str, Cost]) -> Iterator[dict[str, Value]]:
        fused: dict[str, Value] = {IN_PROCESS: self.settings[IN_PROCESS].choices[-1]}
        cheap = [name for name, cost in costs.items() if cost.execution_us <= _MAX_INLINE_US]
        everywhere: dict[str, Value] = {
            f"{name}.execution": INLINE for name in costs if f"{name}.execution" in self.settings
        }
        inline = {key: value for key, value in everywhere.items() if key.partition(".")[0] in cheap}
        unbatched: dict[str, Value] = {
            key: OFF for name in cheap if OFF in self._choices(key := f"{name}.queue_delay_us")
        }
        more: dict[str, Value] = {}
        for name in costs:
            key = f"{name}.instances"
            for number, next_number in pairwise(self._choices(key)):
                if number == incumbent[key]:
                    more[key] = next_number
        for step in (fused, fused | inline, fused | everywhere, more, inline, fused | inline | unbatched):
            if step:
                yield step

    def _at_distance(self, incumbent: Configuration, key: str, distance: int) -> Iterator[dict[str, Value]]:
        choices = self._choices(key)
        at = choices.index(incumbent[key])
        for place in (at + distance, at - distance):
            if 0 <= place < len(choices):
                yield {**incumbent, key: choices[place]}

    def _choices(self, key: str) -> tuple[Value, ...]:
        return self.settings[key].choices if key in self.settings else ()

    @property
    def size(self) -> int:
        """How many configurations there are."""
        return math.prod(len(setting.choices) for setting in self.settings.values())


def make_space(models: Sequence[TunedModel], machine: Machine) -> SearchSpace:
    """The search space of a graph.

    Args:
        models: That the graph calls.
        machine: Bounds the values.
    """
    settings: dict[str, Setting] = {}
    tuned = {model.name: model for model in models if _can_be_tuned(model)}
    for model in tuned.values():
        for kind in KINDS.values():
            shipped = kind.shipped(model)
            if shipped is None:
                continue
            choices = list(dict.fromkeys(kind.choices(model, machine)))
            if shipped not in choices:
                choices = _with(choices, shipped)
            if len(choices) > 1:
                key = f"{model.name}.{kind.name}"
                settings[key] = Setting(key, tuple(choices), shipped)
    services = list(dict.fromkeys(model.service for model in models))
    transforms = [name for name in services if name in _TRANSFORMS]
    fused = [",".join(names) for names in (transforms, services) if names]
    settings[IN_PROCESS] = Setting(IN_PROCESS, (SEPARATE, *dict.fromkeys(fused)), SEPARATE)
    return SearchSpace(tuned, settings)


def _can_be_tuned(model: TunedModel) -> bool:
    config = model.config
    is_stateful = config.HasField("sequence_batching") or config.model_transaction_policy.decoupled
    return bool(config.backend) and config.backend not in _UNTUNED_BACKENDS and not is_stateful


def _with(choices: list[Value], value: Value) -> list[Value]:
    """The choices with one more, in the order of numbers where they are numbers."""
    numbers = [choice for choice in choices if isinstance(choice, int)]
    if not isinstance(value, int):
        return [*choices, value]
    texts: list[Value] = [choice for choice in choices if not isinstance(choice, int)]
    return [*texts, *sorted([*numbers, value])]
