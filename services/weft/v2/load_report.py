"""ORCA out-of-band load reports for clients with load-aware balancing.

A gRPC client with the policy ``weighted_round_robin`` opens one stream to each server and weights servers by requests
per second over utilisation. Calls themselves carry no report.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from weft.base.statistics import ModelStatistics
from weft.wire.interface import grpc
from weft_protos import load_report_pb2 as pb

SERVICE_NAME = "xds.service.orca.v3.OpenRcaService"
METHOD_NAME = "StreamCoreMetrics"
#: Limits and default of the reporting period that a client requests, in seconds.
MIN_PERIOD_S = 0.1
DEFAULT_PERIOD_S = 1.0
MAX_PERIOD_S = 3_600.0
#: Sampling period of the occupancy, in seconds.
SAMPLE_PERIOD_S = 0.02


class LoadReporter:
    """Serves ``StreamCoreMetrics``.

    Args:
        models: Returns the counters of every ready model.
        clock_ns: Monotonic.
    """

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
    """Measures the load between two reports.

    Args:
        models: Returns the counters of every ready model.
        clock_ns: Monotonic.
    """

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
