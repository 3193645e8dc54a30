"""An event loop whose time jumps to the next timer whenever nothing else is left to do.

A test with the fixture ``virtual_clock`` needs no real time to wait hours, and the same waits in every run::

    async def test_it(virtual_clock):
        target = FakeTarget(slow=answering(after_ms=80))
        result = await make.run(plan, target, context=make.context(timeout_ms=50))  # DEADLINE_EXCEEDED at 50 ms
        assert 50.0 == virtual_clock.elapsed_ms()

While a loop has a virtual clock, ``make.run`` gives it to the runtime, ``make.context`` counts from it, and a
``FakeTarget`` answers DEADLINE_EXCEEDED at the deadline of a call, as a target behind gRPC does. A test that makes its
own loop (``asyncio.run`` in a property test) calls ``VirtualClock()`` first thing inside it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

_START_NS = 1_000_000_000_000
#: How long a loop without timers may wait for other threads before the test is told that it hangs, in real seconds.
_HANG_S = 5.0


class VirtualClock:
    """Time of the running loop from now on; call it for the time in nanoseconds.

    A loop in which every task waits and no timer is set would wait for ever: it raises RuntimeError.
    """

    def __init__(self) -> None:
        loop: Any = asyncio.get_running_loop()
        self._now_ns = _START_NS
        self._select: Callable[[float | None], list[Any]] = loop._selector.select
        loop._selector.select = self._jump
        loop.time = lambda: self._now_ns / 1e9
        loop.virtual_clock = self

    def __call__(self) -> int:
        return self._now_ns

    def elapsed_ms(self) -> float:
        """Since the clock was made."""
        return round((self._now_ns - _START_NS) / 1e6, 3)

    def at_ms(self, elapsed_ms: float) -> int:
        """The time in nanoseconds when ``elapsed_ms`` will have passed since the clock was made."""
        return _START_NS + round(elapsed_ms * 1e6)

    def _jump(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            events = self._select(_HANG_S)
            if not events:
                raise RuntimeError("every task waits for something that cannot come: there is no timer either")
            return events
        events = self._select(0)
        if not events:
            self._now_ns += round(max(timeout_s, 0) * 1e9)
        return events


def virtual_clock_of_loop() -> VirtualClock | None:
    """The virtual clock of the running loop, if it has one."""
    return getattr(asyncio.get_running_loop(), "virtual_clock", None)
