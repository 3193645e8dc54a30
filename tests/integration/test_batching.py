"""Batching, priorities and deadlines of a real model service process, seen by a real client."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.batching import WAITS, Service, arrays, message, running_service, write_model

DELAY_S = 2.0
DELAY = f"max_queue_delay_microseconds: {int(DELAY_S * 1e6)}"
LEVELS = "priority_levels: 2 default_priority_level: 2"
MODELS = {
    "table": f"dynamic_batching {{ preferred_batch_size: [ 2, 6 ] {DELAY} }}",
    "batched": "dynamic_batching { }",
    "ordered": "dynamic_batching { preferred_batch_size: [ 1 ] preserve_ordering: true } "
    "instance_group { count: 2 kind: KIND_CPU }",
    "levels": f"dynamic_batching {{ preferred_batch_size: [ 1 ] {LEVELS} "
    "priority_queue_policy { key: 1 value { max_queue_size: 2 } } }",
    "rejects": "dynamic_batching { default_queue_policy { default_timeout_microseconds: 60000000 "
    "allow_timeout_override: true } }",
    "splits": 'dynamic_batching { } parameters { key: "split_large_requests" value { string_value: "true" } }',
}


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Any]]:
    """Endpoints of a service that holds its batches until ``num_to_hold`` requests are queued; 0: it does not."""
    repository: Path = tmp_path_factory.mktemp("repository")
    for name, config in MODELS.items():
        write_model(repository, name, config)
    running: dict[int, Any] = {}
    with ExitStack() as stack:

        def start(num_to_hold: int) -> Any:
            if num_to_hold not in running:
                started = running_service(repository, num_to_hold=num_to_hold)
                running[num_to_hold] = (stack.enter_context(started), repository)
            return running[num_to_hold]

        yield start


@pytest.fixture
async def service(endpoints: Callable[[int], Any]) -> AsyncIterator[Callable[..., Any]]:
    """A service, from a model's name and the number of requests to hold, with the model freshly loaded."""
    async with AsyncExitStack() as stack:

        async def start(model: str, num_to_hold: int = 0) -> Service:
            started = Service(*endpoints(num_to_hold))
            stack.push_async_callback(started.channel.close)
            await started.load(model)
            return started

        yield start


@pytest.mark.parametrize(
    ("rows", "expected", "is_late"),
    [
        pytest.param([2, 6], {2: 1, 6: 1}, False, id="preferred sizes go at once"),
        pytest.param([7], {7: 1}, False, id="above the largest preferred goes at once"),
        pytest.param([1, 3], {4: 1}, True, id="what comes within the delay joins"),
    ],
)
async def test_outcomes(service: Callable[..., Any], rows: list[int], expected: dict[int, int], is_late: bool) -> None:
    """max_batch_size 8, preferred [2, 6], a delay: requests that are queued together lead to these executions."""
    held = await service("table", len(rows) if len(rows) > 1 else 0)
    start_s = time.monotonic()
    responses = await held.stream(*(message("table", number, count) for number, count in enumerate(rows)))
    assert is_late == (time.monotonic() - start_s >= DELAY_S)
    outputs = [arrays(response)["OUT"] for response in responses]
    assert [(count, number) for number, count in enumerate(rows)] == [(len(out), out[0, 0]) for out in outputs]
    assert expected == await held.executions("table")


async def test_different_outputs_share_a_batch(service: Callable[..., Any]) -> None:
    """Two requests that ask for different outputs are one batch, and each gets what it asked for."""
    held = await service("table", 2)
    responses = await held.stream(
        message("table", 1, outputs=("OUT",)), message("table", 2, outputs=("COUNT", "NUMBER"))
    )
    assert [["OUT"], ["COUNT", "NUMBER"]] == [[output.name for output in found.outputs] for found in responses]
    assert {2: 1} == await held.executions("table")


async def _finish(running: Service, model: str, *calls: Any) -> list[Any]:
    """Answers of calls, after the execution that blocks has been let go."""
    await running.release(model)
    return [arrays(response) for response in await asyncio.gather(*calls)]


async def _in_queue(running: Service, model: str, *requests: Any) -> list[Any]:
    """Calls that wait in the queue, in this order."""
    calls = []
    for count, request in enumerate(requests, start=1):
        calls.append(running.call(request))
        await running.queued(model, count)
    return calls


