"""Attacks with connections: many, silent, half, or of another protocol."""

import contextlib
import os
import socket
import time

from tests.wire import peer as h2
from tests.wire.arena import Arena, Attack
from tests.wire.peer import Closed, Peer

HTTP_1 = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl\r\n\r\n"
UNAVAILABLE = 14


def slow_writer(arena: Arena) -> str:
    """A request a byte at a time."""
    peers = [arena.peer(greets=False) for _ in range(arena.num(100, 5))]
    whole = [h2.PREFACE + h2.settings_frame() + peer.request("/test.Echo/Unary", b"hello") for peer in peers]
    for at in range(max(map(len, whole))):
        for peer, sent in zip(peers, whole, strict=True):
            peer.send(sent[at : at + 1])
    answers = [peer.read_answer() for peer in peers]
    assert all(answer.messages == [b"hello"] for answer in answers)
    return f"{len(answers)} answered"


def half_requests(arena: Arena) -> str:
    """Connections that stop in the middle: of the preface, of a frame, of a block, of a message; then go."""
    sample = Peer(socket.socket())
    whole = h2.PREFACE + h2.settings_frame() + sample.request("/test.Echo/Unary", b"hello" * 100)
    sample.close()
    lengths = range(0, len(whole), 1 if arena.num(100) >= 100 else 23)
    peers = []
    for length in lengths:
        peer = arena.peer(greets=False)
        peer.send(whole[:length])
        peers.append(peer)
    arena.echo.call("Unary", b"x")
    for index, peer in enumerate(peers):
        peer.abort() if index % 2 else peer.close()
    return f"{len(peers)} came and went"


def silent_preface(arena: Arena) -> str:
    """Connections that never say a word lose their sockets."""
    peers = [arena.peer(greets=False) for _ in range(20)]
    begin_s = time.monotonic()
    if arena.is_ours:
        for peer in peers:
            peer.wait_gone(15.0)
    return f"cut off after {time.monotonic() - begin_s:.1f} s"


def idle(arena: Arena) -> str:
    """Connections that have shaken hands and wait."""
    number = arena.num(3000)
    peers = [arena.peer() for _ in range(number)]
    assert peers[0].call("/test.Echo/Unary", b"first").messages == [b"first"]
    assert peers[-1].call("/test.Echo/Unary", b"last").messages == [b"last"]
    return f"{number:,} wait, the first and the last are answered"


def churn(arena: Arena) -> str:
    """Connections that are reset in the middle of a call, one after another."""
    number = arena.num(10_000)
    for index in range(number):
        peer = arena.peer(greets=False)
        peer.send(
            h2.PREFACE, h2.settings_frame(), peer.request("/test.Echo/Slow" if index % 2 else "/test.Echo/Big", b"1000")
        )
        peer.abort()
    return f"{number:,} came and went"


def beyond_connections(arena: Arena) -> str:
    """More connections than --max-connections."""
    taken, cut = [], 0
    for _ in range(60):
        peer = arena.peer(greets=False, timeout_s=2.0)
        try:
            taken.append(peer.handshake())
            peer.call("/test.Echo/Unary")
        except (Closed, AssertionError, TimeoutError):
            cut += 1
    arena.expect(18 <= 60 - cut <= 20, cut)  # the neighbour's and the test's own count too
    for peer in taken:
        peer.close()
    deadline_s = time.monotonic() + 5
    while arena.is_ours:
        with contextlib.suppress(Closed, AssertionError):
            arena.peer().call("/test.Echo/Unary")
            break
        assert time.monotonic() < deadline_s, "no connection is taken, although others have gone"
    return f"{60 - cut} of 60 taken, and more when those have gone"


def beyond_descriptors(arena: Arena) -> str:
    """More connections than the process may have descriptors; when they have gone, others are taken."""
    peers = [arena.peer(greets=False) for _ in range(200)]
    arena.echo.call("Unary", b"x")
    time.sleep(1.0)
    for peer in peers:
        peer.abort()
    deadline_s = time.monotonic() + 10
    while True:
        with contextlib.suppress(Closed, AssertionError, TimeoutError):
            arena.peer(timeout_s=1.0).call("/test.Echo/Unary")
            return "others are taken when those have gone"
        assert time.monotonic() < deadline_s, "no connection is taken, although others have gone"


def unread_answers(arena: Arena) -> str:
    """Connections that leave a megabyte unread each, less than makes the service pause, and that go on sending."""
    peers = []
    for _ in range(10):
        peer = arena.peer({h2.INITIAL_WINDOW_SIZE: 1 << 24}, to="unix", window=1 << 24)
        peer.send(peer.request("/test.Echo/Big", b"1500000"))
        peers.append(peer)
    begin_s = time.monotonic()
    while arena.is_ours and not all(_is_gone(peer) for peer in peers):
        for peer in peers:
            peer.try_send(h2.frame(h2.PRIORITY, 0, 9, bytes(5)))
        assert time.monotonic() < begin_s + 20, "they keep their sockets"
        time.sleep(0.2)
    return f"cut off after {time.monotonic() - begin_s:.1f} s"


