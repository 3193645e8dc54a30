"""Which of a client's metadata travels on to the services behind the router."""

from collections.abc import Mapping

from weft.base.security.access import KEY_HEADERS

#: Added to the calls of a shadow step.
SHADOW_HEADER = "x-graph-shadow"
#: Metadata that belongs to one connection, or that each hop writes anew.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-type",
        "host",
        "keep-alive",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "triton_grpc_error",
        "upgrade",
        "user-agent",
    }
)
#: A key is for the service that it was sent to.
_NOT_FORWARDED = _HOP_BY_HOP | KEY_HEADERS
_TRACE_CONTEXT = frozenset({"traceparent", "tracestate"})


def forwarded_headers(headers: Mapping[str, str], *, is_traced: bool) -> dict[str, str]:
    """The metadata that a step receives.

    Args:
        headers: The client's, lower-case keys.
        is_traced: Spans are made here, so each call carries a trace context of its own; else the client's goes through.
    """
    forwarded: dict[str, str] = {}
    if not headers:
        return forwarded
    for key, value in headers.items():
        if key in _NOT_FORWARDED or key.startswith(("grpc-", ":")) or (is_traced and key in _TRACE_CONTEXT):
            continue
        forwarded[key] = value
    return forwarded
