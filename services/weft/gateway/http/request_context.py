"""Context of an HTTP request: its span, its metrics, and the metadata of its calls to the router."""

import contextlib
import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from opentelemetry.context import attach
from opentelemetry.trace import Span
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.base.errors import InternalError, RequestCancelledError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.base.observing.settings import TRACE
from weft.gateway.errors import RequestError
from weft.v2.client.v2_client import Metadata

_KEY = "weft_call"
#: Headers with API keys.
KEY_HEADERS = ("authorization", "x-api-key")
_MAX_HEADER_CHARS = 4096

_log = get_logger("weft.gateway")


class RequestContext:
    """A request in flight.

    Args:
        endpoint: Path of the endpoint, for spans and metrics.
        forwarded: Headers to forward to the router besides keys and trace context.
        hosts: As of ``RequestTracker``.
        path: Names the model, whose trace settings count; "": it is in the body.

    Attributes:
        failure: The error that ended it; None: none.
        at_end: Closed when the request has ended.
        response_headers: Added to the response, whatever it is; ASCII.
    """

    def __init__(
        self,
        endpoint: str,
        headers: Headers,
        forwarded: Sequence[str],
        hosts: Collection[str] | None = None,
        path: str = "",
    ) -> None:
        self.arrival_ns = time.monotonic_ns()
        self.failure: WeftError | None = None
        self.is_disconnected = False
        self.at_end = contextlib.ExitStack()
        self.response_headers: dict[str, str] = {}
        self.headers = headers
        self._forwarded = forwarded
        self._hosts = hosts
        parent = telemetry.extract(headers)
        parts = path.split("/")
        model = parts[3] if parts[1:3] == ["v2", "models"] and len(parts) > 4 else ""  # else it is in the body
        parent = TRACE.admit(model, parent, is_inference=bool(model) or endpoint.startswith("/v1"))
        self.span: Span = telemetry.start_span(f"weft.gateway{endpoint}", parent=parent, kind=telemetry.SERVER)
        self._context = telemetry.context_of(self.span, parent) if telemetry.is_enabled() else None
        if self._context is not None:
            attach(self._context)  # in the task of this request alone, for its log lines

    def name_span(self, operation: str, model: str) -> None:
        """Name the span by OpenTelemetry's conventions for generative AI, for example ``chat writer``."""
        self.span.update_name(f"{operation} {model}")
        self.span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.request.model": model})

    def identity(self) -> Metadata:
        """The client's keys and forwarded headers, as metadata; equal for calls of the same client.

        Raises RequestError: a header cannot be sent as metadata, or is given twice.
        """
        for name in KEY_HEADERS:
            if (number := len(self.headers.getlist(name))) > 1:
                raise RequestError(f"the header '{name}' is there {number} times; send one, that of your key")
        names = (*KEY_HEADERS, *self._forwarded)
        return tuple((name, _sendable(name, value)) for name in names if (value := self.headers.get(name)) is not None)

    def metadata(self) -> Metadata:
        """``identity`` and the trace context, for calls to the router."""
        if self._context is not None:
            return (*self.identity(), *telemetry.inject(self._context).items())
        given = ((name, self.headers.get(name, "")) for name in telemetry.TRACE_HEADERS)
        trace = ((name, value) for name, value in given if value and value.isascii() and value.isprintable())
        return (*self.identity(), *trace)

    def check_host(self) -> None:
        """Check the name by which the client calls the gateway. Raises RequestError (403) if it is not allowed."""
        if self._hosts is None:
            return
        host = self.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.strip("[]").lower()
        if name in self._hosts or "*" in self._hosts or name.endswith(".localhost") or name in ("localhost", ""):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise RequestError(
                f"the host '{name[:80]}' is not one of this gateway, which is for this machine alone; call localhost, "
                f"or start it with --allow-host {name[:80]}",
                http_status=403,
            ) from None

    def record_failure(self, error: Exception) -> WeftError:
        """Record an error and return it as the client sees it: a defect becomes INTERNAL, with its cause in the log."""
        failure = error if isinstance(error, WeftError) else InternalError("the gateway failed")
        if isinstance(failure, InternalError):
            _log.error("%s", failure.message, exc_info=error, extra={"error_id": failure.error_id})
        self.failure = failure
        return failure

    def record_disconnect(self) -> None:
        """Record that the client disconnected."""
        self.is_disconnected = True
        self.failure = RequestCancelledError("the client disconnected")


def context_of(scope: Scope) -> RequestContext:
    """The context of a request."""
    context: RequestContext = scope[_KEY]
    return context


class RequestTracker(Collector):
    """ASGI middleware that creates a ``RequestContext`` per request and exports metrics, which another thread collects.

    Args:
        endpoint_of: Maps a path to one of a few endpoint names.
        forwarded: See ``RequestContext``.
        hosts: Names by which a gateway on a loopback address may be called besides addresses and ``localhost``; "*" or
            None: all. Otherwise a web page could resolve its own name to 127.0.0.1 (DNS rebinding) and call the gateway
            as same-origin from its visitor's browser; the ``host`` header shows the name.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoint_of: Callable[[str], str],
        forwarded: Sequence[str],
        hosts: Collection[str] | None = None,
    ) -> None:
        self._app = app
        self._endpoint_of = endpoint_of
        self._forwarded = tuple(forwarded)
        self._hosts = None if hosts is None else {name.lower() for name in hosts}
        self._num_ended: Counter[tuple[str, str]] = Counter()
        self._num_disconnected: Counter[str] = Counter()
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = self._endpoint_of(scope["path"])
        context = scope[_KEY] = RequestContext(
            endpoint, Headers(scope=scope), self._forwarded, self._hosts, scope["path"]
        )
        status = 0

        has_two_lengths = all(name in context.headers for name in ("content-length", "transfer-encoding"))

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if added := context.response_headers:
                    pairs = [(name.encode(), value.encode()) for name, value in added.items()]
                    message["headers"] = [*message.get("headers", ()), *pairs]
                if has_two_lengths:  # what follows may be read otherwise by a proxy in front: RFC 9112 6.1
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        self._num_open += 1
        try:
            await self._app(scope, receive, watched)
        finally:
            context.at_end.close()
            self._num_open -= 1
            self._num_ended[endpoint, str(status)] += 1
            if context.is_disconnected:
                self._num_disconnected[endpoint] += 1
            context.span.set_attribute("http.response.status_code", status)
            telemetry.end_span(context.span, None if isinstance(context.failure, RequestError) else context.failure)
            context.failure = None  # its traceback holds the body

    def collect(self) -> Iterator[Metric]:
        """Requests by endpoint and status, disconnects by endpoint, and requests in flight."""
        requests = CounterMetricFamily(
            "weft_gateway_requests", "HTTP requests that ended", labels=("endpoint", "status")
        )
        for labels, count in list(self._num_ended.items()):
            requests.add_metric(labels, count)
        disconnects = CounterMetricFamily(
            "weft_gateway_disconnects", "HTTP requests whose client disconnected before the end", labels=("endpoint",)
        )
        for endpoint, count in list(self._num_disconnected.items()):
            disconnects.add_metric((endpoint,), count)
        yield from (requests, disconnects)
        yield GaugeMetricFamily("weft_gateway_inflight", "HTTP requests in flight", self._num_open)


def _sendable(name: str, value: str) -> str:
    if len(value) > _MAX_HEADER_CHARS or not (value.isascii() and value.isprintable()):
        raise RequestError(
            f"the header '{name}' must have at most {_MAX_HEADER_CHARS} printable ASCII characters, got {len(value)}"
        )
    return value
