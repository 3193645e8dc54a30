"""Rotary position embedding settings of ``config.json``, validated and normalised."""

import math
from collections.abc import Mapping
from typing import Any

from weft.base.errors import InvalidArgumentError

#: Required and optional numbers of each type, besides ``rope_theta``.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
_TYPES_WITH_ORIGINAL = ("yarn", "llama3")
_DEFAULT_THETA = 10000.0


def rope_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embedding settings of a ``config.json``, written by transformers 5 or earlier.

    Earlier versions put ``rope_theta`` beside ``rope_scaling``; version 5 has both in ``rope_parameters``.

    Args:
        config: The parsed file.

    Returns:
        ``rope_type``, ``rope_theta`` and the parameters of the type, as returned by ``checked_rope``.

    Raises:
        InvalidArgumentError: The type is not supported, or a value is missing or wrong.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(field) or {}
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"config.json: {field} must be an object, got {given!r}")
    rope = {"rope_theta": config.get("rope_theta"), **given}
    rope["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rope["rope_type"] in _TYPES_WITH_ORIGINAL:
        original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    return checked_rope(rope, where=f"config.json: {field}")


def checked_rope(rope: Mapping[str, Any], *, where: str = "rope") -> dict[str, Any]:
    """``rope`` with defaults filled in, every number validated, and ineffective entries removed.

    Args:
        rope: Keys as in ``rope_parameters`` of transformers.
        where: Prefix of error messages.

    Raises:
        InvalidArgumentError: The type is not supported, or a value is missing or wrong.
    """
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise InvalidArgumentError(
            f"{where} must be one set of values for all layers, got one for each of {', '.join(map(str, rope))}; "
            f"models with several are not supported"
        )
    rope_type = rope.get("rope_type") or "default"
    if rope_type not in _REQUIRED:
        raise InvalidArgumentError(f"{where}.rope_type must be one of {', '.join(_REQUIRED)}, got {rope_type!r}")
    if rope.get("mrope_section"):
        raise InvalidArgumentError(f"{where}.mrope_section is not supported, got {rope['mrope_section']!r}")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise InvalidArgumentError(
            f"{where}.partial_rotary_factor must be 1, the whole head, got {rope['partial_rotary_factor']!r}"
        )
    theta = rope.get("rope_theta")
    result: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": _positive(where, "rope_theta", _DEFAULT_THETA if theta is None else theta),
    }
    for name in _REQUIRED[rope_type]:
        result[name] = _positive(where, name, rope.get(name))
    for name in _OPTIONAL.get(rope_type, ()):
        if rope.get(name) is not None:
            result[name] = _positive(where, name, rope[name])
    if rope_type in _TYPES_WITH_ORIGINAL:
        name = "original_max_position_embeddings"
        result[name] = _positive(where, name, rope.get(name))
    if rope_type == "yarn":
        result["truncate"] = bool(rope.get("truncate", True))
    if rope_type == "llama3" and result["low_freq_factor"] >= result["high_freq_factor"]:
        raise InvalidArgumentError(
            f"{where}.low_freq_factor must be below high_freq_factor = {result['high_freq_factor']}, "
            f"got {result['low_freq_factor']}"
        )
    return result


def _positive(where: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise InvalidArgumentError(f"{where}.{name} must be a number above 0, got {value!r}")
    return float(value)
