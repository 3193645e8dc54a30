"""Every error that can reach a client, as one tree.

``code`` is the name of a gRPC status code, which ``weft.v2.protocol.status`` converts. Policy code raises these
and never imports gRPC.
"""

import uuid
from typing import ClassVar, Self

#: Exit status of a process that its watchdog aborted.
EXIT_HUNG = 70


class WeftError(Exception):
    """An error with a gRPC status and a message for the client.

    Args:
        message: What is wrong, the value got, the value allowed, the cure.

    Attributes:
        is_refused: The request was never started, so that it is safe to retry at another server.
        traceback: Where user code raised; for the log, and for clients where ``--dev`` allows it. "" if unknown.
    """

    code: ClassVar[str] = "UNKNOWN"
    is_refused: bool = False
    traceback: str = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def refused(self) -> Self:
        """Mark this error as one of a request that was never started; returns it."""
        self.is_refused = True
        return self

    def with_message(self, message: str) -> Self:
        """A copy (same class, code and extra fields) with another message; used to add context."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        Exception.__init__(copy, message)
        copy.message = message
        return copy


class InvalidArgumentError(WeftError):
    """The request is invalid; retrying cannot help. INVALID_ARGUMENT."""

    code = "INVALID_ARGUMENT"


class UnauthenticatedError(WeftError):
    """The key is missing or invalid. UNAUTHENTICATED."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(WeftError):
    """The caller is authenticated but not authorised. PERMISSION_DENIED."""

    code = "PERMISSION_DENIED"


class NotFoundError(WeftError):
    """Unknown model, version or name. NOT_FOUND."""

    code = "NOT_FOUND"


class AlreadyExistsError(WeftError):
    """The name is in use. ALREADY_EXISTS."""

    code = "ALREADY_EXISTS"


class ResourceExhaustedError(WeftError):
    """A queue is full or a limit is reached; nothing was done. RESOURCE_EXHAUSTED.

    Args:
        message: Names the limit and both numbers.
        retry_after_ms: When a retry may succeed, in milliseconds; None: never.
    """

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlineExceededError(WeftError):
    """The deadline or the queue timeout passed. DEADLINE_EXCEEDED."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelledError(WeftError):
    """The caller cancelled. CANCELLED."""

    code = "CANCELLED"


class UnavailableError(WeftError):
    """Not ready, down or draining; the same request may succeed later. UNAVAILABLE."""

    code = "UNAVAILABLE"


class FailedPreconditionError(WeftError):
    """Something else must change before the same request can succeed. FAILED_PRECONDITION."""

    code = "FAILED_PRECONDITION"


class UnsupportedError(WeftError):
    """The server does not support this. UNIMPLEMENTED."""

    code = "UNIMPLEMENTED"


class UnknownError(WeftError):
    """A model reported an error of unknown kind. UNKNOWN."""

    code = "UNKNOWN"


class InternalError(WeftError):
    """User code raised, or Weft has a defect. INTERNAL.

    The client sees an id, never the exception's text; the log line and the span with the same id have the details.

    Args:
        message: What failed, without details of the exception.
        error_id: Id for the log; generated if absent.
    """

    code = "INTERNAL"

    def __init__(self, message: str, *, error_id: str | None = None) -> None:
        self.error_id = error_id or uuid.uuid4().hex[:12]
        super().__init__(f"{message} (error id {self.error_id})")


#: Errors by status, but for INTERNAL, which carries an id.
ERROR_BY_CODE: dict[str, type[WeftError]] = {
    cls.code: cls for cls in WeftError.__subclasses__() if cls is not InternalError
}


class RemoteError(WeftError):
    """An error returned by another service, with its status code.

    Args:
        code: gRPC status name, for example ``"UNAVAILABLE"``.
        message: The other service's message, or what failed where.
        retry_after_ms: The other service's hint, if any.
        is_unanswered: There was no response: the connection failed or was lost.
        error_id: Id for the other service's log, if given.
        path: Way of the request through a graph as far as it came, if given; ``weft.router.reporting.path``.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retry_after_ms: int | None = None,
        is_unanswered: bool = False,
        error_id: str | None = None,
        path: str = "",
    ) -> None:
        super().__init__(message)
        self.path = path
        self.is_unanswered = is_unanswered
        self.error_id = error_id
        self.code = code  # type: ignore[misc]  # the code is instance data here
        self.retry_after_ms = retry_after_ms

    def of_its_class(self) -> "RemoteError":
        """A copy that ``except NotFoundError`` and the like catch too, by its code."""
        kind = _REMOTE_BY_CODE.get(self.code, RemoteError)
        copy = kind.__new__(kind)
        copy.__dict__.update(self.__dict__)
        Exception.__init__(copy, self.message)
        return copy


_REMOTE_BY_CODE: dict[str, type[RemoteError]] = {
    code: type(f"Remote{cls.__name__}", (RemoteError, cls), {"__doc__": cls.__doc__})
    for code, cls in {**ERROR_BY_CODE, InternalError.code: InternalError}.items()
}
