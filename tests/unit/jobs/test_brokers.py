"""Addresses of brokers, and what of a Kafka partition may be committed."""

import random

import pytest
from nats.errors import ConnectionClosedError, MsgAlreadyAckdError

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.jobs.brokers import parse_address
from weft.jobs.brokers.broker import Message, Publication
from weft.jobs.brokers.kafka import CommittedOffsets
from weft.jobs.brokers.nats_jetstream import NatsBroker


def test_an_address_is_a_server_and_a_topic() -> None:
    """Hosts, ports, users and topics with dots are kept as they are."""
    assert parse_address("nats://user:word@host:4222/orders.new") == ("nats://user:word@host:4222", "orders.new")
    assert parse_address("kafka://a:9092,b:9092/orders") == ("kafka://a:9092,b:9092", "orders")


@pytest.mark.parametrize(
    "text", ["", "orders", "nats://host:4222", "nats://host:4222/", "amqp://host/orders", "nats:///x"]
)
def test_other_texts_are_no_address(text: str) -> None:
    """The error shows the text and the form."""
    with pytest.raises(InvalidArgumentError, match="SCHEME://HOST:PORT/TOPIC"):
        parse_address(text)


async def test_an_acknowledgement_that_was_lost_is_not_sent_again() -> None:
    """The connection breaks behind the first try; the second one ends, and the broker delivers the message again."""

    class Handle:
        is_acked = False

        async def ack(self) -> None:
            if self.is_acked:
                raise MsgAlreadyAckdError
            self.is_acked = True

    class Connection:
        num_flushed = 0

        async def flush(self, _: int) -> None:
            self.num_flushed += 1
            if self.num_flushed == 1:
                raise ConnectionClosedError

    broker = NatsBroker("nats://127.0.0.1:1", "group", 30.0)
    broker._connection = Connection()  # type: ignore[assignment]
    messages = [Message("1", b"", handle=Handle())]
    with pytest.raises(UnavailableError):
        await broker.acknowledge(messages)
    await broker.acknowledge(messages)


async def test_a_message_that_nats_does_not_take_is_not_sent() -> None:
    """The server would close the connection of all messages; headers count."""

    class Connection:
        max_payload = 100

    broker = NatsBroker("nats://127.0.0.1:1", "group", 30.0)
    broker._connection = Connection()  # type: ignore[assignment]
    for letter in (Publication("1", b"x" * 101, {}), Publication("1", b"x" * 20, {"name": "y" * 60})):
        with pytest.raises(InvalidArgumentError, match="takes messages of 100 bytes"):
            await broker.publish("topic", [Publication("0", b"", {}), letter])


def test_offsets_are_committed_up_to_the_first_unfinished_message() -> None:
    """In whatever order messages are done, no offset is committed before all below it are."""
    generator = random.Random(0)
    for _ in range(200):
        received = sorted(generator.sample(range(100, 140), 12))
        offsets, left, done = CommittedOffsets(received[0]), list(received), set[int]()
        for offset in generator.sample(received, len(received)):
            offsets.acknowledge(offset)
            done.add(offset)
            left = offsets.advance(left)
            unfinished = [each for each in received if each not in done]
            assert all(each < offsets.next_offset or each in unfinished or each > unfinished[0] for each in received)
            assert offsets.next_offset == (
                max((each for each in received if not unfinished or each < unfinished[0]), default=received[0] - 1) + 1
            )
        assert not left
