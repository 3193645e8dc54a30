"""Reload, unload and close while requests are answered."""

import asyncio
from typing import Any

import pytest

from weft.base.core import IndexEntry
from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError


async def test_reload_serves_what_the_folder_has_now(repository: Any) -> None:
    """A new version folder is found, and an old one that is gone no longer serves."""
    repository.write("m", {1: 1})
    core = await repository.serve()
    repository.write("m", {2: 20})
    await core.load("m", {})
    assert await repository.infer(core) == 20
    with pytest.raises(UnavailableError, match="'m' version 1 is not at ready state"):
        await repository.infer(core, version="1")


@pytest.mark.parametrize(
    ("values", "line", "reason"),
    [
        ({1: "none"}, "", "version 1 is at UNAVAILABLE state: file 'value' has no number"),
        ({1: 2}, "metric_tag { }", "unknown field 'metric_tag' in ModelConfig; did you mean 'metric_tags'?"),
        ({1: 2, 2: "none"}, "version_policy { all { } }", "version 2 is at UNAVAILABLE state"),
    ],
)
async def test_failed_reload_keeps_what_serves(repository: Any, values: dict[int, Any], line: str, reason: str) -> None:
    """The caller learns why, the index too, and the old version answers as before; a good reload then clears it."""
    repository.write("m", {1: 1})
    core = await repository.serve()
    repository.write("m", values, repository.CONFIG + line)
    with pytest.raises(InvalidArgumentError) as caught:
        await core.load("m", {})
    assert reason in caught.value.message
    assert await repository.infer(core) == 1
    assert core.is_ready()
    (entry,) = core.index(ready_only=False)
    assert entry[:3] == ("m", "1", "READY")
    assert "serving what was loaded before; the reload failed" in entry.reason
    assert reason in entry.reason
    repository.write("m", {1: 5}, repository.CONFIG + "version_policy { specific { versions: 1 } }")
    await core.load("m", {})
    assert await repository.infer(core) == 5
    assert core.index(ready_only=False) == [IndexEntry("m", "1", "READY", "")]


async def test_an_unload_waits_for_what_a_reload_has_replaced(repository: Any, gate: Any) -> None:
    """A replaced version that still answers is closed, too, when the unload ends."""
    repository.write("m", {1: 1})
    core = await repository.serve(gate.on_run())
    request = asyncio.create_task(repository.infer(core))
    await gate.has_entered()
    await core.load("m", {})
    unload = asyncio.create_task(core.unload("m", unload_dependents=False))
    await asyncio.wait([unload], timeout=0.2)
    assert not unload.done()
    gate.is_open.set()
    await unload
    assert (gate.num_closed, await request) == (2, 1)


async def test_versions_of_a_failed_load_are_closed(repository: Any) -> None:
    """When one version fails, those that were loaded beside it hold nothing any longer."""
    closed: list[str] = []

    class Closing(repository.BACKEND):
        def close(self) -> None:
            closed.append(self.model.signature.version)

    repository.write("m", {1: 1, 2: "none", 3: 3}, repository.CONFIG + "version_policy { all { } }")
    core = await repository.serve(Closing)
    assert sorted(closed) == ["1", "3"]
    assert [entry.state for entry in core.index(ready_only=False)] == ["UNAVAILABLE"] * 3


async def test_reload_loses_no_request(repository: Any) -> None:
    """Requests that run all the while are answered, each by an old or a new version, never by an error."""
    repository.write("m", {1: 0}, repository.CONFIG + "dynamic_batching { } instance_group { count: 2 }")
    core = await repository.serve()
    is_over = False

    async def client() -> list[float]:
        answers = []
        while not is_over:
            answers.append(await repository.infer(core))
        return answers

    clients = [asyncio.create_task(client()) for _ in range(8)]
    for generation in range(1, 11):
        (repository.root / "m" / "1" / "value").write_text(str(generation))
        await core.load("m", {})
        assert await repository.infer(core) == generation
    is_over = True
    for answers in await asyncio.gather(*clients):
        assert answers == sorted(answers)
        assert len(set(answers)) > 2


