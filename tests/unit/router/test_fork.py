"""Tasks that run at once: what is left of them, however they end."""

import asyncio
import contextlib
from typing import Any

import pytest

from weft.base.errors import DeadlineExceededError, UnavailableError
from weft.router.tasks import Fork, Quorum


async def value(result: int) -> int:
    return result


async def fail(error: Exception) -> int:
    raise error


def num_other_tasks() -> int:
    return len(asyncio.all_tasks()) - 1


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

    fork = Quorum(1, [kind == "h" for kind in kinds], None, waits_for_hard=False)
    late: list[Any] = [asyncio.Event().wait()] if len(kinds) > 2 else []
    for task in (value(1), fail_then(), *late):
        fork.start(task)
    with pytest.raises(type(error)) if is_raised else contextlib.nullcontext():
        await fork.join()
    assert ([0], 0) == (fork.answered, num_other_tasks())
