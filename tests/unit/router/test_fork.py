"""Tasks that run at once: what is left of them, however they end."""

import asyncio
from typing import Any

import pytest
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.errors import DeadlineExceededError, UnavailableError
from weft.router.tasks import Fork, Quorum, Race


async def value(result: int) -> int:
    return result


async def fail(error: Exception) -> int:
    raise error


def num_other_tasks() -> int:
    return len(asyncio.all_tasks()) - 1


async def test_a_fork_ends_when_all_tasks_have_ended() -> None:
    """Tasks may start others while they run."""
    done: list[str] = []
    fork = Fork()

    async def parent() -> int:
        fork.start(child())
        done.append("parent")
        return 0

    async def child() -> int:
        await asyncio.sleep(0)
        done.append("child")
        return 0

    fork.start(parent())
    await fork.join()
    assert ["parent", "child"] == done


async def test_a_cancel_while_siblings_are_cleared_away_is_not_lost() -> None:
    """The request was cancelled, so that is what it ends with, not the sibling's error."""
    is_clearing = asyncio.Event()

    async def slow_to_leave() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            is_clearing.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return 0

    async def join() -> None:
        fork = Fork()
        fork.start(slow_to_leave())
        fork.start(fail(ValueError("first")))
        await fork.join()

    request = asyncio.create_task(join())
    await is_clearing.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert 0 == num_other_tasks()


async def test_a_task_that_is_cancelled_from_outside_fails_the_fork() -> None:
    """It does not look like a cancel of the request itself."""
    fork = Fork()

    async def cancel_itself() -> int:
        raise asyncio.CancelledError

    fork.start(cancel_itself())
    with pytest.raises(Exception, match="cancelled from outside"):
        await fork.join()


async def test_errors_after_the_first_are_seen_and_dropped() -> None:
    """Two tasks fail at once: one error is raised, the other leaves no warning behind."""
    fork = Fork()
    fork.start(fail(ValueError("first")))
    fork.start(fail(ValueError("second")))
    with pytest.raises(ValueError, match="first"):
        await fork.join()


async def test_a_race_is_won_by_the_first_success() -> None:
    """Failures before it do not count, nor do tasks that end without success; the rest is cancelled."""
    race = Race(KeyError)
    race.start(fail(ValueError("early")))
    race.start(value(0))
    race.start(value(1))
    race.start(asyncio.Event().wait())
    await race.join()
    assert 2 == race.winner
    assert 0 == num_other_tasks()


async def test_a_race_that_all_lose_raises_the_error_of_the_first_started() -> None:
    """Whichever failed first."""
    race = Race(KeyError)

    async def late() -> int:
        await asyncio.sleep(0)
        raise ValueError("declared first")

    race.start(late())
    race.start(fail(ValueError("declared second")))
    with pytest.raises(ValueError, match="declared first"):
        await race.join()


async def test_a_race_without_success_and_without_error_has_no_winner() -> None:
    """Every task was allowed to fail."""
    race = Race(KeyError)
    race.start(value(0))
    race.start(value(0))
    await race.join()
    assert -1 == race.winner


async def test_a_fatal_error_ends_a_race() -> None:
    """The others might still succeed, and are cancelled."""
    race = Race(KeyError)
    race.start(asyncio.Event().wait())
    race.start(fail(KeyError("fatal")))
    with pytest.raises(KeyError, match="fatal"):
        await race.join()
    assert 0 == num_other_tasks()


def quorum(needed: int, kinds: str, straggler_ms: float | None = None, *, waits_for_hard: bool = False) -> Quorum:
    """A quorum of tasks that are hard (h) or soft (s)."""
    straggler_s = None if straggler_ms is None else straggler_ms / 1e3
    return Quorum(needed, [kind == "h" for kind in kinds], straggler_s, waits_for_hard=waits_for_hard)


async def after(delay_ms: float, result: int = 1) -> int:
    await asyncio.sleep(delay_ms / 1e3)
    return result


async def joined(fork: Quorum, *coroutines: Any) -> list[int]:
    """Numbers of the tasks that succeeded, when all is over."""
    for coroutine in coroutines:
        fork.start(coroutine)
    await fork.join()
    assert 0 == num_other_tasks()
    return fork.answered


