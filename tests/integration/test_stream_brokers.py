"""`weft stream` between real brokers and the sample mesh: nothing is lost, whatever dies."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from benchmarks.jobs.brokers import Nats, Redis, Topics

from weft_common.processes.process import Endpoint

TIMEOUT_S = 120.0


@pytest.fixture(params=[Nats, Redis])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Topics]:
    """A broker with the topics `in`, `out` and `in.dead`."""
    folder = tmp_path / "broker"
    folder.mkdir()
    try:
        started: Nats | Redis = request.param(folder)
    except FileNotFoundError as error:
        pytest.skip(str(error))

    async def create() -> None:
        for topic in ("in", "out", "in.dead"):
            await started.create(topic)

    started.start()
    try:
        asyncio.run(create())
        yield started
    finally:
        started.kill()


@pytest.fixture
def consumer(broker: Topics, mesh: Mapping[str, Endpoint], tmp_path: Path) -> Iterator[Callable[..., "Consumer"]]:
    """Starts consumers, none of which outlives the test."""
    started: list[Consumer] = []

    def start(*arguments: str) -> Consumer:
        started.append(Consumer(broker, mesh["router"].grpc, tmp_path / f"log{len(started)}", *arguments))
        return started[-1]

    yield start
    for each in started:
        each.kill()


class Consumer:
    """A `weft stream` in a process of its own.

    Args:
        broker: Topics `in` and `out`.
        url: The router.
        log: Gets its standard error.
    """

    def __init__(self, broker: Topics, url: str, log: Path, *arguments: str) -> None:
        command = [
            sys.executable, "-P", "-m", "weft_cli", "stream", "simple", "--url", url,
            "--from", f"{broker.url}/in", "--to", f"{broker.url}/out", "--keep", "id",
            "--ack-wait-s", "2", "--metrics-port", "0", *arguments,
        ]  # fmt: skip
        self.log = log
        with log.open("a") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)

    def metrics(self) -> dict[str, float]:
        """Values by name and labels."""
        until(lambda: '"metrics": ' in self.log.read_text())
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        url = next(f"http://{line['metrics']}/metrics" for line in lines if "metrics" in line)
        with urlopen(url, timeout=30) as page:
            lines = page.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def end(self) -> int:
        """SIGTERM; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def until(holds: Callable[[], bool]) -> None:
    """Wait."""
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def message(number: int) -> bytes:
    """A message with its number and a value for each input of `simple`."""
    return json.dumps({"id": number, "key": number % 7, "INPUT0": [number] * 16, "INPUT1": [1] * 16}).encode()


def answers(broker: Topics, topic: str = "out") -> list[dict[str, Any]]:
    """What was written so far."""
    return [json.loads(payload) for payload, _ in asyncio.run(broker.read(topic))]


def test_each_message_is_answered(broker: Topics, consumer: Callable[..., Consumer]) -> None:
    """Messages in JSON become rows, their answers messages; what cannot be answered is a dead letter that says why."""
    bad = [b"{", b"[]", json.dumps({"id": 1, "INPUT0": [1], "INPUT1": [1] * 16}).encode(), b""]
    asyncio.run(broker.write("in", [message(number) for number in range(50)] + bad))
    running = consumer()
    until(lambda: running.metrics().get('weft_stream_messages_total{outcome="dead"}', 0) == len(bad))
    until(lambda: running.metrics()['weft_stream_messages_total{outcome="answered"}'] == 50)
    until(lambda: running.metrics()["weft_stream_lag_messages"] == 0)
    assert running.end() == 0
    got = {int(answer["id"]): answer for answer in answers(broker)}
    assert sorted(got) == list(range(50))
    assert got[7]["OUTPUT0"] == [8] * 16
    dead = asyncio.run(broker.read("in.dead"))
    assert [payload for payload, _ in dead] == bad
    assert {headers["weft-status"] for _, headers in dead} == {"INVALID_ARGUMENT"}
    assert "which does not fit [16]" in dead[2][1]["weft-message"]


def test_nothing_is_lost_when_consumers_and_brokers_are_killed(
    broker: Topics, consumer: Callable[..., Consumer]
) -> None:
    """Kill -9 of the consumer, then of the broker, in the middle: every message is answered at least once."""
    count = 600
    asyncio.run(broker.write("in", [message(number) for number in range(count)]))
    shape = ("--rows-per-request", "1", "--max-inflight", "8")
    first = consumer(*shape)
    until(lambda: len(answers(broker)) > 50)
    first.kill()
    second = consumer(*shape)
    until(lambda: len(answers(broker)) > 200)
    broker.kill()
    broker.start()
    until(lambda: len({answer["id"] for answer in answers(broker)}) == count)
    until(lambda: second.metrics()["weft_stream_lag_messages"] == 0)
    redelivered = second.metrics()["weft_stream_redelivered_total"]
    assert second.end() == 0
    times = Counter(answer["id"] for answer in answers(broker))
    num_duplicates = sum(times.values()) - count
    assert len(times) == count
    assert num_duplicates <= redelivered + 8
    assert asyncio.run(broker.read("in.dead")) == []


def test_messages_of_a_key_are_answered_in_order(broker: Topics, consumer: Callable[..., Consumer]) -> None:
    """With --order-by, answers to messages with an equal key come in the order of these."""
    asyncio.run(broker.write("in", [message(number) for number in range(300)]))
    running = consumer("--order-by", "key", "--rows-per-request", "2")
    until(lambda: len(answers(broker)) == 300)
    assert running.end() == 0
    numbers = [int(answer["id"]) for answer in answers(broker)]
    for key in range(7):
        own = [number for number in numbers if number % 7 == key]
        assert own == sorted(own)


def test_what_is_in_work_is_finished_or_given_back(broker: Topics, consumer: Callable[..., Consumer]) -> None:
    """SIGTERM in the middle: no message is lost, and another consumer goes on at once with what is left."""
    count = 400
    asyncio.run(broker.write("in", [message(number) for number in range(count)]))
    first = consumer("--rows-per-request", "1", "--max-inflight", "8")
    until(lambda: len(answers(broker)) > 20)
    assert first.end() == 0
    before = [answer["id"] for answer in answers(broker)]
    assert len(before) == len(set(before))
    second = consumer()
    until(lambda: len(answers(broker)) >= count)
    assert second.end() == 0
    assert sorted(int(answer["id"]) for answer in answers(broker)) == list(range(count))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "mqtt://a:1/in"), "must be SCHEME://HOST:PORT/TOPIC"),
        (("--from", "nats://127.0.0.1:1"), "must be SCHEME://HOST:PORT/TOPIC"),
        (("--from", "nats://127.0.0.1:1/in"), "UNAVAILABLE"),
        (("--from", "redis://127.0.0.1:1/in"), "UNAVAILABLE"),
        (("--from", "kafka://127.0.0.1:1/in"), "UNAVAILABLE"),
        (("--write", "Y"), "--write 'Y': simple has none"),
    ],
)
def test_streams_that_cannot_begin_say_why(
    mesh: Mapping[str, Endpoint], arguments: tuple[str, ...], message: str
) -> None:
    """One line on standard error, exit status 1."""
    command = [
        sys.executable, "-P", "-m", "weft_cli", "stream", "simple", "--url", mesh["router"].grpc,
        "--from", "nats://127.0.0.1:1/in", "--to", "nats://127.0.0.1:1/out", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
