"""The least possible wire, for ``benchmarks.fused``: messages with their lengths over Unix sockets.

It gives requests the arrivals that they have in a service: some of several connections in each turn of the event loop,
instead of all at once. ``python -m benchmarks.fused_wire PATH CONNECTIONS DEPTH REQUESTS`` is the client: it reads a
message from its standard input and keeps so many copies of it in flight on each connection.
"""

import asyncio
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from select import EPOLLIN, epoll
from typing import Any

_LENGTH = struct.Struct("<I")

#: Answers one message.
Answer = Callable[[bytes], Awaitable[bytes]]


class _Connection(asyncio.Protocol):
    """A task for each message; what one turn of the loop answers leaves in one write."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._received = b""
        self._outbox: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        data = self._received + data
        offset = 0
        while offset + 4 <= len(data):
            end = offset + 4 + _LENGTH.unpack_from(data, offset)[0]
            if end > len(data):
                break
            task = self._loop.create_task(self._serve(data[offset + 4 : end]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            offset = end
        self._received = data[offset:]

    async def _serve(self, message: bytes) -> None:
        try:
            answer = await self._answer(message)
        except BaseException:
            self._transport.close()  # the client notices
            raise
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox += (_LENGTH.pack(len(answer)), answer)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._outbox))
        self._outbox.clear()


@asynccontextmanager
async def listening(path: str, answer: Answer) -> AsyncIterator[None]:
    """Answer the messages of clients at ``path``."""
    server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(answer), path)
    try:
        yield
    finally:
        server.close()


async def send(path: str, message: bytes, *, num_connections: int, depth: int, num_requests: int) -> None:
    """Have a process of its own send copies of a message, and wait until all are answered."""
    arguments = ("-m", "benchmarks.fused_wire", path, str(num_connections), str(depth), str(num_requests))
    client = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=asyncio.subprocess.PIPE)
    await client.communicate(message)
    if client.returncode:
        raise RuntimeError(f"the client failed: {client.returncode}")


def _run_client(path: str, num_connections: int, depth: int, num_requests: int) -> None:
    message = sys.stdin.buffer.read()
    frame = _LENGTH.pack(len(message)) + message
    poll, buffers, sockets = epoll(), {}, {}
    num_unsent = num_requests
    for _ in range(num_connections):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        sockets[connection.fileno()], buffers[connection.fileno()] = connection, b""
        poll.register(connection.fileno(), EPOLLIN)
        connection.sendall(frame * min(depth, num_unsent))
        num_unsent -= min(depth, num_unsent)
    num_left = num_requests
    while num_left:
        for number, _ in poll.poll():
            data = buffers[number] + sockets[number].recv(1 << 18)
            if not data:
                raise SystemExit("the service closed the connection")
            offset = num_answers = 0
            while offset + 4 <= len(data) and (end := offset + 4 + _LENGTH.unpack_from(data, offset)[0]) <= len(data):
                offset = end
                num_answers += 1
            buffers[number] = data[offset:]
            num_left -= num_answers
            num_next = min(num_answers, num_unsent)
            num_unsent -= num_next
            if num_next:
                sockets[number].sendall(frame * num_next)


if __name__ == "__main__":
    _run_client(sys.argv[1], *map(int, sys.argv[2:]))
