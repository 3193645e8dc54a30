"""The lowest level in the background: which level that is, what waits for what, and the priority of the thread."""

import asyncio
import os
import threading
from typing import Any

import pytest
from tests.unit.serving.builders import make_call, make_request
from tests.unit.serving.fake_backends import TIMEOUT_S, Echo

from weft.base.core import CallContext
from weft.base.tensors import decode
from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import SchedulerSettings, SequenceSettings

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the operating system has no such priority")

LEVELS: dict[str, Any] = {"is_batching": True, "priority_levels": 3, "default_priority_level": 2}


class _Doors:
    """Executions of values from 100 on wait until they are let go; tells who executed what."""

    def __init__(self, *, can_share=True):
        self.batches = []
        self.policies = []
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        doors = self

        class Held(Echo):
            def can_share_processor(self):
                return can_share

            def execute(self, batch):
                values = [float(request.array("IN")[0, 0]) for request in batch.requests]
                doors.batches.append(values)
                if max(values) >= 100:
                    doors.entered.release()
                    assert doors.go.acquire(timeout=TIMEOUT_S)
                return super().execute(batch)

            def run(self, inputs, num_rows):
                doors.policies.append((float(inputs["IN"][0, 0]), os.sched_getscheduler(0)))
                return super().run(inputs, num_rows)

        self.backend = Held

    async def wait(self):
        assert await asyncio.to_thread(self.entered.acquire, timeout=TIMEOUT_S)


def _infer(model, value, priority=0):
    parameters = {"priority": priority} if priority else {}
    return asyncio.ensure_future(model.infer(make_call(value, **parameters), CallContext()))


async def _count(answer):
    """Rows of the batch that a request was in."""
    async with asyncio.timeout(TIMEOUT_S):
        return int(decode((await answer).outputs["COUNT"])[0, 0])


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({}, 3),
        ({"default_priority_level": 3}, 0),
        ({"priority_levels": 1, "default_priority_level": 1}, 0),
        ({"priority_levels": 0, "default_priority_level": 0}, 0),
        ({"is_batching": False}, 0),
        ({"priority_aging_us": 1000}, 0),
        ({"execution_timeout_us": 1000}, 0),
        ({"sequences": SequenceSettings()}, 0),
    ],
)
def test_only_the_lowest_of_strict_levels_is_in_the_background_and_never_the_default(settings, level):
    """So nothing runs in the background unless a request asked for the lowest level, and no limit of time counts."""
    assert SchedulerSettings(8, **{**LEVELS, **settings}).background_level == level


def test_a_range_of_levels_is_a_part_of_the_order_of_service():
    """The ranges of a queue hold each request once, and follow the queue as it changes."""
    queue = PriorityQueue(SchedulerSettings(8, **LEVELS))
    better, worst = queue.apart(3)
    assert (list(better), list(worst), len(better), len(worst)) == ([], [], 0, 0)
    requests = [make_request(priority=priority) for priority in (3, 2, 1, 3, 1)]
    for request in requests:
        queue.add(request, 0)
    assert list(better) == [requests[2], requests[4], requests[1]]
    assert list(worst) == [requests[0], requests[3]]
    assert [*better, *worst] == list(queue)
    queue.take([requests[0], requests[2]], 0)
    assert (len(better), len(worst)) == (2, 1)


async def test_a_priority_that_a_model_without_levels_does_not_know_is_told_once(serve, caplog):
    """It is served, as with Triton, and the log says that and why it goes before nobody."""
    caplog.set_level("INFO")
    doors = _Doors()
    model = await serve(doors.backend, is_batching=True)
    assert [await _count(_infer(model, value, priority)) for value, priority in ((1, 0), (2, 1), (3, 2))] == [1, 1, 1]
    (record,) = caplog.records
    assert (
        "a request for model 'echo' has priority 1, but its configuration has no priority_levels" in record.getMessage()
    )


