"""The search space: settings of a graph's models, their values, the edits that set them, and likely improvements.

``KINDS`` is the only table of the settings of a model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

from weft.capacity.tuning.config_text import Edit, edited
from weft.serving.config.placement import EXECUTION, INLINE, THREAD, execution_of
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

#: Of a setting: a number, or text.
Value: TypeAlias = int | str
#: Value of every setting, by ``MODEL.SETTING``; that of the mesh is ``IN_PROCESS``.
Configuration: TypeAlias = Mapping[str, Value]

IN_PROCESS = "in_process"
#: Value of ``IN_PROCESS``: each service is a process.
SEPARATE = "none"
#: Value of ``queue_delay_us`` of a model without ``dynamic_batching``.
OFF = "off"
_THREADS = "threads"
_BUCKETS, _ELEMENTS = "batch_buckets", "batch_buckets_max_elements"
_DELAYS_US = (0, 100, 250, 500, 1000, 2000, 5000, 10_000)
_PREFERRED = (2, 4, 8, 16, 32, 64)
_MAX_BATCH = 256
#: Share of a latency limit that requests may wait for others.
_MAX_DELAY_SHARE = 0.25
#: Parameter with the threads of an operator, by backend, and its default.
_THREAD_PARAMETERS = {"onnxruntime": ("intra_op_thread_count", 1), "pytorch": ("INTRA_OP_THREAD_COUNT", 0)}
_TRANSFORMS = ("preprocess", "postprocess")
#: A batch that takes no longer may run on the event loop, microseconds.
_MAX_INLINE_US = 1000.0


@dataclass(frozen=True)
class TunedModel:
    """A model whose settings are searched.

    Attributes:
        service: Its service, as the folder of the repository is called.
        config: The configuration file, parsed, without completion.
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

    def parameter(self, name: str, default: str) -> str:
        """Value of a parameter as text."""
        return self.config.parameters[name].string_value if name in self.config.parameters else default


class Machine(NamedTuple):
    """Bounds for values: cores that this process may use, and the smallest latency limit, milliseconds."""

    num_cores: int
    limit_ms: float


class SettingKind(NamedTuple):
    """A setting that models have.

    Attributes:
        shipped: The configured value; None: the model has no such setting.
        choices: Other values to try, ordered so that neighbours differ least.
        edits: Edits that set a value other than the shipped one.
    """

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


def _shipped_threads(model: TunedModel) -> Value | None:
    if model.config.backend not in _THREAD_PARAMETERS:
        return None
    name, default = _THREAD_PARAMETERS[model.config.backend]
    text = model.parameter(name, str(default))
    return int(text) if text.isdecimal() else None


