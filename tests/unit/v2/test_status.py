"""Errors become gRPC statuses and statuses errors, and nothing of use is lost between."""

import grpc
import pytest

from weft.base import errors
from weft.base.errors import (
    ERROR_BY_CODE,
    InternalError,
    RemoteError,
    ResourceExhaustedError,
    UnavailableError,
    WeftError,
)
from weft.v2.protocol.status import MAX_TEXT_BYTES, cut_message, from_rpc_error, to_status, trailing_pairs

WHERE = "target 'model' (127.0.0.1:8021)"
DECLARED = {
    "InvalidArgumentError": "INVALID_ARGUMENT",
    "UnauthenticatedError": "UNAUTHENTICATED",
    "PermissionDeniedError": "PERMISSION_DENIED",
    "NotFoundError": "NOT_FOUND",
    "FailedPreconditionError": "FAILED_PRECONDITION",
    "AlreadyExistsError": "ALREADY_EXISTS",
    "ResourceExhaustedError": "RESOURCE_EXHAUSTED",
    "DeadlineExceededError": "DEADLINE_EXCEEDED",
    "RequestCancelledError": "CANCELLED",
    "UnavailableError": "UNAVAILABLE",
    "UnsupportedError": "UNIMPLEMENTED",
    "UnknownError": "UNKNOWN",
    "InternalError": "INTERNAL",
}


def rpc_error(code, details, trailing=()):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)  # type: ignore[call-arg]


@pytest.mark.parametrize(("name", "code"), DECLARED.items())
def test_class_has_its_status(name, code):
    """Each error class becomes the status that the tree in its module shows."""
    assert grpc.StatusCode[code] is to_status(getattr(errors, name)("m"))


def test_tree_is_complete():
    """Every error class is in the table of this test, so that none escapes it."""
    assert set(DECLARED) | {"RemoteError"} == {cls.__name__ for cls in WeftError.__subclasses__()}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_remote_error_keeps_any_status(code):
    """A status that came from a peer goes on as the same status, also those that Weft never makes."""
    assert code is to_status(from_rpc_error(rpc_error(code, "text"), WHERE))


def test_a_call_that_a_stopping_server_dropped_is_unavailable():
    """It ends as CANCELLED, which the caller did not do; a peer's own CANCELLED, with a text, stays."""
    dropped = from_rpc_error(rpc_error(grpc.StatusCode.CANCELLED, "CANCELLED"), WHERE)
    assert ("UNAVAILABLE", True) == (dropped.code, dropped.is_unanswered)
    assert f"{WHERE} cannot be reached: CANCELLED" == dropped.message
    for details, trailing in (("the client cancelled", ()), ("CANCELLED", [("x-trace-id", "ab")])):
        assert "CANCELLED" == from_rpc_error(rpc_error(grpc.StatusCode.CANCELLED, details, trailing), WHERE).code


def test_codes_of_policy_map_back_to_classes():
    """A code finds the class that has it; INTERNAL is left out because it needs an id."""
    assert set(DECLARED.values()) - {"INTERNAL"} == set(ERROR_BY_CODE)
    assert all(code == cls.code for code, cls in ERROR_BY_CODE.items())


def test_retry_hint_survives_a_hop():
    """``retry-after-ms`` of an overloaded service is in the error that its caller raises, and in its metadata."""
    sent = trailing_pairs(ResourceExhaustedError("full", retry_after_ms=250))
    assert [("retry-after-ms", "250")] == sent
    received = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", sent), WHERE)
    assert ("full", 250) == (received.message, received.retry_after_ms)
    assert sent == trailing_pairs(received)


@pytest.mark.parametrize("value", ["", "soon", "-1", "1.5", "²"])
def test_unreadable_retry_hint_is_left_out(value):
    """A hint that is no whole number is ignored instead of hiding the error that carries it."""
    error = rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("retry-after-ms", value)])
    assert from_rpc_error(error, WHERE).retry_after_ms is None


def test_error_without_hint_has_no_metadata():
    """No pair is made of a hint that is None."""
    assert [] == trailing_pairs(ResourceExhaustedError("full"))


def test_error_id_is_in_text_and_metadata():
    """The id of an internal error is in its message and in its trailing metadata."""
    error = InternalError("model 'm' failed")
    assert f"model 'm' failed (error id {error.error_id})" == error.message
    assert [("x-error-id", error.error_id)] == trailing_pairs(error)


