"""``streams``: messages through each broker while consumer, router and broker are killed in turn."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.request import urlopen

from benchmarks import machine
from benchmarks.jobs.brokers import Kafka, Nats, Redis, Topics
from benchmarks.jobs.mesh import descendants, kill, parent, write_repository
from benchmarks.language_model.figures import Figure, Target, figure, render
from benchmarks.requests import SEED
from weft.mesh.running import running_mesh

_CASE = "streams"
_GROUP = "weft"
_NUM_KEYS = 10_007
_MAX_INFLIGHT = 256
_ACK_WAIT_S, _GRACE_S = 2.0, 10.0
_TIMEOUT_S = 600.0
_POLL_S = 0.1
_NOTE = (
    "`simple`, JSON in and out, answers on the same broker, --order-by one of 10,007 keys, --ack-wait-s 2; SIGKILL to "
    "consumer, router and broker in turn, each time at a seeded number of answers, and one SIGTERM to the consumer. "
    f"A duplicate is an answer beyond the first of its message: at most {_MAX_INFLIGHT} for each kill of a consumer or "
    "broker."
)


class Consumer:
    """``weft stream`` in a process of its own, with what its metrics said last."""

    def __init__(self, broker: Topics, url: str, log: Path) -> None:
        self._log = log
        self._command = [
            sys.executable, "-P", "-m", "weft.cli", "stream", "simple", "--url", url,
            "--from", f"{broker.url}/in{broker.options}", "--to", f"{broker.url}/out{broker.options}",
            "--keep", "id", "--order-by", "key", "--max-inflight", str(_MAX_INFLIGHT),
            "--ack-wait-s", str(_ACK_WAIT_S), "--grace-s", str(_GRACE_S),
            "--metrics-port", "0",
        ]  # fmt: skip
        self.num_redelivered = self.cpu_s = self._cpu_s = 0.0
        self.metrics: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        offset = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("a") as log:
            self.process = subprocess.Popen(self._command, stderr=log)
        self._offset, self._metrics_url = offset, ""
        self.metrics = {}

    def observe(self) -> dict[str, float]:
        """Its metrics as they are now; as they were if it does not serve them."""
        with contextlib.suppress(OSError, ValueError):
            if not self._metrics_url:
                lines = self._log.read_text()[self._offset :].splitlines()
                found = [json.loads(line)["metrics"] for line in lines if line.startswith("{") and '"metrics"' in line]
                self._metrics_url = f"http://{found[0]}/metrics" if found else ""
            if self._metrics_url:
                with urlopen(self._metrics_url, timeout=5) as page:  # noqa: S310  # our own
                    text = page.read().decode()
                pairs = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
                self.metrics = {name: float(value) for name, _, value in pairs}
                self._cpu_s = machine.cpu_seconds({"": self.process.pid})[""]
        return self.metrics

    def end(self, number: int) -> int:
        """Send a signal and wait; its exit status. What its metrics said last is added to the sums."""
        self.observe()
        self.process.send_signal(number)
        status = self.process.wait(_GRACE_S * 6)
        self.num_redelivered += self.metrics.get("weft_stream_redelivered_total", 0.0)
        self.cpu_s += self._cpu_s
        return status


def measure(num_messages: int, num_rounds: int) -> list[Figure]:
    """All brokers; in each round each of the three is killed once."""
    return [one for make in (Nats, Redis, Kafka) for one in _measure(make, num_messages, num_rounds)]


def _measure(make: Callable[[Path], Topics], num_messages: int, num_rounds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "broker").mkdir()
        broker = make(root / "broker")
        repository = write_repository(root / "repository", "simple")
        try:
            broker.start()
            asyncio.run(_fill(broker, num_messages))
            with (root / "mesh.log").open("a") as log, running_mesh(repository, log=log) as endpoints:
                supervisor = parent(endpoints["router"].pid)
                run = _Run(broker, Consumer(broker, endpoints["router"].grpc, root / "log"), supervisor, num_messages)
                try:
                    run.pass_all(num_rounds)
                finally:
                    run.consumer.process.kill()
            figures = run.figures(make.__name__)
            print(render(figures), file=sys.stderr, flush=True)
            return figures
        finally:
            broker.kill()


async def _fill(broker: Topics, num_messages: int) -> None:
    for topic in ("in", "out", "in.dead"):
        await broker.create(topic)
    row = {"INPUT0": list(range(16)), "INPUT1": [1] * 16}
    keys = _keys(num_messages)
    await broker.write("in", [json.dumps({"id": n, "key": key, **row}).encode() for n, key in enumerate(keys)])


class _Run:
    def __init__(self, broker: Topics, consumer: Consumer, supervisor: int, num_messages: int) -> None:
        self._broker = broker
        self.consumer = consumer
        self._supervisor = supervisor
        self._num_messages = num_messages
        self._kills: Counter[str] = Counter()
        self._lags: list[tuple[float, int]] = []
        self._grace_s = self._drain_status = -1.0
        self._duration_s = 0.0

    def pass_all(self, num_rounds: int) -> None:
        """Kill at seeded numbers of answers; end with every message acknowledged."""
        draw = random.Random(SEED)
        kills = [self._kill_consumer, self._kill_router, self._kill_broker] * num_rounds
        acts = [*kills, self._compare_lag, self._drain]
        # Each act at a random place of a stretch of its own.
        share = self._num_messages / (len(acts) + 1)
        start_s = time.perf_counter()
        for number, act in enumerate(acts):
            self._until_answered(int(share * (number + draw.uniform(0.3, 1.0))))
            act()
        self._until_answered(self._num_messages)
        self._wait(lambda: asyncio.run(self._broker.lag("in", _GROUP)) == 0)
        self._duration_s = time.perf_counter() - start_s
        self._wait(lambda: self.consumer.observe().get("weft_stream_lag_messages") == 0)
        self.consumer.end(signal.SIGTERM)

    def _kill_consumer(self) -> None:
        self.consumer.end(signal.SIGKILL)
        self._kills["consumer"] += 1
        self.consumer.start()
        # One that begins does not wait for a router that is killed meanwhile.
        self._wait(lambda: self.consumer.observe().get("weft_stream_received_total", 0) > 0)

    def _kill_router(self) -> None:
        kill([pid for pid in descendants(self._supervisor) if b"weft.services.router" in _command_line(pid)][:1])
        self._kills["router"] += 1

    def _kill_broker(self) -> None:
        self._broker.interrupt()
        self._kills["broker"] += 1

    def _compare_lag(self) -> None:
        """With the mesh stopped the lag stands still, so that the metric and the broker's own figure must be equal."""
        stopped = descendants(self._supervisor)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4.0)  # more than an interval of the metric
        metrics = self.consumer.observe()
        self._lags.append((metrics.get("weft_stream_lag_messages", -1.0), asyncio.run(self._broker.lag("in", _GROUP))))
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    def _drain(self) -> None:
        start_s = time.perf_counter()
        self._drain_status = self.consumer.end(signal.SIGTERM)
        self._grace_s = time.perf_counter() - start_s
        self.consumer.start()

    def _until_answered(self, count: int) -> None:
        self._wait(lambda: asyncio.run(self._broker.count("out")) >= count)

    def _wait(self, holds: Callable[[], bool]) -> None:
        end_s = time.monotonic() + _TIMEOUT_S
        while not holds():
            if time.monotonic() > end_s:
                raise TimeoutError(f"nothing more within {_TIMEOUT_S:g} s; {self.consumer.observe()}")
            if (status := self.consumer.process.poll()) is not None:
                raise RuntimeError(f"the consumer ended with exit status {status}")
            time.sleep(_POLL_S)

    def figures(self, broker: str) -> list[Figure]:
        """What came of it."""
        answers = [json.loads(payload) for payload, _ in asyncio.run(self._broker.read("out"))]
        keys = _keys(self._num_messages)
        times = Counter(int(answer["id"]) for answer in answers)
        num_disordered, last = 0, dict.fromkeys(range(_NUM_KEYS), -1)
        seen: set[int] = set()
        for number in (int(answer["id"]) for answer in answers):
            if number not in seen:
                seen.add(number)
                num_disordered += number < last[keys[number]]
                last[keys[number]] = number
        num_dead = len(asyncio.run(self._broker.read("in.dead")))
        num_duplicates = times.total() - len(times)
        allowed = _MAX_INFLIGHT * (self._kills["consumer"] + self._kills["broker"])
        metric, own = self._lags[0]
        rate = self._num_messages / self._duration_s
        cpu_ms = self.consumer.cpu_s / self._num_messages * 1e3
        killed = ", ".join(f"{count} {name}" for name, count in self._kills.items())
        zero = Target("=", 0)
        return [
            figure(_CASE, f"{broker}: messages", [self._num_messages], "", note=_NOTE),
            figure(_CASE, f"{broker}: kills ({killed})", [self._kills.total()], ""),
            figure(_CASE, f"{broker}: lost", [self._num_messages - len(times)], "", target=zero),
            figure(_CASE, f"{broker}: dead letters", [num_dead], "", target=zero),
            figure(_CASE, f"{broker}: duplicates", [num_duplicates], "", target=Target("<=", allowed)),
            figure(_CASE, f"{broker}: received again, by the metric", [self.consumer.num_redelivered], ""),
            figure(_CASE, f"{broker}: out of order within a key", [num_disordered], "", target=zero),
            figure(_CASE, f"{broker}: lag {own}, the metric's difference", [metric - own], "", target=zero),
            figure(_CASE, f"{broker}: exit status after SIGTERM", [self._drain_status], "", target=zero),
            figure(_CASE, f"{broker}: end after SIGTERM", [self._grace_s], "s", target=Target("<=", _GRACE_S)),
            figure(_CASE, f"{broker}: answered, kills included", [rate], "1/s"),
            figure(_CASE, f"{broker}: CPU of the consumer for one message", [cpu_ms], "ms"),
        ]


def _keys(num_messages: int) -> Sequence[int]:
    draw = random.Random(SEED)
    return [draw.randrange(_NUM_KEYS) for _ in range(num_messages)]


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