async def test_replaced_version_finishes_its_requests(repository: Any, gate: Any) -> None:
    """A request that runs while its version is replaced is answered by that version, which is then closed."""
    repository.write("m", {1: 1})
    core = await repository.serve(gate.on_run())
    running = asyncio.create_task(repository.infer(core))
    await gate.has_entered()
    repository.write("m", {1: 2})
    await core.load("m", {})
    newer = asyncio.create_task(repository.infer(core))
    await gate.has_entered()
    assert gate.num_closed == 0
    gate.is_open.set()
    assert (await running, await newer) == (1, 2)


async def test_unload_drains(repository: Any, gate: Any) -> None:
    """New requests are refused, those in work are answered, then the backends are closed and unload returns."""
    repository.write("m", {1: 1})
    core = await repository.serve(gate.on_run())
    running = asyncio.create_task(repository.infer(core))
    await gate.has_entered()
    unloading = asyncio.create_task(core.unload("m", unload_dependents=False))
    await asyncio.sleep(0)  # the unload has begun
    assert core.index(ready_only=False) == [IndexEntry("m", "1", "UNLOADING", "unloaded")]
    for version in ("", "1"):
        with pytest.raises(UnavailableError, match="is not at ready state"):
            await repository.infer(core, version=version)
    assert not unloading.done()
    gate.is_open.set()
    assert await running == 1
    await unloading
    assert gate.num_closed == 1
    assert core.index(ready_only=False) == [IndexEntry("m", "1", "UNAVAILABLE", "unloaded")]
    assert core.is_ready()
    with pytest.raises(NotFoundError, match="has no available versions"):
        await repository.infer(core)


async def test_unload_gives_up_after_its_grace(repository: Any, gate: Any) -> None:
    """A request that does not end in time fails, so that unload ends."""
    repository.write("m", {1: 1})
    core = await repository.serve(gate.on_run(), drain_grace_s=0.05)
    running = asyncio.create_task(repository.infer(core))
    await gate.has_entered()
    await core.unload("m", unload_dependents=False)
    with pytest.raises(UnavailableError):
        await running
    gate.is_open.set()


async def test_unloaded_model_loads_again(repository: Any) -> None:
    """Unloading twice is no error; a load brings the model back."""
    repository.write("m", {1: 1})
    core = await repository.serve()
    await core.unload("m", unload_dependents=True)
    await core.unload("m", unload_dependents=False)
    await core.load("m", {})
    assert await repository.infer(core) == 1


async def test_failed_load_after_unload(repository: Any) -> None:
    """The index then has the new reason, and the server is not ready until it is unloaded."""
    repository.write("m", {1: 1})
    core = await repository.serve()
    await core.unload("m", unload_dependents=False)
    repository.write("m", {1: "none"})
    with pytest.raises(InvalidArgumentError):
        await core.load("m", {})
    assert core.index(ready_only=False) == [IndexEntry("m", "1", "UNAVAILABLE", "file 'value' has no number")]
    assert not core.is_ready()
    await core.unload("m", unload_dependents=False)
    assert core.is_ready()


async def test_close_answers_what_is_in_work(repository: Any, gate: Any) -> None:
    """Closing the core waits for running requests within the grace."""
    repository.write("m", {1: 1})
    core = await repository.serve(gate.on_run())
    running = asyncio.create_task(repository.infer(core))
    await gate.has_entered()
    closing = asyncio.create_task(core.close(grace_s=10))
    gate.is_open.set()
    assert await running == 1
    await closing
    assert gate.num_closed == 1


async def test_close_shortens_a_drain_that_began_before(repository: Any, gate: Any) -> None:
    """The grace of the shutdown holds, also for versions that were replaced with a longer one."""
    repository.write("m", {1: 1})
    core = await repository.serve(gate.on_run())
    running = asyncio.create_task(repository.infer(core))
    await gate.has_entered()
    await core.load("m", {})
    await asyncio.wait_for(core.close(grace_s=0.05), 10)
    with pytest.raises(UnavailableError):
        await running
    gate.is_open.set()
