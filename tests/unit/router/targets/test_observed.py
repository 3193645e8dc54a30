"""What is counted of the calls of a target."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.stream_targets import collected, stream_target

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.base.statistics import ModelStatistics
from weft.router.target import RetryBudget
from weft.router.targets.catalog import ObservedTarget


class Observed:
    """A target with a model `llm`, observed; `lost` has the names that it told were not there."""

    def __init__(self, error: Exception | None = None) -> None:
        self.statistics: dict[tuple[str, str], ModelStatistics] = {}
        self.lost: list[str] = []
        inner = stream_target()

        async def stream(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
            yield make.tensor(1)
            if error is not None:
                raise error
            yield make.tensor(2)

        async def hang(call: InferCall, context: CallContext) -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        inner.streams["llm"] = stream
        inner.answers["llm"] = hang
        batching = make.signature("llm", max_batch_size=8, version="3")
        self.target = ObservedTarget(
            inner, self.statistics, self.lost.append, lambda name, version: batching, RetryBudget()
        )
        self.call = InferCall("llm", inputs={"IN": make.tensor(1, 2, 3, shape=(3, 1))}, num_rows=3)

    @property
    def counted(self) -> dict[str, tuple[int, int, dict[str, int]]]:
        """Model version -> rows, successes, failures by reason."""
        return {
            version: (one.inference_count, one.success.count, one.failures_by_reason)
            for (_, version), one in self.statistics.items()
        }


async def test_a_whole_stream_is_one_success() -> None:
    """Of the version that answered, and as many rows as were sent."""
    observed = Observed()
    await collected(observed.target.stream_infer(observed.call, CallContext()))
    assert {"1": (3, 1, {})} == observed.counted


@pytest.mark.parametrize(
    ("code", "reason", "lost"), [("UNAVAILABLE", "BACKEND", ["model"]), ("INTERNAL", "BACKEND", [])]
)
async def test_a_stream_that_fails_is_one_failure(code: str, reason: str, lost: list[str]) -> None:
    """Though responses came before; a target that is not there is told of."""
    observed = Observed(RemoteError(code, "boom"))
    _, error = await collected(observed.target.stream_infer(observed.call, CallContext()))
    assert code == error.code
    assert ({"3": (0, 0, {reason: 1})}, lost) == (observed.counted, observed.lost)


async def test_what_is_left_counts_as_cancelled() -> None:
    """A stream that is closed, and a call that is cancelled."""
    observed = Observed()
    async with aclosing(observed.target.stream_infer(observed.call, CallContext())) as results:
        await anext(results)
    assert {"3": (0, 0, {"CANCELED": 1})} == observed.counted
    task = asyncio.create_task(observed.target.infer(observed.call, CallContext()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    assert {"3": (0, 0, {"CANCELED": 2})} == observed.counted
