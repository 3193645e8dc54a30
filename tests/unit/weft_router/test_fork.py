"""Tasks that run at once: what is left of them, however they end."""

import asyncio

import pytest

from weft_router.fork import Fork, Race


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


async def test_a_race_returns_the_value_of_the_first_success() -> None:
    """Failures before it do not count, and the rest is cancelled."""
    race = Race()
    race.start(fail(ValueError("early")))
    race.start(value(7))
    race.start(asyncio.Event().wait())
    assert 7 == await race.join()
    assert 0 == num_other_tasks()


async def test_a_race_that_all_lose_raises_the_error_of_the_first_started() -> None:
    """Whichever failed first."""
    race = Race()

    async def late() -> int:
        await asyncio.sleep(0)
        raise ValueError("declared first")

    race.start(late())
    race.start(fail(ValueError("declared second")))
    with pytest.raises(ValueError, match="declared first"):
        await race.join()
