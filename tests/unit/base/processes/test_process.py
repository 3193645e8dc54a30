"""A service as a child process, with scripts in the place of services."""

import asyncio
import os
import signal
import sys

from tests.processes import kill_and_wait

from weft.base.processes.process import Endpoint, ServiceProcess

ANNOUNCE = 'print(\'{"service": "s", "grpc": "127.0.0.1:1", "metrics": "127.0.0.1:2"}\', flush=True); '


def service(script: str, log: list[tuple[str, str]] | None = None) -> ServiceProcess:
    """A child that runs a script."""
    lines = [] if log is None else log
    return ServiceProcess("fake", [sys.executable, "-c", script], lambda name, line: lines.append((name, line)))


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


async def test_how_a_process_ended_is_told_with_its_last_lines() -> None:
    """Exit status or signal name, and what it said last on standard error."""
    failed = service("import sys; sys.stderr.write('no port\\n'); sys.exit(3)")
    await failed.start()
    assert await failed.wait() == 3
    assert failed.describe_exit() == "fake ended with exit status 3; its last lines:\n  no port"
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


async def test_only_the_last_lines_are_kept() -> None:
    """A chatty service costs no memory, and a line without end is no obstacle."""
    log: list[tuple[str, str]] = []
    process = service(
        "import sys; [print(n, file=sys.stderr) for n in range(500)]; print('y' * 500_000, file=sys.stderr); "
        "sys.stderr.write('x' * 3_000_000)",
        log,
    )
    await process.start()
    assert await process.wait() == 0
    lines = process.describe_exit().splitlines()
    assert len(lines) == 11
    assert max(map(len, lines)) < 5000, "a service that dies again and again must not fill the log"
    assert any("was left out" in line for line in lines)
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
