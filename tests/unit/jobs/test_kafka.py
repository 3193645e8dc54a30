"""Kafka's offsets, keys, deliveries, users and encryption, against librdkafka's mock cluster and Tansu."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.protocol.admin import SaslAuthenticateResponse_v0, SaslAuthenticateResponse_v1, SaslHandShakeResponse_v1
from benchmarks.jobs.brokers import Kafka
from tests.certificates import Authority
from tests.unit.jobs.test_resume import Echo

from weft.base.errors import FailedPreconditionError, InvalidArgumentError, UnauthenticatedError, UnavailableError
from weft.jobs.brokers import Broker, Message, Publication, make_broker, parse_address
from weft.jobs.brokers.kafka import PartitionProgress
from weft.jobs.stream import MessageStream, StreamMetrics, StreamOptions

TOPIC = "orders"
#: Keys of the protocol's requests.
SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE = 17, 18, 36
SASL_AUTHENTICATION_FAILED = 58


@pytest.fixture
def hosts() -> Any:
    """A cluster in this process, which keeps all that it is told."""
    client = pytest.importorskip("confluent_kafka", reason="librdkafka's mock cluster: pip install confluent-kafka")
    owner = client.Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "log_level": 0})
    (node,) = owner.list_topics(timeout=30).brokers.values()
    yield f"{node.host}:{node.port}"
    del owner


@pytest.fixture
def tansu(tmp_path: Path) -> Any:
    """Starts the broker."""
    started: list[Kafka] = []

    def start(**options: Any) -> Kafka:
        try:
            started.append(Kafka(tmp_path, **options))
        except FileNotFoundError as error:
            pytest.skip(str(error))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.kill()


@asynccontextmanager
async def consumer(hosts: str, options: str = "") -> AsyncIterator[Broker]:
    """A member of the group."""
    broker = make_broker(parse_address(f"kafka://{hosts}/{TOPIC}{options}"), "group", 6.0)
    try:
        await broker.connect(TOPIC)
        yield broker
    finally:
        await broker.close()


async def write(hosts: str, payloads: Sequence[bytes], key: bytes | None = b"key") -> None:
    """Append messages to one partition."""
    async with AIOKafkaProducer(bootstrap_servers=hosts) as producer:
        for payload in payloads:
            await producer.send_and_wait(TOPIC, payload, key=key)


async def take(broker: Broker, count: int) -> list[Message]:
    """So many messages, and no more for a while."""
    messages: list[Message] = []
    async with asyncio.timeout(30):
        while len(messages) < count:
            messages += await broker.receive(100, 1.0)
    messages += await broker.receive(100, 0.3)
    return messages


def text(*numbers: int) -> list[bytes]:
    return [b'{"X": "%d"}' % number for number in numbers]


async def test_messages_that_are_left_are_counted_and_end_as_dead_letters(hosts: str) -> None:
    """A message that its consumers leave is counted each time, also beside others that are answered meanwhile.

    Those behind it that were answered do not come again, though the offset that is committed is below them. One that
    has been delivered as often as a stream allows is a dead letter there, and the one behind it is answered.
    """
    await write(hosts, text(0, 1, 2, 3))
    async with consumer(hosts) as first:
        messages = await take(first, 4)
        told = [(each.payload, each.num_deliveries, each.key) for each in messages]
        assert told == [(payload, 1, b"key") for payload in text(0, 1, 2, 3)]
        await first.acknowledge([messages[0], messages[2]])
        assert await first.lag() == 3
    await write(hosts, text(4))
    async with consumer(hosts) as second:
        messages = await take(second, 3)
        told = [(each.payload, each.num_deliveries, each.key) for each in messages]
        assert told == [(payload, count, b"key") for payload, count in zip(text(1, 3, 4), (2, 2, 1), strict=True)]
        await second.acknowledge(messages[1:])
    await write(hosts, text(5))
    address = parse_address(f"kafka://{hosts}/{TOPIC}")
    options = StreamOptions("echo", address, address._replace(topic="out"), "dead", max_deliveries=2, ack_wait_s=6.0)
    broker = make_broker(address, "group", 6.0)
    stream = MessageStream(Echo(), broker, broker, options, StreamMetrics())  # type: ignore[arg-type]
    running = asyncio.create_task(stream.run())
    records: dict[str, Any] = {}
    async with AIOKafkaConsumer("out", "dead", bootstrap_servers=hosts, auto_offset_reset="earliest") as reader:
        async with asyncio.timeout(30):
            while len(records) < 2 or await broker.lag():
                for partition, found in (await reader.getmany(timeout_ms=100)).items():
                    assert partition.topic not in records
                    (records[partition.topic],) = found
    stream.end()
    await running
    assert (records["out"].value, records["out"].key) == (b'{"Y": "5"}', b"key")
    assert (records["dead"].value, records["dead"].key) == (b'{"X": "1"}', b"key")
    assert ("weft-message", b"delivered 3 times without an answer") in records["dead"].headers


async def test_what_is_given_back_comes_again_at_once(hosts: str) -> None:
    """It is counted as delivered, others that are in work meanwhile are acknowledged as ever."""
    await write(hosts, [b"0", b"1", b"2"])
    async with consumer(hosts) as broker:
        messages = await take(broker, 3)
        await broker.give_back([messages[1]])
        again = {each.payload: each.num_deliveries for each in await take(broker, 2)}
        assert again[b"1"] == 2
        await broker.acknowledge(messages)
        assert await broker.lag() == 0


async def test_messages_of_a_key_stay_in_one_partition(hosts: str) -> None:
    """Answers that have the key of their message are in its order at who reads them.

    One that is too large says so, as trying again cannot help; those beside it are written.
    """
    await write(hosts, [b"first"], key=None)
    async with consumer(hosts) as broker:
        await take(broker, 1)
        await broker.publish(TOPIC, [Publication(str(n), b"%d" % n, {"a": "b"}, b"%d" % (n % 3)) for n in range(30)])
        messages = await take(broker, 30)
        with pytest.raises(InvalidArgumentError, match="takes no message of such a size"):
            await broker.publish(TOPIC, [Publication("0", b"small", {}), Publication("1", b"x" * 2_000_000, {})])
        assert [each.payload for each in await take(broker, 1)] == [b"small"]
    assert {each.headers["a"] for each in messages} == {"b"}
    for key in (b"0", b"1", b"2"):
        own = [each for each in messages if each.key == key]
        assert [int(each.payload) for each in own] == list(range(int(key), 30, 3))
        assert len({each.handle[0] for each in own}) == 1


def test_a_commit_says_what_was_delivered_and_answered() -> None:
    """Over any crashes no unfinished message is passed over, none that is answered comes again, all are counted."""
    generator = random.Random(0)
    for _ in range(200):
        offsets = sorted(generator.sample(range(100, 160), 24))  # a compacted topic has gaps
        counts, answered, committed = dict.fromkeys(offsets, 0), set[int](), (offsets[0], "")
        for _life in range(4):
            progress = PartitionProgress(*committed)
            coming = [offset for offset in offsets if offset >= committed[0]]
            came = coming[: generator.randrange(len(coming) + 1)]
            for offset in came:
                counts[offset] += offset not in answered
                assert progress.deliver(offset) == (0 if offset in answered else counts[offset])
            waiting = [offset for offset in came if offset not in answered]
            for offset in generator.sample(waiting, generator.randrange(len(waiting) + 1)):
                progress.finish(offset)
                answered.add(offset)
            committed = progress.commit()
            assert len(committed[1]) < 4096
            assert all(offset in answered for offset in offsets if offset < committed[0])


def test_a_text_of_another_client_says_nothing() -> None:
    """Offsets that an operator has set begin anew."""
    for text in ("", "set by hand", "[]", '{"answered":"zz","delivered":[]}', '{"answered":"1"}', "null"):
        progress = PartitionProgress(7, text)
        assert progress.offset == 7
        assert progress.deliver(7) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("?sasl=GSSAPI", "must be one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, got 'GSSAPI'"),
        ("?sasl=PLAIN", "must have a user"),
        ("?ca=ca.pem", "ca of kafka://a:1 needs TLS: kafka\\+ssl://"),
        ("?idempotence=maybe", "must be one of yes, no, got 'maybe'"),
        ("?retries=3", "has no option 'retries'; it has password-file, sasl, ca, cert, key, idempotence"),
        ("?sasl=PLAIN&password-file=/none", "password-file=/none of kafka://a:1 must be a file"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: str, message: str) -> None:
    """Before anything is connected, and with what is allowed."""
    with pytest.raises(InvalidArgumentError, match=message):
        make_broker(parse_address(f"kafka://a:1/orders{options}"), "group", 6.0)
    with pytest.raises(InvalidArgumentError, match="must say how it logs in"):
        make_broker(parse_address("kafka://user@a:1/orders"), "group", 6.0)


async def test_a_broker_without_idempotent_producers_needs_an_option(tansu: Any) -> None:
    """The error names it."""
    broker = make_broker(parse_address(f"{tansu().url}/{TOPIC}"), "group", 6.0)
    with pytest.raises(FailedPreconditionError, match=r"\?idempotence=no"):
        await broker.connect(None)
    await broker.close()


class Gate:
    """Stands before a broker: TLS, then SASL PLAIN for the user ``weft`` with the password ``secret``.

    Args:
        context: Of TLS.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self.target_port = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[int]:
        """Listens; the port."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context) as server:
            yield int(server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", self.target_port)
        is_known = False
        back = asyncio.create_task(_copy(inner, writer))
        try:
            while True:
                frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
                kind, correlation = int.from_bytes(frame[:2], "big"), frame[4:8]
                answer = b""
                if kind == SASL_HANDSHAKE:
                    answer = SaslHandShakeResponse_v1(0, ["PLAIN"]).encode()
                elif kind == SASL_AUTHENTICATE:
                    is_known = frame.endswith(b"\0weft\0secret")
                    said = (0 if is_known else SASL_AUTHENTICATION_FAILED, "no such user", b"")
                    older, newer = SaslAuthenticateResponse_v0(*said), SaslAuthenticateResponse_v1(*said, 0)
                    answer = (newer if frame[3] else older).encode()
                elif is_known or kind == API_VERSIONS:  # versions are told to everyone
                    outer.write(len(frame).to_bytes(4, "big") + frame)
                else:
                    return
                if answer:
                    writer.write((len(answer) + 4).to_bytes(4, "big") + correlation + answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            back.cancel()
            outer.close()
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)


async def test_users_log_in_over_tls(tansu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a password from a file or the environment; a wrong one and an unknown authority are told apart."""
    authority = Authority(tmp_path)
    pair = authority.issue("broker")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pair)
    gate = Gate(context)
    word = tmp_path / "password"
    word.write_text("secret\n")
    options = f"sasl=PLAIN&idempotence=no&ca={authority.ca}"

    async def connect(options: str) -> None:
        broker = make_broker(parse_address(f"kafka+ssl://weft@127.0.0.1:{port}/{TOPIC}?{options}"), "group", 6.0)
        try:
            await broker.connect(None)
            await broker.publish(TOPIC, [Publication("0", b"{}", {})])
        finally:
            await broker.close()

    async with gate.opened() as port:
        gate.target_port = int(tansu(advertised_port=port).hosts.rpartition(":")[2])
        await connect(f"{options}&password-file={word}")
        monkeypatch.setenv("WEFT_STREAM_PASSWORD", "secret")
        await connect(options)
        monkeypatch.setenv("WEFT_STREAM_PASSWORD", "wrong")
        with pytest.raises(UnauthenticatedError, match=r"refuses the user 'weft': .*no such user"):
            await connect(options)
        with pytest.raises(UnavailableError, match=r"TLS: .*CERTIFICATE_VERIFY_FAILED.*\?ca=FILE"):
            await connect("sasl=PLAIN&idempotence=no")
