"""What becomes of clients that connect and then do nothing."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from weft.gateway.http import http_server as connection
from weft.gateway.http.http_server import HttpServer, bound_socket
from weft.gateway.http.request_context import RequestTracker

WAIT_S = 10.0
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


class App:
    """Answers ``/`` before it has read the body, and ``/endless`` without an end; ``ended``: one has ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while scope["path"] == "/endless":
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
                leaving = asyncio.ensure_future(receive())
                await asyncio.sleep(0)
                if leaving.done() and leaving.result()["type"] == "http.disconnect":
                    return
                leaving.cancel()
            await send({"type": "http.response.body", "body": b"ok"})
        finally:
            self.ended.set()


@pytest.fixture
async def app(monkeypatch: pytest.MonkeyPatch) -> App:
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.2)
    return App()


@contextlib.asynccontextmanager
async def connected(app: App) -> AsyncIterator[socket.socket]:
    """A client of a server with the application; it takes little before it reads."""
    listening = bound_socket("127.0.0.1", 0, shares_port=False)
    server = HttpServer(app, None, 1.0)
    await server.start(listening)
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, listening.getsockname())
            yield client
    finally:
        await server.stop()


async def read_answer(client: socket.socket) -> None:
    """The whole answer has come, and is the application's."""
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        part = await asyncio.get_running_loop().sock_recv(client, 4096)
        assert part, "the connection ended before the answer"
        answer += part
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("answered", "part"),
    [(b"", b""), (b"", b"GET / HT"), (POST, b"a"), (GET, b"GET / HT")],
    ids=["nothing", "headers", "body", "second"],
)
async def test_a_request_that_does_not_come_is_not_waited_for(app: App, answered: bytes, part: bytes) -> None:
    """Nothing, a part of the headers, of the body of an answered request, or of a second request."""
    loop = asyncio.get_running_loop()
    async with connected(app) as client, asyncio.timeout(WAIT_S):
        if answered:
            await loop.sock_sendall(client, answered)
            await read_answer(client)
        await loop.sock_sendall(client, part)
        with contextlib.suppress(ConnectionResetError):
            while await loop.sock_recv(client, 4096):
                pass


async def test_a_body_after_its_answer_is_read_for_a_while(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the client can read the answer; one that sends for ever is cut off."""
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(connection, "MAX_UNREAD_BYTES", 1 << 20)
    loop, num_sent = asyncio.get_running_loop(), 0
    async with connected(app) as client, asyncio.timeout(WAIT_S):
        await loop.sock_sendall(client, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        await read_answer(client)
        with contextlib.suppress(ConnectionError):
            while num_sent < 500 << 20:
                await loop.sock_sendall(client, bytes(1 << 16))
                num_sent += 1 << 16
    assert connection.MAX_UNREAD_BYTES <= num_sent < 64 << 20, num_sent  # what the system buffers counts too


async def test_who_sends_all_before_reading_gets_the_answer(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client with a body over the limit does, which the server has refused at once."""
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", WAIT_S)
    loop = asyncio.get_running_loop()
    async with connected(app) as client, asyncio.timeout(WAIT_S):
        size = 80 << 20
        await loop.sock_sendall(client, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(80):
            await loop.sock_sendall(client, bytes(1 << 20))
        await read_answer(client)


async def test_a_request_with_two_lengths_ends_its_connection(app: App) -> None:
    """Its body is read by its chunks, and what follows as no request: a proxy in front may have read it otherwise."""
    loop = asyncio.get_running_loop()
    smuggled = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET
    async with connected(RequestTracker(app, str, ())) as client, asyncio.timeout(WAIT_S):  # type: ignore[arg-type]
        await loop.sock_sendall(client, smuggled)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := await loop.sock_recv(client, 4096):
                answer += part
    assert 1 == answer.count(b"HTTP/1.1")
    assert b"connection: close" in answer


async def test_an_answer_that_nobody_reads_ends(app: App) -> None:
    """The application is told that the client left; one that does not know it would wait for ever."""
    async with connected(app) as client, asyncio.timeout(WAIT_S):
        await asyncio.get_running_loop().sock_sendall(client, b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await app.ended.wait()


async def test_a_request_in_work_has_its_time(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its headers have come, however long it takes; and the next one after it."""
    loop, may_end = asyncio.get_running_loop(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await may_end.wait()
        await App.__call__(app, scope, receive, send)

    async with connected(slow) as client, asyncio.timeout(WAIT_S):  # type: ignore[arg-type]
        loop.call_later(2 * connection.HEADERS_TIMEOUT_S, may_end.set)
        for _ in range(2):
            await loop.sock_sendall(client, GET)
            await read_answer(client)


async def test_a_new_connection_may_send_its_request_while_the_server_stops(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has connected just before a stop is answered; then its connection is closed."""
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(connection, "FIRST_REQUEST_S", 2.0)  # then its connection is closed, answered or not
    listening = bound_socket("127.0.0.1", 0, shares_port=False)
    address = listening.getsockname()
    server = HttpServer(app, None, 5.0)
    await server.start(listening)
    reader, writer = await asyncio.open_connection(*address)
    stop = asyncio.create_task(server.stop())
    with contextlib.suppress(ConnectionError):  # refused, or reset as the listener closes
        while not stop.done():
            (await asyncio.open_connection(*address))[1].close()
    writer.write(GET)
    assert b"HTTP/1.1 200 OK\r\n" == await asyncio.wait_for(reader.readline(), WAIT_S)
    assert (await asyncio.wait_for(reader.read(), WAIT_S)).endswith(b"ok\r\n0\r\n\r\n")
    await stop
    writer.close()
