"""Reads a language model's settings from ``config.pbtxt`` and the instance."""

from typing import NamedTuple

from weft.backends.llm.kv_events import KvEventsConfig
from weft.backends.llm.metric_names import CONVENTIONS
from weft.backends.llm.tensors import PARAMETERS as CHAT_PARAMETERS
from weft.base.errors import InvalidArgumentError
from weft.base.signature import MIGRATION_PARAMETER
from weft.llm.config import HEADS, EngineConfig
from weft.serving.backends.base import InstanceContext, ModelContext
from weft.serving.backends.parameters import ParameterReader
from weft.v2.protocol.handover import DEFAULT_MIN_TOKENS, MIN_TOKENS, ROLE, ROLES

_MAX_TEXT_BYTES, _LOAD_FORMAT, _GENERATION = "max_text_bytes", "load_format", "generation_config"
_METRIC_NAMES, _KV_EVENTS, _TRANSFER_MS = "metric_names", "kv_events", "kv_transfer_timeout_ms"
_FOR_ROUTERS = (MIGRATION_PARAMETER, ROLE, MIN_TOKENS)
_OWN = (_MAX_TEXT_BYTES, _LOAD_FORMAT, _GENERATION, _METRIC_NAMES, _KV_EVENTS, _TRANSFER_MS, *_FOR_ROUTERS)
#: Ageing of the model's queue, which the engine applies as well.
_AGING = "priority_aging_us"
#: Fields of ``EngineConfig`` that are set by other parts of the configuration.
_DECIDED = {"device": "instance_group", "aging_ns": f"parameter '{_AGING}'"}

_LOAD_FORMATS = ("safetensors", "dummy")


class Settings(NamedTuple):
    """Load settings of a model.

    Attributes:
        engine: Not yet resolved for the model.
        max_text_bytes: Longest prompt as text, in bytes of UTF-8.
        has_weights: Whether to load weights; False: random ones, for benchmarks.
        has_own_defaults: Whether ``generation_config.json`` sets the sampling parameters that a request lacks.
        metric_names: Conventions by whose names metrics are exported besides our own.
        kv_transfer_timeout_ms: How long a request waits for blocks.
        kv_events: Where and how to publish events of cached blocks; None: nowhere.
    """

    engine: EngineConfig
    max_text_bytes: int
    has_weights: bool
    has_own_defaults: bool = True
    metric_names: tuple[str, ...] = ()
    mesh_key: str = ""
    role: str = "both"
    kv_transfer_timeout_ms: int = 5_000
    kv_events: KvEventsConfig | None = None


def read_settings(model: ModelContext, instance: InstanceContext | None = None) -> Settings:
    """Read the settings of the model for ``instance``; None: independent of an instance.

    Raises:
        InvalidArgumentError: A parameter is unknown, or its value is not allowed.
    """
    reader = ParameterReader(model)
    max_text_bytes = reader.integer(_MAX_TEXT_BYTES, 1 << 20, minimum=1)
    load_format = reader.choice(_LOAD_FORMAT, "safetensors", _LOAD_FORMATS)
    generation = reader.choice(_GENERATION, "auto", ("auto", "none"))
    reader.integer(MIGRATION_PARAMETER, 0, minimum=0)  # routers read it
    metric_names = reader.choices(_METRIC_NAMES, "weft", ("weft", *CONVENTIONS))
    role = reader.choice(ROLE, "both", ROLES)
    reader.integer(MIN_TOKENS, DEFAULT_MIN_TOKENS, minimum=1)  # the router's
    transfer_ms = reader.integer(_TRANSFER_MS, 5_000, minimum=1)
    events_text, kv_events = reader.text(_KV_EVENTS, ""), None
    if events_text:
        try:
            kv_events = KvEventsConfig.parse(events_text)
        except ValueError as error:
            raise model.error(f"parameters[{_KV_EVENTS}]", f"parameter '{_KV_EVENTS}': {error}") from None
    parameters = {name: text for name, text in model.parameters.items() if name not in (*_OWN, *CHAT_PARAMETERS)}
    for name, decider in _DECIDED.items():
        if name in parameters:
            raise model.error(f"parameters[{name}].key", f"parameter '{name}' is set by {decider}; remove it")
    aging = model.config.get("parameters", {}).get(_AGING, {}).get("string_value", "0")
    parameters["aging_ns"] = str(int(aging) * 1000)
    if instance is not None and instance.kind == "GPU":
        parameters["device"] = f"cuda:{instance.device_id}"
    try:
        engine = EngineConfig.from_parameters(parameters)
    except InvalidArgumentError as error:
        raise model.error("parameters", error.message) from None
    is_divided = engine.parallel_sizes.num_ranks > 1
    if role != "both" and (not engine.enable_prefix_caching or engine.speculation in HEADS or is_divided):
        others = f"with speculation {' or '.join(HEADS)}, and in several processes"
        raise reader.fault(ROLE, role, f"both without enable_prefix_caching, {others}")
    if kv_events is not None and not engine.enable_prefix_caching:
        text = f"{_KV_EVENTS} needs enable_prefix_caching, whose blocks it tells of"
        raise model.error(f"parameters[{_KV_EVENTS}]", text)
    names = tuple(name for name in metric_names if name in CONVENTIONS)
    flags = load_format == "safetensors", generation == "auto"
    return Settings(engine, max_text_bytes, *flags, names, model.mesh_key, role, transfer_ms, kv_events)
