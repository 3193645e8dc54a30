"""`weft stream` between real brokers and the sample mesh: nothing is lost, whatever dies."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.jobs import brokers
from benchmarks.jobs.brokers import Kafka, Nats, Redis
from tests.processes import WAIT_S, running, scrape, wait_until

pytestmark = pytest.mark.long

QUICK = Path(__file__).with_name("quick_stream.py")


class Topics:
    """Topics of one test at a broker that all tests share: messages, answers and dead letters.

    Args:
        broker: Runs.
        name: Of the topic of messages.
    """

    def __init__(self, broker: brokers.Topics, name: str) -> None:
        self.broker, self.name = broker, name
        self.source, self.target = f"{broker.url}/{name}{broker.options}", f"{broker.url}/{name}.out{broker.options}"

    async def create(self) -> None:
        """Make them."""
        for suffix in ("", ".out", ".dead"):
            await self.broker.create(f"{self.name}{suffix}")

    def write(self, payloads: Sequence[bytes]) -> None:
        """Append messages."""
        asyncio.run(self.broker.write(self.name, payloads))

    def num_answers(self) -> int:
        """Answers so far."""
        return asyncio.run(self.broker.count(f"{self.name}.out"))

    def answers(self) -> list[dict[str, Any]]:
        """What was answered so far."""
        return [json.loads(payload) for payload, _ in asyncio.run(self.broker.read(f"{self.name}.out"))]

    def dead(self) -> list[tuple[bytes, dict[str, str]]]:
        """Dead letters with their headers."""
        return asyncio.run(self.broker.read(f"{self.name}.dead"))


@pytest.fixture(scope="module", params=[Nats, Redis, Kafka])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[brokers.Topics]:
    """A broker for all tests."""
    try:
        started: brokers.Topics = request.param(tmp_path_factory.mktemp("broker"))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    started.start()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def url(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a model service with the sample `simple`."""
    models = tmp_path_factory.mktemp("models")
    (models / "simple").symlink_to(repository / "model" / "simple")
    with running("weft.services.model", "--repository", str(models)) as service:
        yield service.grpc


@pytest.fixture
def topics(broker: brokers.Topics, request: pytest.FixtureRequest) -> Topics:
    """Topics of the test, which are empty."""
    made = Topics(broker, request.node.originalname)
    asyncio.run(made.create())
    return made


@pytest.fixture
def consumer(topics: Topics, url: str, tmp_path: Path) -> Iterator[Callable[..., "Consumer"]]:
    """Starts consumers, none of which outlives the test."""
    started: list[Consumer] = []

    def start(*arguments: str) -> Consumer:
        started.append(Consumer(topics, url, tmp_path / f"log{len(started)}", *arguments))
        return started[-1]

    yield start
    for each in started:
        each.kill()


