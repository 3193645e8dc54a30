"""A core that follows its repository."""

import asyncio
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from weft.base.errors import UnavailableError, WeftError
from weft.serving import core as serving_core
from weft.serving.core import ServingCore


@pytest.fixture
async def core(repository: Any, monkeypatch: pytest.MonkeyPatch) -> ServingCore:
    """Polls a repository with model m, version 1, all the time."""
    monkeypatch.setattr(serving_core, "SETTLE_S", 0.0)
    repository.write("m", {1: 1})
    return await repository.serve(model_control="poll", load_models=(), repository_poll_s=0.01)  # type: ignore[no-any-return]


async def until(holds: Callable[[], bool]) -> None:
    """Return when it holds."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # the index tells nobody when it changes
            await asyncio.sleep(0.005)


def states(core: ServingCore) -> list[tuple[str, str, str]]:
    """Name, version and state of the index."""
    return [entry[:3] for entry in core.index(ready_only=False)]


async def test_versions_and_models_that_are_added(repository: Any, core: ServingCore) -> None:
    """A new version takes over, a new model serves."""
    assert await repository.infer(core) == 1
    repository.write("m", {2: 2})
    repository.write("n", {1: 7})
    await until(lambda: ("m", "2", "READY") in states(core) and ("n", "1", "READY") in states(core))
    assert (2, 7) == (await repository.infer(core), await repository.infer(core, "n"))


async def test_a_model_that_is_removed(repository: Any, core: ServingCore) -> None:
    """It is unloaded and the server stays ready."""
    shutil.rmtree(repository.root / "m")
    await until(lambda: states(core) == [("m", "1", "UNAVAILABLE")])
    assert core.is_ready()
    repository.write("m", {1: 5})
    await until(lambda: states(core) == [("m", "1", "READY")])
    assert await repository.infer(core) == 5


async def test_a_model_that_went_while_the_core_started(repository: Any, core: ServingCore) -> None:
    """There is nothing to unload, and what else has changed is loaded."""
    core._known["brief"] = ()
    repository.write("n", {1: 7})
    await until(lambda: ("n", "1", "READY") in states(core))
    assert await repository.infer(core, "n") == 7


async def test_a_bad_change_does_not_replace_what_serves(repository: Any, core: ServingCore) -> None:
    """The old version goes on, the index says why, and the next good change is taken over."""
    repository.write("m", {1: "none"})
    await until(lambda: "the reload failed" in core.index(ready_only=False)[0].reason)
    assert await repository.infer(core) == 1
    repository.write("m", {1: 3})
    await until(lambda: not core.index(ready_only=False)[0].reason)
    assert await repository.infer(core) == 3


async def test_a_load_that_hangs_holds_up_no_other_change(repository: Any, core: ServingCore, gate: Any) -> None:
    """Others are taken over meanwhile, the index says LOADING, and a mended file is loaded in its place at once."""
    core._backends = {**core._backends, "slow": gate.on_load()}
    repository.write("slow", {1: 1}, config=repository.CONFIG.replace('"add"', '"slow"'))
    await until(lambda: ("slow", "1", "LOADING") in states(core))
    repository.write("m", {1: 3})
    repository.write("n", {1: 7})
    await until(lambda: ("n", "1", "READY") in states(core))
    repository.write("slow", {1: 8})
    await until(lambda: ("slow", "1", "READY") in states(core))
    assert (3, 8) == (await repository.infer(core), await repository.infer(core, "slow"))
    gate.is_open.set()


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "max_batch_size: 8\n"])
async def test_a_configuration_that_an_edit_has_emptied_is_passed_over(
    repository: Any, core: ServingCore, text: str
) -> None:
    """What serves goes on, without a reload; the finished edit is taken over. A new model may say as little."""
    repository.write("n", {1: 7}, config=text)
    repository.write("m", {1: 3}, config=text)
    await until(lambda: any(name == "n" for name, *_ in states(core)))
    assert ("m", "1", "READY") in states(core)
    assert (await repository.infer(core), core.index(ready_only=False)[0].reason) == (1, "")
    repository.write("m", {1: 3})
    async with asyncio.timeout(10):
        while await repository.infer(core) != 3:  # noqa: ASYNC110  # a reload tells nobody
            await asyncio.sleep(0.005)


async def test_clients_do_not_control_what_is_polled(core: ServingCore) -> None:
    """Load and unload are refused with the text of Triton Inference Server."""
    for change in (core.load("m", {}), core.unload("m", unload_dependents=False)):
        with pytest.raises(UnavailableError, match="not allowed if polling is enabled"):
            await change


async def test_nothing_is_lost_while_models_are_replaced(repository: Any, core: ServingCore) -> None:
    """Every request during twenty reloads is answered, by one version or the other."""
    answers: list[float | WeftError] = []

    async def ask() -> None:
        while True:
            answers.append(await repository.infer(core))

    asking = asyncio.create_task(ask())
    for value in range(2, 22):
        repository.write("m", {1: value})
        await until(lambda value=value: bool(answers) and answers[-1] == value)  # type: ignore[misc]
    asking.cancel()
    assert set(answers) <= set(range(1, 22))
    assert answers == sorted(answers, key=float)  # type: ignore[arg-type]
