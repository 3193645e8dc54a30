"""A TCP relay in front of a service, which can do to a connection what networks do.

``python -m tests.faults.relay HOST:PORT HOST:PORT``, which listens on the first and forwards to the second, takes lines
``MODE DELAY_S`` on its standard input and answers each with ``done``; it ends with its input.
"""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, Literal

#: What the relay does with what it reads. ``pass``: forwards it. ``hold``: keeps the connections open and forwards
#: nothing, as if the host had gone away without a word. ``garble``: replaces what the service answers by noise.
#: ``reset``: resets every connection, new ones too.
Mode = Literal["pass", "hold", "garble", "reset"]

_CHUNK_BYTES = 1 << 16


class Relay:
    """Listens on a port of 127.0.0.1 and forwards to another; runs on a thread of its own until ``close``.

    Args:
        upstream: Address of the service.
        listen: Address to listen on; port 0 is any free one.

    Attributes:
        port: Where clients connect.
    """

    def __init__(self, upstream: str, listen: str = "127.0.0.1:0") -> None:
        self.port = 0
        self._upstream = upstream.split(":")
        self._mode: Mode = "pass"
        self._delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._thread.start()
        self._server = self._run(self._listen(*listen.split(":")))

    def set_mode(self, mode: Mode, *, delay_s: float = 0.0) -> None:
        """From now on the relay does this; with ``pass`` each piece arrives ``delay_s`` later.

        What was held is forwarded when the mode becomes ``pass`` again.
        """
        self._run(self._change(mode, delay_s))

    def close(self) -> None:
        """No connection is left and the thread has ended."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self, host: str, port: str) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, host, int(port))
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _change(self, mode: Mode, delay_s: float) -> None:
        self._mode, self._delay_s = mode, delay_s
        if mode == "hold":
            self._passing.clear()
        else:
            self._passing.set()
        if mode == "reset":
            self._reset()

    async def _end(self) -> None:
        self._server.close()
        self._reset()
        self._passing.set()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self._mode == "reset":
                return
            service, upstream = await asyncio.open_connection(*self._upstream)
            self._writers.add(upstream)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, upstream, is_answer=False))
                both.create_task(self._pump(service, writer, is_answer=True))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for end in (writer, upstream):
                if end is not None:
                    end.transport.abort()
                    self._writers.discard(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        """Forward one direction until its end, which ends the other too."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            while piece := await reader.read(_CHUNK_BYTES):
                pieces.put_nowait((loop.time() + self._delay_s, piece))
            raise ConnectionResetError

        async def write() -> None:
            while True:
                due_s, piece = await pieces.get()
                await asyncio.sleep(max(due_s - loop.time(), 0.0))
                await self._passing.wait()
                writer.write(os.urandom(len(piece)) if is_answer and self._mode == "garble" else piece)
                await writer.drain()

        async with asyncio.TaskGroup() as both:
            both.create_task(read())
            both.create_task(write())


if __name__ == "__main__":
    with contextlib.closing(Relay(sys.argv[2], sys.argv[1])) as served:
        print("done", flush=True)
        for line in sys.stdin:
            mode, delay_s = line.split()
            served.set_mode(mode, delay_s=float(delay_s))  # type: ignore[arg-type]
            print("done", flush=True)
