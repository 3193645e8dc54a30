"""Sources that are worked on ahead of their turn."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from weft.router.tasks import in_order


class Sources:
    """Numbered sources of a few items; `asked` has what was asked of them, `closed` the sources that have ended."""

    def __init__(self, *sizes: int, fails_at: tuple[int, int] = (-1, -1), ends_with: Exception | None = None) -> None:
        self.sizes = sizes
        self.fails_at = fails_at
        self.ends_with = ends_with
        self.asked: list[tuple[int, int]] = []
        self.opened: list[int] = []
        self.closed: list[int] = []

    async def source(self, number: int) -> AsyncGenerator[tuple[int, int], None]:
        try:
            for item in range(self.sizes[number]):
                self.asked.append((number, item))
                await asyncio.sleep(0)
                if (number, item) == self.fails_at:
                    raise ValueError(f"{number}.{item}")
                yield number, item
        finally:
            self.closed.append(number)

    async def all(self) -> AsyncGenerator[AsyncGenerator[tuple[int, int], None], None]:
        for number in range(len(self.sizes)):
            self.opened.append(number)
            yield self.source(number)
        if self.ends_with is not None:
            raise self.ends_with


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def collect(items: AsyncGenerator[tuple[int, int], None], got: list[tuple[int, int]]) -> None:
    async for item in items:
        got.append(item)


def others() -> int:
    return len(asyncio.all_tasks()) - 1


@pytest.mark.parametrize("limit", [1, 2, 3, 99])
async def test_the_order_is_that_of_the_sources(limit: int) -> None:
    """However many are in work at once; empty ones take no place."""
    sources = Sources(2, 0, 3, 1)
    got = [item async for item in in_order(sources.all(), limit)]
    assert [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (3, 0)] == got
    assert ({0, 1, 2, 3}, 0) == (set(sources.closed), others())


async def test_no_sources_give_nothing() -> None:
    """And end at once."""
    for limit in (1, 2):
        assert [] == [item async for item in in_order(Sources().all(), limit)]


async def test_only_so_many_sources_are_in_work() -> None:
    """The others are not even opened; one that is not the first is asked for one item."""
    sources = Sources(2, 2, 2, 2)
    async with aclosing(in_order(sources.all(), 2)) as items:
        await anext(items)
        await settled()
        assert ([0, 1], [(0, 0), (1, 0)]) == (sources.opened, sources.asked)
        await anext(items)
        await anext(items)
        await settled()
        assert ([0, 1, 2], (2, 0)) == (sources.opened, sources.asked[-1])


@pytest.mark.parametrize("limit", [1, 2, 99])
async def test_an_item_does_not_wait_for_later_sources(limit: int) -> None:
    """It is given while the next source is still to come."""
    comes = asyncio.Event()
    sources = Sources(1, 1)

    async def slowly() -> AsyncGenerator[AsyncGenerator[tuple[int, int], None], None]:
        yield sources.source(0)
        await comes.wait()
        yield sources.source(1)

    async with asyncio.timeout(5), aclosing(slowly()) as opened, aclosing(in_order(opened, limit)) as items:
        assert (0, 0) == await anext(items)
        comes.set()
        assert (1, 0) == await anext(items)


@pytest.mark.parametrize("limit", [1, 2, 99])
async def test_a_source_fails_in_its_turn(limit: int) -> None:
    """What comes before it is given; the others are closed."""
    sources = Sources(2, 2, 2, fails_at=(1, 1))
    got: list[tuple[int, int]] = []
    with pytest.raises(ValueError, match=r"1\.1"):
        await collect(in_order(sources.all(), limit), got)
    assert ([(0, 0), (0, 1), (1, 0)], 0) == (got, others())
    assert set(sources.opened) >= set(sources.closed)


@pytest.mark.parametrize("limit", [1, 2, 99])
async def test_a_failure_to_open_comes_after_what_was_opened(limit: int) -> None:
    """Nothing that was on its way is lost."""
    got: list[tuple[int, int]] = []
    with pytest.raises(ValueError, match="no more"):
        await collect(in_order(Sources(1, 2, ends_with=ValueError("no more")).all(), limit), got)
    assert [(0, 0), (1, 0), (1, 1)] == got


@pytest.mark.parametrize("limit", [1, 2, 99])
@pytest.mark.parametrize("num_taken", range(6))
async def test_closing_early_closes_what_was_opened(limit: int, num_taken: int) -> None:
    """No task is left, and every source that was asked has ended."""
    sources = Sources(2, 2, 2)
    async with aclosing(in_order(sources.all(), limit)) as items:
        for _ in range(num_taken):
            await anext(items)
    assert 0 == others()
    assert {number for number, _ in sources.asked} == set(sources.closed)


@pytest.mark.parametrize("limit", [1, 2, 99])
@pytest.mark.parametrize("num_turns", range(12))
async def test_a_cancel_at_any_moment_closes_what_was_opened(limit: int, num_turns: int) -> None:
    """After any number of turns of the loop."""
    sources = Sources(2, 2, 2)

    async def use() -> None:
        async with aclosing(sources.all()) as opened, aclosing(in_order(opened, limit)) as items:
            async for _ in items:
                pass

    task = asyncio.create_task(use())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    assert 0 == others()
    assert {number for number, _ in sources.asked} == set(sources.closed)
