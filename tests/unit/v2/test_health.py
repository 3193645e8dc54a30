"""``grpc.health.v1`` over a real socket: Check and Watch, also with several watchers."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from weft.base.core import IndexEntry
from weft.v2.protocol.services import HEALTH, HealthCheckRequest, HealthListRequest, stub_of
from weft.v2.server.server import SERVICE_NAME, add_services

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
async def health(channel):
    return HealthStub(channel)


def ask(service=""):
    return health_pb2.HealthCheckRequest(service=service)


async def next_status(watch):
    return (await asyncio.wait_for(watch.read(), 5)).status


@pytest.mark.parametrize("service", ["", SERVICE_NAME])
async def test_not_serving_until_told(server, core, service):
    """A server that has loaded nothing yet says NOT_SERVING, for itself and for the V2 service."""
    add_services(server, core, "weft.test")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        assert NOT_SERVING == (await HealthStub(channel).Check(ask(service))).status


@pytest.mark.parametrize("service", ["", SERVICE_NAME])
async def test_check_follows(health, services, service):
    """Check answers what was set last."""
    for is_serving, status in ((True, SERVING), (False, NOT_SERVING), (True, SERVING)):
        services.health.set_serving(is_serving)
        assert status == (await health.Check(ask(service))).status


async def test_unknown_service(health):
    """Check of an unknown service is NOT_FOUND with its name; Watch says SERVICE_UNKNOWN and stays open."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(ask("nope"))
    assert ("NOT_FOUND", "service 'nope' is not offered here") == (caught.value.code().name, caught.value.details())
    watch = health.Watch(ask("nope"))
    assert SERVICE_UNKNOWN == await next_status(watch)
    assert not watch.done()
    watch.cancel()


async def test_each_model_has_a_health_of_its_own(channel, services, core):
    """By its name, whatever the server's is; List tells all; a stopping server serves none."""
    states = {"good": "READY", "bad": "UNAVAILABLE"}
    core.index = lambda *, ready_only: [IndexEntry(name, "1", state, "") for name, state in states.items()]
    services.health.set_serving(False)
    health = stub_of(channel, HEALTH)  # that of grpcio-health-checking has no List yet
    ask = lambda service="": HealthCheckRequest(service=service)  # noqa: E731
    watch = health.Watch(ask("bad"))
    assert [NOT_SERVING, NOT_SERVING] == [(await health.Check(ask())).status, await next_status(watch)]
    assert SERVING == (await health.Check(ask("good"))).status
    listed = (await health.List(HealthListRequest())).statuses
    assert {"good", "liveness"} == {name for name, response in listed.items() if response.status == SERVING}
    assert {"", "bad", SERVICE_NAME} == {name for name, response in listed.items() if response.status == NOT_SERVING}
    states["bad"] = "READY"
    services.health.set_serving(True)
    assert SERVING == await next_status(watch)
    services.health.stop()
    assert NOT_SERVING == await next_status(watch)


async def test_watch_tells_every_change(health, services):
    """A watch tells the status at once and then each change, once."""
    watch = health.Watch(ask())
    assert SERVING == await next_status(watch)
    services.health.set_serving(True)
    services.health.set_serving(False)
    assert NOT_SERVING == await next_status(watch)
    services.health.set_serving(True)
    assert SERVING == await next_status(watch)
    watch.cancel()


async def test_watchers_are_independent(health, services):
    """When one of several watchers of a service leaves, the others still hear of changes."""
    leaver, stayer = health.Watch(ask()), health.Watch(ask())
    assert [SERVING, SERVING] == [await next_status(leaver), await next_status(stayer)]
    leaver.cancel()
    await asyncio.wait([asyncio.ensure_future(leaver.code())])
    await health.Check(ask())  # the server has seen the cancel that was sent before
    services.health.set_serving(False)
    assert NOT_SERVING == await next_status(stayer)
    stayer.cancel()


async def test_watch_does_not_hold_up_a_stop(health, server, services):
    """A stopping server tells its watchers NOT_SERVING and ends them, so that it need not wait out the grace."""
    watches = [health.Watch(ask(service)) for service in ("", SERVICE_NAME, "nope")]
    assert [SERVING, SERVING, SERVICE_UNKNOWN] == [await next_status(watch) for watch in watches]
    services.health.stop()
    services.health.set_serving(True)  # comes too late
    await asyncio.wait_for(server.stop(60), 5)
    assert [NOT_SERVING, NOT_SERVING] == [await next_status(watch) for watch in watches[:2]]
    assert ["OK"] * 3 == [(await watch.code()).name for watch in watches]
