"""Brokers of Debian's packages as processes of a test, on free ports, with their data in a folder."""

import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import nats
import pytest
import redis
from tests.ports import free_port

_START_TIMEOUT_S = 30.0


class Topics(Protocol):
    """A broker that a test starts, kills and starts again; it writes to topics and reads them whole."""

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


class _Process:
    def __init__(self, program: str, folder: Path) -> None:
        path = shutil.which(program) or shutil.which(f"/usr/sbin/{program}")
        if path is None:
            pytest.skip(f"{program} is not installed (Debian: apt-get install {program})")
        self._program, self._folder, self._port = path, folder, free_port()
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
        for payload in payloads:
            await connection.jetstream().publish(topic, payload)
        await connection.close()

    async def read(self, topic: str) -> list[tuple[bytes, dict[str, str]]]:
        """Every message, with its headers."""
        connection = await self._connected()
        try:
            stream = connection.jetstream()
            name = topic.replace(".", "_")
            state = (await stream.stream_info(name)).state
            numbers = range(state.first_seq, state.last_seq + 1) if state.messages else ()
            messages = [await stream.get_msg(name, number) for number in numbers]
        finally:
            await connection.close()
        return [(message.data or b"", dict(message.headers or {})) for message in messages]


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
            for payload in payloads:
                client.xadd(topic, {"payload": payload, "source": "test"})

    async def read(self, topic: str) -> list[tuple[bytes, dict[str, str]]]:
        """Every message, with its headers."""
        with self._client() as client:
            entries = client.xrange(topic)
        return [
            (fields.pop(b"payload"), {key.decode(): value.decode() for key, value in fields.items()})
            for _, fields in entries
        ]


async def _quiet(_: Exception) -> None:
    """Failed attempts to connect are tried again."""
