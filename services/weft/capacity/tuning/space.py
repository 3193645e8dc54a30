"""The settings of a whole graph: what may be tried, what it changes, and which changes are likely to help."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from weft.capacity.tuning.config_text import Edit, edited
from weft.capacity.tuning.settings import KINDS, OFF, OPERATOR_THREADS, Machine, TunedModel, Value
from weft.serving.config.placement import INLINE

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
        torch = (name for name, model in self.models.items() if model.config.backend == "pytorch")
        keys = (f"{name}.{OPERATOR_THREADS}" for name in torch)  # set for all of torch, once
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