class Consumer:
    """A `weft stream` in a process of its own.

    Args:
        topics: Of messages and answers.
        url: The router.
        log: Gets its standard error.
    """

    def __init__(self, topics: Topics, url: str, log: Path, *arguments: str) -> None:
        command = [
            sys.executable, "-P", str(QUICK), "stream", "simple", "--url", url, "--from", topics.source,
            "--to", topics.target, "--keep", "id", "--ack-wait-s", "1", "--metrics-port", "0", *arguments,
        ]  # fmt: skip
        self.log = log
        with log.open("a") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)

    def metrics(self) -> dict[str, float]:
        """Values by name and labels."""
        wait_until(lambda: '"metrics": ' in self.log.read_text())
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return scrape(next(line["metrics"] for line in lines if "metrics" in line))

    def end(self) -> int:
        """SIGTERM; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def message(number: int) -> bytes:
    """A message with its number and a value for each input of `simple`."""
    return json.dumps({"id": number, "key": number % 7, "INPUT0": [number] * 16, "INPUT1": [1] * 16}).encode()


def test_each_message_is_answered(topics: Topics, consumer: Callable[..., Consumer]) -> None:
    """Messages in JSON become rows, their answers messages; what cannot be answered is a dead letter that says why.

    With --order-by, answers to messages with an equal key come in the order of these.
    """
    bad = [b"{", b"[]", json.dumps({"id": 1, "INPUT0": [1], "INPUT1": [1] * 16}).encode(), b""]
    topics.write([message(number) for number in range(300)] + bad)
    running = consumer("--order-by", "key", "--rows-per-request", "2")
    wait_until(lambda: running.metrics().get('weft_stream_messages_total{outcome="dead"}', 0) == len(bad))
    wait_until(lambda: running.metrics()['weft_stream_messages_total{outcome="answered"}'] == 300)
    wait_until(lambda: running.metrics()["weft_stream_lag_messages"] == 0)
    assert running.end() == 0
    answers = topics.answers()
    got = {int(answer["id"]): answer for answer in answers}
    assert sorted(got) == list(range(300))
    assert got[7]["OUTPUT0"] == [8] * 16
    for key in range(7):
        own = [int(answer["id"]) for answer in answers if int(answer["id"]) % 7 == key]
        assert own == sorted(own)
    dead = topics.dead()
    assert sorted(payload for payload, _ in dead) == sorted(bad)
    assert {headers["weft-status"] for _, headers in dead} == {"INVALID_ARGUMENT"}
    (misfit,) = [headers for payload, headers in dead if payload == bad[2]]
    assert "which does not fit [16]" in misfit["weft-message"]


def test_nothing_is_lost_when_consumers_and_brokers_are_killed(
    topics: Topics, consumer: Callable[..., Consumer]
) -> None:
    """Kill -9 of the consumer, then of the broker, in the middle: every message is answered, in its order, and counted.

    What the first consumer held is counted as delivered again, where the broker counts, and nothing is but what was in
    flight at a kill.
    """
    count = 400
    topics.write([message(number) for number in range(count)])
    shape = ("--rows-per-request", "1", "--max-inflight", "8", "--order-by", "key")
    first = consumer(*shape)
    wait_until(lambda: topics.num_answers() > 50)
    first.kill()
    second = consumer(*shape)
    wait_until(lambda: topics.num_answers() > 150)
    topics.broker.interrupt()
    wait_until(lambda: topics.num_answers() >= count)
    wait_until(lambda: second.metrics()["weft_stream_lag_messages"] == 0)
    redelivered = second.metrics()["weft_stream_redelivered_total"]
    assert second.end() == 0
    numbers = [int(answer["id"]) for answer in topics.answers()]
    assert set(numbers) == set(range(count))
    assert len(numbers) - count <= 3 * 8
    if topics.broker.counts_deliveries:
        assert len(numbers) - count <= redelivered + 8
        assert 1 <= redelivered <= 3 * 8
    first_answers = list(dict.fromkeys(numbers))
    for key in range(7):
        own = [number for number in first_answers if number % 7 == key]
        assert own == sorted(own)
    assert topics.dead() == []


@pytest.mark.parametrize("broker", [Kafka], indirect=True)
def test_consumers_share_the_partitions_of_kafka(broker: Kafka, topics: Topics, url: str, tmp_path: Path) -> None:
    """Consumers join, end and are killed: nothing is lost, keys are kept and in order, no offset goes back.

    The lag is the broker's own. A consumer that joins or ends in peace makes no duplicate; one that is killed makes at
    most what it had in work.
    """
    kafka, at_once = broker, 8
    shape = ("--rows-per-request", "1", "--max-inflight", str(at_once), "--order-by", "key")
    consumers: list[Consumer] = []
    committed: list[dict[int, int]] = [dict.fromkeys(range(6), 0)]
    is_over, written = threading.Event(), list[int]()

    def write() -> None:
        while not is_over.wait(0.1):
            topics.write([message(len(written) + number) for number in range(10)])
            written.extend(range(len(written), len(written) + 10))

    def join() -> Consumer:
        consumers.append(Consumer(topics, url, tmp_path / f"log{len(consumers)}", *shape))
        return consumers[-1]

    def until_works(consumer: Consumer) -> None:
        before = consumer.metrics().get("weft_stream_received_total", 0)
        wait_until(lambda: watch() and consumer.metrics()["weft_stream_received_total"] > before + 20)

    def watch() -> bool:
        now = asyncio.run(kafka.committed(topics.name, "weft"))
        assert all(now[number] >= offset for number, offset in committed[-1].items()), (committed[-1], now)
        committed.append(now)
        return True

    writer = threading.Thread(target=write)
    writer.start()
    try:
        first = join()
        until_works(first)
        second = join()
        until_works(second)
        until_works(first)
        assert first.end() == 0
        until_works(second)
        identities = [answer["id"] for answer in topics.answers()]
        in_peace = len(identities) - len(set(identities))
        third = join()
        until_works(third)
        second.kill()
        until_works(third)
        is_over.set()
        writer.join()
        wait_until(lambda: watch() and asyncio.run(kafka.lag(topics.name, "weft")) == 0)
        wait_until(lambda: third.metrics()["weft_stream_lag_messages"] == 0)
        assert third.end() == 0
    finally:
        is_over.set()
        writer.join()
        for each in consumers:
            each.kill()
    numbers = [int(answer["id"]) for answer in topics.answers()]
    num_lost, num_duplicates = len(written) - len(set(numbers)), len(numbers) - len(set(numbers))
    print(f"{len(written)} messages, {num_lost} lost, {num_duplicates} answered twice, {in_peace} of these in peace")
    assert set(numbers) == set(written)
    assert in_peace == 0
    assert num_duplicates <= at_once
    records = asyncio.run(kafka.records(f"{topics.name}.out"))
    assert all(int(record.key) == int(json.loads(record.value)["id"]) % 7 for record in records)
    for key in range(7):
        own = list(dict.fromkeys(number for number in numbers if number % 7 == key))
        assert own == sorted(own)


def test_what_is_in_work_is_finished_or_given_back(topics: Topics, consumer: Callable[..., Consumer]) -> None:
    """SIGTERM in the middle: no message is lost, and another consumer goes on at once with what is left."""
    count = 400
    topics.write([message(number) for number in range(count)])
    first = consumer("--rows-per-request", "1", "--max-inflight", "8")
    wait_until(lambda: topics.num_answers() > 20)
    assert first.end() == 0
    before = [answer["id"] for answer in topics.answers()]
    assert len(before) == len(set(before))
    second = consumer("--ack-wait-s", "600")
    wait_until(lambda: topics.num_answers() >= count)
    wait_until(lambda: second.metrics()["weft_stream_lag_messages"] == 0)
    assert second.end() == 0
    assert sorted(int(answer["id"]) for answer in topics.answers()) == list(range(count))


def test_streams_that_cannot_begin_say_why(url: str) -> None:
    """One line on standard error, exit status 1."""
    given = {"--from": "nats://127.0.0.1:1/in", "--to": "nats://127.0.0.1:1/out"}
    command = [sys.executable, "-P", "-m", "weft.cli", "stream", "simple", "--url", url]
    started = []
    for option, value, message in (
        ("--from", "mqtt://a:1/in", "must be SCHEME://HOST:PORT/TOPIC"),
        ("--from", "redis://127.0.0.1:1/in", "UNAVAILABLE"),
        ("--from", "kafka://127.0.0.1:1/in", "UNAVAILABLE"),
        ("--write", "Y", "--write 'Y': simple has none"),
    ):
        options = [text for pair in (given | {option: value}).items() for text in pair]
        started.append((subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True), message))
    for process, message in started:
        _, error = process.communicate(timeout=WAIT_S)
        assert process.returncode == 1
        assert message in error
        assert "Traceback" not in error
