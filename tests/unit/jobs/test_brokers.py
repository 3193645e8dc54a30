"""Addresses of brokers, and what NATS is not sent, and who leaves a group of Redis."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.jobs.brokers import Redis
from nats.errors import ConnectionClosedError, MsgAlreadyAckdError

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.jobs.brokers import Address, Message, Publication, parse_address
from weft.jobs.brokers.nats_jetstream import NatsBroker
from weft.jobs.brokers.redis_streams import RedisBroker


def test_an_address_is_a_server_and_a_topic() -> None:
    """Hosts, ports, users and topics with dots are kept as they are."""
    assert parse_address("nats://user:word@host:4222/orders.new") == (
        "nats://user:word@host:4222",
        "orders.new",
        {},
    )
    address = parse_address("kafka+ssl://user@a:9092,b:9092/orders?sasl=PLAIN&ca=a%20b.pem")
    assert tuple(address) == ("kafka+ssl://user@a:9092,b:9092", "orders", {"sasl": "PLAIN", "ca": "a b.pem"})
    assert (address.name, address.hosts) == ("kafka+ssl://a:9092,b:9092", "a:9092,b:9092")


def test_a_password_need_not_stand_in_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file comes before the environment, which counts where there is a user."""
    (tmp_path / "word").write_text("from file\n")
    monkeypatch.setenv("WEFT_STREAM_PASSWORD", "from environment")
    for text, credentials in (
        ("redis://host:1/orders", (None, None)),
        ("redis://user:a%40b@host:1/orders", ("user", "a@b")),
        ("redis://user@host:1/orders", ("user", "from environment")),
        (f"redis://user@host:1/orders?password-file={tmp_path}/word", ("user", "from file")),
        (f"redis://host:1/orders?password-file={tmp_path}/word", (None, "from file")),
    ):
        assert parse_address(text).credentials() == credentials


@pytest.mark.parametrize(
    "text", ["", "orders", "nats://host:4222", "nats://host:4222/", "amqp://host/orders", "nats:///x"]
)
def test_other_texts_are_no_address(text: str) -> None:
    """The error shows the text and the form."""
    with pytest.raises(InvalidArgumentError, match="SCHEME://HOST:PORT/TOPIC"):
        parse_address(text)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    """A server of its own."""
    try:
        server = Redis(tmp_path)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    server.start()
    yield server
    server.kill()


async def test_consumers_of_redis_leave_their_group(redis: Redis) -> None:
    """At their end; and those that were killed once they have no message any more. Acknowledged entries are trimmed."""

    async def join(ack_wait_s: float, name: str) -> RedisBroker:
        broker = RedisBroker(parse_address(f"{redis.url}/orders?trim=yes"), "group", ack_wait_s)
        broker._consumer = name
        await broker.connect("orders")
        return broker

    with redis._client() as client:
        client.xadd("orders", {"payload": b"first"})
        killed = await join(0.1, "killed")
        (message,) = await killed.receive(10, 1.0)
        await killed._client.aclose()
        await redis.write("orders", [b"{}"] * 300)
        other = await join(0.1, "other")
        while (taken := list(await other.receive(1000, 1.0)))[0].id != message.id:
            await other.give_back(taken)
        while len(taken) < 301:
            taken += [each for each in await other.receive(1000, 1.0) if each not in taken]
        assert {each["name"] for each in client.xinfo_consumers("orders", "group")} == {b"killed", b"other"}
        await other.acknowledge(taken[:-1])
        async with asyncio.timeout(30):
            while len(client.xinfo_consumers("orders", "group")) == 2:
                await other.extend(taken[-1:])
        assert client.xlen("orders") <= 100
        assert await other.lag() == 1
        await other.close()
        (left,) = client.xinfo_consumers("orders", "group")
        assert left["pending"] == 1
        last = await join(0.1, "last")
        async with asyncio.timeout(30):
            while not (found := await last.receive(10, 0.1)):
                pass
        await last.acknowledge(found)
        await last.close()
        assert "last" not in {each["name"].decode() for each in client.xinfo_consumers("orders", "group")}


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

    broker = NatsBroker(Address("nats://127.0.0.1:1", "orders"), "group", 30.0)
    broker._connection = Connection()  # type: ignore[assignment]
    messages = [Message("1", b"", handle=Handle())]
    with pytest.raises(UnavailableError):
        await broker.acknowledge(messages)
    await broker.acknowledge(messages)


async def test_a_message_that_nats_does_not_take_is_not_sent() -> None:
    """The server would close the connection of all messages; headers count."""

    class Connection:
        max_payload = 100

    broker = NatsBroker(Address("nats://127.0.0.1:1", "orders"), "group", 30.0)
    broker._connection = Connection()  # type: ignore[assignment]
    for letter in (Publication("1", b"x" * 101, {}), Publication("1", b"x" * 20, {"name": "y" * 60})):
        with pytest.raises(InvalidArgumentError, match="takes messages of 100 bytes"):
            await broker.publish("topic", [Publication("0", b"", {}), letter])