@pytest.mark.parametrize(
    ("needed", "kinds", "straggler_ms", "delays_ms", "answered", "elapsed_ms"),
    [
        (2, "sss", None, (30, 10, 20), [1, 2, 0], 30),  # without a limit all are waited for
        (2, "sss", 5, (30, 10, 20), [1, 2], 25),  # the wait starts with the second success
        (2, "sss", 15, (30, 10, 20), [1, 2, 0], 30),  # nobody is late
        (1, "shs", 5, (30, 40, 10), [2, 1], 40),  # a hard task is waited for, soft ones in the meantime not
        (1, "sh", 5, (10, 12), [0, 1], 12),  # a late hard task is not late
        (3, "sss", 5, (30, 10, 20), [1, 2, 0], 30),  # the wait starts when all is over
    ],
)
async def test_late_soft_tasks_are_cancelled(
    virtual_clock: VirtualClock,
    needed: int,
    kinds: str,
    straggler_ms: float | None,
    delays_ms: tuple[int, ...],
    answered: list[int],
    elapsed_ms: float,
) -> None:
    """The wait is counted from the success that makes the quorum."""
    fork = quorum(needed, kinds, straggler_ms)
    assert answered == await joined(fork, *(after(delay_ms) for delay_ms in delays_ms))
    assert elapsed_ms == virtual_clock.elapsed_ms()


async def test_without_a_number_the_wait_starts_when_the_hard_tasks_have_ended(virtual_clock: VirtualClock) -> None:
    """A success of a soft task before that starts nothing."""
    fork = quorum(1, "ssh", 5, waits_for_hard=True)
    assert [0, 2] == await joined(fork, after(1), after(60), after(20))
    assert 25.0 == virtual_clock.elapsed_ms()


async def test_a_quorum_out_of_reach_is_over_at_once(virtual_clock: VirtualClock) -> None:
    """Two of three have ended without success, so two cannot succeed any more; the third is cancelled."""
    fork = quorum(2, "sss")
    assert [] == await joined(fork, after(5, 0), after(1, 0), after(1_000))
    assert not fork.is_reached
    assert 5.0 == virtual_clock.elapsed_ms()


async def test_an_error_of_a_hard_task_cancels_the_others(virtual_clock: VirtualClock) -> None:
    """However many have succeeded."""
    with pytest.raises(UnavailableError):
        await joined(quorum(1, "shs"), value(1), fail(UnavailableError("gone")), after(1_000))
    assert 0 == num_other_tasks()
    assert 0.0 == virtual_clock.elapsed_ms()


@pytest.mark.parametrize(
    ("error", "kinds", "is_raised"),
    [
        (DeadlineExceededError("late"), "ss", False),  # all that is needed is there
        (DeadlineExceededError("late"), "hs", False),
        (DeadlineExceededError("late"), "ssh", True),  # a hard task still runs
        (UnavailableError("gone"), "ss", True),
        (ValueError("a defect"), "ss", True),
    ],
)
async def test_an_error_of_a_soft_task_counts_unless_time_is_over_and_the_answer_there(
    error: Exception, kinds: str, is_raised: bool
) -> None:
    """The request has no more time, so whoever has an answer gives it."""

    async def fail_then() -> int:
        await asyncio.sleep(0)
        raise error

    tasks = [value(1), fail_then(), *([asyncio.Event().wait()] if len(kinds) > 2 else [])]
    fork = quorum(1, kinds)
    if is_raised:
        with pytest.raises(type(error)):
            await joined(fork, *tasks)
    else:
        assert [0] == await joined(fork, *tasks)
    assert 0 == num_other_tasks()


async def test_a_timer_does_not_outlive_its_quorum(virtual_clock: VirtualClock) -> None:
    """A cancel while stragglers are waited for leaves neither tasks nor timer."""
    fork = quorum(1, "ss", 60_000)
    fork.start(value(1))
    fork.start(asyncio.Event().wait())
    join = asyncio.create_task(fork.join())
    await asyncio.sleep(0.01)
    join.cancel()
    with pytest.raises(asyncio.CancelledError):
        await join
    assert 0 == num_other_tasks()
    assert all(timer.cancelled() for timer in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kinds", ["ss", "ssh"])
async def test_what_a_late_task_raises_when_it_is_cancelled_does_not_matter(
    virtual_clock: VirtualClock, kinds: str
) -> None:
    """Its answer is not waited for any more, whether or not a hard task still runs."""

    async def leave_badly() -> int:
        try:
            await asyncio.sleep(1_000)
        finally:
            raise ValueError("a defect")

    fork = quorum(1, kinds, 5)
    assert [0, 2][: len(kinds) - 1] == await joined(
        fork, value(1), leave_badly(), *([after(9)] if "h" in kinds else [])
    )
