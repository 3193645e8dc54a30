"""Which models are loaded when they load on demand."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from weft.base.errors import UnavailableError
from weft.base.signature import ModelSignature
from weft.serving.lifecycle.warm_pool import WarmLimits, WarmPool


class Model:
    """A model whose loads a test can hold or let fail."""

    def __init__(self, name: str, num_bytes: int = 10) -> None:
        self.signature = ModelSignature(name, "1", "p", 0, (), ())
        self.size = num_bytes
        self.log: list[str] = []
        self.error: Exception | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.may_cool = asyncio.Event()
        self.may_cool.set()
        self.is_loaded = False
        self.is_held = False

    async def num_bytes(self) -> int:
        """As made."""
        return self.size

    async def warm(self) -> None:
        """Load, or fail."""
        self.log.append("load")
        await self.may_load.wait()
        if self.error is not None:
            raise self.error
        self.is_loaded = True

    async def cool(self) -> None:
        """Unload."""
        self.log.append("unload")
        await self.may_cool.wait()
        self.is_loaded = False


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """At 0."""
    return Clock()


@pytest.fixture
def make_pool(clock: Clock) -> Callable[..., WarmPool]:
    """A pool with limits."""
    return lambda **limits: WarmPool(WarmLimits(**limits), clock)


async def use(pool: WarmPool, clock: Clock, *models: Model) -> None:
    """One request for each, one second apart."""
    for model in models:
        clock.now_s += 1
        await pool.enter(model)
        assert model.is_loaded
        pool.leave(model)


def loaded(*models: Model) -> str:
    """Names of those that are loaded."""
    return "".join(model.signature.name for model in models if model.is_loaded)


async def spin() -> None:
    """Everything that can go on has."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_least_recently_used_makes_room(make_pool: Any, clock: Clock) -> None:
    """With room for two, the third load unloads the one whose last use is longest ago."""
    pool = make_pool(num_models=2)
    a, b, c = Model("a"), Model("b"), Model("c")
    await use(pool, clock, a, b, a, c)
    assert ("ac", 2, 20) == (loaded(a, b, c), pool.num_warm, pool.num_warm_bytes)
    assert 1 == pool.cold_starts["b", "1"].num_evicted
    await use(pool, clock, b)
    assert ("bc", ["load", "unload", "load"]) == (loaded(a, b, c), b.log)


async def test_bytes_are_a_limit_too(make_pool: Any, clock: Clock) -> None:
    """As many are unloaded as it takes; one that is larger than the limit is loaded alone."""
    pool = make_pool(num_bytes=30)
    a, b, c, giant = Model("a"), Model("b"), Model("c", 25), Model("g", 99)
    await use(pool, clock, a, b, c)
    assert "c" == loaded(a, b, c, giant)
    await use(pool, clock, giant)
    assert "g" == loaded(a, b, c, giant)


async def test_without_limits_everything_stays(make_pool: Any, clock: Clock) -> None:
    """Models are loaded once each."""
    pool = make_pool()
    models = [Model(str(i)) for i in range(20)]
    await use(pool, clock, *models, *models)
    assert [["load"]] * 20 == [model.log for model in models]


async def test_one_load_for_all_who_wait(make_pool: Any) -> None:
    """Requests for a model that is being loaded wait for the same load."""
    pool, a = make_pool(), Model("a")
    a.may_load.clear()
    waiting = [asyncio.create_task(pool.enter(a)) for _ in range(5)]
    await spin()
    a.may_load.set()
    await asyncio.gather(*waiting)
    assert (["load"], False) == (a.log, pool.try_enter(Model("b")))
    assert pool.try_enter(a)


async def test_a_model_in_use_stays(make_pool: Any, clock: Clock) -> None:
    """Where every loaded model is in use the next load waits until one is free."""
    pool = make_pool(num_models=1)
    a, b = Model("a"), Model("b")
    await pool.enter(a)
    waiting = asyncio.create_task(pool.enter(b))
    await spin()
    assert ("a", False) == (loaded(a, b), waiting.done())
    clock.now_s += 1
    pool.leave(a)
    await waiting
    assert "b" == loaded(a, b)


