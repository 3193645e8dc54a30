"""``grpc.health.v1`` for one process: of the server, of each model or graph; and load reports (ORCA).

grpcio's own asyncio servicer reports SERVING before anything is loaded, drops its other watchers when one of them
disconnects, and keeps watches open during a shutdown, which then takes the whole grace period.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from weft.base.statistics import ModelStatistics
from weft.v2.protocol.services import (
    HEALTH,
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListResponse,
    add_service,
    method_handlers,
)
from weft.wire.interface import grpc
from weft_protos import load_report_pb2 as pb

#: A service that is SERVING as long as the event loop runs, also while models load and while the process drains. For
#: liveness probes, because a service that is not ready yet must not be restarted.
LIVENESS = "liveness"

_Response = HealthCheckResponse


class HealthServicer:
    """Serves ``Check``, ``Watch`` and ``List`` for the server (""), ``liveness``, the given services and models.

    All but ``liveness`` are NOT_SERVING at first.

    Args:
        models: Each model's or graph's name, and whether it is ready; read while a client asks for one.
    """

    def __init__(self, services: Iterable[str], models: Callable[[], Mapping[str, bool]] = dict) -> None:
        self._services = frozenset(("", LIVENESS, *services))
        self._models = models
        self._models_seen: dict[str, bool] = {}
        self._num_model_watches = 0
        self._is_serving = False
        self._is_stopping = False
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        add_service(server, HEALTH.full_name, method_handlers(self, HEALTH))

    def set_serving(self, is_serving: bool) -> None:
        """Set SERVING or NOT_SERVING, and read the states of models if one is watched; no effect after ``stop``."""
        if self._num_model_watches:
            self._read_models()
        if is_serving != self._is_serving and not self._is_stopping:
            self._is_serving = is_serving
            self._notify()

    def stop(self) -> None:
        """Set NOT_SERVING for good; watches end after reporting it."""
        self._read_models()
        self._is_serving, self._is_stopping = False, True
        self._models_seen = dict.fromkeys(self._models_seen, False)
        self._notify()

    async def Check(  # noqa: N802  # the protocol's name
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> HealthCheckResponse:
        """The current status; NOT_FOUND for an unknown service."""
        if request.service not in self._services:
            self._read_models()
        status = self._status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service '{request.service}' is not offered here")
        return _Response(status=status)

    async def List(  # noqa: N802  # the protocol's name
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        """The current status of every service, model and graph, by name."""
        self._read_models()
        names = self._services | self._models_seen.keys()
        return HealthListResponse(statuses={name: _Response(status=self._status(name)) for name in sorted(names)})

    async def Watch(  # noqa: N802  # the protocol's name
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[HealthCheckResponse]:
        """The current status and every change; SERVICE_UNKNOWN for an unknown service."""
        last, is_of_model = None, request.service not in self._services
        self._num_model_watches += is_of_model
        try:
            if is_of_model:
                self._read_models()
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
        finally:
            self._num_model_watches -= is_of_model

    def _status(self, service: str) -> Any:
        if service in self._services:
            is_serving = self._is_serving or service == LIVENESS
        elif service in self._models_seen:
            is_serving = self._models_seen[service]
        else:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if is_serving else _Response.NOT_SERVING

    def _read_models(self) -> None:
        models = dict(self._models())
        if models != self._models_seen and not self._is_stopping:
            self._models_seen = models
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


SERVICE_NAME = "xds.service.orca.v3.OpenRcaService"
METHOD_NAME = "StreamCoreMetrics"
#: Limits and default of the reporting period that a client requests, in seconds.
MIN_PERIOD_S = 0.1
DEFAULT_PERIOD_S = 1.0
MAX_PERIOD_S = 3_600.0
#: Sampling period of the occupancy, in seconds.
SAMPLE_PERIOD_S = 0.02


class LoadReporter:
    """Serves ``StreamCoreMetrics`` from the counters of every ready model."""

    def __init__(
        self, models: Callable[[], Iterable[ModelStatistics]], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._models = models
        self._clock_ns = clock_ns

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the service to a server. Returns no names for reflection: the messages are those of xDS."""
        handler = grpc.unary_stream_rpc_method_handler(
            self._stream,
            request_deserializer=pb.LoadReportRequest.FromString,
            response_serializer=pb.LoadReport.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {METHOD_NAME: handler}),))
        return ()

    async def _stream(self, request: pb.LoadReportRequest, context: Any) -> AsyncIterator[pb.LoadReport]:
        interval = request.report_interval
        asked_s = interval.seconds + interval.nanos / 1e9
        period_s = min(max(asked_s, MIN_PERIOD_S), MAX_PERIOD_S) if asked_s > 0 else DEFAULT_PERIOD_S
        meter = LoadMeter(self._models, self._clock_ns)
        while True:
            end_ns = self._clock_ns() + int(period_s * 1e9)
            while self._clock_ns() < end_ns:
                await asyncio.sleep(min(SAMPLE_PERIOD_S, period_s))
                meter.sample()
            yield meter.report()


class LoadMeter:
    """Measures the load between two reports."""

    def __init__(self, models: Callable[[], Iterable[ModelStatistics]], clock_ns: Callable[[], int]) -> None:
        self._models = models
        self._clock_ns = clock_ns
        self._sums: dict[tuple[str, str], float] = {}
        self._num_samples = 0
        self._begin_ns = clock_ns()
        self._num_answered, self._num_failed = self._counts()

    def sample(self) -> None:
        """Sample the occupancy of each model."""
        self._num_samples += 1
        for model in self._models():
            key = model.name, model.version
            self._sums[key] = self._sums.get(key, 0.0) + model.occupancy()

    def report(self) -> pb.LoadReport:
        """Mean load since the previous report; the busiest model determines the utilisation."""
        now_ns = self._clock_ns()
        duration_s = max((now_ns - self._begin_ns) / 1e9, 1e-9)
        num_answered, num_failed = self._counts()
        num_new_failed = max(num_failed - self._num_failed, 0)  # an unloaded model removes its counters
        num_new = max(num_answered - self._num_answered, 0) + num_new_failed
        report = pb.LoadReport(
            rps_fractional=num_new / duration_s,
            eps=num_new_failed / duration_s,
            application_utilization=max(self._sums.values(), default=0.0) / max(self._num_samples, 1),
        )
        self._begin_ns, self._num_answered, self._num_failed = now_ns, num_answered, num_failed
        self._sums.clear()
        self._num_samples = 0
        return report

    def _counts(self) -> tuple[int, int]:
        models = list(self._models())
        return sum(model.success.count for model in models), sum(model.fail.count for model in models)