def _is_gone(peer: Peer) -> bool:
    try:
        peer.wait_gone(0.0)
    except TimeoutError:
        return False
    return True


def beyond_streams(arena: Arena) -> str:
    """More streams than MAX_CONCURRENT_STREAMS."""
    peer = arena.peer()
    allowed = peer.settings.get(h2.MAX_CONCURRENT_STREAMS, 100)
    extra = 50
    for stream_id in range(1, 2 * (allowed + extra), 2):
        peer.send(peer.request("/test.Echo/Slow", b"x", stream_id=stream_id))
    if not arena.is_ours:
        return f"{allowed} allowed"
    refused = [peer.wait_reset(stream_id) for stream_id in range(2 * allowed + 1, 2 * (allowed + extra), 2)]
    arena.expect(set(refused) == {h2.REFUSED_STREAM}, refused)
    arena.echo.wait_stats(lambda found: found["num_slow"] == allowed)
    arena.echo.call("Release")
    answers = peer.read_answers(range(1, 2 * allowed, 2))
    assert all(answer.messages == [b"x"] for answer in answers)
    return f"{extra} of {allowed + extra} refused, the others answered"


def garbage(arena: Arena) -> str:
    """Random bytes, HTTP/1.1 and TLS where the preface belongs."""
    hello = bytes.fromhex("16030100c8010000c40303") + os.urandom(200)
    pieces = [HTTP_1, hello, b"\0" * 1000, b"PRI * HTTP/1.1\r\n\r\n", b"\n", *(os.urandom(1000) for _ in range(20))]
    pieces += [h2.PREFACE + os.urandom(1000), h2.PREFACE + h2.settings_frame() + os.urandom(1000)]
    pieces += [h2.PREFACE + h2.ping(), h2.PREFACE + b"\0" * 1000, h2.PREFACE * 2]
    for piece in pieces:
        peer = arena.peer(greets=False)
        peer.try_send(piece)
        if arena.is_ours and len(piece) > 1:
            peer.socket.shutdown(socket.SHUT_WR)
            _wait_end(peer)
    return f"{len(pieces)} cut off"


def _wait_end(peer: Peer) -> None:
    """Whatever comes, as bytes, to the end of the connection."""
    peer.socket.settimeout(10.0)
    with contextlib.suppress(ConnectionResetError):
        while peer.socket.recv(1 << 16):
            pass


def tls_garbage(arena: Arena) -> str:
    """Bytes that are no TLS, handshakes that stop, and connections that say nothing, on the port with TLS."""
    host, _, port = arena.echo.tls.rpartition(":")
    pieces = [h2.PREFACE + h2.settings_frame(), HTTP_1, b"\x16\x03\x01\xff\xff" + os.urandom(100), os.urandom(5000)]
    pieces += [b"\x16\x03\x01", b"\x16"]
    sockets = []
    for piece in pieces * arena.num(40, 2):
        connected = socket.create_connection((host, int(port)))
        arena.num_connections += 1
        with contextlib.suppress(OSError):
            connected.sendall(piece)
        sockets.append(connected)
    peer = arena.peer(to="tls")
    assert peer.call("/test.Echo/Unary", b"x").messages == [b"x"]
    for connected in sockets:
        connected.close()
    return f"{len(sockets)} came and went, others are answered"


def half_closed(arena: Arena) -> str:
    """Clients that close their half after a request; the service may answer, and must not keep the other half."""
    for _ in range(arena.num(200, 10)):
        peer = arena.peer()
        peer.send(peer.request("/test.Echo/Unary", b"x"))
        peer.socket.shutdown(socket.SHUT_WR)
        if arena.is_ours:
            peer.wait_closed()
    return "closed"


_UVLOOP = "--loop=uvloop"

STRANGERS = (
    Attack("a byte at a time", slow_writer),
    Attack("half requests", half_requests, max_mib=32.0),
    Attack("not a word", silent_preface, limits={"handshake_timeout_s": 1.0}),
    Attack("3,000 idle connections", idle, max_mib=200.0),
    Attack("10,000 connections that are reset", churn),
    Attack("connections beyond the limit", beyond_connections, limits={"max_connections": 20}),
    Attack("connections beyond the descriptors", beyond_descriptors, arguments=("--max-descriptors=64", _UVLOOP)),
    Attack("1.5 MB left unread on each connection", unread_answers, 64.0, limits={"write_timeout_s": 2.0}),
    Attack("streams beyond the limit", beyond_streams, max_mib=32.0),
    Attack("random bytes, HTTP/1.1, TLS on the plain port", garbage),
    Attack("no TLS, half TLS on the port with TLS", tls_garbage, max_mib=32.0, arguments=(_UVLOOP,)),
    Attack("half-closed connections", half_closed),
)
