"""Instances whose backend is lost: what becomes of their batches, and of those that wait."""

import asyncio
import threading
import time
from typing import ClassVar

import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo

from weft.base.core import CallContext
from weft.base.errors import UnavailableError
from weft.base.tensors import decode


@pytest.fixture
def fragile():
    """A backend that is lost when the test says so; each load waits for ``may_load`` and fails while ``is_broken``."""

    class Fragile(Echo):
        made: ClassVar[list["Fragile"]] = []
        may_load = threading.Event()
        is_broken = False
        num_loads = 0

        def load(self):
            assert Fragile.may_load.wait(10)
            if Fragile.is_broken:
                raise UnavailableError("still broken")
            Fragile.num_loads += 1
            self.reason = ""
            Fragile.made.append(self)

        def why_lost(self):
            return self.reason

        def execute(self, batch):
            assert not self.reason
            return super().execute(batch)

    Fragile.may_load.set()
    return Fragile


def _wait_for(condition):
    """Return when it holds; losses are noticed, and loads attempted, on another thread."""
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


async def _ask(model, value=1):
    result = await asyncio.wait_for(model.infer(make_call(value), CallContext()), 10)
    return decode(result.outputs["OUT"])[0, 0]


async def test_batch_that_finds_its_backend_lost_waits_for_it(serve, fragile):
    """A batch that has not begun when the loss shows is executed after the next load."""
    model = await serve(fragile)
    fragile.made[0].reason = "gone"
    assert 1 == await _ask(model)
    assert (2, 1, "") == (fragile.num_loads, model.statistics.restart_count, str(model.crashed))


async def test_batch_that_waits_fails_with_the_first_attempt(serve, fragile):
    """When the lost backend cannot be loaded, the batch that waited for it is told so; later ones are refused."""
    model = await serve(fragile)
    fragile.is_broken, fragile.made[0].reason = True, "gone"
    with pytest.raises(UnavailableError, match=r"instance echo_0 of model 'echo' is lost|no instance of"):
        await _ask(model)
    with pytest.raises(UnavailableError, match=r"no instance of model 'echo' runs: gone; it cannot be loaded again"):
        await _ask(model)
    fragile.is_broken = False
    await asyncio.to_thread(_wait_for, lambda: not model.crashed.includes_all)
    assert 1 == await _ask(model)


async def test_instance_that_is_lost_idle_gets_no_batches(serve, fragile):
    """While one of two instances is loaded again, every request goes to the other one."""
    model = await serve(fragile, num_instances=2)
    fragile.may_load.clear()
    lost = fragile.made[0]
    lost.reason = "gone"
    lost.on_lost()
    await asyncio.to_thread(_wait_for, lambda: str(model.crashed))
    for value in (1, 2, 3):
        assert value == await _ask(model, value)
    assert not model.crashed.includes_all
    fragile.may_load.set()


async def _until(is_true):
    """Return when it holds; the loop turns meanwhile."""
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.005)


@pytest.fixture
def slow():
    """A backend whose executions end when the test lets them."""

    class Slow(Echo):
        begun = threading.Semaphore(0)
        may_end = threading.Semaphore(0)

        def execute(self, batch):
            Slow.begun.release()
            assert Slow.may_end.acquire(timeout=20)
            return super().execute(batch)

    return Slow


async def test_an_execution_that_does_not_return_takes_its_instance_out(serve, slow):
    """The model is out, with reason and time, while each instance hangs; a late answer ends it."""
    model = await serve(slow, execution_timeout_us=100_000)
    asked = asyncio.create_task(_ask(model))
    await asyncio.to_thread(slow.begun.acquire)
    await _until(lambda: model.crashed.includes_all)
    assert "has executed one batch since 20" in str(model.crashed)
    with pytest.raises(UnavailableError, match="longer than its execution_timeout_us"):
        await _ask(model)
    slow.may_end.release(2)
    assert await asked == 1
    assert not model.crashed.includes_all
    assert await _ask(model, 2) == 2
    assert 0 == model.statistics.restart_count


async def test_one_hung_instance_leaves_the_others(serve, slow):
    """The reason is there, and requests go to the instance that is left."""
    model = await serve(slow, execution_timeout_us=100_000, num_instances=2)
    asked = asyncio.create_task(_ask(model))
    await asyncio.to_thread(slow.begun.acquire)
    await _until(lambda: str(model.crashed))
    assert not model.crashed.includes_all
    other = asyncio.create_task(_ask(model, 2))
    await asyncio.to_thread(slow.begun.acquire)
    slow.may_end.release(2)
    assert [1, 2] == [await asked, await other]
