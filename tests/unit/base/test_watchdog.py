"""A watchdog finds an event loop that does not turn."""

import asyncio
import subprocess
import sys
import threading

from weft.base.errors import EXIT_HUNG
from weft.base.observing.watchdog import LoopWatchdog, StallDetector

HUNG = """
import asyncio, sys, threading
from weft.base.observing import logs
from weft.base.observing.watchdog import LoopWatchdog

def hold_the_loop():
    threading.Event().wait()

async def main():
    logs.configure()
    watchdog = LoopWatchdog(stall_s=0.5, abort_s=1.5)
    hold_the_loop()

asyncio.run(main())
"""


def test_lag_is_counted_and_a_stall_is_found_once():
    """A stall is told when it has lasted long enough, and again when it is over, with its length."""
    detector = StallDetector(stall_s=5.0, abort_s=0.0, period_s=0.5)
    assert detector.ping(0.0)
    assert not detector.ping(0.1)
    assert 0.0 == detector.pong(0.002)
    assert detector.ping(1.0)
    verdicts = [detector.check(1.0 + 0.5 * turn) for turn in range(14)]
    assert ["stall"] == [verdict for verdict in verdicts if verdict]
    assert 10 == verdicts.index("stall")
    assert 8.0 == detector.pong(9.0)
    assert (1, 2, 8.002) == (detector.num_stalls, detector.lag.count, detector.lag.sum_s)


def test_a_process_that_was_stopped_has_not_stalled():
    """After SIGCONT the watchdog sees that it slept itself, and gives the loop its time."""
    detector = StallDetector(stall_s=5.0, abort_s=10.0, period_s=0.5)
    detector.ping(0.0)
    assert "" == detector.check(0.5)
    verdicts = [detector.check(100.0 + 0.5 * turn) for turn in range(19)]
    assert {8: "stall", 18: "abort"} == {turn: verdict for turn, verdict in enumerate(verdicts) if verdict}


async def test_a_stall_is_logged_with_the_stack(caplog):
    """What holds the loop is in the log while it does; the metrics count it."""
    watchdog = LoopWatchdog(stall_s=0.3)
    try:
        is_told = threading.Event()
        caplog.handler.addFilter(lambda record: is_told.set() or True if "hangs" in record.getMessage() else True)
        assert is_told.wait(20)  # and the loop does not turn meanwhile
        record = next(record for record in caplog.records if "hangs" in record.getMessage())
        assert "test_a_stall_is_logged_with_the_stack" in record.stack
        async with asyncio.timeout(20):
            while not any("turns again" in record.getMessage() for record in caplog.records):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        samples = {s.name: s.value for family in watchdog.collect() for s in family.samples}
        assert 1 == samples["weft_event_loop_stalls_total"]
        assert 0.3 < samples["weft_event_loop_lag_seconds_sum"]
    finally:
        watchdog.close()


def test_a_hang_that_lasts_ends_the_process():
    """The status is ``EXIT_HUNG``, and the last log lines name the function that hung."""
    done = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=60, check=False)
    assert EXIT_HUNG == done.returncode
    assert 2 == done.stderr.count("the event loop hangs")
    assert "hold_the_loop" in done.stderr
