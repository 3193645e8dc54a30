"""Message brokers of Debian's packages as processes, on free ports, with their data in a folder."""

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import nats
import redis
from nats.js.api import AckPolicy, ConsumerConfig

_START_TIMEOUT_S = 30.0
#: Messages of one batch.
_AT_ONCE = 500


class Topics(Protocol):
    """A broker that is started, killed and started again; it writes to topics and reads them whole."""

    url: str

    def start(self) -> None:
        """Start it, with what it had before."""

    def kill(self) -> None:
        """End it at once."""

    async def create(self, topic: str) -> None:
        """Make a topic."""

    async def write(self, topic: str, payloads: Sequence[bytes]) -> None:
        """Append messages."""

    async def read(self, topic: str) -> list[tuple[bytes, dict[str, str]]]:
        """Every message, with its headers."""

    async def count(self, topic: str) -> int:
        """Messages of a topic."""

    async def lag(self, topic: str, group: str) -> int:
        """Messages that a group has not acknowledged, as the broker counts them."""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class _Process:
    def __init__(self, program: str, folder: Path) -> None:
        path = shutil.which(program) or shutil.which(f"/usr/sbin/{program}")
        if path is None:
            raise FileNotFoundError(f"{program} is not installed (Debian: apt-get install {program})")
        self._program, self._folder, self._port = path, folder, _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def _launch(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [self._program, *arguments], cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


class Nats(_Process):
    """nats-server with JetStream; a topic is a stream with one subject."""

    def __init__(self, folder: Path) -> None:
        super().__init__("nats-server", folder)
        self.url = f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, with what it had before."""
        self._launch("-a", "127.0.0.1", "-p", str(self._port), "-js", "-sd", str(self._folder))

    async def _connected(self) -> nats.NATS:  # type: ignore[name-defined]
        end = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                return await nats.connect(self.url, allow_reconnect=False, error_cb=_quiet)
            except Exception:  # whatever a server that starts does
                if time.monotonic() > end:
                    raise

    async def create(self, topic: str) -> None:
        """Make a topic."""
        connection = await self._connected()
        await connection.jetstream().add_stream(name=topic.replace(".", "_"), subjects=[topic])
        await connection.close()

    async def write(self, topic: str, payloads: Sequence[bytes]) -> None:
        """Append messages."""
        connection = await self._connected()
        stream = connection.jetstream()
        for first in range(0, len(payloads), _AT_ONCE):
            written = [await stream.publish_async(topic, each) for each in payloads[first : first + _AT_ONCE]]
            await asyncio.gather(*written)
        await connection.close()

    async def read(self, topic: str) -> list[tuple[bytes, dict[str, str]]]:
        """Every message, with its headers."""
        connection = await self._connected()
        try:
            count = await self.count(topic)
            config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True, inactive_threshold=_START_TIMEOUT_S)
            reader = await connection.jetstream().pull_subscribe(topic, config=config)
            messages: list[Any] = []
            while len(messages) < count:
                messages += await reader.fetch(min(_AT_ONCE, count - len(messages)), _START_TIMEOUT_S)
        finally:
            await connection.close()
        return [(message.data or b"", dict(message.headers or {})) for message in messages]

    async def count(self, topic: str) -> int:
        """Messages of a topic."""
        connection = await self._connected()
        try:
            return (await connection.jetstream().stream_info(topic.replace(".", "_"))).state.messages
        finally:
            await connection.close()

    async def lag(self, topic: str, group: str) -> int:
        """Messages that a group has not acknowledged, as the broker counts them."""
        connection = await self._connected()
        try:
            info = await connection.jetstream().consumer_info(topic.replace(".", "_"), group)
        finally:
            await connection.close()
        return int((info.num_pending or 0) + (info.num_ack_pending or 0))


class Redis(_Process):
    """redis-server that writes what it is told to a file; a topic is a stream."""

    def __init__(self, folder: Path) -> None:
        super().__init__("redis-server", folder)
        self.url = f"redis://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, with what it had before."""
        self._launch("--port", str(self._port), "--bind", "127.0.0.1", "--appendonly", "yes", "--save", "")

    def _client(self) -> "redis.Redis[bytes]":
        client = redis.Redis.from_url(self.url)
        end = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                client.ping()
            except redis.RedisError:
                if time.monotonic() > end:
                    raise
            else:
                return client

    async def create(self, topic: str) -> None:
        """Make a topic."""
        with self._client() as client:
            client.xgroup_create(topic, "unused", mkstream=True)

    async def write(self, topic: str, payloads: Sequence[bytes]) -> None:
        """Append messages."""
        with self._client() as client:
            for first in range(0, len(payloads), _AT_ONCE):
                with client.pipeline(transaction=False) as pipeline:
                    for payload in payloads[first : first + _AT_ONCE]:
                        pipeline.xadd(topic, {"payload": payload, "source": "test"})
                    pipeline.execute()

    async def read(self, topic: str) -> list[tuple[bytes, dict[str, str]]]:
        """Every message, with its headers."""
        with self._client() as client:
            entries = client.xrange(topic)
        return [
            (fields.pop(b"payload"), {key.decode(): value.decode() for key, value in fields.items()})
            for _, fields in entries
        ]

    async def count(self, topic: str) -> int:
        """Messages of a topic."""
        with self._client() as client:
            return int(client.xlen(topic))

    async def lag(self, topic: str, group: str) -> int:
        """Messages that a group has not acknowledged: what Redis calls the lag is wrong after a restart."""
        with self._client() as client:
            (found,) = [each for each in client.xinfo_groups(topic) if each["name"] == group.encode()]
            num_waiting = len(client.xrange(topic, b"(" + found["last-delivered-id"]))
        return int(found["pending"]) + num_waiting


async def _quiet(_: Exception) -> None:
    """Failed attempts to connect are tried again."""
