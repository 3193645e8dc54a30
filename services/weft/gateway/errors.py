"""Errors as HTTP responses: the only table from gRPC statuses to HTTP statuses.

Internally every error is a ``WeftError``; this module maps it to a status, headers, and a body of OpenAI,
Anthropic or V2.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.responses import JSONResponse

from weft.base.errors import InvalidArgumentError, WeftError


class RequestError(InvalidArgumentError):
    """A request that is invalid before it reaches a model.

    Args:
        message: What is wrong, the value got, the value allowed, the cure.
        param: The invalid field; None if it is not one field.
        code: Machine-readable code; None: none.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, http_status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.reason = code
        self.http_status = http_status


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None


#: By gRPC status name.
_KINDS: Mapping[str, _Kind] = {
    "INVALID_ARGUMENT": _Kind(400, "invalid_request_error", None),
    "OUT_OF_RANGE": _Kind(400, "invalid_request_error", None),
    "FAILED_PRECONDITION": _Kind(400, "invalid_request_error", None),
    "UNAUTHENTICATED": _Kind(401, "invalid_request_error", "invalid_api_key"),
    "PERMISSION_DENIED": _Kind(403, "invalid_request_error", "permission_denied"),
    "NOT_FOUND": _Kind(404, "invalid_request_error", "model_not_found"),
    "RESOURCE_EXHAUSTED": _Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    "UNIMPLEMENTED": _Kind(501, "server_error", "not_supported"),
    "UNAVAILABLE": _Kind(503, "server_error", "unavailable"),
    "CANCELLED": _Kind(503, "server_error", "cancelled"),
    "DEADLINE_EXCEEDED": _Kind(504, "server_error", "deadline_exceeded"),
}
#: Statuses from here on are not the client's fault.
_SERVER_ERRORS = 500
_UNKNOWN = _Kind(500, "server_error", "internal_error")
#: Every status of an error, with those of bodies that come too slowly, are too large, or of another type.
STATUSES = sorted({408, 413, 415, _UNKNOWN.status, *(kind.status for kind in _KINDS.values())})


def _kind_of(error: WeftError) -> _Kind:
    kind = _KINDS.get(error.code, _UNKNOWN)
    return kind._replace(status=error.http_status, code=error.reason) if isinstance(error, RequestError) else kind


def openai_body(error: WeftError) -> dict[str, Any]:
    """An error in OpenAI's format."""
    kind, param = _kind_of(error), getattr(error, "param", None)
    return {"error": {"message": error.message, "type": kind.type, "param": param, "code": kind.code}}


#: Anthropic's types of errors, by HTTP status.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: WeftError) -> dict[str, Any]:
    """An error in Anthropic's format."""
    status = _kind_of(error).status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < _SERVER_ERRORS else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def v2_body(error: WeftError) -> dict[str, Any]:
    """An error in V2's format."""
    return {"error": error.message}


def error_response(error: WeftError, body: Callable[[WeftError], dict[str, Any]] = openai_body) -> JSONResponse:
    """The response to an error.

    A passed deadline sets ``x-should-retry: false``, because OpenAI's clients retry every status of 500 or above
    although the caller's time is over.
    """
    headers: dict[str, str] = {}
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(retry_after_ms / 1000))
        headers["retry-after-ms"] = str(retry_after_ms)
    if error.code == "DEADLINE_EXCEEDED":
        headers["x-should-retry"] = "false"
    if error.code == "UNAUTHENTICATED":
        headers["www-authenticate"] = "Bearer"
    error_id = getattr(error, "error_id", None)
    if error_id is not None:
        headers["x-error-id"] = error_id
    return JSONResponse(body(error), _kind_of(error).status, headers)
