"""What the router knows of its targets: found at the start, lost, found again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.language import GraphSource
from weft.router.compile import check_graph
from weft.router.target import Target, TargetModel
from weft.router.targets.catalog import FIRST_BACKOFF_S, TargetCatalog
from weft.router.targets.replicas import Health, MembershipSettings, OnHealth
from weft.router.targets.replicated import ReplicatedTarget
from weft.router.targets.specification import BalancingPolicy

FOR_EVER_S = 3_600.0
GONE = RemoteError("UNAVAILABLE", "cannot be reached")


@dataclass
class StartedCatalog:
    """A running catalog; `until` waits for a change after which a claim holds."""

    catalog: TargetCatalog
    until: Callable[[Callable[[], bool]], Awaitable[None]]


@asynccontextmanager
async def started(*targets: Any, poll_s: float = FOR_EVER_S) -> AsyncIterator[StartedCatalog]:
    """A catalog that polls once an hour."""
    changed = asyncio.Event()
    catalog = TargetCatalog(targets, poll_s=poll_s, on_change=changed.set)
    await catalog.start()

    async def until(claim: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not claim():
                changed.clear()
                await changed.wait()

    try:
        yield StartedCatalog(catalog, until)
    finally:
        await catalog.close()


def serving(target: FakeTarget, *models: str, version: str = "1", is_ready: bool = True) -> None:
    target.models = [TargetModel(make.signature(model, version=version), is_ready) for model in models]


async def test_models_of_all_targets_are_found() -> None:
    """Each model leads to the target that serves it; versions may be left out."""
    first, second = FakeTarget("preprocess"), FakeTarget("model")
    serving(first, "tokenize")
    serving(second, "bert", "lid", version="3")
    async with started(first, second) as s:
        assert "preprocess" == s.catalog.find("tokenize", "")[0]
        assert ("model", make.signature("bert", version="3")) == s.catalog.find("bert", "3")
        assert s.catalog.find("bert", "4") is None
        assert s.catalog.find("nobody", "") is None
        assert ["tokenize", "bert", "lid"] == s.catalog.names()
        assert [] == s.catalog.unreachable


async def test_the_default_version_is_the_highest_that_is_ready() -> None:
    """Numbers are compared as numbers; without any ready version it is the highest."""
    target = FakeTarget()
    target.models = [
        TargetModel(make.signature("m", version=version), is_ready)
        for version, is_ready in (("9", True), ("10", True), ("11", False))
    ]
    async with started(target) as s:
        assert "10" == s.catalog.find("m", "")[1].version
        target.models = [model._replace(is_ready=False) for model in target.models]
        s.catalog.wake("model")
        await s.until(lambda: s.catalog.find("m", "")[1].version == "11")


async def test_of_two_targets_with_one_model_the_first_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """The order of the command line decides, and is told once."""
    first, second = FakeTarget("a"), FakeTarget("b")
    serving(first, "m")
    serving(second, "m", "other")
    async with started(first, second) as s:
        assert "a" == s.catalog.find("m", "")[0]
        assert "b" == s.catalog.find("other", "")[0]
        serving(second, "m")
        s.catalog.wake("b")
        await s.until(lambda: s.catalog.find("other", "") is None)
    text = (
        "model 'm' is served by the targets 'a' and 'b'; of those where it is ready, the one that was given first is "
        "used"
    )
    assert [text] == [record.message for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_replica_takes_over_while_the_first_target_is_gone() -> None:
    """The model stays ready; when the first target is back, it is used again."""
    first, second = FakeTarget("a"), FakeTarget("b")
    serving(first, "m")
    serving(second, "m")
    async with started(first, second) as s:
        first.models = GONE
        s.catalog.wake("a")
        await s.until(lambda: s.catalog.find("m", "")[0] == "b")
        assert s.catalog.entry("m", "").model.is_ready
        second.models = GONE
        s.catalog.wake("b")
        await s.until(lambda: not s.catalog.entry("m", "").model.is_ready)
        assert "a" == s.catalog.find("m", "1")[0]
        serving(first, "m")
        await s.until(lambda: s.catalog.entry("m", "").model.is_ready)
        assert "a" == s.catalog.find("m", "")[0]


async def test_a_lost_target_keeps_its_models_but_they_are_not_ready() -> None:
    """An UNAVAILABLE answer makes the catalog ask at once, not at the next poll; it comes back by itself."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, Any]:
        raise GONE

    target = FakeTarget(m=fail)
    serving(target, "m")
    async with started(target) as s:
        target.models = GONE
        with pytest.raises(RemoteError):
            await s.catalog.targets["model"].infer(InferCall("m"), CallContext())
        await s.until(lambda: not s.catalog.entry("m", "").model.is_ready)
        assert ["model (fake:1)"] == s.catalog.unreachable
        assert s.catalog.find("m", "") is not None
        serving(target, "m", version="2")
        await s.until(lambda: s.catalog.entry("m", "").model.is_ready)
        assert "2" == s.catalog.find("m", "")[1].version
        assert [] == s.catalog.unreachable


