"""A service as a child process: its start, addresses, log and end, when it starts again, and the port kept for it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import pytest
from tests.processes import kill_and_wait

from weft.base.processes.process import (
    DEATH_WINDOW_S,
    MAX_DEATHS,
    MAX_PAUSE_S,
    STABLE_S,
    Endpoint,
    RestartPolicy,
    ServiceProcess,
    reserve_port,
)
from weft.mesh.readiness import HangDetector

ANNOUNCE = 'print(\'{"service": "s", "grpc": "127.0.0.1:1", "metrics": "127.0.0.1:2"}\', flush=True); '


def service(script: str, log: list[tuple[str, str]] | None = None) -> ServiceProcess:
    """A child that runs a script."""
    lines = [] if log is None else log
    return ServiceProcess("fake", [sys.executable, "-c", script], lambda name, pid, line: lines.append((name, line)))


async def test_the_announcement_gives_addresses_and_pid() -> None:
    """The JSON line on standard output is read; other output is logged."""
    log: list[tuple[str, str]] = []
    process = service("print('hello'); import sys; print('5'); " + ANNOUNCE + "sys.stdin.read()", log)
    await process.start()
    endpoint = await process.endpoint()
    assert endpoint == Endpoint("127.0.0.1:1", "127.0.0.1:2", endpoint.pid)
    assert os.getpgid(endpoint.pid) == endpoint.pid
    assert log == [("fake", "hello"), ("fake", "5")]
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert not process.is_running


async def test_a_service_of_http_announces_that() -> None:
    """And has no gRPC address; what has neither is no announcement."""
    for announced in ('{"http": "h:1", "metrics": "h:2"}', '{"metrics": "h:2"}'):
        process = service(f"print('{announced}', flush=True); " + ANNOUNCE + "sys.stdin.read()")
        await process.start()
        endpoint = await process.endpoint()
        expected = ("", "h:1") if "http" in announced else ("127.0.0.1:1", "")
        assert expected == (endpoint.grpc, endpoint.http)
        assert ("http" in announced) == ("http" in endpoint.as_json())
        process.kill()
        await process.wait()


async def test_how_a_process_ended_is_told() -> None:
    """Exit status or signal name; what it said last on standard error was logged."""
    failed = service("import sys; sys.stderr.write('no port\\n'); sys.exit(3)")
    await failed.start()
    assert await failed.wait() == 3
    assert failed.describe_exit() == "fake ended with exit status 3"
    killed = service("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    await killed.start()
    await killed.wait()
    assert killed.describe_exit().startswith("fake was ended by SIGSEGV")


async def test_an_end_is_known_before_the_event_loop_learns_of_it() -> None:
    """From the system, whether or not its status was taken already."""
    process = service(ANNOUNCE + "import sys; sys.stdin.read()")
    assert process.has_ended()
    await process.start()
    pid = (await process.endpoint()).pid
    assert not process.has_ended()
    kill_and_wait(pid)
    assert process.has_ended()
    assert process.is_running
    await process.wait()
    assert process.has_ended()


async def test_a_line_without_end_is_left_out() -> None:
    """A line without end is no obstacle for those before it."""
    log: list[tuple[str, str]] = []
    process = service(
        "import sys; [print(n, file=sys.stderr) for n in range(500)]; print('y' * 500_000, file=sys.stderr); "
        "sys.stderr.write('x' * 3_000_000)",
        log,
    )
    await process.start()
    assert await process.wait() == 0
    assert any("was left out" in line for _, line in log)
    assert [line for _, line in log[:500]] == [str(number) for number in range(500)]


async def test_a_signal_reaches_the_process_and_only_once_it_runs() -> None:
    """`terminate` does nothing before the start and after the end."""
    process = service(
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); " + ANNOUNCE + "signal.pause()"
    )
    process.terminate()
    await process.start()
    await process.endpoint()
    process.terminate()
    assert await process.wait() == 7
    process.terminate()
    process.kill()


async def test_killing_takes_grandchildren_along() -> None:
    """A process that the service started is in its group and is killed with it."""
    script = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']); "
        "print(p.pid, flush=True); " + ANNOUNCE + "p.wait()"
    )
    log: list[tuple[str, str]] = []
    process = service(script, log)
    await process.start()
    await process.endpoint()
    grandchild = os.pidfd_open(int(log[0][1]))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(grandchild, ended.set)
    process.kill()
    await asyncio.wait_for(ended.wait(), 10)
    asyncio.get_running_loop().remove_reader(grandchild)
    os.close(grandchild)
    await process.wait()


async def test_a_child_may_share_the_group_and_a_descriptor() -> None:
    """Without a group of its own it is in this process's, writes to a descriptor passed, and ends with its input."""
    ours, its = os.pipe()
    script = f"import os, sys; os.write({its}, b'here'); sys.stdin.read()"
    process = ServiceProcess("fake", [sys.executable, "-c", script], lambda *_: None, pass_fds=[its], own_group=False)
    await process.start()
    os.close(its)
    assert await asyncio.to_thread(os.read, ours, 4) == b"here"
    os.close(ours)
    process.close_stdin()
    process.close_stdin()
    assert await process.wait() == 0


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("draw", "pauses"), [(0.0, [0.1, 0.5, 1.0, 2.0]), (1.0, [0.5, 1.0, 2.0, 4.0])], ids=["shortest", "longest"]
)
def test_pauses_double_up_to_the_cap(draw: float, pauses: list[float]) -> None:
    """The first is 0.1 to 0.5 s; none is longer than the cap; half of each is random; good service begins anew."""
    clock = _Clock()
    policy = RestartPolicy(clock, lambda: draw)
    assert pauses == [policy.died() for _ in range(4)]
    clock.now_s += STABLE_S - 1
    policy.serves()
    clock.now_s += STABLE_S - 1
    assert policy.died() > pauses[3]
    policy.serves()
    clock.now_s += STABLE_S
    assert policy.died() == pauses[0]
    assert (1, 1) == (policy.attempt, policy.num_deaths)
    assert MAX_PAUSE_S * (1 + draw) / 2 == [policy.died() for _ in range(60)][-1]


