"""One HTTP request from its arrival to its end: its span, its count, and what it sends on to the router."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from opentelemetry.trace import Span
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft_common.client.v2_client import Metadata
from weft_common.errors import InternalError, RequestCancelledError, WeftError
from weft_common.observing import telemetry
from weft_common.observing.logs import get_logger
from weft_gateway.errors import RequestError

_KEY = "weft_call"
#: What the router takes a key from.
_KEY_HEADERS = ("authorization", "x-api-key")
_TRACE_HEADERS = ("traceparent", "tracestate")
_MAX_HEADER_CHARS = 4096
_OTHER = "other"

_log = get_logger("weft.gateway")


class PendingCall:
    """A request in work.

    Args:
        endpoint: Of the interface, for spans and counts.
        headers: The client's.
        forwarded: Headers that go on to the router beside keys and trace.

    Attributes:
        arrival_ns: On the clock of ``time.monotonic_ns``.
        failure: What it ended with; None: nothing went wrong.
        has_left: Whether the client did not wait for the end.
    """

    def __init__(self, endpoint: str, headers: Headers, forwarded: Sequence[str]) -> None:
        self.arrival_ns = time.monotonic_ns()
        self.failure: WeftError | None = None
        self.has_left = False
        self._headers = headers
        self._forwarded = forwarded
        parent = telemetry.extract({name: headers[name] for name in _TRACE_HEADERS if name in headers})
        self.span: Span = telemetry.start_span(f"weft.gateway{endpoint}", parent=parent, kind=telemetry.SERVER)
        self._context = telemetry.context_of(self.span, parent) if telemetry.is_enabled() else None

    def identity(self) -> Metadata:
        """The client's keys and forwarded headers, as metadata; equal for calls of one client.

        Raises:
            RequestError: One cannot be sent.
        """
        names = (*_KEY_HEADERS, *self._forwarded)
        return tuple((name, _sendable(name, value)) for name in names if (value := self._headers.get(name)) is not None)

    def trace(self) -> Metadata:
        """The trace that what is called belongs to."""
        if self._context is not None:
            return tuple(telemetry.inject(self._context).items())
        given = ((name, self._headers.get(name, "")) for name in _TRACE_HEADERS)
        return tuple((name, value) for name, value in given if value and value.isascii() and value.isprintable())

    def failed(self, error: Exception) -> WeftError:
        """The error that the client gets; INTERNAL, with its cause in the log, for what is a defect of somebody."""
        failure = error if isinstance(error, WeftError) else InternalError("the gateway failed")
        if isinstance(failure, InternalError):
            trace_id = telemetry.trace_id_of(self._context)
            extra = {"error_id": failure.error_id, "trace_id": trace_id}
            _log.error("%s", failure.message, exc_info=error, extra=extra)
        self.failure = failure
        return failure

    def left(self) -> None:
        """The client has gone."""
        self.has_left = True
        self.failure = RequestCancelledError("the client left")


def call_of(scope: Scope) -> PendingCall:
    """The call that a request is."""
    call: PendingCall = scope[_KEY]
    return call


class CallsInWork(Collector):
    """Makes a ``PendingCall`` of each request, and counts them; an ASGI middleware, collected on the metrics thread.

    Args:
        app: Answers.
        endpoints: Paths that are counted by themselves; a request to another one is ``other``.
        forwarded: As of ``PendingCall``.
    """

    def __init__(self, app: ASGIApp, endpoints: Sequence[str], forwarded: Sequence[str]) -> None:
        self._app = app
        self._endpoints = frozenset(endpoints)
        self._forwarded = tuple(forwarded)
        self._num_ended: Counter[tuple[str, str]] = Counter()
        self._num_left: Counter[str] = Counter()
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = scope["path"] if scope["path"] in self._endpoints else f"/{_OTHER}"
        call = scope[_KEY] = PendingCall(endpoint, Headers(scope=scope), self._forwarded)
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._num_open += 1
        try:
            await self._app(scope, receive, watched)
        finally:
            self._num_open -= 1
            self._num_ended[endpoint, str(status)] += 1
            if call.has_left:
                self._num_left[endpoint] += 1
            call.span.set_attribute("http.response.status_code", status)
            telemetry.end_span(call.span, None if isinstance(call.failure, RequestError) else call.failure)

    def collect(self) -> Iterator[Metric]:
        """Requests by endpoint and status, those whose client left, and those in work."""
        requests = CounterMetricFamily(
            "weft_gateway_requests", "HTTP requests that ended", labels=("endpoint", "status")
        )
        for labels, count in list(self._num_ended.items()):
            requests.add_metric(labels, count)
        yield requests
        left = CounterMetricFamily(
            "weft_gateway_disconnects", "HTTP requests whose client left before the end", labels=("endpoint",)
        )
        for endpoint, count in list(self._num_left.items()):
            left.add_metric((endpoint,), count)
        yield left
        yield GaugeMetricFamily("weft_gateway_inflight", "HTTP requests in work", self._num_open)


def _sendable(name: str, value: str) -> str:
    if len(value) > _MAX_HEADER_CHARS or not (value.isascii() and value.isprintable()):
        raise RequestError(
            f"the header '{name}' must have at most {_MAX_HEADER_CHARS} printable ASCII characters, got {len(value)}"
        )
    return value
