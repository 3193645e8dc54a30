"""Addresses of brokers, and what of a Kafka partition may be committed."""

import random

import pytest

from weft_common.errors import InvalidArgumentError
from weft_jobs.brokers import parse_address
from weft_jobs.brokers.kafka import CommittedOffsets


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
