"""Deadlines and liveness, with clocks of the tests; tasks that begin at once."""

import asyncio
import contextvars
from dataclasses import dataclass, replace
from typing import Any

import pytest

from weft.wire.event_loop import DeadlineQueue, start_now
from weft.wire.transport import Liveness, LivenessAction, LivenessOptions, PingPolice


class FakeLoop:
    """Time that the test moves, and the timers that are set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers = []
        self.num_timers = 0

    def time(self):
        return self.now_s

    def call_at(self, when_s, callback):
        self.num_timers += 1
        timer = FakeTimer(self, when_s, callback)
        self.timers.append(timer)
        return timer

    def advance(self, seconds):
        self.now_s += seconds
        for timer in [timer for timer in self.timers if timer.when_s <= self.now_s]:
            self.timers.remove(timer)
            timer.callback()


class FakeTimer:
    def __init__(self, loop, when_s, callback):
        self.loop, self.when_s, self.callback = loop, when_s, callback

    def cancel(self):
        self.loop.timers.remove(self)


def test_deadlines_expire_in_order():
    """Each expires at its time, a cancelled one never."""
    loop = FakeLoop()
    queue = DeadlineQueue(loop)  # type: ignore[arg-type]
    expired = []
    queue.add(3, lambda: expired.append(3))
    queue.add(1, lambda: expired.append(1))
    queue.add(2, lambda: expired.append(2)).cancel()
    for _ in range(4):
        loop.advance(1)
    assert [1, 3] == expired
    assert [] == loop.timers


def test_deadlines_share_a_timer():
    """Thousands of calls that end in time set one timer, and are not kept."""
    loop = FakeLoop()
    queue = DeadlineQueue(loop)  # type: ignore[arg-type]
    queue.add(1, lambda: None)
    for _ in range(10_000):
        queue.add(60, pytest.fail).cancel()
    assert 1 == loop.num_timers
    assert len(queue._buckets) == 2
    queue.close()
    assert [] == loop.timers


def test_a_deadline_that_waits_is_met_exactly():
    """However far away, a deadline is met at its time or up to a millisecond later, with few timers."""
    for delay_s in (0.0003, 0.005, 0.0123, 0.7, 1.1, 15.99, 29.987, 250.3, 5000.77):
        loop = FakeLoop()
        loop.now_s = 1234.5678
        queue = DeadlineQueue(loop)  # type: ignore[arg-type]
        met_s = []
        queue.add(delay_s, lambda loop=loop, met_s=met_s: met_s.append(loop.now_s))
        while not met_s:
            loop.advance(min(timer.when_s for timer in loop.timers) - loop.now_s)
        assert -0.0006 <= met_s[0] - 1234.5678 - delay_s <= 0.001
        assert loop.num_timers <= 5
        assert [] == loop.timers


def test_deadlines_cancel_one_another():
    """A deadline that is cancelled by another one of the same moment is not met."""
    loop = FakeLoop()
    queue = DeadlineQueue(loop)  # type: ignore[arg-type]
    deadlines = []
    expired = []

    def expire():
        expired.append(True)
        for deadline in deadlines:
            deadline.cancel()

    deadlines += [queue.add(1.0, expire) for _ in range(3)]
    loop.advance(1.0)
    assert [True] == expired


@dataclass
class Observation:
    """What a connection is like at a check."""

    num_received: int = 1
    streams: tuple[int, ...] = ()
    has_partial_frame: bool = False
    num_partial_frames: int = 0
    num_unwritten_bytes: int = 0
    is_draining: bool = False
    is_drain_finished: bool = False


SEEN = Observation()


BUSY = replace(SEEN, streams=(1,))
PARTIAL = replace(SEEN, has_partial_frame=True)
DRAINING = replace(SEEN, is_draining=True)
MARKS = {
    LivenessAction.NOTHING: ".", LivenessAction.PING: "P", LivenessAction.ABORT: "A", LivenessAction.DRAIN: "D",
    LivenessAction.FINISH_DRAIN: "F",
}  # fmt: skip
STALLS = {"frame_timeout_s": 99, "handshake_timeout_s": 99, "write_timeout_s": 99}
KEEPALIVE = {"keepalive_time_s": 3, "keepalive_timeout_s": 2}
#: What is done by options of a connection that looks so, a second after a second: a mark for each.
LIVENESS = {
    "a silent peer gets a PING, and is aborted after its time-out": (KEEPALIVE, [SEEN] * 6, "...P.A"),
    "any bytes are an answer": (KEEPALIVE, [*[SEEN] * 5, replace(SEEN, num_received=2)], "...P.."),
    "without calls no PING is sent if the options say so": (
        {"keepalive_time_s": 2, "keepalive_without_calls": False}, [SEEN] * 5, ".....",
    ),
    "calls are kept alive": ({"keepalive_time_s": 2, "keepalive_without_calls": False}, [BUSY] * 3, "..P"),
    "a frame that makes no progress ends the connection": (
        STALLS | {"frame_timeout_s": 3}, [replace(PARTIAL, num_partial_frames=1)] * 4, "...A",
    ),
    "a handshake that makes no progress ends it": (STALLS | {"handshake_timeout_s": 3}, [PARTIAL] * 4, "...A"),
    "a write that makes no progress ends it": (
        STALLS | {"write_timeout_s": 3}, [replace(SEEN, num_unwritten_bytes=5)] * 4, "...A",
    ),
    "another incomplete frame begins the time anew": (
        {"frame_timeout_s": 2}, [replace(PARTIAL, num_partial_frames=number) for number in range(1, 9)], "........",
    ),
    "output that shrinks begins the time anew": (
        {"write_timeout_s": 2}, [replace(SEEN, num_unwritten_bytes=100 - number) for number in range(8)], "........",
    ),
    "a connection is drained at its age": ({"max_connection_age_s": 3}, [BUSY] * 3, "..D"),
    "a connection is drained when it was idle for long": ({"max_connection_idle_s": 3}, [SEEN] * 3, "..D"),
    "a connection with calls is not idle": ({"max_connection_idle_s": 3}, [BUSY] * 9, "........."),
    "after the grace a drained connection ends": (
        {"max_connection_age_s": 2, "max_connection_age_grace_s": 2},
        [BUSY, BUSY, *[replace(BUSY, is_draining=True, is_drain_finished=True)] * 3], ".D..A",
    ),
    "a peer that does not answer the PING of a drain gets the last GOAWAY all the same": (
        {"drain_timeout_s": 2}, [DRAINING] * 3, "..F",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "seen", "marks"), LIVENESS.values(), ids=LIVENESS)
def test_liveness(options: dict[str, Any], seen: list[Observation], marks: str):
    """A connection is looked at each second, and what is to be done about it is what the case says."""
    liveness = Liveness(LivenessOptions(**options), 0.0)
    found = [
        liveness.check(one, one.num_received, one.num_unwritten_bytes, second)  # type: ignore[arg-type]
        for second, one in enumerate(seen, start=1)
    ]
    assert marks == "".join(MARKS[action] for action in found)


def test_pings_have_an_interval():
    """The third PING that comes too early is one too many, unless data was sent between them."""
    police = PingPolice(5.0)
    assert [False, False, False, True] == [police.is_too_many(now_s, has_sent_data=False) for now_s in (0, 1, 2, 3)]
    police = PingPolice(5.0)
    assert not any(police.is_too_many(now_s, has_sent_data=True) for now_s in range(20))
    assert not any(PingPolice(5.0).is_too_many(now_s, has_sent_data=False) for now_s in range(0, 100, 5))


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")


def begun(coroutine) -> "asyncio.Task | None":
    """``start_now`` as the event loop calls it: from a callback, outside of any task."""
    loop = asyncio.new_event_loop()
    results = []

    def start():
        task = start_now(coroutine, loop)
        results.append(task)
        if task is None:
            loop.stop()
        else:
            task.add_done_callback(lambda _: loop.stop())

    loop.call_soon(start)
    try:
        loop.run_forever()
    finally:
        loop.close()
    return results[0]


def test_coroutine_that_does_not_wait_needs_no_task():
    """It has ended when the call returns, and what it set in its context is gone."""
    done = []

    async def run():
        variable.set("inside")
        done.append(variable.get())

    assert begun(run()) is None
    assert ["inside"] == done
    assert "outside" == variable.get()


def test_coroutine_that_waits_goes_on_in_a_task():
    """It keeps its context, may use time-outs from its first step on, and its result is the task's."""

    async def run():
        variable.set("inside")
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(5)
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
        return variable.get()

    task = begun(run())
    assert "inside" == task.result()


def test_task_is_cancelled_before_its_second_step():
    """A cancel right after the first step reaches what it waits for and the coroutine."""
    seen = []

    async def run():
        inner = asyncio.get_running_loop().create_future()
        try:
            await inner
        except asyncio.CancelledError:
            seen.append(inner.cancelled())
            raise

    loop = asyncio.new_event_loop()

    def start():
        task = start_now(run(), loop)
        task.cancel()
        task.add_done_callback(lambda _: loop.stop())

    loop.call_soon(start)
    loop.run_forever()
    loop.close()
    assert [True] == seen


def test_cancel_in_the_first_step():
    """A coroutine that cancels its own task before it first waits is cancelled where it waits."""

    async def run():
        asyncio.current_task().cancel()
        await asyncio.sleep(5)

    assert begun(run()).cancelled()


def test_first_step_that_raises():
    """An exception of the first step is raised at once."""

    async def run():
        raise ValueError("first")

    loop = asyncio.new_event_loop()
    with pytest.raises(ValueError, match="first"):
        start_now(run(), loop)
    loop.close()


def test_first_step_that_cancels_itself():
    """A coroutine that raises CancelledError has ended; whoever began it goes on."""

    async def run():
        raise asyncio.CancelledError

    assert begun(run()) is None
