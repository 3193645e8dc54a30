"""What graphs share while they run."""

import asyncio

import pytest
from tests.unit.router import make

from weft.base.errors import ResourceExhaustedError
from weft.router.runtime import Runtime, ShadowPool


def test_workers_divide_the_limits_of_graphs() -> None:
    """One of three may have a third, rounded up, and says so; no limit stays none."""
    runtime = Runtime({}, num_workers=3)
    assert [0, 1, 1, 2] == [runtime.share(limit) for limit in (0, 1, 3, 4)]
    limit = runtime.inflight_limit("step 'root/a'", 4)
    limit.enter()
    limit.enter()
    text = "step 'root/a' has 2 requests in flight, and 'max_inflight' of its policy, divided among 3 workers, allows 2"
    with pytest.raises(ResourceExhaustedError, match=text):
        limit.enter()
    unlimited = Runtime({}).inflight_limit("node 'a'", 0)
    for _ in range(100):
        unlimited.enter()


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
