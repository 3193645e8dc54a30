"""Request bodies: size limits, time limits and JSON parsing."""

import asyncio
import json
import math
from collections import Counter
from typing import Any, NoReturn

from starlette.requests import Request

from weft_gateway.errors import RequestError

#: Time for a client to send its body, in seconds.
BODY_TIMEOUT_S = 60.0


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Read and parse the body, a JSON object with finite numbers only.

    The content type must be JSON. That blocks cross-site requests: a browser does not send it for a foreign page
    without a preflight.

    Args:
        request: The request, with its body unread.
        max_bytes: Size limit.

    Raises:
        RequestError: The body is not a JSON object (400), another type (415), larger than ``max_bytes`` (413), or not
            received within ``BODY_TIMEOUT_S`` (408).
        starlette.requests.ClientDisconnect: The client disconnected before its end.
    """
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise RequestError(
            f"content-type '{declared}' is not taken; send JSON with 'content-type: application/json'", http_status=415
        )
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await _read(request, max_bytes)
    except TimeoutError:
        raise RequestError(f"the body did not come within {BODY_TIMEOUT_S:g} s", http_status=408) from None
    return parse_json(data)


async def _read(request: Request, max_bytes: int) -> bytes:
    declared_size = request.headers.get("content-length", "")
    size = int(declared_size) if declared_size.isdecimal() and len(declared_size) < 20 else 0
    if size > max_bytes:
        raise _too_large(f"{size} bytes", max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(f"more than {max_bytes} bytes", max_bytes)
        parts.append(part)
    return b"".join(parts)


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises RequestError."""
    try:
        value = json.loads(
            data.decode(), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object
        )
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


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can encode it: JSON escapes may contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body has {name}, which is no JSON number; every number must be finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"the body has the number {text[:40]}, which is too large; every number must be finite")
    return value


def _too_large(got: str, max_bytes: int) -> RequestError:
    return RequestError(f"the body has {got}; at most {max_bytes} are taken", code="body_too_large", http_status=413)
