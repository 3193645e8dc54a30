"""Messages with a length and a number over a plain Unix socket: what a hop costs at the least on asyncio.

Not robust: no flow control, no errors, no deadlines. ``python -m benchmarks.framed SOCKET`` serves an echo; it prints
one JSON line with its process id, and ends with its standard input.
"""

import asyncio
import itertools
import json
import os
import struct
import sys
from typing import Any, cast

import uvloop

#: Length of the message and number of its call.
_HEADER = struct.Struct(">IQ")


class _Framed(asyncio.Protocol):
    """Reads whole messages; writes what one turn of the loop sends at once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._unsent: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._received:
            self._received += data
            data = bytes(self._received)
        position, end = 0, len(data)
        while end - position >= _HEADER.size:
            length, number = _HEADER.unpack_from(data, position)
            if end - position - _HEADER.size < length:
                break
            position += _HEADER.size
            self.take(number, data[position : position + length])
            position += length
        self._received = bytearray(data[position:])

    def take(self, number: int, message: bytes) -> None:
        """A message has come."""
        raise NotImplementedError

    def put(self, number: int, message: bytes) -> None:
        """Send a message with this turn of the loop."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += (_HEADER.pack(len(message), number), message)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()


class _Echo(_Framed):
    """Answers each call from a task, as any service does."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, number: int, message: bytes) -> None:
        task = self._loop.create_task(self._answer(number, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, message: bytes) -> None:
        self.put(number, message)


class FramedClient(_Framed):
    """Calls over one connection."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    @classmethod
    async def connect(cls, path: str) -> "FramedClient":
        """A client of the echo that listens there. Raises OSError."""
        _, client = await asyncio.get_running_loop().create_unix_connection(cls, path)
        return client

    def take(self, number: int, message: bytes) -> None:
        """The answer of a call has come."""
        self._waiting.pop(number).set_result(message)

    def call(self, message: bytes) -> "asyncio.Future[bytes]":
        """Send a message; the result is its answer."""
        number = next(self._numbers)
        future = self._waiting[number] = self._loop.create_future()
        self.put(number, message)
        return future

    async def close(self) -> None:
        """Close the connection."""
        self._transport.close()


async def _serve(path: str) -> None:
    server: Any = await asyncio.get_running_loop().create_unix_server(_Echo, path)
    print(json.dumps({"grpc": "", "metrics": "", "pid": os.getpid()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[1]))
