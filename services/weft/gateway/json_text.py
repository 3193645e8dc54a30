"""Parses JSON of request bodies, and estimates the cost."""

import json
import math
from collections import Counter
from typing import Any, NoReturn

from weft.gateway.errors import RequestError

#: A body of more bytes, or about so many values, is parsed in a process of its own: some 10 ms of Python.
MAX_INLINE_BYTES = 1 << 20
MAX_INLINE_VALUES = 8192


def is_large(data: bytes | memoryview) -> bool:
    """Whether parsing takes so long that other requests would notice it."""
    if len(data) > MAX_INLINE_BYTES:
        return True
    data = bytes(data)
    return data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_INLINE_VALUES


def parse_json(data: bytes, *, is_finite: bool = True) -> dict[str, Any]:
    """Parse a JSON object; duplicate names are an error. Raises RequestError.

    Numbers must be finite if ``is_finite``; else they may also be NaN, Infinity and -Infinity.
    """
    hooks: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite} if is_finite else {}
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object, **hooks)
    except RequestError:
        raise
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body is no JSON: {error.msg} at line {error.lineno}, column {error.colno}", code="invalid_json"
        ) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError:  # Python's limit of digits in an integer
        raise RequestError("the body has an integer with too many digits") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {json_type(value)}")
    return value


def json_type(value: object) -> str:
    """Name of a value's JSON type, for messages."""
    if value is None:
        return "null"
    kinds: dict[type, str] = {
        bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object",
    }  # fmt: skip
    return kinds[type(value)]


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can encode it: JSON escapes may contain half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole(text: str, name: str) -> str:
    """Check that UTF-8 can encode a field's text, and return it. Raises RequestError."""
    if not is_encodable(text):
        raise RequestError(f"'{name[:80]}' has half of a surrogate pair; send whole characters", param=name)
    return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject objects with duplicate names, or names that cannot be encoded in an error message."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise RequestError(f"the body has the field {twice[:80]!r} twice in one object; give it once")
    for name in value:
        if not (name.isascii() or is_encodable(name)):
            raise RequestError(f"the body has the field {name[:80]!r}, with half of a surrogate pair; leave it out")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body has {name}, which is no JSON number; every number must be finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"the body has the number {text[:40]}, which is too large; every number must be finite")
    return value