@pytest.mark.parametrize(
    "details",
    [
        "",
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: connection refused",
        "Socket closed",
        "DNS resolution failed for nowhere:1",
        "recvmsg:Connection reset by peer",
        "Stream removed (ping timeout)",
        "errors resolving nowhere:1: [field:hostname lookup error:Domain name not found]",
    ],
)
def test_silent_peer_is_named(details):
    """When nobody answered, the text says which target cannot be reached."""
    message = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, details), WHERE).message
    assert message.startswith(f"{WHERE} cannot be reached: ")
    assert details in message


@pytest.mark.parametrize(
    "details",
    [
        "model 'DNS' is not at ready state",
        "draining: no new requests",
        "g/1: root/a -> m@1: model 'm' on target 't' (h:1) cannot be reached: failed to connect to all addresses",
    ],
)
def test_answer_of_a_peer_is_kept(details):
    """An UNAVAILABLE that the peer itself gave keeps its text, whatever the model is called."""
    assert details == from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, details), WHERE).message


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused", (True, True)),
        ("connections to all backends failing; last error: UNAVAILABLE: backend unhealthy", (True, True)),
        ("errors resolving nowhere:1: [field:hostname lookup error]", (True, True)),
        ("Socket closed", (False, True)),
        ("draining", (False, False)),
    ],
)
def test_what_never_left_is_told_from_what_was_lost(details, expected):
    """The former was not begun and may be called elsewhere; the latter may have run, and nobody answered."""
    error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, details), WHERE)
    assert expected == (error.is_refused, error.is_unanswered)


def test_a_refusal_is_told_by_the_server_that_refused():
    """In its trailing metadata; what a server behind it refused says nothing about the work done before."""
    assert ("x-refused", "true") in trailing_pairs(UnavailableError("draining").refused())
    assert [] == trailing_pairs(UnavailableError("draining"))
    assert [] == trailing_pairs(RemoteError("UNAVAILABLE", "draining").refused())


def test_way_through_a_graph_is_in_the_error():
    """As far as the request came; "" where the server tells none."""
    assert (
        "g/1: root>a"
        == from_rpc_error(rpc_error(grpc.StatusCode.INTERNAL, "x", [("x-graph-path", "g/1: root>a")]), WHERE).path
    )
    assert "" == from_rpc_error(rpc_error(grpc.StatusCode.INTERNAL, "x"), WHERE).path


def test_empty_text_gets_one():
    """A peer that sends a status without text does not leave the message empty."""
    message = from_rpc_error(rpc_error(grpc.StatusCode.NOT_FOUND, ""), WHERE).message
    assert f"{WHERE} answered NOT_FOUND" == message


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "ü" * 100_000, "語" * 100_000, "%\n" * 50_000], ids=["1", "2", "3", "%"]
)
def test_long_message_is_cut_to_what_a_header_holds(text):
    """A cut message fits the limit once gRPC has percent-encoded it, ends with a mark and cuts no character."""
    cut = cut_message(text)
    encoded = sum(1 if 0x20 <= byte <= 0x7E and byte != ord("%") else 3 for byte in cut.encode())
    assert MAX_TEXT_BYTES - 12 <= encoded <= MAX_TEXT_BYTES
    assert text.startswith(cut.removesuffix(" ..."))
    assert cut.endswith(" ...")


def test_text_that_utf8_cannot_carry_is_replaced():
    """A lone surrogate, as Python makes of an odd file name, does not stop the message."""
    assert "file 'a?'" == cut_message("file 'a\udc80'")


@pytest.mark.parametrize("text", ["", "short", "ü"])
def test_short_message_is_kept(text):
    """A message within the limit is sent as it is."""
    assert text == cut_message(text)


def test_other_message_same_error():
    """Adding where an error happened keeps its class, code and extra fields, and leaves the original alone."""
    error = ResourceExhaustedError("full", retry_after_ms=5)
    longer = error.with_message("graph 'g': full")
    assert (ResourceExhaustedError, "graph 'g': full", "graph 'g': full", 5) == (
        type(longer),
        longer.message,
        str(longer),
        longer.retry_after_ms,  # type: ignore[attr-defined]
    )
    assert ("full", "full") == (error.message, str(error))
    internal = InternalError("failed")
    assert internal.error_id == internal.with_message("graph: " + internal.message).error_id  # type: ignore[attr-defined]
    assert "ABORTED" == RemoteError("ABORTED", "m").with_message("n").code
