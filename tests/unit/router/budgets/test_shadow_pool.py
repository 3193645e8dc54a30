"""Work that nobody waits for has an owner all the same."""

import asyncio

import pytest
from tests.unit.router import make

from weft.router.runtime import ShadowPool


async def test_a_pool_has_room_for_so_many() -> None:
    """One that has ended, however, makes room."""
    pool = ShadowPool(max_inflight=2)
    ended: list[str] = []
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()

    for name in ("a", "b"):
        assert pool.has_room
        pool.start(work(), lambda _, name=name: ended.append(name))
    assert not pool.has_room
    go.set()
    await asyncio.sleep(0.001)
    assert (["a", "b"], True, 0) == (ended, pool.has_room, pool.num_inflight)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_closed_pool_has_nothing_left(has_begun: bool) -> None:
    """What runs is cancelled, also what has not begun; nothing starts any more."""
    pool = ShadowPool()
    ended: list[bool] = []

    async def work() -> None:
        await asyncio.Event().wait()

    pool.start(work(), lambda task: ended.append(task.cancelled()))
    if has_begun:
        await asyncio.sleep(0)
    await pool.close()
    await asyncio.sleep(0)
    assert ([True], 0, False) == (ended, make.num_other_tasks(), pool.has_room)
    await pool.close()