async def test_levels(service: Callable[..., Any]) -> None:
    """Level 1 is executed before level 2 whatever came first; no level, or one that does not exist, is the default."""
    running = await service("levels")
    blocked = await running.block("levels")
    calls = await _in_queue(
        running, "levels", *(message("levels", number, priority=level) for number, level in enumerate((2, 0, 9, 1)))
    )
    assert [3.0, 1.0] == [await running.metric(_queue_size("levels", level)) for level in (2, 1)]
    answers = await _finish(running, "levels", blocked, *calls)
    assert [0, 2, 3, 4, 1] == [found["NUMBER"][0, 0] for found in answers]
    assert 1 == await running.metric('weft_queue_latency_seconds_count{model="levels",priority="1",version="1"}')


def _queue_size(model: str, level: int) -> str:
    return f'weft_queue_size{{model="{model}",priority="{level}",version="1"}}'


async def test_full_level(service: Callable[..., Any]) -> None:
    """A full level refuses at once with RESOURCE_EXHAUSTED and a hint when to come back; the other level takes more."""
    running = await service("levels")
    blocked = await running.block("levels")
    calls = await _in_queue(running, "levels", message("levels", 1, priority=1), message("levels", 2, priority=1))
    full = "Exceeds maximum queue size: 2 requests wait at priority level 1 already"
    with pytest.raises(grpc.aio.AioRpcError, match=full) as raised:
        await running.call(message("levels", 3, priority=1))
    assert grpc.StatusCode.RESOURCE_EXHAUSTED == raised.value.code()
    assert int(dict(raised.value.trailing_metadata())["retry-after-ms"]) >= 1
    calls.append(running.call(message("levels", 4, priority=2)))
    assert 4 == len(await _finish(running, "levels", blocked, *calls))


async def test_a_request_that_waits_too_long_fails(service: Callable[..., Any]) -> None:
    """At once, while the only instance is busy; it is gone, and never executed."""
    running = await service("rejects")
    blocked = await running.block("rejects")
    with pytest.raises(grpc.aio.AioRpcError, match="Request timeout expired") as raised:
        await running.call(message("rejects", 1, timeout=20_000))
    assert grpc.StatusCode.DEADLINE_EXCEEDED == raised.value.code()
    await _finish(running, "rejects", blocked)
    assert {1: 1} == await running.executions("rejects")


async def test_cancel_one_of_four(service: Callable[..., Any]) -> None:
    """A request that its client gives up leaves the queue at once; the other three are one batch and are answered."""
    running = await service("batched")
    blocked = await running.block("batched")
    calls = await _in_queue(running, "batched", *(message("batched", number) for number in range(4)))
    calls.pop(1).cancel()
    await running.queued("batched", 3)
    answers = await _finish(running, "batched", blocked, *calls)
    assert [WAITS, 0, 2, 3] == [found["OUT"][0, 0] for found in answers]
    assert {1: 1, 3: 1} == await running.executions("batched")


async def test_cancel_one_that_runs(service: Callable[..., Any]) -> None:
    """The clients of a batch get their answers although one of them has left while it ran."""
    running = await service("batched")
    blocked = await running.block("batched")
    calls = await _in_queue(running, "batched", message("batched", WAITS), *(message("batched", n) for n in (1, 2, 3)))
    await running.release("batched")
    await blocked
    await asyncio.to_thread((running.repository / "batched" / "running").read_text)
    calls.pop(2).cancel()
    answers = await _finish(running, "batched", *calls)
    assert [WAITS, 1, 3] == [found["OUT"][0, 0] for found in answers]
    assert {1: 1, 4: 1} == await running.executions("batched")


async def test_order_across_instances(service: Callable[..., Any]) -> None:
    """With preserve_ordering the answer of a second instance waits for that of the first, which was asked before."""
    running = await service("ordered")
    answered: list[int] = []
    blocked = await running.block("ordered")
    calls = [running.call(message("ordered", number)) for number in range(3)]
    for number, call in enumerate([blocked, *calls]):
        call.add_done_callback(lambda _, number=number: answered.append(number))
    await running.reached('nv_inference_exec_count{model="ordered",version="1"}', 3)
    assert [] == answered
    await _finish(running, "ordered", blocked, *calls)  # in which order calls of one connection end gRPC does not say


async def test_large_request_is_split(service: Callable[..., Any]) -> None:
    """20 rows go through a model of 8 as three executions, and come back as 20."""
    running = await service("splits")
    found = arrays(await running.call(message("splits", 5, rows=20)))
    assert ((20, 1), [8] * 16 + [4] * 4) == (found["OUT"].shape, found["COUNT"].ravel().tolist())
    assert {8: 2, 4: 1} == await running.executions("splits")
