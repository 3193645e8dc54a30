"""A served model: batching, cancellation, timeouts, overload and stop, with a backend that waits at a gate."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from tests.case_files import Case, cases
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import TIMEOUT_S, CannotLoad, Echo
from tests.unit.serving.timelines_model import ModelTimeline

from weft.base.core import CallContext
from weft.base.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from weft.base.signature import ModelSignature
from weft.base.tensors import decode
from weft.serving.backends.base import InstanceContext
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy
from weft.serving.runtime.model import ServedModel

MS = 1_000_000


def _value(result):
    return decode(result.outputs["OUT"])[0, 0]


async def _queued(model, *calls):
    """Tasks of calls that have been admitted, in this order."""
    tasks = [asyncio.create_task(model.infer(call, CallContext())) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def _busy(model, gate, call):
    """The task of a call that is executed and waits at the gate."""
    (task,) = await _queued(model, call)
    await gate.entered()
    return task


@cases(Path(__file__).parent / "timelines" / "models.txt")
async def test_timeline(signature: ModelSignature, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Requests are batched, answered, refused, cancelled, given up and counted as the case says."""
    timeline = ModelTimeline(case, signature, monkeypatch)
    await timeline.model.start()
    said = [(line, await timeline.run(line)) for line in case.text.split("\n")]
    timeline.held.release("all")
    await timeline.model.stop(grace_s=TIMEOUT_S)
    case.check_script(lambda line: said.pop(0)[1])


async def test_answer(serve):
    """A request is answered with its outputs, its id, and the model's name and version."""
    model = await serve(Echo)
    result = await model.infer(make_call(5, rows=2), CallContext())
    assert ("echo", "1", "r5", 5) == (result.model_name, result.model_version, result.request_id, _value(result))


async def test_delay_ends(serve):
    """A batch that does not fill up goes after the delay, not before."""
    model = await serve(Echo, is_batching=True, max_queue_delay_us=3000)
    start_ns = time.monotonic_ns()
    await model.infer(make_call(), CallContext())
    assert time.monotonic_ns() - start_ns >= 3 * MS


async def test_cancel_after_the_answer_counts_once(serve, monkeypatch):
    """A cancel in the turn of the loop in which the answer came is not counted a second time."""
    model = await serve(Echo)
    task = asyncio.create_task(model.infer(make_call(), CallContext()))
    count = model.recorder.succeeded
    monkeypatch.setattr(model.recorder, "succeeded", lambda *args: (count(*args), task.cancel()))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (1, 0) == (model.statistics.success.count, model.statistics.fail.count)


async def test_delayed_request_is_executed_last(serve, gate, monkeypatch):
    """With DELAY a request that waited too long runs after one that came later, and is answered."""
    policy = WaitPolicy("DELAY", default_timeout_us=60_000_000, allow_timeout_override=True)
    model = await serve(gate.backend, is_batching=True, preferred_batch_sizes=(1,), default_policy=policy)
    first = await _busy(model, gate, make_call(0))
    expire, is_expired = model.queue.expire, asyncio.Event()
    monkeypatch.setattr(model.queue, "expire", lambda now_ns: (expire(now_ns), is_expired.set())[0])
    (late,) = await _queued(model, make_call(1, timeout=1))
    await asyncio.wait_for(is_expired.wait(), 5)
    (other,) = await _queued(model, make_call(2))
    gate.open()
    await asyncio.gather(first, late, other)
    assert [[0], [2], [1]] == gate.batches


async def test_retry_hint_follows_the_model(serve, gate):
    """The hint of a full queue is the measured time of a request, for each that waits, shared by the instances."""
    model = await serve(gate.backend, default_policy=WaitPolicy(max_queue_size=3))
    gate.open(1)
    await model.infer(make_call(0), CallContext())
    await gate.entered()
    statistics = model.statistics
    parts = (statistics.compute_input, statistics.compute_infer, statistics.compute_output)
    assert sum(part.total_ns for part in parts) == model.times._request_ns
    model.times._request_ns = 50.0 * MS
    running = await _busy(model, gate, make_call(1))
    rest = await _queued(model, make_call(2), make_call(3), make_call(4))
    with pytest.raises(ResourceExhaustedError) as raised:
        await model.infer(make_call(5), CallContext())
    assert 150 == raised.value.retry_after_ms
    gate.open()
    await asyncio.gather(running, *rest)


async def test_two_instances_run_at_once(serve):
    """Two instances execute at the same time, each on its own thread."""
    barrier = threading.Barrier(2, timeout=10)

    class Meets(Echo):
        def execute(self, batch):
            barrier.wait()
            return super().execute(batch)

    model = await serve(Meets, num_instances=2)
    results = await asyncio.gather(*(model.infer(make_call(value), CallContext()) for value in range(4)))
    assert [0, 1, 2, 3] == [_value(result) for result in results]


async def test_load_failure(model_context, gate):
    """A model of which one instance cannot load does not start; it says why and closes the others."""
    places = [InstanceContext("echo_0"), InstanceContext("echo_1")]

    class SecondFails(gate.backend):  # type: ignore[name-defined]
        def load(self):
            if self.instance.name == "echo_1":
                CannotLoad.load(self)

    model = ServedModel(model_context, SecondFails, SchedulerSettings(8), places)
    with pytest.raises(InternalError, match=r"instance echo_1: OSError: weights.bin is not there"):
        await model.start()
    assert 1 == gate.closed
    with pytest.raises(UnavailableError, match="is not at ready state"):
        await model.infer(make_call(), CallContext())


async def test_not_started(model_context):
    """A model that was never started refuses requests and can be stopped."""
    model = ServedModel(model_context, Echo, SchedulerSettings(8), [InstanceContext("echo_0")])
    with pytest.raises(UnavailableError, match="is not at ready state"):
        await model.infer(make_call(), CallContext())
    await model.stop(grace_s=0)


def test_bad_settings(model_context):
    """Settings that cannot be served are refused before anything is loaded."""
    settings = SchedulerSettings(8, is_batching=True, preferred_batch_sizes=(9,))
    with pytest.raises(InvalidArgumentError, match="got 9"):
        ServedModel(model_context, Echo, settings, [InstanceContext("echo_0")])
