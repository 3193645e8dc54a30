"""The wire in hard use for a long time: neither end holds more at the end than at the beginning, no answer is wrong."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.soak.actors import repeated
from tests.soak.watch import Growth, Sample, growths
from tests.wire import peer as h2
from tests.wire.echo_process import ROOT, EchoService
from tests.wire.neighbour import Neighbour
from tests.wire.peer import Closed, Peer
from tests.wire.soak_client import ClientSample

pytestmark = pytest.mark.long

#: ``make soak-wire`` runs it for twenty minutes.
DURATION_S = float(os.environ.get("WEFT_SOAK_S", "6"))
NUM_SAMPLES = 24
#: A neighbour's call takes at most so long, on a machine that does much else.
LATE_MS = 10_000.0

Act = Callable[[EchoService, random.Random], None]


def vanishes(echo: EchoService, generator: random.Random) -> None:
    """Connections that are reset with calls in flight."""
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        for stream_id in range(1, 2 * generator.randint(1, 30), 2):
            peer.send(
                peer.request(f"/test.Echo/{generator.choice(('Slow', 'Unary'))}", b"x" * 500, stream_id=stream_id)
            )
        peer.abort()


def resets(echo: EchoService, generator: random.Random) -> None:
    """Calls that are reset before, while and after they are answered."""
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        for stream_id in range(1, 101, 2):
            method = generator.choice(("Slow", "Unary", "BidiStream"))
            is_end = generator.random() < 0.7
            peer.send(peer.request(f"/test.Echo/{method}", b"x", stream_id=stream_id, end=is_end))
            if generator.random() < 0.8:
                peer.send(h2.reset(stream_id))
        assert peer.call("/test.Echo/Unary", b"last", stream_id=101).messages == [b"last"]


def expires(echo: EchoService, generator: random.Random) -> None:
    """Calls with deadlines, short and long."""
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        for stream_id in range(1, 41, 2):
            text = f"{generator.randint(1, 30)}{generator.choice('mun')}" if generator.random() < 0.8 else "1H"
            peer.send(peer.request("/test.Echo/Slow", b"x", stream_id=stream_id, timeout=text))
        time.sleep(0.05)


def is_big(echo: EchoService, generator: random.Random) -> None:
    """Answers of megabytes, read whole, in part, or not at all."""
    with Peer.connect(echo.address) as peer:
        peer.handshake(window=1 << 20)
        peer.send(peer.request("/test.Echo/Big", b"%d" % generator.randrange(1, 6_000_000)))
        if generator.random() < 0.5:
            peer.read_answer()
        elif generator.random() < 0.5:
            peer.read_kind(h2.DATA)


def breaks_off(echo: EchoService, generator: random.Random) -> None:
    """Requests that stop anywhere."""
    with Peer.connect(echo.address) as peer:
        whole = h2.PREFACE + h2.settings_frame() + peer.request("/test.Echo/ClientStream", b"y" * 60_000)
        peer.send(whole[: generator.randrange(len(whole))])
        if generator.random() < 0.3:
            peer.send(os.urandom(30))
        peer.abort() if generator.random() < 0.5 else peer.close()


ACTS: tuple[Act, ...] = (vanishes, resets, expires, is_big, breaks_off)


def at_work(echo: EchoService) -> contextlib.AbstractContextManager[Counter[str]]:
    """Each act, again and again, on a thread of its own; how often each was done."""

    def tolerant(act: Act) -> Callable[[random.Random], None]:
        def once(generator: random.Random) -> None:
            # A connection that has reached its age is closed when its calls have ended.
            with contextlib.suppress(Closed, TimeoutError):
                act(echo, generator)

        return once

    return repeated({act.__name__: tolerant(act) for act in ACTS}, pause_s=0.02)


@contextlib.contextmanager
def client_at_work(address: str) -> Iterator[Callable[[], ClientSample]]:
    """Our client in a process of its own; gives a sample at each call."""
    command = [sys.executable, "-m", "tests.wire.soak_client", address]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def sample() -> ClientSample:
            process.stdin.write(b"\n")
            process.stdin.flush()
            return ClientSample(*json.loads(process.stdout.readline()))

        try:
            sample()
            yield sample
            process.stdin.close()
            assert 0 == process.wait(30)
        finally:
            process.kill()


def taken(echo: EchoService) -> Sample:
    """What the service holds now; timers, calls and counted bytes count as tasks."""
    found = echo.stats(b"collect")
    num_tasks = found["num_tasks"] + found["num_timers"] + found["num_slow"]
    return Sample(time.monotonic(), found["rss_bytes"], found["num_descriptors"], found["num_threads"], num_tasks)


def leaks(samples: list[Sample]) -> list[Growth]:
    """What grows."""
    return [growth for growth in growths(samples) if growth.is_leak]


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Callable[[], EchoService]]:
    """A service on a port that stays; each call ends it gracefully and starts the next one."""
    port, running = free_port(), contextlib.ExitStack()

    def restart() -> EchoService:
        running.close()
        service = EchoService("weft", tmp_path / "restarted.log", f"--address=127.0.0.1:{port}", "--loop=asyncio")
        return running.enter_context(service)

    with running:
        yield restart


def test_nothing_grows(wire: str, tmp_path: Path, restarted: Callable[[], EchoService]) -> None:
    """Neither server nor client, whatever clients do and although connections age; neighbours get right answers.

    Another server is restarted meanwhile, and its neighbour loses no call.
    """
    limits = {"max_connection_age_s": max(1.0, DURATION_S / 100), "max_connection_age_grace_s": 5.0}
    served, used, failed, num_restarts = [], [], [], 0
    with contextlib.ExitStack() as stack:
        echo = stack.enter_context(EchoService(wire, tmp_path / "log", "--loop=asyncio", limits=limits))
        other = restarted()
        one, two = (stack.enter_context(Neighbour(address)) for address in (echo.address, other.address))
        one.go()
        two.go()
        sample = stack.enter_context(client_at_work(echo.address))
        with at_work(echo) as done:
            for index in range(NUM_SAMPLES):
                time.sleep(DURATION_S / NUM_SAMPLES)
                served.append(taken(echo))
                now = sample()
                used.append(Sample(time.monotonic(), *now[:4]))
                if index % 8 == 4:
                    restarted()
                    num_restarts += 1
                for neighbour in (one, two):
                    report = neighbour.pause()
                    failed += report.errors
                    if report.num_calls != report.num_right or report.worst_ms > LATE_MS:
                        failed.append(str(report))
                    neighbour.go()
        ends = sample().ends
        for neighbour in (one, two):
            neighbour.pause()
    if report_file := os.environ.get("WEFT_SOAK_REPORT"):
        found = {
            name: [growth._asdict() for growth in growths(samples)]
            for name, samples in (("server", served), ("client", used))
        }
        Path(report_file).parent.mkdir(parents=True, exist_ok=True)
        text = {"growth": found, "acts": done, "ends": ends, "restarts": num_restarts, "failed": failed}
        Path(report_file).write_text(json.dumps(text, indent=1))
    assert [] == failed
    assert [] == [end for end in ends if end.startswith("wrong")]
    assert {"right", "cancelled", "late", "left_stream", "bidi", "new_channel"} <= ends.keys()
    assert {act.__name__ for act in ACTS} <= done.keys()
    assert ([], []) == (leaks(served), leaks(used))
