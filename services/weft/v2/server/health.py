"""``grpc.health.v1`` of one process: all its services have the same status.

grpcio's own asyncio servicer reports SERVING before anything is loaded, drops its other watchers when one of them
disconnects, and keeps watches open during a shutdown, which then takes the whole grace period.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from weft.v2.protocol.services import HEALTH, HealthCheckRequest, HealthCheckResponse, add_service, method_handlers
from weft.wire.interface import grpc

#: A service that is SERVING as long as the event loop runs, also while models load and while the process drains. For
#: liveness probes, because a service that is not ready yet must not be restarted.
LIVENESS = "liveness"

_Response = HealthCheckResponse


class HealthServicer:
    """Serves ``Check`` and ``Watch``; initially NOT_SERVING.

    Args:
        services: Full names of the services; the empty name, which means the server, and ``liveness`` are added.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", LIVENESS, *services))
        self._is_serving = False
        self._is_stopping = False
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """The server offers the service."""
        add_service(server, HEALTH.full_name, method_handlers(self, HEALTH))

    def set_serving(self, is_serving: bool) -> None:
        """Set SERVING or NOT_SERVING; no effect after ``stop``."""
        if is_serving != self._is_serving and not self._is_stopping:
            self._is_serving = is_serving
            self._notify()

    def stop(self) -> None:
        """Set NOT_SERVING for good; watches end after reporting it."""
        self._is_serving, self._is_stopping = False, True
        self._notify()

    async def Check(  # noqa: N802  # the protocol's name
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> HealthCheckResponse:
        """The current status; NOT_FOUND for an unknown service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service '{request.service}' is not offered here")
        return _Response(status=self._status(request.service))

    async def Watch(  # noqa: N802  # the protocol's name
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[HealthCheckResponse]:
        """The current status and every change; SERVICE_UNKNOWN for an unknown service."""
        last = None
        while True:
            changed = self._changed  # before the status is read, so that no change is missed
            status = self._status(request.service)
            if status != last:
                yield _Response(status=status)
                last = status
                continue  # the status may have changed while the answer was sent
            if self._is_stopping:
                return
            await changed.wait()

    def _status(self, service: str) -> Any:
        if service not in self._services:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if self._is_serving or service == LIVENESS else _Response.NOT_SERVING

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
