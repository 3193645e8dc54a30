"""Models that load on their first request."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall
from weft.base.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from weft.base.tensors import encode
from weft.serving.lifecycle import warm_pool
from weft.serving.lifecycle.warm_pool import WarmLimits
from weft.serving.runtime import idle


def figures(core: Any) -> dict[str, float]:
    """Samples of the pool's metrics."""
    collector = core.extension().collectors[-1]
    return {
        f"{sample.name}{''.join(sample.labels.values())}": sample.value
        for family in collector.collect()
        for sample in family.samples
    }


async def test_cold_models_are_ready_and_answer(repository: Any) -> None:
    """Index, signature and configuration are there before the first request, which loads the model."""
    repository.write("m", {1: 5})
    core = await repository.serve(on_demand=WarmLimits())
    assert [("m", "1", "READY")] == [entry[:3] for entry in core.index(ready_only=True)]
    assert (True, "X", 8) == (
        core.is_ready(),
        core.signature("m", "").inputs[0].name,
        core.config("m", "").max_batch_size,
    )
    assert 0 == figures(core)["weft_warm_models"]
    assert 5 == await repository.infer(core)
    found = figures(core)
    assert (1, 1, 1) == (
        found["weft_warm_models"],
        found["weft_warm_model_bytes"],
        found["weft_cold_start_seconds_countm1"],
    )


