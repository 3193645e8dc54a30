"""Models that declare that they execute on the event loop."""

import asyncio
import logging
import threading
from typing import ClassVar

import pytest
from tests.unit.serving import fake_backends
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import TIMEOUT_S, Echo

from weft.base.core import CallContext, InferResult
from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.statistics import ModelStatistics
from weft.base.tensors import decode
from weft.serving.metrics import inline_metrics
from weft.serving.runtime.recorder import LIMIT_NS, Recorder


class Noted(Echo):
    """Tells what it executed, and on which thread."""

    batches: ClassVar[list[list[float]]] = []
    threads: ClassVar[list[int]] = []

    def execute(self, batch):
        self.batches.append([float(request.array("IN")[0, 0]) for request in batch.requests])
        self.threads.append(threading.get_ident())
        return super().execute(batch)


class Fragile(Noted):
    """Is lost after its first execution; its second load waits for ``may_load``."""

    num_loads, is_lost = 0, False
    may_load = threading.Event()

    def load(self):
        super().load()
        if type(self).num_loads:
            assert self.may_load.wait(TIMEOUT_S)
        type(self).num_loads += 1
        self.is_lost = False

    def execute(self, batch):
        self.is_lost = type(self).num_loads == 1
        return super().execute(batch)

    def why_lost(self):
        return "gone" if self.is_lost else ""


@pytest.fixture(autouse=True)
def _nothing_noted():
    """Each test begins with nothing executed."""
    Noted.batches.clear()
    Noted.threads.clear()
    Fragile.num_loads = 0
    Fragile.may_load.clear()


def _answer_of(result: InferResult) -> tuple[float, int]:
    return float(decode(result.outputs["OUT"])[0, 0]), int(decode(result.outputs["COUNT"])[0, 0])


async def _ask(model, value=1.0, **context):
    async with asyncio.timeout(TIMEOUT_S):
        return _answer_of(await model.infer(make_call(value), CallContext(**context)))


async def test_a_lone_request_is_answered_where_it_stands(serve):
    """Without batching the coroutine ends with its first step: no thread, no task, no turn of the event loop."""
    model = await serve(Noted, is_inline=True)
    with pytest.raises(StopIteration) as ended:
        model.infer(make_call(7), CallContext()).send(None)
    assert (7.0, 1) == _answer_of(ended.value.value)
    assert [threading.get_ident()] == Noted.threads


async def test_others_have_a_turn_between_two_batches(serve):
    """A queue of several batches does not hold the event loop until it is empty."""
    model = await serve(Noted, is_inline=True, is_batching=True)
    requests = [asyncio.ensure_future(_ask(model, value)) for value in range(20)]
    turns = []
    while len(Noted.batches) < 3:
        await asyncio.sleep(0)
        turns.append(len(Noted.batches))
    assert {1, 2} <= set(turns)
    assert [8, 8, 4] == [len(batch) for batch in Noted.batches]
    assert list(range(20)) == [value for value, _ in await asyncio.gather(*requests)]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (fake_backends.Raises, InternalError),
        (fake_backends.Exits, InternalError),
        (fake_backends.TooFewOutcomes, InternalError),
        (fake_backends.WrongShape, InternalError),
        (fake_backends.RaisesOwnError, InvalidArgumentError),
    ],
)
async def test_what_the_model_does_wrong_fails_its_own_requests(serve, backend, expected):
    """An error, even an exit, reaches the callers and not the event loop; the instance takes the next request."""
    model = await serve(backend, is_inline=True)
    for _ in range(2):
        with pytest.raises(WeftError) as caught:
            await _ask(model)
        assert expected is type(caught.value)


async def test_a_lost_backend_is_loaded_again_on_its_thread(serve):
    """The request that comes meanwhile waits for it."""
    model = await serve(Fragile, is_inline=True)
    assert (1.0, 1) == await _ask(model, 1)  # without a turn of the event loop, which would learn of the loss
    asyncio.get_running_loop().call_soon(Fragile.may_load.set)
    assert (2.0, 1) == await _ask(model, 2)
    assert (2, 1) == (Fragile.num_loads, model.statistics.restart_count)


async def test_inline_executions_are_counted_as_others(serve):
    """Executions, requests and times; and no overrun where there is none."""
    model = await serve(Noted, is_inline=True)
    await _ask(model)
    statistics = model.statistics
    parts = (statistics.queue, statistics.compute_input, statistics.compute_infer, statistics.compute_output)
    assert (1, 1, 1, 0) == (
        statistics.execution_count,
        statistics.success.count,
        statistics.inference_count,
        statistics.inline_overrun_count,
    )
    assert sum(part.total_ns for part in parts) <= statistics.success.total_ns


def test_an_execution_that_takes_too_long_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the model's name; each counts, and of those within ten seconds one is logged."""
    statistics = ModelStatistics("slow", "3")
    recorder = Recorder(statistics, is_inline=True)
    with caplog.at_level(logging.WARNING, "weft.serving"):
        for duration_ns, now_ns in ((LIMIT_NS + 1, 10), (2 * LIMIT_NS, 20), (2 * LIMIT_NS, 2 * 10**10)):
            recorder.overran(duration_ns, now_ns)
    assert 3 == statistics.inline_overrun_count
    first, second = caplog.messages
    assert first.startswith("model 'slow' held the event loop for 5.0 ms, 1 times so far")
    assert second.startswith("model 'slow' held the event loop for 10.0 ms, 3 times so far")
    (family,) = inline_metrics([statistics, ModelStatistics("threaded", "1")])
    assert [("weft_inline_overruns_total", {"model": "slow", "version": "3"}, 3)] == [
        (sample.name, sample.labels, sample.value) for sample in family.samples
    ]
