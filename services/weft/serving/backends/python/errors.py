"""Errors that a ``model.py`` raises and catches, and their gRPC statuses."""

from weft.base.errors import ERROR_BY_CODE, InternalError, WeftError


class TritonModelException(Exception):  # noqa: N818  # the name that models raise and catch
    """An error inside a model, or a wrong use of this module."""

    def __init__(self, msg: str = "") -> None:
        super().__init__(msg)

    def message(self) -> str:
        """The text."""
        return str(self)


class TritonError:
    """The error of one response.

    Args:
        code: One of the class's codes.
    """

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = str(message), code
        self._cause: WeftError | None = None

    def message(self) -> str:
        """Text for the client."""
        return self._message

    def code(self) -> int:
        """One of the class's codes."""
        return self._code

    def __str__(self) -> str:
        return self._message

    @classmethod
    def of(cls, cause: WeftError) -> "TritonError":
        """The error of a call of another model; a model that answers with it passes on ``cause`` unchanged."""
        error = cls(cause.message, _CODE_BY_STATUS.get(cause.code, cls.UNAVAILABLE))
        error._cause = cause
        return error


_STATUS_BY_CODE = {
    TritonError.UNKNOWN: "UNKNOWN",
    TritonError.NOT_FOUND: "NOT_FOUND",
    TritonError.INVALID_ARG: "INVALID_ARGUMENT",
    TritonError.UNAVAILABLE: "UNAVAILABLE",
    TritonError.UNSUPPORTED: "UNIMPLEMENTED",
    TritonError.ALREADY_EXISTS: "ALREADY_EXISTS",
    TritonError.CANCELLED: "CANCELLED",
}
_CODE_BY_STATUS = {status: code for code, status in _STATUS_BY_CODE.items()} | {"INTERNAL": TritonError.INTERNAL}


def weft_error(error: object) -> WeftError:
    """The error of a response, with the status of its code; INTERNAL for an unknown code, or for a bare text."""
    if isinstance(error, TritonError) and error._cause is not None:
        return error._cause
    message = error.message() if isinstance(error, TritonError | TritonModelException) else str(error)
    code = error.code() if isinstance(error, TritonError) else TritonError.INTERNAL
    error_class = ERROR_BY_CODE.get(_STATUS_BY_CODE.get(code, ""), InternalError)
    return error_class(message)


def inline_refusal(what: str) -> TritonModelException:
    """The error of a model that executes on the event loop, and would wait for what the event loop must do."""
    return TritonModelException(
        f"a model with the parameter EXECUTION inline {what}: it executes on the event loop, which would wait for "
        "itself; remove the parameter"
    )
