"""How a group of workers ends."""

import argparse
import sys

import pytest
from tests.processes import kill_and_wait

from weft.base.processes.process import ServiceProcess
from weft.v2.workers.group import _Group

SERVE = """
import sys
print('{"grpc": "h:1", "metrics": "h:2"}', flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("script", "expected"), [(SERVE, 0), (SERVE + "sys.exit(3)", 1)], ids=["well", "badly"])
async def test_the_status_of_a_stop_is_that_of_the_workers(
    script: str, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """0 if each ends with 0, else 1, and the log has which did not."""
    group, process = await _group_of_one(script)
    assert await group._stop([]) == expected
    assert ("worker 1 ended with exit status 3" in caplog.messages) == bool(expected)
    assert not process.is_running


async def test_a_worker_that_died_before_the_stop_does_not_count() -> None:
    """Even if the event loop has yet to learn of it: it would have been started again."""
    group, process = await _group_of_one(SERVE)
    kill_and_wait((await process.endpoint()).pid)
    assert process.is_running
    assert await group._stop([]) == 0


async def _group_of_one(script: str) -> tuple[_Group, ServiceProcess]:
    """A group whose one worker runs a script, and serves."""
    group = _Group("router", (), argparse.Namespace(workers=1, grace_s=30.0), ())
    process = ServiceProcess("worker 1", [sys.executable, "-c", script], lambda *line: None)
    await process.start()
    await process.endpoint()
    worker = group._workers[1]
    worker.process, worker.is_up = process, True
    return group, process