async def test_a_load_that_fails(make_pool: Any) -> None:
    """Those who wait are told, nothing counts as loaded, and the next request tries again."""
    pool, a = make_pool(num_models=1), Model("a")
    a.error = UnavailableError("no file")
    waiting = [asyncio.create_task(pool.enter(a)) for _ in range(2)]
    assert ["no file"] * 2 == [str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)]
    assert (0, 1) == (pool.num_warm, pool.cold_starts["a", "1"].num_failed)
    a.error = None
    await pool.enter(a)
    assert (["load", "load"], 1) == (a.log, sum(pool.cold_starts["a", "1"].seconds.counts))


async def test_who_leaves_does_not_stop_a_load(make_pool: Any, clock: Clock) -> None:
    """A request that is cancelled while it waits leaves no user behind, and the others get their model."""
    pool = make_pool(num_models=1)
    a, b = Model("a"), Model("b")
    a.may_load.clear()
    first, second = asyncio.create_task(pool.enter(a)), asyncio.create_task(pool.enter(a))
    await spin()
    first.cancel()
    a.may_load.set()
    await second
    assert first.cancelled()
    pool.leave(a)
    await use(pool, clock, b)
    assert "b" == loaded(a, b)


async def test_idle_models_are_unloaded(make_pool: Any, clock: Clock) -> None:
    """What nobody has asked for during the idle time goes, what is in use or was used lately stays."""
    pool = make_pool(idle_s=10.0)
    a, b, c = Model("a"), Model("b"), Model("c")
    await use(pool, clock, a, b)
    await pool.enter(c)
    clock.now_s = 11.0  # a was used at 1, b at 2
    await pool.cool_idle()
    assert ("bc", 1) == (loaded(a, b, c), pool.cold_starts["a", "1"].num_idled)
    clock.now_s = 100.0
    await pool.cool_idle()
    assert "c" == loaded(a, b, c)


async def test_asked_for_while_it_is_being_unloaded(make_pool: Any, clock: Clock) -> None:
    """The request waits for the unload and loads it again; nothing else is unloaded for that."""
    pool = make_pool(idle_s=10.0)
    a, b = Model("a"), Model("b")
    await use(pool, clock, a)
    clock.now_s = 12.0
    await pool.enter(b)
    a.may_cool.clear()
    cooling = asyncio.create_task(pool.cool_idle())
    await spin()
    waiting = asyncio.create_task(pool.enter(a))
    await spin()
    assert not waiting.done()
    a.may_cool.set()
    await asyncio.gather(cooling, waiting)
    assert ("ab", ["load", "unload", "load"]) == (loaded(a, b), a.log)


async def test_removed_while_it_loads(make_pool: Any) -> None:
    """Who waits for a model that is removed gets UNAVAILABLE, not a cancellation; the pool forgets it."""
    pool, a = make_pool(), Model("a")
    a.may_load.clear()
    waiting = asyncio.create_task(pool.enter(a))
    await spin()
    await pool.remove(a)
    with pytest.raises(UnavailableError, match="is being unloaded"):
        await waiting
    assert (0, 0) == (pool.num_warm, pool.num_warm_bytes)
    await pool.remove(a)


async def test_removed_while_it_is_used(make_pool: Any) -> None:
    """A model is unloaded although requests run, which is the grace's to end; who leaves late does no harm."""
    pool, a = make_pool(), Model("a")
    await pool.enter(a)
    await pool.remove(a)
    pool.leave(a)
    assert (False, False) == (a.is_loaded, pool.try_enter(a))


async def test_many_requests_never_exceed_the_limit(make_pool: Any) -> None:
    """Two hundred requests for ten models in a pool of three: each is served, never more than three are loaded."""
    pool = make_pool(num_models=3)
    models = [Model(str(i)) for i in range(10)]
    most = 0

    async def request(i: int) -> None:
        nonlocal most
        model = models[i * 7 % 10]
        await pool.enter(model)
        most = max(most, sum(m.is_loaded for m in models))
        await asyncio.sleep(0)
        assert model.is_loaded
        pool.leave(model)

    await asyncio.wait_for(asyncio.gather(*(request(i) for i in range(200))), 10)
    assert 3 == most == pool.num_warm
