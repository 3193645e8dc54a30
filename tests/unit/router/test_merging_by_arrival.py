"""Items of several sources by arrival."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.unit.router import make

from weft.router.tasks import Arrivals


class Sources:
    """Generators that note what becomes of them.

    Attributes:
        open: Names of those that have begun and have not ended.
        most: Of them at once.
    """

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.most = 0

    async def of(self, name: str, pause_ms: float, count: int, failure: Exception | None = None) -> Any:
        """``count`` items, each after a pause."""
        self.open.add(name)
        self.most = max(self.most, len(self.open))
        try:
            for number in range(count):
                await asyncio.sleep(pause_ms / 1e3)
                yield f"{name}{number}"
            if failure is not None:
                raise failure
        finally:
            self.open.discard(name)


async def taken(arrivals: Arrivals[str]) -> list[str]:
    """All items; the arrivals are closed."""
    got = []
    try:
        while (item := await arrivals.next()) is not None:
            got.append(item)
    finally:
        await arrivals.close()
    assert 0 == make.num_other_tasks()
    return got


async def test_items_come_by_arrival(virtual_clock: Any) -> None:
    """Those of one source in order; a source without an item is one that has ended."""
    sources = Sources()
    arrivals = Arrivals([sources.of("a", 10, 3), sources.of("b", 14, 2), sources.of("c", 1, 0)])
    assert ["a0", "b0", "a1", "b1", "a2"] == await taken(arrivals)
    assert (3, set()) == (sources.most, sources.open)


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_no_more_sources_are_open_than_may_be(limit: int, virtual_clock: Any) -> None:
    """The next begins when one has ended, in order; one whose item is taken is still open."""
    sources = Sources()
    arrivals = Arrivals([sources.of(name, 5, 2) for name in "abcd"], limit)
    got = await taken(arrivals)
    assert (8, limit) == (len(got), sources.most)
    assert [f"{name}{n}" for name in "abcd" for n in range(2)] == (got if limit == 1 else sorted(got))


async def test_a_failure_comes_in_its_turn(virtual_clock: Any) -> None:
    """After the items that arrived before it; the other sources are closed."""
    sources = Sources()
    arrivals = Arrivals([sources.of("a", 5, 1, ValueError("no more")), sources.of("b", 4, 9)])
    assert "b0" == await arrivals.next()
    assert "a0" == await arrivals.next()
    await asyncio.sleep(1)
    assert "b1" == await arrivals.next()
    with pytest.raises(ValueError, match="no more"):
        await arrivals.next()
    await arrivals.close()
    assert (set(), 0) == (sources.open, make.num_other_tasks())


async def test_it_is_known_that_one_source_is_left(virtual_clock: Any) -> None:
    """When all others have ended, and none waits for its turn."""
    sources = Sources()
    arrivals = Arrivals([sources.of("a", 1, 1), sources.of("b", 5, 2)], 2)
    assert ("a0", False) == (await arrivals.next(), arrivals.has_one_left)
    assert ("b0", True) == (await arrivals.next(), arrivals.has_one_left)
    await arrivals.close()
    one_by_one: Arrivals[str] = Arrivals([sources.of("a", 1, 1), sources.of("b", 5, 2)], 1)
    assert ("a0", False) == (await one_by_one.next(), one_by_one.has_one_left)
    await one_by_one.close()


@pytest.mark.parametrize("num_turns", range(12))
async def test_a_cancel_leaves_nothing(num_turns: int) -> None:
    """At any moment."""
    sources = Sources()

    async def all_of_them() -> None:
        await taken(Arrivals([slow(name) for name in "abc"], 2))

    async def slow(name: str) -> AsyncGenerator[str, None]:
        async for item in sources.of(name, 0, 2):
            yield item

    task = asyncio.create_task(all_of_them())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    assert 0 == make.num_other_tasks()
