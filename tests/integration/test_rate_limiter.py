"""Models that share resources, on a real model service process."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from tests.integration.batching import Service, message, running_service, write_model
from tests.processes import Running

R = 'rate_limiter {{ resources {{ name: "R" count: {} }} priority: {} }}'


def group(count: int, priority: int = 1) -> str:
    """An instance that needs that many of R."""
    return f"instance_group {{ kind: KIND_CPU {R.format(count, priority)} }}"


MODELS = {"one": group(1), "other": group(1), "big": group(2), "half": group(1, 2), "free": "", "impossible": group(3)}
#: OUT is that of ``big``, whose error is its own.
CALLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = [
            pb_utils.InferenceRequest(model_name="big", inputs=request.inputs(), requested_output_names=["OUT"]).exec()
            for request in requests
        ]
        return [
            pb_utils.InferenceResponse(answer.output_tensors(), error=answer.error()) for answer in answers
        ]
"""
CALLER_CONFIG = """
backend: "python"
parameters { key: "EXECUTION" value { string_value: "thread" } }
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
SINGLE = "dynamic_batching { preferred_batch_size: [ 1 ] }"


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """A service with two units of R."""
    repository: Path = tmp_path_factory.mktemp("limited")
    for name, config in MODELS.items():
        write_model(repository, name, SINGLE + config)
    (repository / "caller" / "1").mkdir(parents=True)
    (repository / "caller" / "1" / "model.py").write_text(CALLER)
    (repository / "caller" / "config.pbtxt").write_text(CALLER_CONFIG + group(1))
    options = ("--rate-limit", "execution_count", "--rate-limit-resource", "R:2")
    with running_service(repository, *options) as started:
        yield started, repository


@pytest.fixture
async def service(endpoints: tuple[Running, Path]) -> AsyncIterator[Service]:
    """The service, every model but ``impossible`` freshly loaded."""
    started = Service(*endpoints)
    for name in MODELS:
        if name != "impossible":
            await started.load(name)
    yield started
    await started.channel.close()


async def test_what_runs_holds_its_units(service: Service) -> None:
    """With both units taken a third model waits, one without demands does not; it runs when a unit is free."""
    blocked = [await service.block(name) for name in ("one", "other")]
    waiting = service.call(message("half", 1))
    await service.queued("half", 1)
    await service.call(message("free", 1))
    await service.release("one")
    await waiting
    await service.release("other")
    await asyncio.gather(*blocked)


async def test_who_needs_more_than_is_free_holds_nothing(service: Service) -> None:
    """``big`` waits for two units; meanwhile the free one is used by another."""
    blocked = await service.block("one")
    waiting = service.call(message("big", 1))
    await service.queued("big", 1)
    await service.call(message("other", 1))
    await service.release("one")
    await asyncio.gather(blocked, waiting)


async def test_cancelled_and_late_requests_need_no_units(service: Service) -> None:
    """They leave while they wait for resources, at once."""
    blocked = [await service.block(name) for name in ("one", "other")]
    cancelled, late = service.call(message("half", 1)), service.call(message("half", 2), timeout_s=0.2)
    await service.queued("half", 2)
    cancelled.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await late
    assert grpc.StatusCode.DEADLINE_EXCEEDED == caught.value.code()
    await service.queued("half", 0)
    for name in ("one", "other"):
        await service.release(name)
    await asyncio.gather(*blocked)
    assert {} == await service.executions("half")


async def test_impossible_demand_is_refused_at_load(service: Service) -> None:
    """The load fails with both numbers, and the others go on."""
    with pytest.raises(grpc.aio.AioRpcError, match=r"\"R\" is limited to 2 .* minimum required count is 3"):
        await service.load("impossible")
    await service.call(message("big", 1))


async def test_a_call_of_a_model_that_the_caller_keeps_from_running(service: Service) -> None:
    """It is refused at once, and does not wait for ever; the caller's units are free again."""
    await service.load("caller")
    with pytest.raises(
        grpc.aio.AioRpcError, match="big_0_0 needs 2 of 'R', which instances hold that wait for this call"
    ):
        await service.call(message("caller", 1))
    await service.call(message("big", 1))


async def test_everyone_is_served_under_load(service: Service) -> None:
    """Forty requests each to models of different demands are all answered."""
    names = ("one", "other", "big", "half")
    calls = [service.call(message(name, number)) for number in range(40, 80) for name in names]
    await asyncio.gather(*calls)
    assert [{1: 40}] * 4 == [await service.executions(name) for name in names]
