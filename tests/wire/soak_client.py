"""Our client in hard use: ``python -m tests.wire.soak_client ADDRESS``.

It makes right calls, cancelled ones, ones whose deadline passes, streams that are left, and channels that come and go.
Each line on standard input is answered with one line of JSON, a ``ClientSample``; it ends with its input.
"""

import asyncio
import gc
import json
import os
import random
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import grpc
from tests.wire.echo_service import num_timers

from weft.wire.client import Channel


class ClientSample(NamedTuple):
    """What the process holds, and what became of its calls so far.

    Attributes:
        num_tasks: Of the event loop, with its timers.
        ends: How often each act was done, and each end that it may not have.
    """

    rss_bytes: int
    num_descriptors: int
    num_threads: int
    num_tasks: int
    ends: dict[str, int]


class SoakClient:
    """The acts, each repeated on one channel, and one on channels of its own.

    Args:
        address: Of the echo service.
    """

    def __init__(self, address: str) -> None:
        self.ends: Counter[str] = Counter()
        self._address = address
        self._channel = Channel(address)
        self._random = random.Random(1)

    async def run(self) -> None:
        """Until it is cancelled."""
        acts = (self._right, self._right, self._cancelled, self._late, self._left_stream, self._bidi, self._new_channel)
        try:
            async with asyncio.TaskGroup() as group:
                for act in acts:
                    group.create_task(self._repeat(act))
        finally:
            await self._channel.close()

    async def _repeat(self, act) -> None:
        while True:
            try:
                async with asyncio.timeout(30):
                    await act()
                self.ends[act.__name__.strip("_")] += 1
            except Exception as error:
                name = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
                details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self.ends[f"wrong: {act.__name__.strip('_')} {name} {details}"[:200]] += 1
            await asyncio.sleep(self._random.uniform(0, 0.02))

    async def _right(self) -> None:
        body = os.urandom(self._random.choice((0, 10, 1000, 100_000, 2_000_000)))
        answer = await self._channel.unary_unary("/test.Echo/Unary")(body, timeout=20, wait_for_ready=True)
        assert answer == body, "another answer"

    async def _cancelled(self) -> None:
        call = self._channel.unary_unary("/test.Echo/Slow")(b"", wait_for_ready=True)
        await asyncio.sleep(self._random.uniform(0, 0.01))
        call.cancel()
        try:
            await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # not the call alone: this client is to end
                raise
            return
        raise AssertionError("a cancelled call was answered")

    async def _late(self) -> None:
        timeout_s = self._random.uniform(0.0001, 0.02)
        try:
            await self._channel.unary_unary("/test.Echo/Slow")(b"", timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                return
            raise
        raise AssertionError("a call that waits for ever was answered")

    async def _left_stream(self) -> None:
        call = self._channel.unary_stream("/test.Echo/ServerStream")(b"100 5000", wait_for_ready=True)
        async for _ in call:
            if self._random.random() < 0.1:
                break
        call.cancel()

    async def _bidi(self) -> None:
        bodies = [os.urandom(self._random.randrange(3000)) for _ in range(self._random.randrange(20))]
        call = self._channel.stream_stream("/test.Echo/BidiStream")(iter(bodies), wait_for_ready=True, timeout=20)
        assert bodies == [body async for body in call], "other answers"

    async def _new_channel(self) -> None:
        async with Channel(self._address) as channel:
            call = channel.unary_unary("/test.Echo/Unary")(b"x", timeout=20, wait_for_ready=True)
            if self._random.random() < 0.7:
                assert await call == b"x", "another answer"

    def sample(self) -> ClientSample:
        """What this process holds now."""
        status = Path("/proc/self/status").read_text()
        rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        gc.collect()
        num_tasks = len(asyncio.all_tasks()) + num_timers(asyncio.get_running_loop())
        descriptors = len(os.listdir("/proc/self/fd"))
        return ClientSample(
            int(rss.split()[1]) << 10, descriptors, threading.active_count(), num_tasks, dict(self.ends)
        )


async def _main(address: str) -> None:
    client = SoakClient(address)
    running = asyncio.create_task(client.run())
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps(client.sample()), flush=True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
