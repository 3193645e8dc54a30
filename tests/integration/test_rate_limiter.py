"""Models that share resources, on a real model service process."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from tests.integration.batching import Service, message, running_service, write_model
from tests.processes import Running


def group(count: int) -> str:
    """An instance that needs that many of R."""
    return (
        f'instance_group {{ kind: KIND_CPU rate_limiter {{ resources {{ name: "R" count: {count} }} priority: 1 }} }}'
    )


MODELS = {"one": group(1), "other": group(1), "half": group(1), "free": "", "impossible": group(3)}
SINGLE = "dynamic_batching { preferred_batch_size: [ 1 ] }"


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """A service with two units of R."""
    repository: Path = tmp_path_factory.mktemp("limited")
    for name, config in MODELS.items():
        write_model(repository, name, SINGLE + config)
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


async def test_impossible_demand_is_refused_at_load(service: Service) -> None:
    """The load fails with both numbers, and the others go on."""
    with pytest.raises(grpc.aio.AioRpcError, match=r"\"R\" is limited to 2 .* minimum required count is 3"):
        await service.load("impossible")
    await service.call(message("one", 1))