def test_many_deaths_are_hopeless_but_tried() -> None:
    """So many in the window make every pause the longest; slow ones, for weeks, do so too, but are not hopeless."""
    clock = _Clock()
    policy = RestartPolicy(clock, lambda: 1.0)
    pauses = [policy.died() for _ in range(MAX_DEATHS)]
    assert policy.is_hopeless
    assert MAX_PAUSE_S == pauses[-1]
    clock.now_s += DEATH_WINDOW_S + 1
    policy.died()
    assert not policy.is_hopeless
    for _ in range(2000):
        clock.now_s += DEATH_WINDOW_S
        pause_s = policy.died()
    assert MAX_PAUSE_S == pause_s
    assert not policy.is_hopeless


def test_silence_is_told_once_and_ends_in_a_hang() -> None:
    """Any answer ends it; what was told is taken back then."""
    clock = _Clock()
    detector = HangDetector(10.0, clock)

    def after(seconds: float, has_answered: bool) -> str:
        clock.now_s += seconds
        return detector.heard(has_answered)

    looks = [(1, True), (2, False), (2, False), (1, False), (1, False), (1, True), (1, True)]
    assert ["", "", "", "silent", "", "answers", ""] == [after(*look) for look in looks]
    assert ["", "", "silent", "", "hangs"] == [after(2, False) for _ in range(5)]


def test_a_judge_that_was_stopped_itself_condemns_nobody() -> None:
    """As after SIGSTOP and SIGCONT in the middle of a check, which is then over without an answer."""
    clock = _Clock()
    detector = HangDetector(30.0, clock)
    assert "" == detector.heard(True)
    clock.now_s += 3600.0
    assert "" == detector.heard(False)


def listener(port: int, *, shares: bool) -> socket.socket:
    """A socket that listens on the port."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
    try:
        made.bind(("127.0.0.1", port))
    except OSError:
        made.close()
        raise
    made.listen()
    return made


def test_a_reserved_port_is_for_sockets_that_share_it() -> None:
    """One that shares the port may listen, another one may not, and connections reach who listens."""
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listener(port, shares=False)
        with listener(port, shares=True), contextlib.closing(socket.create_connection(("127.0.0.1", port), 5)):
            pass


def test_a_port_in_use_is_refused_unless_it_is_shared() -> None:
    """A port that others listen on, sharing it, can be reserved only by who shares it too."""
    with listener(0, shares=True) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            reserve_port("127.0.0.1", port)
        reserve_port("127.0.0.1", port, is_shared=True).close()
