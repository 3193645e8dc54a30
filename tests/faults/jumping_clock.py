"""``python jumping_clock.py MODULE ARGUMENTS``: runs a module whose wall clock goes an hour back at each SIGUSR2.

What people and time servers set is the wall clock; a test may not, so Python's view of it jumps. The monotonic clock
does not, as on any machine.
"""

import runpy
import signal
import sys
import time

_offset_s = 0
_time, _time_ns = time.time, time.time_ns


def _jump(number: int, frame: object) -> None:
    global _offset_s  # noqa: PLW0603  # the clock of the process
    _offset_s -= 3600


time.time = lambda: _time() + _offset_s
time.time_ns = lambda: _time_ns() + _offset_s * 1_000_000_000
signal.signal(signal.SIGUSR2, _jump)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
