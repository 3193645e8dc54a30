"""Redis Streams: a consumer group of a stream."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redis import asyncio as redis
from redis.exceptions import RedisError, ResponseError

from weft.base.errors import NotFoundError, UnavailableError
from weft.jobs.brokers.broker import Message, Publication

#: Field of an entry that is the message; all others are headers.
PAYLOAD = "payload"
_CALL_TIMEOUT_S = 5.0
#: Counts entries where they are, in pieces that keep nobody waiting.
_COUNT = """
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
return {#found, #found > 0 and found[#found][1] or ARGV[2]}
"""
_COUNTED_AT_ONCE = 1000


class RedisBroker:
    """A connection to a Redis server; see ``Broker``.

    Entries have the field ``payload``; other fields are headers. Redis keeps what it acknowledged only with
    ``appendonly yes``, and it knows no duplicates.

    Args:
        server: ``redis://HOST:PORT``.
        group: Name of the consumer group, which is made at the first entry of the stream if it is missing.
        ack_wait_s: After so long without a sign of life another consumer takes a message.
    """

    def __init__(self, server: str, group: str, ack_wait_s: float) -> None:
        self._server = server
        self._group = group
        self._idle_ms = int(ack_wait_s * 1000)
        self._consumer = f"{socket.gethostname()}-{os.getpid()}"
        self._client: Any = redis.Redis.from_url(server, socket_connect_timeout=_CALL_TIMEOUT_S)
        self._source = ""
        #: Where the next look for messages of consumers that died begins.
        self._claim_from = "0-0"
        #: Entries up to and with this id are counted in the number of those that were delivered.
        self._counted_to: bytes | None = None
        self._num_delivered = 0

    async def connect(self, source: str | None) -> None:
        """As ``Broker``; the stream must exist."""
        with self._failures():
            await self._client.ping()
            if source is None:
                return
            self._source = source
            if await self._client.type(source) != b"stream":
                raise NotFoundError(f"{self._server} has no stream '{source}'; XADD or XGROUP CREATE MKSTREAM make one")
            try:
                await self._client.xgroup_create(source, self._group, id="0")
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    async def receive(self, num_messages: int, timeout_s: float) -> Sequence[Message]:
        """As ``Broker``."""
        with self._failures():
            claimed = await self._client.xautoclaim(
                self._source, self._group, self._consumer, self._idle_ms, self._claim_from, count=num_messages
            )
            self._claim_from = claimed[0]
            if entries := [entry for entry in claimed[1] if entry[1] is not None]:
                return await self._with_deliveries(entries)
            answer = await self._client.xreadgroup(
                self._group, self._consumer, {self._source: ">"}, count=num_messages, block=max(1, int(timeout_s * 1e3))
            )
        return [self._message(entry, 1) for _, entries in answer or [] for entry in entries]

    async def publish(self, topic: str, publications: Sequence[Publication]) -> None:
        """As ``Broker``: all or none; duplicates are not known."""
        with self._failures():
            async with self._client.pipeline(transaction=True) as pipeline:
                for each in publications:
                    pipeline.xadd(topic, {**each.headers, PAYLOAD: each.payload})
                await pipeline.execute()

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """As ``Broker``."""
        with self._failures():
            await self._client.xack(self._source, self._group, *(message.handle for message in messages))

    async def extend(self, messages: Sequence[Message]) -> None:
        """As ``Broker``."""
        await self._claim(messages, self._consumer, 0)

    async def give_back(self, messages: Sequence[Message]) -> None:
        """As ``Broker``: as idle as it takes for another consumer to claim them."""
        await self._claim(messages, self._consumer, self._idle_ms + 1)

    async def num_unacknowledged(self) -> int:
        """As ``Broker``."""
        return int((await self._info())["pending"])

    async def lag(self) -> int:
        """As ``Broker``.

        What Redis 7 itself calls the lag is wrong once it was restarted, until the group has read all, and for longer.
        So entries are counted here: those behind the last that was delivered at first, then those that are delivered.
        """
        with self._failures():
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.xinfo_stream(self._source)
                pipeline.xinfo_groups(self._source)
                stream, groups = await pipeline.execute()
            group = self._own(groups)
            delivered, last = group["last-delivered-id"], stream["last-generated-id"]
            num_added = int(stream["entries-added"])
            if delivered == last:
                self._num_delivered = num_added
            elif self._counted_to is None:
                self._num_delivered = num_added - await self._count(delivered, last)
            else:
                self._num_delivered += await self._count(self._counted_to, delivered)
            self._counted_to = delivered
        return int(group["pending"]) + min(num_added - self._num_delivered, int(stream["length"]))

    async def _count(self, after: bytes, to: bytes) -> int:
        """Entries behind the id ``after``, up to ``to``."""
        total = 0
        while after != to:
            count, after = await self._client.eval(_COUNT, 1, self._source, b"(" + after, to, _COUNTED_AT_ONCE)
            total += count
            if count < _COUNTED_AT_ONCE:
                break
        return total

    async def close(self) -> None:
        """As ``Broker``."""
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()

    async def _info(self) -> Mapping[str, Any]:
        with self._failures():
            return self._own(await self._client.xinfo_groups(self._source))

    def _own(self, groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        for group in groups:
            if group["name"].decode() == self._group:
                return group
        raise UnavailableError(f"{self._server} has no group '{self._group}' of '{self._source}' any more")

    async def _claim(self, messages: Sequence[Message], consumer: str, idle_ms: int) -> None:
        if not messages:
            return
        ids = [message.handle for message in messages]
        with self._failures():
            await self._client.xclaim(self._source, self._group, consumer, 0, ids, idle=idle_ms, justid=True)

    async def _with_deliveries(self, entries: Sequence[Any]) -> list[Message]:
        pending = await self._client.xpending_range(
            self._source, self._group, entries[0][0], entries[-1][0], len(entries), consumername=self._consumer
        )
        counts = {each["message_id"]: int(each["times_delivered"]) for each in pending}
        return [self._message(entry, counts.get(entry[0], 2)) for entry in entries]

    def _message(self, entry: Any, num_deliveries: int) -> Message:
        own_id, fields = entry
        headers = {
            name.decode(): value.decode(errors="replace")
            for name, value in fields.items()
            if name.decode(errors="replace") != PAYLOAD
        }
        payload = fields.get(PAYLOAD.encode(), b"")
        return Message(f"{self._source}.{own_id.decode()}", payload, headers, num_deliveries, own_id)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{self._server}: {str(error) or type(error).__name__}") from error
