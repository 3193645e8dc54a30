"""The tools of the other tests: the peer and the echo service."""

import json
import threading

import grpc
import pytest
from tests.wire import peer as h2
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService
from tests.wire.peer import Listener, Peer


def test_a_unary_call(peer: Peer) -> None:
    """The peer's request is answered with its own bytes and status 0."""
    answer = peer.call("/test.Echo/Unary", b"hello")
    assert ([b"hello"], 0, None) == (answer.messages, answer.status, answer.reset_code)
    assert "200" == answer.headers[":status"]


def test_several_streams_and_large_answers(peer: Peer) -> None:
    """Answers that need more than one window are read to their ends, on several streams at once."""
    ids = [1, 3, 5]
    peer.send(*(peer.request("/test.Echo/Big", b"200000", stream_id=stream_id) for stream_id in ids))
    assert [(0, 200_000)] * 3 == [(answer.status, len(answer.messages[0])) for answer in peer.read_answers(ids)]


def test_every_form(echo: EchoService) -> None:
    """The service's RPCs do what they say, over its port and its Unix socket, for a client of grpcio."""
    for address in (echo.address, echo.unix):
        with grpc.insecure_channel(address) as channel:
            stream = channel.unary_stream("/test.Echo/ServerStream")(b"3 2", timeout=10)
            assert [b"\0\0", b"\1\1", b"\2\2"] == list(stream)
            assert b"2 5" == channel.stream_unary("/test.Echo/ClientStream")(iter([b"ab", b"cde"]), timeout=10)
            assert [b"a", b"b"] == list(channel.stream_stream("/test.Echo/BidiStream")(iter([b"a", b"b"]), timeout=10))
            metadata = (("want-code", "8"), ("want-details", "too much"), ("trailing-a", "b"))
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary("/test.Echo/Status")(b"", metadata=metadata, timeout=10)
            failed = error.value
            assert (grpc.StatusCode.RESOURCE_EXHAUSTED, "too much") == (failed.code(), failed.details())
            assert ("trailing-a", "b") in list(failed.trailing_metadata())
            meta = json.loads(channel.unary_unary("/test.Echo/Meta")(b"", metadata=(("a-bin", b"\0\xff"),), timeout=10))
            assert ["a-bin", "00ff"] in meta


def test_slow_and_release(start_echo: StartEcho) -> None:
    """A slow call is answered when it is released, and one that is reset is cancelled; the service counts them."""
    echo = start_echo()
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        peer.send(peer.request("/test.Echo/Slow", b"a", stream_id=1), peer.request("/test.Echo/Slow", stream_id=3))
        echo.wait_stats(lambda found: found["num_slow"] == 2)
        peer.send(h2.reset(3))
        found = echo.wait_stats(lambda found: found["num_slow"] == 1)
        assert 1 == found["counts"]["slow_cancelled"]
        assert b"1" == echo.call("Release")
        assert [b"a"] == peer.read_answer(1).messages
    assert 0 == echo.stop()


def test_the_peer_as_a_server() -> None:
    """A client of grpcio is answered by a listener, frame by frame."""
    with Listener() as listener, grpc.insecure_channel(listener.address) as channel:
        call = channel.unary_unary("/a/b").future(b"question", timeout=10)
        with listener.accept() as peer:
            peer.server_handshake()
            fields, is_end = peer.read_headers(1)
            assert ("/a/b", False) == (fields[":path"], is_end)
            assert h2.message(b"question") == peer.read_kind(h2.DATA, 1).payload
            head = peer.headers(1, [(":status", "200"), ("content-type", "application/grpc")])
            peer.send(head, h2.data(1, h2.message(b"answer")), peer.headers(1, [("grpc-status", "0")], end=True))
            assert b"answer" == call.result(10)


def test_waiting(peer: Peer) -> None:
    """A wait ends with its time or with the connection, whichever is first."""
    with pytest.raises(TimeoutError):
        peer.read_kind(h2.GOAWAY, timeout_s=0.1)
    with pytest.raises(TimeoutError):
        peer.wait_gone(timeout_s=0.1)
    threading.Timer(0.1, lambda: peer.socket.shutdown(2)).start()
    assert [] == peer.wait_closed()
