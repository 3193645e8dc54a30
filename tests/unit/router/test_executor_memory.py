"""What a request held is freed with it, and does not wait for the collector of reference cycles."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError, WeftError
from weft.base.tensors import WireTensor
from weft.language.plan import GraphPlan
from weft.router.combine import METHODS, CombineMethod
from weft.router.executor import GraphExecutor
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.policies.cache import CachePlan
from weft.router.policies.hedge import HedgePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime


class Data(bytearray):
    """Bytes that can be watched."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only counting references frees memory."""
    gc.disable()
    yield
    gc.enable()


async def fail(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
    raise RemoteError("INTERNAL", "boom")


async def hold(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
    await asyncio.Event().wait()
    return {}


def chain() -> GraphPlan:
    """X -> good -> bad."""
    steps = [make.step("a", "good", {"IN": "X"}, {"OUT": "M"}), make.step("b", "bad", {"IN": "M"}, {"OUT": "Y"})]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))


def fork() -> GraphPlan:
    """X -> (good, bad, slow) at once."""
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": m}) for m in ("good", "bad", "slow")]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["good", "bad", "slow"]))


def ensemble(method: CombineMethod, members: tuple[str, ...]) -> GraphPlan:
    """X -> all members -> Y."""
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.Y"}) for m in members]
    combine = ("Y", method, {m: f"{m}.Y" for m in members}, {})
    return make.graph(make.node("root", EnsemblePlan, steps, inputs=["X"], outputs=["Y"], combines=[combine]))


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "failed"])
@pytest.mark.parametrize(
    "plan_of",
    [
        chain,
        fork,
        lambda: ensemble(METHODS["AVERAGE"], ("good", "bad", "slow")),
        lambda: ensemble(METHODS["FIRST"], ("good", "bad", "slow")),
        lambda: ensemble(METHODS["FIRST"], ("bad", "bad2")),
    ],
    ids=["chain", "fork", "average", "first", "all-fail"],
)
@pytest.mark.usefixtures("no_collector")
async def test_tensors_are_freed_when_the_request_is_over(plan_of: Callable[[], GraphPlan], fails: bool) -> None:
    """Also when it failed: an error that keeps its frames alive would keep every tensor of the request."""
    target = FakeTarget(**({"bad": fail, "bad2": fail, "slow": hold} if fails else {}))
    data = Data(4)
    watched = weakref.ref(data)
    inputs = {"X": WireTensor("FP32", (1,), data)}  # type: ignore[arg-type]
    del data
    with contextlib.suppress(WeftError):
        await make.run(plan_of(), target, inputs)
    target.calls.clear()
    inputs.clear()
    await asyncio.sleep(0)  # the loop lets go of the tasks that have ended
    assert watched() is None


@pytest.mark.parametrize("plan_of", [chain, fork], ids=["chain", "fork"])
@pytest.mark.usefixtures("no_collector")
async def test_tensors_are_freed_when_the_request_is_cancelled(plan_of: Callable[[], GraphPlan]) -> None:
    """A client that goes away takes its tensors with it."""
    is_called = asyncio.Event()

    async def hold_and_tell(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
        is_called.set()
        return await hold(call, context)

    target = FakeTarget(bad=hold_and_tell)
    data = Data(4)
    watched = weakref.ref(data)
    request = asyncio.create_task(make.run(plan_of(), target, {"X": WireTensor("FP32", (1,), data)}))  # type: ignore[arg-type]
    del data
    await is_called.wait()
    request.cancel()
    await asyncio.wait((request,))
    del request
    target.calls.clear()
    await asyncio.sleep(0)
    assert watched() is None


POLICIES: dict[str, dict[str, Any]] = {
    "soft": {"is_soft": True},
    "retry": {"retry": RetryPlan(3, 0, frozenset({"INTERNAL"}), 20.0)},
    "hedge": {"hedge": HedgePlan(0, 2)},
    "hedge that is not needed": {"hedge": HedgePlan(60_000, 1)},
    "cache": {"cache": CachePlan(0, 1)},
    "fallback": {"fallback": ("bad2",)},
    "all": {
        "is_soft": True,
        "retry": RetryPlan(3, 0, frozenset({"INTERNAL"}), 20.0),
        "hedge": HedgePlan(0, 2),
        "cache": CachePlan(0, 1),
        "fallback": ("bad2",),
        "max_inflight": 1,
        "timeout_ms": 1000,
    },
}


@pytest.mark.parametrize("ending", ["answered", "failed", "cancelled"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("no_collector")
async def test_policies_hold_no_tensors(policy: str, ending: str) -> None:
    """What was tried in vain is freed with the rest; an answer larger than the cache is not kept."""
    options = dict(POLICIES[policy])
    if "fallback" in options:
        options["fallback"] = make.step("f", "bad2", {"IN": "X"}, {"OUT": "Y"})
    steps = [make.step("a", "bad", {"IN": "X"}, {"OUT": "Y"}, **options)]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))
    scripts = {"answered": {}, "failed": {"bad": fail, "bad2": fail}, "cancelled": {"bad": hold}}[ending]
    target = FakeTarget(**scripts)
    executor = GraphExecutor(plan, Runtime({"model": target}))
    data = Data(4)
    watched = weakref.ref(data)
    request = asyncio.create_task(make.run(executor, inputs={"X": WireTensor("FP32", (1,), data)}))  # type: ignore[arg-type]
    del data
    await asyncio.wait((request,), timeout=0.01 if ending == "cancelled" else None)
    request.cancel()
    await asyncio.wait((request,))
    assert (ending == "cancelled") == request.cancelled()
    if not request.cancelled():
        request.exception()
    del request
    target.calls.clear()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert watched() is None
