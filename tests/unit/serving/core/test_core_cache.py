"""Models with ``response_cache``: equal requests are executed once."""

import asyncio
from typing import Any

import numpy as np
import pytest

from weft.base.caching import CoalescingCache
from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.statistics import ModelStatistics
from weft.base.tensors import decode, encode
from weft.serving.lifecycle.response_cache import CachedModel
from weft.serving.lifecycle.warm_pool import WarmLimits

CACHED = "response_cache { enable: true }"


def call(value: float = 0, *, rows: int = 1, outputs: tuple[str, ...] = (), **parameters: Any) -> InferCall:
    """Rows of two equal values."""
    inputs = {"X": encode(np.full((rows, 2), value, np.float32))}
    return InferCall("m", "", "id", parameters, inputs, tuple(RequestedOutput(name, {}) for name in outputs))


async def serve(repository: Any, *backend: Any, **options: Any) -> Any:
    """A core with the cached model m, which adds 1."""
    repository.write("m", {1: 1}, repository.CONFIG + CACHED)
    return await repository.serve(*backend, **options)


async def infer(core: Any, *arguments: Any, **options: Any) -> float:
    """First element of the answer."""
    return float(decode((await core.infer(call(*arguments, **options), CallContext())).outputs["Y"]).ravel()[0])


def counts(core: Any) -> tuple[int, int, int, int]:
    """Executions, answers, hits, misses."""
    (found,) = core.statistics("m", "1")
    return found.execution_count, found.success.count, found.cache_hit.count, found.cache_miss.count


async def test_equal_requests_are_executed_once(repository: Any) -> None:
    """The second is a hit: an answer of its own id and no execution, as Triton Inference Server counts it."""
    core = await serve(repository)
    assert [1, 1] == [await infer(core), await infer(core)]
    assert (1, 2, 1, 1) == counts(core)
    again = call()
    again.request_id = "other"
    assert "other" == (await core.infer(again, CallContext())).request_id


async def test_a_hit_is_told_to_the_caller(repository: Any) -> None:
    """In the result, and as trailing metadata for a router, which counts it; no other answer has any."""
    core = await serve(repository)
    contexts = [CallContext(), CallContext()]
    assert [False, True] == [(await core.infer(call(), context)).is_cached for context in contexts]
    assert [[], [("x-cache", "hit")]] == [context.trailing_metadata for context in contexts]


@pytest.mark.parametrize(
    "other",
    [call(1), call(rows=2), call(flag=True), call(outputs=("Y",), text="a")],
    ids=["value", "shape", "parameter", "text"],
)
async def test_requests_that_differ(repository: Any, other: InferCall) -> None:
    """Inputs, their shapes and parameters tell requests apart."""
    core = await serve(repository)
    await infer(core)
    await core.infer(other, CallContext())
    assert (2, 2, 0, 2) == counts(core)


async def test_what_does_not_tell_requests_apart(repository: Any) -> None:
    """Priority, timeout, and whether all outputs were asked for by name or by silence."""
    core = await serve(repository)
    await infer(core)
    await infer(core, priority=3, timeout=10_000_000)
    await infer(core, outputs=("Y",))
    assert 2 == counts(core)[2]


class TwoOutputs:
    """Answers what is asked for; `num_calls` counts."""

    def __init__(self) -> None:
        specs = [TensorSpec(name, "FP32", (1,)) for name in ("Z", "Y")]
        self.signature = ModelSignature("m", "1", "", 0, (), tuple(specs))
        self.statistics = ModelStatistics("m", "1")
        self.num_calls = 0

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        self.num_calls += 1
        names = [output.name for output in call.outputs] or ["Z", "Y"]
        return InferResult("m", "1", outputs={name: encode(np.array([ord(name)], np.float32)) for name in names})


async def test_the_order_of_outputs_does_not_tell_requests_apart() -> None:
    """Each gets its own order."""
    served: Any = TwoOutputs()
    model = CachedModel(served, CoalescingCache(1 << 20, 0, lambda: 0), lambda priority: 0)
    for names in (("Y", "Z"), ("Z", "Y"), (), ("Y", "Z")):
        result = await model.infer(call(outputs=names), CallContext())
        assert list(names or ("Z", "Y")) == list(result.outputs)
        assert [ord(name) for name in result.outputs] == [float(decode(t)[0]) for t in result.outputs.values()]
    assert (1, 3) == (served.num_calls, served.statistics.cache_hit.count)
    await model.infer(call(outputs=("Y",)), CallContext())
    assert 2 == served.num_calls


async def test_equal_requests_at_once_share_one_execution(repository: Any, gate: Any) -> None:
    """Those who come while the first is executed wait for its answer; one that leaves costs the others nothing."""
    core = await serve(repository, gate.on_run())
    asking = [asyncio.create_task(infer(core)) for _ in range(5)]
    await gate.has_entered()
    asking[0].cancel()
    gate.is_open.set()
    assert [1] * 4 == await asyncio.gather(*asking[1:])
    assert 1 == counts(core)[0]


async def test_errors_are_not_kept(repository: Any) -> None:
    """A request that does not fit is refused each time, and leaves nothing."""
    core = await serve(repository)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError):
            await core.infer(call(nonsense=1, outputs=("Z",)), CallContext())
    assert (0, 0) == counts(core)[:2]


async def test_a_reload_begins_with_nothing(repository: Any) -> None:
    """The answers of a model that was replaced, also of the same version, are not given any more."""
    core = await serve(repository)
    assert 1 == await infer(core)
    repository.write("m", {1: 5})
    await core.load("m", {})
    assert 5 == await infer(core)


async def test_classes_are_made_of_kept_answers(repository: Any) -> None:
    """A kept tensor stays as it is when another request asks for its best classes."""
    core = await serve(repository)
    classes = call()
    classes.outputs = (RequestedOutput("Y", {"classification": 1}),)
    await infer(core)
    assert [[b"1.000000:0"]] == decode((await core.infer(classes, CallContext())).outputs["Y"]).tolist()
    assert 1 == await infer(core)
    assert (1, 3, 2, 1) == counts(core)


async def test_on_demand_and_cached(repository: Any) -> None:
    """A kept answer is given although the model is unloaded, and does not load it."""
    repository.write("n", {1: 1})
    core = await serve(repository, on_demand=WarmLimits(num_models=1))
    await infer(core)
    await repository.infer(core, "n")
    assert 1 == await infer(core)
    assert 1 == core._pool.num_warm
    assert 1 == counts(core)[2]


@pytest.mark.parametrize("text", ["model_transaction_policy { decoupled: true }", "sequence_batching { direct { } }"])
async def test_where_it_is_not_possible(repository: Any, text: str) -> None:
    """A model whose equal requests have different answers is refused at load."""
    repository.write("m", {1: 1}, repository.CONFIG + CACHED + text)
    core = await repository.serve()
    assert "response_cache.enable is not possible" in core.index(ready_only=False)[0].reason


async def test_a_hit_counts_at_the_level_it_is_served_at(repository: Any) -> None:
    """Executions and hits have one rule: no priority, or one that is no level, is the model's default level."""
    levels = "dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    repository.write("m", {1: 1}, repository.CONFIG + CACHED + levels)
    core = await repository.serve()
    for value in (0, 0, 1, 1):
        await infer(core, value)
    await infer(core, priority=7)
    await infer(core, priority=3)
    (found,) = core.statistics("m", "1")
    assert {2: 5, 3: 1} == {level: sum(entry.counts) for level, entry in found.request_latency.items()}
