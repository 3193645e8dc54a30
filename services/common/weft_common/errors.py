"""Every error that can reach a client, as one tree.

::

    WeftError
    ├── InvalidArgumentError       INVALID_ARGUMENT    wrong name, shape, dtype, size; no switch branch matches
    ├── UnauthenticatedError       UNAUTHENTICATED     no key, or one that is not valid
    ├── PermissionDeniedError      PERMISSION_DENIED   the key does not allow it
    ├── NotFoundError              NOT_FOUND           unknown model, version or region
    ├── AlreadyExistsError         ALREADY_EXISTS      a name is taken
    ├── ResourceExhaustedError     RESOURCE_EXHAUSTED  queue full, limit reached; carries ``retry_after_ms``
    ├── DeadlineExceededError      DEADLINE_EXCEEDED   deadline or queue timeout passed
    ├── RequestCancelledError      CANCELLED           the caller no longer wants the answer
    ├── UnavailableError           UNAVAILABLE         not ready, target down, draining
    ├── UnsupportedError           UNIMPLEMENTED       the server does not offer this
    ├── UnknownError               UNKNOWN             a user model said so
    └── InternalError              INTERNAL            user code raised, or a defect; carries ``error_id``

``code`` is the name of a gRPC status code; ``weft_common.protocol.status`` turns it into one. Policy code raises these
and never imports gRPC.
"""

import uuid
from typing import ClassVar, Self


class WeftError(Exception):
    """An error with a gRPC status and a message meant for the client.

    Args:
        message: What is wrong, the value got, the value allowed, the cure.

    Attributes:
        is_refused: The request was never begun, so that the same call at another server cannot do anything twice.
    """

    code: ClassVar[str] = "UNKNOWN"
    is_refused: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def refused(self) -> Self:
        """This error, of a request that was never begun."""
        self.is_refused = True
        return self

    def with_message(self, message: str) -> "WeftError":
        """The same error (class, code and extra fields) with another message; used to add where it happened."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        Exception.__init__(copy, message)
        copy.message = message
        return copy


class InvalidArgumentError(WeftError):
    """The request is wrong and will be wrong again. INVALID_ARGUMENT."""

    code = "INVALID_ARGUMENT"


class UnauthenticatedError(WeftError):
    """The caller showed no key, or one that is not valid. UNAUTHENTICATED."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(WeftError):
    """The caller is known and may not do this. PERMISSION_DENIED."""

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
        retry_after_ms: When trying again may succeed, in milliseconds; None where it never will.
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


class UnsupportedError(WeftError):
    """The server does not offer this. UNIMPLEMENTED."""

    code = "UNIMPLEMENTED"


class UnknownError(WeftError):
    """A model reported an error of no known kind. UNKNOWN."""

    code = "UNKNOWN"


class InternalError(WeftError):
    """User code raised, or Weft has a defect. INTERNAL.

    The client sees an id, never the exception's text; the log line and the span with the same id have the rest.

    Args:
        message: What failed, without details of the exception.
        error_id: Id to look for in the log; made here when absent.
    """

    code = "INTERNAL"

    def __init__(self, message: str, *, error_id: str | None = None) -> None:
        self.error_id = error_id or uuid.uuid4().hex[:12]
        super().__init__(f"{message} (error id {self.error_id})")


ERROR_BY_CODE: dict[str, type[WeftError]] = {
    cls.code: cls
    for cls in (
        InvalidArgumentError,
        UnauthenticatedError,
        PermissionDeniedError,
        NotFoundError,
        AlreadyExistsError,
        ResourceExhaustedError,
        DeadlineExceededError,
        RequestCancelledError,
        UnavailableError,
        UnsupportedError,
        UnknownError,
    )
}


class RemoteError(WeftError):
    """An error that another service answered with; keeps its status code.

    Args:
        code: gRPC status name, for example ``"UNAVAILABLE"``.
        message: The other service's text, or where and what.
        retry_after_ms: The other service's hint, if any.
        is_unanswered: Nobody answered: the connection could not be made, or was lost.
        error_id: What to look for in the other service's log, if it said so.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retry_after_ms: int | None = None,
        is_unanswered: bool = False,
        error_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.is_unanswered = is_unanswered
        self.error_id = error_id
        self.code = code  # type: ignore[misc]  # per instance here: the code is data, not a kind
        self.retry_after_ms = retry_after_ms
