"""Redis Streams: a consumer group of a stream."""

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from redis import asyncio as redis
from redis.exceptions import RedisError, ResponseError
from typing_extensions import override

from weft.base.errors import NotFoundError, UnavailableError
from weft.jobs.brokers import Address, Broker, Message, Publication

#: Field of an entry that is the message; all others are headers.
PAYLOAD = "payload"
_CALL_TIMEOUT_S = 5.0
#: Counts entries where they are, in pieces that keep nobody waiting.
_COUNT = """
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
return {#found, #found > 0 and found[#found][1] or ARGV[2]}
"""
_COUNTED_AT_ONCE = 1000
#: Ends consumers that have no message and gave no sign of life for too long, and this one when it ends. With the last
#: argument 1 it deletes, whole nodes at a time, entries that every group of the stream has acknowledged.
_TIDY = """
local stream, group, idle_ms, own, trims = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local function fields(list)
  local named = {}
  for i = 1, #list, 2 do named[list[i]] = list[i + 1] end
  return named
end
for _, each in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local consumer = fields(each)
  if consumer.pending == 0 and (consumer.idle > idle_ms or consumer.name == own) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer.name)
  end
end
if trims ~= '1' then return end
local function parts(id)
  local ms, number = id:match('(%d+)-(%d+)')
  return tonumber(ms), tonumber(number)
end
local first
for _, each in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local other = fields(each)
  local id = other.pending > 0 and redis.call('XPENDING', stream, other.name)[2] or other['last-delivered-id']
  local ms, number = parts(id)
  local least_ms, least = parts(first or id)
  if not first or ms < least_ms or (ms == least_ms and number < least) then first = id end
end
redis.call('XTRIM', stream, 'MINID', '~', first)
"""
#: A consumer without messages leaves the group after so many times ``ack_wait_s``.
_LEAVES_AFTER = 3


class RedisBroker(Broker):
    """A connection to a Redis server; see ``Broker``.

    Entries have the field ``payload``; other fields are headers. Redis keeps acknowledged writes only with ``appendonly
    yes``, and does not detect duplicates. The group is created at the first entry of the stream if it is missing.
    """

    OPTIONS = MappingProxyType({"trim": ("yes", "no")})
    ERRORS = (RedisError, OSError)

    def __init__(self, address: Address, group: str, ack_wait_s: float) -> None:
        super().__init__(address, group, ack_wait_s)
        self._trims = address.options.get("trim") == "yes"
        self._idle_ms = int(ack_wait_s * 1000)
        self._consumer = f"{socket.gethostname()}-{os.getpid()}"
        self._client: Any = redis.Redis.from_url(
            address.server, password=address.secret(), socket_connect_timeout=_CALL_TIMEOUT_S
        )
        #: Where the next look for messages of consumers that died begins.
        self._claim_from = "0-0"
        #: Entries up to and with this id are counted in the number of those that were delivered.
        self._counted_to: bytes | None = None
        self._num_delivered = 0

    @override
    async def connect(self, source: str | None) -> None:
        """See ``Broker``; the stream must exist."""
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

    @override
    async def receive(self, num_messages: int, timeout_s: float) -> Sequence[Message]:
        with self._failures():
            claimed = await self._client.xautoclaim(
                self._source, self._group, self._consumer, self._idle_ms, self._claim_from, count=num_messages
            )
            self._claim_from = claimed[0]
            if entries := [entry for entry in claimed[1] if entry[1] is not None]:
                pending = await self._client.xpending_range(
                    self._source, self._group, entries[0][0], entries[-1][0], len(entries), consumername=self._consumer
                )
                counts = {each["message_id"]: int(each["times_delivered"]) for each in pending}
                return [self._message(entry, counts.get(entry[0], 2)) for entry in entries]
            answer = await self._client.xreadgroup(
                self._group, self._consumer, {self._source: ">"}, count=num_messages, block=max(1, int(timeout_s * 1e3))
            )
        return [self._message(entry, 1) for _, entries in answer or [] for entry in entries]

    @override
    async def publish(self, topic: str, publications: Sequence[Publication]) -> None:
        """See ``Broker``; writes all or none, and does not detect duplicates."""
        with self._failures():
            async with self._client.pipeline(transaction=True) as pipeline:
                for each in publications:
                    pipeline.xadd(topic, {**each.headers, PAYLOAD: each.payload})
                await pipeline.execute()

    @override
    async def acknowledge(self, messages: Sequence[Message]) -> None:
        with self._failures():
            await self._client.xack(self._source, self._group, *(message.handle for message in messages))

    @override
    async def extend(self, messages: Sequence[Message]) -> None:
        """See ``Broker``; also removes other consumers that have ended and have no message left."""
        await self._claim(messages, self._consumer, 0)
        with self._failures():
            await self._tidy("")

    @override
    async def give_back(self, messages: Sequence[Message]) -> None:
        """Make them idle for long enough that another consumer can claim them."""
        await self._claim(messages, self._consumer, self._idle_ms + 1)

    @override
    async def num_unacknowledged(self) -> int:
        with self._failures():
            return int(self._own(await self._client.xinfo_groups(self._source))["pending"])

    @override
    async def lag(self) -> int:
        # What Redis 7 itself calls the lag is wrong once it was restarted, until the group has read all and for longer.
        # So entries are counted here: those behind the last that was delivered at first, then those that are delivered.
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
        """Number of entries after the id ``after``, up to ``to``."""
        total = 0
        while after != to:
            count, after = await self._client.eval(_COUNT, 1, self._source, b"(" + after, to, _COUNTED_AT_ONCE)
            total += count
            if count < _COUNTED_AT_ONCE:
                break
        return total

    @override
    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            if self._source:
                await self._tidy(self._consumer)
            await self._client.aclose()

    async def _tidy(self, leaves: str) -> None:
        idle_ms = _LEAVES_AFTER * self._idle_ms
        await self._client.eval(_TIDY, 1, self._source, self._group, idle_ms, leaves, int(self._trims))

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

    def _message(self, entry: Any, num_deliveries: int) -> Message:
        own_id, fields = entry
        headers = {
            name.decode(): value.decode(errors="replace")
            for name, value in fields.items()
            if name.decode(errors="replace") != PAYLOAD
        }
        payload = fields.get(PAYLOAD.encode(), b"")
        return Message(f"{self._source}.{own_id.decode()}", payload, headers, num_deliveries, own_id)
