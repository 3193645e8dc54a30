"""Kafka's protocol: a consumer group of a topic."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError
from weft.jobs.brokers.broker import Message, Publication


class CommittedOffsets:
    """What may be committed of one partition: all below the first message that is not acknowledged.

    Attributes:
        next_offset: The offset to commit.
    """

    def __init__(self, first_offset: int) -> None:
        self.next_offset = first_offset
        self._acknowledged: set[int] = set()

    def acknowledge(self, offset: int) -> None:
        """A message is done; those before it may not be."""
        self._acknowledged.add(offset)

    def advance(self, received: Sequence[int]) -> list[int]:
        """Move over what is done, along the offsets that were received, in order; returns those that are left."""
        left = list(received)
        while left and left[0] in self._acknowledged:
            self._acknowledged.discard(left[0])
            self.next_offset = left.pop(0) + 1
        return left


class KafkaBroker:
    """A connection to Kafka brokers; see ``Broker``.

    Kafka commits offsets, not messages: after a crash everything behind the first unfinished message of a partition
    comes again. It does not count deliveries.

    Args:
        server: ``kafka://HOST:PORT``, several hosts separated by commas.
        group: Consumer group.
        ack_wait_s: Session timeout of the consumer.
    """

    def __init__(self, server: str, group: str, ack_wait_s: float) -> None:
        self._server = server
        self._hosts = urlsplit(server).netloc
        self._group = group
        self._session_ms = int(ack_wait_s * 1000)
        self._consumer: Any = None
        self._producer: Any = None
        self._offsets: dict[TopicPartition, CommittedOffsets] = {}
        self._received: dict[TopicPartition, list[int]] = {}

    async def connect(self, source: str | None) -> None:
        """As ``Broker``; the topic must exist."""
        with self._failures():
            self._producer = AIOKafkaProducer(bootstrap_servers=self._hosts, acks="all", enable_idempotence=True)
            await self._producer.start()
            if source is None:
                return
            self._consumer = AIOKafkaConsumer(
                source,
                bootstrap_servers=self._hosts,
                group_id=self._group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                session_timeout_ms=self._session_ms,
                heartbeat_interval_ms=self._session_ms // 3,
            )
            await self._consumer.start()
            if source not in await self._consumer.topics():
                raise NotFoundError(f"{self._server} has no topic '{source}'; make one")

    async def receive(self, num_messages: int, timeout_s: float) -> Sequence[Message]:
        """As ``Broker``."""
        with self._failures():
            batches = await self._consumer.getmany(timeout_ms=int(timeout_s * 1000), max_records=num_messages)
        messages = []
        for partition, records in batches.items():
            for record in records:
                self._offsets.setdefault(partition, CommittedOffsets(record.offset))
                self._received.setdefault(partition, []).append(record.offset)
                headers = {name: value.decode(errors="replace") for name, value in record.headers}
                own_id = f"{record.topic}.{record.partition}.{record.offset}"
                messages.append(Message(own_id, record.value or b"", headers, 1, (partition, record.offset)))
        return messages

    async def publish(self, topic: str, publications: Sequence[Publication]) -> None:
        """As ``Broker``; the producer's own retries write no duplicates, those of a consumer after a crash do."""
        with self._failures():
            try:
                sent = [
                    await self._producer.send(
                        topic, each.payload, headers=[(name, value.encode()) for name, value in each.headers.items()]
                    )
                    for each in publications
                ]
            except MessageSizeTooLargeError as error:
                raise InvalidArgumentError(f"{self._server} takes no message of such a size: {error}") from None
            await asyncio.gather(*sent)

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """As ``Broker``: commits as far as all messages of a partition are done."""
        for message in messages:
            partition, offset = message.handle
            self._offsets[partition].acknowledge(offset)
        commit = {}
        for partition in {message.handle[0] for message in messages}:
            offsets = self._offsets[partition]
            before = offsets.next_offset
            self._received[partition] = offsets.advance(self._received[partition])
            if offsets.next_offset > before and partition in self._consumer.assignment():
                commit[partition] = offsets.next_offset
        if commit:
            with self._failures():
                await self._consumer.commit(commit)

    async def extend(self, messages: Sequence[Message]) -> None:
        """As ``Broker``: the consumer's heartbeats do it."""

    async def give_back(self, messages: Sequence[Message]) -> None:
        """As ``Broker``: what is not committed comes again when the consumer leaves the group."""

    async def num_unacknowledged(self) -> int:
        """As ``Broker``: none; what comes again comes before younger messages of its partition."""
        return 0

    async def lag(self) -> int:
        """As ``Broker``, of the partitions of this consumer."""
        with self._failures():
            partitions = list(self._consumer.assignment())
            ends = await self._consumer.end_offsets(partitions)
            committed = {each: await self._consumer.committed(each) or 0 for each in partitions}
        return sum(ends[each] - committed[each] for each in partitions)

    async def close(self) -> None:
        """As ``Broker``."""
        for client in (self._consumer, self._producer):
            if client is not None:
                with contextlib.suppress(KafkaError, OSError):
                    await client.stop()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (KafkaError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{self._server}: {str(error) or type(error).__name__}") from error
