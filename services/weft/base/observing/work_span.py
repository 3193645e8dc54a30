"""The span of work that user code does: its id is known before it is recorded, so that other spans can be within it."""

import random
import time
import traceback
from collections.abc import Mapping
from typing import Any, Self

from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode
from typing_extensions import override

#: Attributes and events that are kept of each span; OpenTelemetry's own limit.
_MAX_KEPT = 128
_PLAIN = (str, bool, int, float)

#: Attributes; events with name, Unix time in nanoseconds and attributes; name and text of the status. All builtins.
Notes = tuple[dict[str, Any], list[tuple[str, int, dict[str, Any]]], tuple[str, str | None] | None]


class WorkSpan(NonRecordingSpan):
    """A span that keeps what user code adds to it until it is recorded, maybe by another process."""

    def __init__(self, context: SpanContext) -> None:
        super().__init__(context)
        self._notes: Notes = ({}, [], None)

    @classmethod
    def within(cls, parent: SpanContext) -> Self:
        """A span with a new id within ``parent``."""
        span_id = random.getrandbits(64) or 1  # no secret
        return cls(SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state))

    @override
    def is_recording(self) -> bool:
        return True

    @override
    def set_attribute(self, key: str, value: Any) -> None:
        if len(self._notes[0]) < _MAX_KEPT:
            self._notes[0].update(_plain({key: value}))

    @override
    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        for key, value in attributes.items():
            self.set_attribute(key, value)

    @override
    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        if len(self._notes[1]) < _MAX_KEPT:
            self._notes[1].append((str(name), timestamp or time.time_ns(), _plain(attributes or {})))

    @override
    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        described = {
            "exception.type": type(exception).__name__,
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
        }
        self.add_event("exception", {**described, **(attributes or {})}, timestamp)

    @override
    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        code, text = (status.status_code, status.description) if isinstance(status, Status) else (status, description)
        self._notes = (*self._notes[:2], (code.name, text))

    def notes(self) -> Notes | None:
        """What user code has added, as builtins; None for nothing."""
        return self._notes if any(self._notes) else None

    def take(self, notes: Notes | None) -> None:
        """Take over what user code has added in another process."""
        self._notes = notes or self._notes

    def write_to(self, span: Span) -> None:
        """Give a span that was just started the id of this one, and what user code has added."""
        span._context = self.get_span_context()  # type: ignore[attr-defined]  # of the SDK's spans
        attributes, events, status = self._notes
        span.set_attributes(attributes)
        for name, unix_ns, more in events:
            span.add_event(name, more, unix_ns)
        if status is not None:
            span.set_status(StatusCode[status[0]], status[1])


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that OpenTelemetry allows."""
    kept: dict[str, Any] = {}
    for key, value in attributes.items():
        if isinstance(value, _PLAIN):
            kept[str(key)] = value
        elif isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
            kept[str(key)] = list(value)
    return kept
