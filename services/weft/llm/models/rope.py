"""Settings of rotary embeddings: read from a ``config.json``, and checked."""

from collections.abc import Mapping
from typing import Any

from weft.base.errors import InvalidArgumentError
from weft.llm.models.fields import fault, flag, is_above_zero

#: Fields of ``config.json`` that ``rope_of_config`` reads.
ROPE_FIELDS = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}
#: Required and optional numbers of each type, besides ``rope_theta``.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("attention_factor",),
}
#: Lists of factors, one for each pair that is rotated.
_FACTORS = ("short_factor", "long_factor")
_DEFAULT_THETA = 10000.0


def rope_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embedding settings of a ``config.json``, as ``checked_rope`` returns them.

    transformers before version 5 put ``rope_theta`` beside ``rope_scaling``; 5 has both in ``rope_parameters``.

    Raises:
        InvalidArgumentError: The type is not supported, or a value is missing or wrong.
    """
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(place) or {}
    if not isinstance(given, Mapping):
        raise fault(place, "an object", given)
    rope = {"rope_theta": config.get("rope_theta"), **given}
    rope["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rope["rope_type"] in ("yarn", "llama3", "longrope"):
        longest = config.get("max_position_embeddings")
        original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or longest
        if rope["rope_type"] == "longrope" and not rope.get("factor") and type(longest) is type(original) is int:
            rope["factor"] = longest / max(original, 1)
    return checked_rope(rope, where=f"config.json: {place}")


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
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        result["partial_rotary_factor"] = _positive(where, "partial_rotary_factor", rope["partial_rotary_factor"])
    if rope_type == "longrope":
        result |= {name: _factors(where, name, rope.get(name)) for name in _FACTORS}
    if rope_type == "yarn":
        result["truncate"] = flag(rope, "truncate", True)
    if rope_type == "llama3" and result["low_freq_factor"] >= result["high_freq_factor"]:
        raise InvalidArgumentError(
            f"{where}.low_freq_factor must be below high_freq_factor = {result['high_freq_factor']}, "
            f"got {result['low_freq_factor']}"
        )
    return result


def _positive(where: str, name: str, value: Any) -> float:
    if not is_above_zero(value):
        raise InvalidArgumentError(f"{where}.{name} must be a number above 0, got {value!r}")
    return float(value)


def _factors(where: str, name: str, value: object) -> list[float]:
    if not isinstance(value, list | tuple):
        raise InvalidArgumentError(f"{where}.{name} must be a list of numbers, got {value!r}")
    return [_positive(where, f"{name}[{index}]", each) for index, each in enumerate(value)]


def rotary_dim_of(rope: Mapping[str, Any], head_dim: int) -> int:
    """Numbers at the front of a head that ``rope`` rotates; 0: the whole head."""
    return int(head_dim * rope["partial_rotary_factor"]) if "partial_rotary_factor" in rope else 0


def check_rotation(rope: Mapping[str, Any], head_dim: int, *, may_be_partial: bool) -> None:
    """Raise InvalidArgumentError unless ``rope`` fits heads of that width."""
    share, rotary_dim = rope.get("partial_rotary_factor", 1), rotary_dim_of(rope, head_dim)
    if share != 1 and not may_be_partial:
        raise InvalidArgumentError(f"rope.partial_rotary_factor must be 1, the whole head, got {share!r}")
    if share != 1 and (rotary_dim % 2 or not 0 < rotary_dim < head_dim):
        raise fault("partial_rotary_factor", f"such that an even part of head_dim = {head_dim} is rotated", share)
    num_pairs = (rotary_dim or head_dim) // 2
    for name in _FACTORS:
        if name in rope and len(rope[name]) != num_pairs:
            raise fault(f"rope_parameters.{name}", f"{num_pairs} numbers, one for each pair", len(rope[name]))