async def test_a_replica_that_comes_back_ends_the_pause() -> None:
    """While all were lost the pause between two questions has grown; nobody waits for its end."""
    tells: list[OnHealth] = []

    async def watch(target: Target, tell: OnHealth) -> None:
        tells.append(tell)
        await asyncio.Event().wait()

    async def resolve() -> list[str]:
        return ["a:1"]

    fake = FakeTarget("a:1")
    target = ReplicatedTarget(
        "model", "a:1", BalancingPolicy(), MembershipSettings(resolve, True, lambda address: fake, watch)
    )
    fake.models = GONE
    async with started(target) as s:
        s.catalog.targets["model"].backoff_s = FOR_EVER_S
        await asyncio.sleep(2 * FIRST_BACKOFF_S)
        serving(fake, "m")
        for health in (Health.UNREACHABLE, Health.SERVING):
            tells[0](health)
        await s.until(lambda: s.catalog.find("m", "") is not None)


async def test_a_target_that_is_down_at_the_start_is_tried_until_it_answers() -> None:
    """The start does not wait for it."""
    target = FakeTarget()
    target.models = GONE
    async with started(target) as s:
        assert [] == s.catalog.names()
        serving(target, "m")
        await s.until(lambda: s.catalog.names() == ["m"])


async def test_a_graph_over_a_model_that_could_not_be_loaded_says_why() -> None:
    """The target's own words stand where the file names the model; a model that nobody lists is unknown."""
    target = FakeTarget()
    target.models = [TargetModel.undescribed("broken", "1", "UNAVAILABLE", "model.onnx is no ONNX file")]
    text = """name: "g" platform: "graph" input { name: "X" data_type: TYPE_FP32 dims: 1 }
    node { name: "root" sequence { step { model_name: "broken" } step { model_name: "other" } } }"""
    async with started(target) as s:
        found = [d.message for d in check_graph(GraphSource(text, "g"), s.catalog) if d.code == "G002"]
    assert ["model 'broken' is not ready: model.onnx is no ONNX file", "unknown model 'other'"] == found


async def test_a_poll_finds_new_models() -> None:
    """Nobody has to call anything."""
    target = FakeTarget()
    async with started(target, poll_s=0.01) as s:
        serving(target, "m")
        await s.until(lambda: s.catalog.names() == ["m"])


async def test_calls_are_counted_per_model_version() -> None:
    """Success, failure with its reason, rows of a batching model; the parts add up to the whole."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, Any]:
        raise RemoteError("RESOURCE_EXHAUSTED", "full")

    target = FakeTarget(bad=fail)
    target.models = [
        TargetModel(make.signature("good", max_batch_size=8, version="3"), is_ready=True),
        TargetModel(make.signature("bad", version="2"), is_ready=True),
    ]
    async with started(target) as s:
        caller = s.catalog.targets["model"]
        await caller.infer(
            InferCall("good", "3", inputs={"IN": make.tensor(1, 2, shape=(2, 1))}, num_rows=2), CallContext()
        )
        with pytest.raises(RemoteError):
            await caller.infer(InferCall("bad", parameters={"priority": 1}), CallContext(priority=1))
        good, bad = s.catalog.statistics["good", "3"], s.catalog.statistics["bad", "2"]
    assert (1, 1, 1, 2) == (good.success.count, good.queue.count, good.execution_count, good.inference_count)
    assert good.success.total_ns == good.compute_infer.total_ns > 0
    assert (0, 1, {"REJECTED": 1}) == (bad.success.count, bad.fail.count, bad.failures_by_reason)


async def test_a_cancelled_call_is_counted_as_cancelled() -> None:
    """The counter is CANCELED, as Triton Inference Server spells it."""
    is_called = asyncio.Event()

    async def never(call: InferCall, context: CallContext) -> dict[str, Any]:
        is_called.set()
        await asyncio.Event().wait()
        return {}

    target = FakeTarget(m=never)
    serving(target, "m")
    async with started(target) as s:
        call = asyncio.create_task(s.catalog.targets["model"].infer(InferCall("m"), CallContext()))
        await is_called.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert {"CANCELED": 1} == s.catalog.statistics["m", "1"].failures_by_reason


async def test_closing_leaves_no_task_and_closes_the_targets() -> None:
    """Pollers end with the catalog."""
    target = FakeTarget()
    async with started(target):
        assert 1 == make.num_other_tasks()
    assert 0 == make.num_other_tasks()
    assert target.is_closed


async def test_counters_of_a_model_go_with_it() -> None:
    """Not when its target is lost for a while, which keeps them."""
    target = FakeTarget()
    serving(target, "old", "m")
    async with started(target) as s:
        await s.catalog.targets["model"].infer(InferCall("m", inputs={"X": make.tensor(1)}), CallContext())
        counters = s.catalog.statistics["m", "1"]
        target.models = GONE
        s.catalog.wake("model")
        await s.until(lambda: s.catalog.unreachable != [])
        serving(target, "m")
        await s.until(lambda: s.catalog.find("old", "") is None)
        assert {("m", "1"): counters} == s.catalog.statistics


async def test_a_version_that_is_no_number_is_the_last_to_be_used() -> None:
    """Whatever another server lists."""
    target = FakeTarget()
    target.models = [TargetModel(make.signature("m", version=version), True) for version in ("²", "x", "1", "-2")]
    async with started(target) as s:
        assert "1" == s.catalog.find("m", "")[1].version