def _batch_sizes(model: TunedModel, machine: Machine) -> Iterable[Value]:
    shipped = model.config.max_batch_size
    yield from _doubling(max(model.min_batch_size, shipped // 4, 1), shipped)
    yield from (size for size in (2 * shipped, 4 * shipped) if size <= _MAX_BATCH)


def _shipped_delay(model: TunedModel) -> Value | None:
    if model.config.max_batch_size < 2:
        return None
    batching = model.config.dynamic_batching
    return batching.max_queue_delay_microseconds if model.config.HasField("dynamic_batching") else OFF


def _delays(model: TunedModel, machine: Machine) -> Iterable[Value]:
    needs_queue = _BUCKETS in model.config.parameters or "priority_aging_us" in model.config.parameters
    others = {field.name for field, _ in model.config.dynamic_batching.ListFields()}
    if not needs_queue and others <= {"preferred_batch_size", "max_queue_delay_microseconds"}:
        yield OFF
    yield from (delay for delay in _DELAYS_US if delay <= machine.limit_ms * 1000 * _MAX_DELAY_SHARE)


def _delay_edits(model: TunedModel, value: Value) -> Sequence[Edit]:
    if value == OFF:
        return [Edit(("dynamic_batching",), None)]
    edits = [] if model.config.HasField("dynamic_batching") else [Edit(("dynamic_batching",), "{ }")]
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


def _shipped_buckets(model: TunedModel) -> Value | None:
    parts = (part.strip() for part in model.parameter(_BUCKETS, "").split(","))
    return ",".join(part for part in parts if part.isdecimal()) or None


def _buckets(model: TunedModel, machine: Machine) -> Iterable[Value]:
    """Every fourth and second bound, all, and one more between each two."""
    bounds = [int(bound) for bound in str(_shipped_buckets(model)).split(",")]
    halves = [(low + high) // 2 for low, high in pairwise(bounds)]
    for chosen in (bounds[::-1][::4][::-1], bounds[::-1][::2][::-1], bounds, sorted({*bounds, *halves})):
        yield ",".join(map(str, chosen))


def _shipped_elements(model: TunedModel) -> Value | None:
    return int(model.parameter(_ELEMENTS, "0")) if _BUCKETS in model.config.parameters else None


def _elements(model: TunedModel, machine: Machine) -> Iterable[Value]:
    shipped = int(model.parameter(_ELEMENTS, "0"))
    return (shipped // 4, shipped // 2, shipped, shipped * 2, shipped * 4) if shipped else (0, 512, 1024, 2048, 4096)


#: Every kind of setting, by name, in the order in which it is edited: batching is put up before its fields.
KINDS: Mapping[str, SettingKind] = {
    "instances": SettingKind(_shipped_instances, _up_to_cores, _set("instance_group", "count")),
    "execution": SettingKind(_shipped_execution, lambda *_: (THREAD, INLINE), _set("parameters", EXECUTION)),
    _THREADS: SettingKind(
        _shipped_threads,
        _up_to_cores,
        lambda model, value: [Edit(("parameters", _THREAD_PARAMETERS[model.config.backend][0]), str(value))],
    ),
    "max_batch_size": SettingKind(
        lambda model: model.config.max_batch_size or None, _batch_sizes, _set("max_batch_size")
    ),
    "queue_delay_us": SettingKind(_shipped_delay, _delays, _delay_edits),
    "preferred_batch_size": SettingKind(
        _shipped_preferred,
        lambda model, _: ("none", *(str(size) for size in _PREFERRED if size < model.config.max_batch_size)),
        _preferred_edits,
    ),
    _BUCKETS: SettingKind(_shipped_buckets, _buckets, _set("parameters", _BUCKETS)),
    _ELEMENTS: SettingKind(_shipped_elements, _elements, _set("parameters", _ELEMENTS)),
}


def _doubling(least: int, most: int) -> tuple[int, ...]:
    """Powers of two times ``least`` below ``most``, and ``most``."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return (*sizes, most)


class Setting(NamedTuple):
    """One dimension of the search: values, ordered so that neighbours differ least, and the configured one."""

    choices: tuple[Value, ...]
    shipped: Value


class Cost(NamedTuple):
    """A model's work: mean time of a batch, microseconds; its share of all models' compute time."""

    execution_us: float
    share: float


@dataclass(frozen=True)
class SearchSpace:
    """Settings, by key, of models (by name), whose ``config.pbtxt`` is edited, and of the mesh."""

    models: Mapping[str, TunedModel]
    settings: Mapping[str, Setting]

    @property
    def shipped(self) -> dict[str, Value]:
        """The configuration as it is in the repository."""
        return {key: setting.shipped for key, setting in self.settings.items()}

    @property
    def size(self) -> int:
        """Number of configurations."""
        return math.prod(len(setting.choices) for setting in self.settings.values())

    def canonical(self, configuration: Configuration) -> dict[str, Value]:
        """A copy in which settings without effect have their shipped values."""
        plain = {key: configuration.get(key, setting.shipped) for key, setting in self.settings.items()}
        for name in self.models:
            for key, value, idle in (
                ("queue_delay_us", OFF, "preferred_batch_size"),
                ("execution", INLINE, "instances"),
            ):
                if plain.get(f"{name}.{key}") == value and (unused := f"{name}.{idle}") in self.settings:
                    plain[unused] = self.settings[unused].shipped
        return plain

    def changes(self, configuration: Configuration) -> dict[str, tuple[Value, Value]]:
        """Settings that differ from the shipped ones: shipped and new value, by key."""
        plain = self.canonical(configuration)
        pairs = {key: (setting.shipped, plain[key]) for key, setting in self.settings.items()}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    def texts(self, configuration: Configuration) -> dict[str, str]:
        """The new ``config.pbtxt`` of each model that changes, by model. Raises UnsupportedError."""
        changes = self.changes(configuration)
        found = {}
        for name, model in self.models.items():
            edits: list[Edit] = []
            for kind, setting in KINDS.items():
                if (change := changes.get(f"{name}.{kind}")) is not None:
                    edits += setting.edits(model, change[1])
            if edits:
                found[name] = edited(model.text, edits, file=str(model.folder / "config.pbtxt"))
        return found

    def mesh_arguments(self, configuration: Configuration) -> list[str]:
        """Arguments of ``weft up``."""
        services = configuration.get(IN_PROCESS, SEPARATE)
        return [] if services == SEPARATE else ["--in-process", str(services)]

    def process_wide(self, configuration: Configuration) -> tuple[tuple[str, Value], ...]:
        """Settings that persist in a process when its models are reloaded: the threads of torch."""
        torch = (name for name, model in self.models.items() if model.config.backend == "pytorch")
        keys = (f"{name}.{_THREADS}" for name in torch)
        return tuple((key, configuration[key]) for key in keys if key in self.settings)

    def steps(self, incumbent: Configuration, costs: Mapping[str, Cost]) -> Iterator[dict[str, Value]]:
        """Yield changes of the incumbent, most promising first: of several models at once, then one by one.

        One by one, the models with the most work come first, and small changes of all before greater ones of any.

        Args:
            costs: Of the models, by name; a missing one did nothing.
        """
        yield from ({**incumbent, **step} for step in self._joint_steps(incumbent, costs) if step)
        dearest = sorted(costs, key=lambda name: costs[name].share, reverse=True)
        keys = [key for name in dearest for kind in KINDS if (key := f"{name}.{kind}") in self.settings] + [IN_PROCESS]
        for distance in range(1, max(len(self._choices(key)) for key in keys)):
            for key in keys:
                choices = self._choices(key)
                at = choices.index(incumbent[key])
                for place in (at + distance, at - distance):
                    if 0 <= place < len(choices):
                        yield {**incumbent, key: choices[place]}

    def _joint_steps(self, incumbent: Configuration, costs: Mapping[str, Cost]) -> Iterator[dict[str, Value]]:
        fused: dict[str, Value] = {IN_PROCESS: self._choices(IN_PROCESS)[-1]}
        cheap = [name for name, cost in costs.items() if cost.execution_us <= _MAX_INLINE_US]
        everywhere: dict[str, Value] = {key: INLINE for name in costs if (key := f"{name}.execution") in self.settings}
        inline = {key: value for key, value in everywhere.items() if key.partition(".")[0] in cheap}
        delays = (f"{name}.queue_delay_us" for name in cheap)
        unbatched: dict[str, Value] = {key: OFF for key in delays if OFF in self._choices(key)}
        more: dict[str, Value] = {}
        for name in costs:
            choices = self._choices(key := f"{name}.instances")
            more.update((key, after) for number, after in pairwise(choices) if number == incumbent[key])
        yield from (fused, fused | inline, fused | everywhere, more, inline, fused | inline | unbatched)

    def _choices(self, key: str) -> tuple[Value, ...]:
        return self.settings[key].choices if key in self.settings else ()


def make_space(models: Sequence[TunedModel], machine: Machine) -> SearchSpace:
    """The search space of a graph that calls these models.

    Stateful, decoupled and language models are not tuned.
    """
    settings: dict[str, Setting] = {}
    tuned = {}
    for model in models:
        config = model.config
        is_stateful = config.HasField("sequence_batching") or config.model_transaction_policy.decoupled
        if config.backend in ("", "llm") or is_stateful:
            continue
        tuned[model.name] = model
        for name, kind in KINDS.items():
            if (shipped := kind.shipped(model)) is None:
                continue
            choices = list(dict.fromkeys(kind.choices(model, machine)))
            if shipped not in choices:
                choices.append(shipped)
                if isinstance(shipped, int):  # behind texts, numbers are in their order
                    choices.sort(key=lambda choice: choice if isinstance(choice, int) else -1)
            if len(choices) > 1:
                settings[f"{model.name}.{name}"] = Setting(tuple(choices), shipped)
    services = list(dict.fromkeys(model.service for model in models))
    transforms = [name for name in services if name in _TRANSFORMS]
    fused = [",".join(names) for names in (transforms, services) if names]
    settings[IN_PROCESS] = Setting((SEPARATE, *dict.fromkeys(fused)), SEPARATE)
    return SearchSpace(tuned, settings)