async def test_a_better_request_does_not_wait_for_one_of_the_lowest_level(serve):
    """With one instance, whose background executes, the better one is answered meanwhile, on the thread as ever."""
    doors = _Doors()
    model = await serve(doors.backend, **LEVELS)
    background = _infer(model, 100, 3)
    await doors.wait()
    assert await _count(_infer(model, 1, 1)) == 1
    assert await _count(_infer(model, 2)) == 1
    assert not background.done()
    doors.go.release()
    assert await _count(background) == 1
    policies = dict(doors.policies)
    assert policies.pop(100) == os.SCHED_IDLE
    assert os.SCHED_IDLE not in policies.values()


async def test_the_lowest_level_shares_no_batch_with_better_ones(serve):
    """What waits together is executed in two batches; those of the lowest level share theirs."""
    doors = _Doors()
    model = await serve(doors.backend, **LEVELS)
    answers = [_infer(model, value, priority) for value, priority in ((1, 1), (2, 3), (3, 2), (4, 3))]
    assert [await _count(answer) for answer in answers] == [2, 2, 2, 2]
    assert sorted(map(sorted, doors.batches)) == [[1, 3], [2, 4]]


async def test_the_lowest_level_does_not_run_on_idle_instances(serve):
    """While the background executes, what comes at the lowest level waits for it, and runs next."""
    doors = _Doors()
    model = await serve(doors.backend, **LEVELS)
    first = _infer(model, 100, 3)
    await doors.wait()
    second = _infer(model, 5, 3)
    assert await _count(_infer(model, 1, 1)) == 1  # the instance was idle, and is again
    assert not second.done()
    doors.go.release()
    assert [await _count(first), await _count(second)] == [1, 1]


async def test_without_a_backend_that_can_levels_share_batches(serve):
    """A backend that computes on threads of its own, or is not safe for two, gets one batch after another."""
    doors = _Doors(can_share=False)
    model = await serve(doors.backend, **LEVELS)
    held = _infer(model, 100, 3)
    await doors.wait()
    others = [_infer(model, 1, 1), _infer(model, 2, 3)]
    doors.go.release()
    assert [await _count(answer) for answer in (held, *others)] == [1, 2, 2]
    assert os.SCHED_IDLE not in dict(doors.policies).values()


async def test_a_stop_answers_what_runs_in_the_background(serve):
    """The model closes when its background has executed what it was given, and what waits for it."""
    doors = _Doors()
    model = await serve(doors.backend, **LEVELS)
    answers = [_infer(model, 100, 3)]
    await doors.wait()
    answers.append(_infer(model, 1, 3))
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(model.stop(grace_s=TIMEOUT_S))
    await asyncio.sleep(0)
    doors.go.release()
    assert [await _count(answer) for answer in answers] == [1, 1]
    await stopping


async def test_a_withdrawn_request_of_the_background_costs_others_nothing(serve):
    """Cancelled while it runs, its batch ends as it would, and the next one follows."""
    doors = _Doors()
    model = await serve(doors.backend, **LEVELS)
    first = _infer(model, 100, 3)
    await doors.wait()
    first.cancel()
    second = _infer(model, 1, 3)
    doors.go.release()
    assert await _count(second) == 1


async def test_a_failure_in_the_background_is_that_of_its_requests_alone(serve):
    """The thread goes on."""

    class Fails(Echo):
        is_repeatable = False

        def can_share_processor(self):
            return True

        def execute(self, batch):
            if any(request.array("IN")[0, 0] == 13 for request in batch.requests):
                raise ValueError("unlucky")
            return super().execute(batch)

    model = await serve(Fails, **LEVELS)
    with pytest.raises(Exception, match="failed to execute"):
        await _infer(model, 13, 3)
    assert await _count(_infer(model, 1, 3)) == 1


async def test_what_takes_long_in_the_background_refuses_no_deadline(serve):
    """Its durations say nothing of those of better requests: the medians that deadlines are held against lack them."""
    doors = _Doors()
    model = await serve(doors.backend, **LEVELS)
    for number in range(20):
        await _infer(model, number, 3)
    assert model.times.median_ns(1, 0) == 0
