"""The span of work that user code does: its id is known before it is recorded, so that other spans can be within it."""

import random
import time
import traceback
from collections.abc import Mapping
from typing import Any, Self

from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode
from typing_extensions import override

#: Calls that are kept of each span: as many as OpenTelemetry keeps events.
_MAX_CALLS = 128


class WorkSpan(NonRecordingSpan):
    """A span that keeps what user code adds to it until it is recorded, maybe by another process.

    Attributes:
        calls: Method and arguments, for a span of the SDK, which checks them.
    """

    def __init__(self, context: SpanContext) -> None:
        super().__init__(context)
        self.calls: list[tuple[Any, ...]] = []

    @classmethod
    def within(cls, parent: SpanContext) -> Self:
        """A span with a new id within ``parent``."""
        span_id = random.getrandbits(64) or 1  # no secret
        return cls(SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state))

    def write_to(self, span: Span) -> None:
        """Give a span of the SDK that was just started the id of this one, and what user code has added."""
        span._context = self.get_span_context()  # type: ignore[attr-defined]
        for method, *arguments in self.calls:
            if method == "set_status":
                arguments[0] = StatusCode[arguments[0]]
            getattr(span, method)(*arguments)

    @override
    def is_recording(self) -> bool:
        return True

    @override
    def set_attribute(self, key: str, value: Any) -> None:
        self._keep("set_attribute", key, value)

    @override
    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._keep("set_attributes", dict(attributes))

    @override
    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        self._keep("add_event", name, dict(attributes or {}), timestamp or time.time_ns())

    @override
    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        told = {"exception.type": type(exception).__name__, "exception.message": str(exception)}
        told["exception.stacktrace"] = "".join(traceback.format_exception(exception))
        self.add_event("exception", {**told, **(attributes or {})}, timestamp)

    @override
    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        code, text = (status.status_code, status.description) if isinstance(status, Status) else (status, description)
        self._keep("set_status", code.name, text)

    def _keep(self, *call: Any) -> None:
        if len(self.calls) < _MAX_CALLS:
            self.calls.append(call)
