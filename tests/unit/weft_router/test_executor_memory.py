"""What a request held is freed with it, and does not wait for the collector of reference cycles."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from weft_common.core import CallContext, InferCall
from weft_common.errors import RemoteError, WeftError
from weft_common.tensors import WireTensor
from weft_router.graph.plan import CombineMethod, GraphPlan, NodeKind


class Data(bytearray):
    """Bytes that can be watched."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only counting references frees memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def fail(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
    raise RemoteError("INTERNAL", "boom")


async def hold(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
    await asyncio.Event().wait()
    return {}


def chain(make: SimpleNamespace) -> GraphPlan:
    """X -> good -> bad."""
    steps = [make.step("a", "good", {"IN": "X"}, {"OUT": "M"}), make.step("b", "bad", {"IN": "M"}, {"OUT": "Y"})]
    return make.graph(make.node("root", NodeKind.SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


def fork(make: SimpleNamespace) -> GraphPlan:
    """X -> (good, bad, slow) at once."""
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": m}) for m in ("good", "bad", "slow")]
    return make.graph(make.node("root", NodeKind.SEQUENCE, steps, inputs=["X"], outputs=["good", "bad", "slow"]))


def ensemble(make: SimpleNamespace, method: CombineMethod, members: tuple[str, ...]) -> GraphPlan:
    """X -> all members -> Y."""
    steps = [make.step(m, m, {"IN": "X"}, {"OUT": f"{m}.Y"}) for m in members]
    combine = ("Y", method, {m: f"{m}.Y" for m in members}, {})
    return make.graph(make.node("root", NodeKind.ENSEMBLE, steps, inputs=["X"], outputs=["Y"], combines=[combine]))


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "failed"])
@pytest.mark.parametrize(
    "plan_of",
    [
        chain,
        fork,
        lambda make: ensemble(make, CombineMethod.AVERAGE, ("good", "bad", "slow")),
        lambda make: ensemble(make, CombineMethod.FIRST, ("good", "bad", "slow")),
        lambda make: ensemble(make, CombineMethod.FIRST, ("bad", "bad2")),
    ],
    ids=["chain", "fork", "average", "first", "all-fail"],
)
@pytest.mark.usefixtures("no_collector")
async def test_tensors_are_freed_when_the_request_is_over(
    make: SimpleNamespace, plan_of: Callable[[SimpleNamespace], GraphPlan], fails: bool
) -> None:
    """Also when it failed: an error that keeps its frames alive would keep every tensor of the request."""
    target = make.FakeTarget(**({"bad": fail, "bad2": fail, "slow": hold} if fails else {}))
    data = Data(4)
    watched = weakref.ref(data)
    inputs = {"X": WireTensor("FP32", (1,), data)}
    del data
    with contextlib.suppress(WeftError):
        await make.run(plan_of(make), target, inputs)
    target.calls.clear()
    inputs.clear()
    await asyncio.sleep(0)  # the loop lets go of the tasks that have ended
    assert watched() is None


@pytest.mark.parametrize("plan_of", [chain, fork], ids=["chain", "fork"])
@pytest.mark.usefixtures("no_collector")
async def test_tensors_are_freed_when_the_request_is_cancelled(
    make: SimpleNamespace, plan_of: Callable[[SimpleNamespace], GraphPlan]
) -> None:
    """A client that goes away takes its tensors with it."""
    is_called = asyncio.Event()

    async def hold_and_tell(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
        is_called.set()
        return await hold(call, context)

    target = make.FakeTarget(bad=hold_and_tell)
    data = Data(4)
    watched = weakref.ref(data)
    request = asyncio.create_task(make.run(plan_of(make), target, {"X": WireTensor("FP32", (1,), data)}))
    del data
    await is_called.wait()
    request.cancel()
    await asyncio.wait((request,))
    del request
    target.calls.clear()
    await asyncio.sleep(0)
    assert watched() is None
