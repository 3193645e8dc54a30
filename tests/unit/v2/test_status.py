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
NOT_BEGUN, LOST, ANSWERED = (True, True), (False, True), (False, False)


def received(code: str, details: str, *trailing: tuple[str, str]) -> RemoteError:
    """The error of a call that ended with this status."""
    pairs = grpc.aio.Metadata(), grpc.aio.Metadata(*trailing)  # type: ignore[call-arg]
    error = grpc.aio.AioRpcError(grpc.StatusCode[code], *pairs, details=details)  # type: ignore[call-arg]
    return from_rpc_error(error, WHERE)


def test_every_class_has_its_status():
    """Each error class becomes the status that the tree shows, and its code finds it; INTERNAL needs an id."""
    assert set(DECLARED) | {"RemoteError"} == {cls.__name__ for cls in WeftError.__subclasses__()}
    for name, code in DECLARED.items():
        assert grpc.StatusCode[code] is to_status(getattr(errors, name)("m"))
    assert set(DECLARED.values()) - {"INTERNAL"} == set(ERROR_BY_CODE)
    assert all(code == cls.code for code, cls in ERROR_BY_CODE.items())


def test_remote_error_keeps_any_status():
    """A status that came from a peer goes on as the same status, also those that Weft never makes."""
    for code in list(grpc.StatusCode)[1:]:
        assert code is to_status(received(code.name, "text"))


def test_a_call_that_a_stopping_server_dropped_is_unavailable():
    """It ends as CANCELLED, which the caller did not do; a peer's own CANCELLED, with a text, stays."""
    dropped = received("CANCELLED", "CANCELLED")
    assert ("UNAVAILABLE", True) == (dropped.code, dropped.is_unanswered)
    assert f"{WHERE} cannot be reached: CANCELLED" == dropped.message
    assert "CANCELLED" == received("CANCELLED", "the client cancelled").code
    assert "CANCELLED" == received("CANCELLED", "CANCELLED", ("x-trace-id", "ab")).code


def test_retry_hint_survives_a_hop():
    """``retry-after-ms`` of an overloaded service is in the error that its caller raises, and in its metadata."""
    sent = trailing_pairs(ResourceExhaustedError("full", retry_after_ms=250))
    assert [("retry-after-ms", "250")] == sent
    error = received("RESOURCE_EXHAUSTED", "full", *sent)
    assert ("full", 250) == (error.message, error.retry_after_ms)
    assert sent == trailing_pairs(error)
    assert [] == trailing_pairs(ResourceExhaustedError("full"))
    for value in ("", "soon", "-1", "1.5", "²"):
        assert received("RESOURCE_EXHAUSTED", "full", ("retry-after-ms", value)).retry_after_ms is None


def test_error_id_is_in_text_and_metadata():
    """The id of an internal error is in its message and in its trailing metadata."""
    error = InternalError("model 'm' failed")
    assert f"model 'm' failed (error id {error.error_id})" == error.message
    assert [("x-error-id", error.error_id)] == trailing_pairs(error)


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused", NOT_BEGUN),
        ("connections to all backends failing; last error: UNAVAILABLE: backend unhealthy", NOT_BEGUN),
        ("errors resolving nowhere:1: [field:hostname lookup error:Domain name not found]", NOT_BEGUN),
        ("DNS resolution failed for nowhere:1", NOT_BEGUN),
        ("", LOST),
        ("Socket closed", LOST),
        ("recvmsg:Connection reset by peer", LOST),
        ("Stream removed (ping timeout)", LOST),
        ("model 'DNS' is not at ready state", ANSWERED),
        ("draining: no new requests", ANSWERED),
        ("g/1: root/a -> m@1: model 'm' on 't' (h:1) cannot be reached: failed to connect to all addresses", ANSWERED),
    ],
)
def test_who_was_silent_is_told_from_who_answered(details, expected):
    """UNAVAILABLE of a peer keeps its text; one that nobody answered names the target, and whether it may have run."""
    error = received("UNAVAILABLE", details)
    assert expected == (error.is_refused, error.is_unanswered)
    if expected == ANSWERED:
        assert details == error.message
    else:
        assert error.message.startswith(f"{WHERE} cannot be reached: ")
        assert details in error.message


def test_a_refusal_is_told_by_the_server_that_refused():
    """In its trailing metadata; what a server behind it refused says nothing about the work done before."""
    assert ("x-refused", "true") in trailing_pairs(UnavailableError("draining").refused())
    assert [] == trailing_pairs(UnavailableError("draining"))
    assert [] == trailing_pairs(RemoteError("UNAVAILABLE", "draining").refused())


def test_what_a_peer_tells_beside_its_status():
    """The path through a graph as far as the request came; a status without text gets one."""
    assert "g/1: root>a" == received("INTERNAL", "x", ("x-graph-path", "g/1: root>a")).path
    assert "" == received("INTERNAL", "x").path
    assert f"{WHERE} answered NOT_FOUND" == received("NOT_FOUND", "").message


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


def test_short_message_is_kept():
    """A message within the limit is sent as it is, but for a lone surrogate, as Python makes of an odd file name."""
    assert ["", "short", "ü", "file 'a?'"] == [cut_message(text) for text in ("", "short", "ü", "file 'a\udc80'")]


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
