"""Fields of a ``config.json``: numbers, lists and what is not known."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from typing_extensions import override

from weft.base.errors import InvalidArgumentError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SLIDING, FULL = "sliding_attention", "full_attention"
#: Names of fields of ``config.json`` that change what a model computes. One of them that an architecture does not read
#: is refused; others, as names of tools and versions, are no concern.
_COMPUTES = re.compile(
    r"alibi|attention_sink|bias|chunk|clip|conv_|cross_attention|expert|kv_shared|latent|layer_types|logit|lora|mamba|moe"
    r"|multipl|nope|normali[sz]|parallel_(attn|residual)|position_embedding|qk_(layer)?norm|residual|rope|rotary|scal"
    r"|soft_?cap|sparse|ssm|swiglu|temperature_tuning|window|_norm$"
)


class Fields(dict[str, Any]):
    """Fields of a ``config.json`` that knows which of them were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    @override
    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    @override
    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def check_unread(self, given: Mapping[str, Any], architecture: str, ignored: Collection[str]) -> None:
        """Raise InvalidArgumentError for a field that was given, was not read, and would change what is computed."""
        for name in sorted(given.keys() - self.read - set(ignored)):
            if _COMPUTES.search(name) and not name.startswith("_") and not _is_neutral(given[name]):
                allowed = f"absent: it changes what a model computes, and is not supported for {architecture}"
                raise fault(name, allowed, given[name])


def _is_neutral(value: object) -> bool:
    """Whether a field of this value asks for nothing: no window, factor 1, one kind of layers."""
    kinds = isinstance(value, list) and set(map(str, value)) <= {FULL}
    return kinds or not value or (value == 1 and value is not True)


def layer_types(values: Mapping[str, Any]) -> list[str] | None:
    """``layer_types`` of a ``config.json``: ``SLIDING`` or ``FULL`` for each layer; None where it has none."""
    types, num_layers = values.get("layer_types"), count(values, "num_hidden_layers")
    if types is not None and (
        not isinstance(types, list) or len(types) != num_layers or any(kind not in (SLIDING, FULL) for kind in types)
    ):
        raise fault("layer_types", f"'{FULL}' or '{SLIDING}' for each of {num_layers} layers", types)
    return types


def sliding_layers(values: Mapping[str, Any], pattern: int) -> tuple[bool, ...]:
    """Whether each layer has a window: by ``layer_types``, or else all but every ``pattern``-th."""
    numbers = range(1, count(values, "num_hidden_layers") + 1)
    types = layer_types(values) or [SLIDING if number % pattern else FULL for number in numbers]
    return tuple(kind == SLIDING for kind in types)


def count(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A field that is a positive integer."""
    value = values.get(name, default)
    if type(value) is not int or value <= 0:
        raise fault(name, "a whole number above 0", value)
    return value


def flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false; null is as absent."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise fault(name, "true or false", value)
    return default if value is None else value


def above_zero(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A field that is a finite number above 0."""
    value = values.get(name, default)
    if not is_above_zero(value):
        raise fault(name, "a number above 0", value)
    return float(value)


def choice(values: Mapping[str, Any], name: str, allowed: Collection[str], default: str) -> str:
    """A field that is one of some words."""
    value: object = values.get(name, default)
    if not isinstance(value, str) or value not in allowed:
        raise fault(name, f"one of {', '.join(allowed)}", value)
    return value


def is_above_zero(value: object) -> bool:
    """Whether a field is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def fault(name: str, allowed: str, got: object) -> InvalidArgumentError:
    """Error for a field of ``config.json``."""
    return InvalidArgumentError(f"config.json: {name} must be {allowed}, got {got!r}")


def stored_dtype(values: Mapping[str, Any]) -> str:
    """The type of the published weights, a key of ``DTYPE_BYTES``."""
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    return choice({"dtype": name}, "dtype", DTYPE_BYTES, name)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """A field that is a token, a list of tokens, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise fault(name, "a token id or a list of them", value)
    return tuple(ids)
