"""What the health service of one server says, as soon as it says it."""

import asyncio
from collections.abc import Callable

from weft.base.observing.logs import get_logger
from weft.router.targets.replica import Health
from weft.v2.protocol.services import HEALTH, HealthCheckRequest, HealthCheckResponse, stub_of
from weft.wire.interface import grpc

#: Whose health it is: that of the V2 service.
_SERVICE = "inference.GRPCInferenceService"
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
#: Pause before a server that has no health service is asked again, in seconds; it may have been replaced.
_UNKNOWN_PAUSE_S = 30.0

_log = get_logger("weft.router.targets")


async def watch_health(channel: grpc.aio.Channel, tell: Callable[[Health], None]) -> None:
    """``tell`` is called with the health of the server now and at every change; ends when it is cancelled.

    A server without a health service is UNKNOWN as long as it answers at all.
    """
    stub = stub_of(channel, HEALTH)
    request = HealthCheckRequest(service=_SERVICE)
    pause_s = _FIRST_BACKOFF_S
    is_lost = False
    while True:
        try:
            # Once it is lost, gRPC connects again by itself, and the call begins as soon as it has.
            async for answer in stub.Watch(request, wait_for_ready=is_lost):
                is_lost, pause_s = False, _FIRST_BACKOFF_S
                tell(_health_of(answer.status))
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                is_lost = True
                tell(Health.UNREACHABLE)
            else:
                _log.debug("no health service: %s: %s", error.code().name, error.details())
                tell(Health.UNKNOWN)
                pause_s = _UNKNOWN_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_BACKOFF_S)


def _health_of(status: int) -> Health:
    match status:
        case HealthCheckResponse.SERVING:
            return Health.SERVING
        case HealthCheckResponse.NOT_SERVING:
            return Health.NOT_SERVING
        case _:  # a server that has a health service, and no status for this name
            return Health.UNKNOWN