async def test_a_load_that_takes_long_is_loading_in_the_index(
    repository: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests wait for it by their own deadlines, and it is ready again with the answer."""
    monkeypatch.setattr(warm_pool, "SLOW_S", 0.01)
    repository.write("m", {1: 5})
    core = await repository.serve(gate.on_load(), on_demand=WarmLimits())
    answer = asyncio.ensure_future(repository.infer(core))
    async with asyncio.timeout(10):
        while core.index(ready_only=False)[0].state != "LOADING":  # noqa: ASYNC110  # the index tells nobody
            await asyncio.sleep(0.005)
    assert not core.is_model_ready("m", "")
    gate.is_open.set()
    assert await answer == 5
    assert core.index(ready_only=False)[0].state == "READY"


async def test_a_load_that_takes_long_holds_up_no_other(
    repository: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads are one at a time, but for one that does not end."""
    monkeypatch.setattr(idle, "SLOW_S", 0.01)
    for name in ("m", "n"):
        repository.write(name, {1: 5})
    core = await repository.serve(gate.on_load(), on_demand=WarmLimits())
    answers = [asyncio.ensure_future(repository.infer(core, name)) for name in ("m", "n")]
    for _ in answers:
        await gate.has_entered()
    gate.is_open.set()
    assert [5, 5] == await asyncio.gather(*answers)


async def test_statistics_outlive_an_unload(repository: Any) -> None:
    """A model that was unloaded to make room counts on when it is loaded again."""
    for name in ("a", "b"):
        repository.write(name, {1: 1})
    core = await repository.serve(on_demand=WarmLimits(num_models=1))
    for name in ("a", "b", "a"):
        await repository.infer(core, name)
    assert [2, 1] == [entry.inference_count for entry in core.statistics("", "")]
    assert (1, 1) == (figures(core)["weft_warm_models"], figures(core)["weft_warm_model_unloads_totala1evicted"])


async def test_a_model_that_cannot_be_loaded(repository: Any) -> None:
    """Requests are told why with UNAVAILABLE and are counted; a mended file is loaded by the next one."""
    repository.write("m", {1: "none"})
    core = await repository.serve(on_demand=WarmLimits())
    with pytest.raises(UnavailableError, match=r"'m' version 1 cannot be loaded: .*file 'value' has no number"):
        await repository.infer(core)
    assert 1 == core.statistics("m", "1")[0].fail.count
    repository.write("m", {1: 3})
    assert 3 == await repository.infer(core)


async def test_a_bad_configuration_is_known_at_the_start(repository: Any) -> None:
    """What can be checked without loading is, and the server is not ready."""
    repository.write("m", {1: 1}, repository.CONFIG.replace('"add"', '"ad"'))
    core = await repository.serve(on_demand=WarmLimits())
    assert (False, "UNAVAILABLE") == (core.is_ready(), core.index(ready_only=False)[0].state)


async def test_a_deadline_that_passes_while_loading(repository: Any, gate: Any) -> None:
    """The request ends in time and says what it waited for; the load goes on and serves the next."""
    repository.write("m", {1: 1})
    core = await repository.serve(gate.on_load(), on_demand=WarmLimits())
    call = InferCall("m", inputs={"X": encode(np.zeros((1, 2), np.float32))})
    with pytest.raises(DeadlineExceededError, match="while model 'm' version 1 was being loaded"):
        await core.infer(call, CallContext(deadline_ns=time.monotonic_ns() + 20_000_000))
    gate.is_open.set()
    assert 1 == await repository.infer(core)
    assert 1 == gate.most_inside


async def test_a_reload_while_it_is_warm(repository: Any) -> None:
    """The new version is cold and takes the requests; the old one is unloaded."""
    repository.write("m", {1: 1})
    core = await repository.serve(on_demand=WarmLimits())
    assert 1 == await repository.infer(core)
    repository.write("m", {1: 2})
    await core.load("m", {})
    assert 2 == await repository.infer(core)
    await core.unload("m", unload_dependents=False)
    assert 0 == figures(core)["weft_warm_models"]


async def test_a_bad_request_is_the_clients(repository: Any) -> None:
    """A request that does not fit is INVALID_ARGUMENT, loaded or not."""
    repository.write("m", {1: 1})
    core = await repository.serve(on_demand=WarmLimits())
    with pytest.raises(InvalidArgumentError):
        await core.infer(InferCall("m"), CallContext())


async def test_stopping_while_requests_wait_for_a_load(repository: Any, gate: Any) -> None:
    """Those who wait get UNAVAILABLE, and the core closes."""
    repository.write("m", {1: 1})
    core = await repository.serve(gate.on_load(), on_demand=WarmLimits())
    waiting = asyncio.create_task(repository.infer(core))
    await gate.has_entered()
    closing = asyncio.create_task(core.close(grace_s=0))
    with pytest.raises(UnavailableError):
        await waiting
    gate.is_open.set()
    await closing


async def test_a_model_with_a_sequence_is_not_evicted(repository: Any) -> None:
    """Another model waits for room while a sequence is alive, though no request is in work, and loads when it ends."""
    repository.write("s", {1: 1}, repository.CONFIG + "sequence_batching { max_sequence_idle_microseconds: 60000000 }")
    repository.write("m", {1: 2})
    core = await repository.serve(on_demand=WarmLimits(num_models=1))

    def call(**flags: bool) -> InferCall:
        inputs = {"X": encode(np.zeros((1, 2), np.float32))}
        return InferCall("s", inputs=inputs, parameters={"sequence_id": 7, **flags})

    await core.infer(call(sequence_start=True), CallContext())
    other = asyncio.ensure_future(repository.infer(core))
    await asyncio.wait([other], timeout=0.1)
    await core.infer(call(), CallContext())  # an evicted model would know nothing of the sequence
    assert not other.done()
    await core.infer(call(sequence_end=True), CallContext())
    assert 2 == await asyncio.wait_for(other, 10)


async def test_an_idle_sequence_lets_its_model_go(repository: Any) -> None:
    """A sequence whose client has vanished holds its model until it was idle for too long."""
    repository.write("s", {1: 1}, repository.CONFIG + "sequence_batching { max_sequence_idle_microseconds: 50000 }")
    repository.write("m", {1: 2})
    core = await repository.serve(on_demand=WarmLimits(num_models=1))
    inputs = {"X": encode(np.zeros((1, 2), np.float32))}
    await core.infer(
        InferCall("s", inputs=inputs, parameters={"sequence_id": 7, "sequence_start": True}), CallContext()
    )
    assert 2 == await asyncio.wait_for(repository.infer(core), 10)
