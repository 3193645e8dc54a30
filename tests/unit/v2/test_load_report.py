"""What clients that balance by load are told, and that gRPC's own policy follows it."""

import asyncio
import struct
from collections import Counter
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from weft.base.statistics import ModelStatistics
from weft.router.targets.specification import BalancingPolicy, channel_options
from weft.v2.client.channels import open_channel
from weft.v2.server.health import LoadMeter, LoadReporter
from weft.v2.server.make_server import make_server
from weft_protos import load_report_pb2


def model(name: str, occupancy: float = 0.0) -> ModelStatistics:
    statistics = ModelStatistics(name, "1")
    statistics.occupancy = lambda: occupancy
    return statistics


def test_the_busiest_model_is_the_load_of_the_server() -> None:
    """As the mean of what was seen; requests count by second, failed ones beside."""
    now_ns = 0
    idle, busy = model("idle", 0.25), model("busy")
    meter = LoadMeter(lambda: [idle, busy], lambda: now_ns)
    for occupancy in (0.5, 1.0, 1.5):
        busy.occupancy = lambda occupancy=occupancy: occupancy
        meter.sample()
    idle.success.add(1, 6)
    busy.fail.add(1, 4)
    now_ns = 2_000_000_000
    report = meter.report()
    assert (1.0, 5.0, 2.0) == (report.application_utilization, report.rps_fractional, report.eps)
    now_ns = 3_000_000_000
    report = meter.report()
    assert (0.0, 0.0, 0.0) == (report.application_utilization, report.rps_fractional, report.eps)


def test_a_model_that_is_unloaded_takes_no_requests_back() -> None:
    """Rates are never negative."""
    models = [model("m")]
    models[0].success.add(1, 100)
    meter = LoadMeter(lambda: models, lambda: 0)
    models.clear()
    report = meter.report()
    assert (0.0, 0.0) == (report.rps_fractional, report.eps)


def test_the_fields_have_the_numbers_of_orca() -> None:
    """``xds.data.orca.v3.OrcaLoadReport``: rps_fractional 6, eps 7, application_utilization 9, all of them doubles."""
    report = load_report_pb2.LoadReport(rps_fractional=3.5, eps=0.5, application_utilization=1.25)
    fields = UnknownFieldSet(Empty.FromString(report.SerializeToString()))
    numbers = {field.field_number: struct.unpack("<d", struct.pack("<Q", field.data))[0] for field in fields}  # type: ignore[attr-defined]
    assert {6: 3.5, 7: 0.5, 9: 1.25} == numbers


async def serve(cost_s: float, counts: Counter[float]) -> tuple[grpc.aio.Server, int]:
    """A server whose calls take so long and that counts them; each keeps one instance of its model busy."""
    statistics = model("m")
    num_running = 0
    statistics.occupancy = lambda: float(num_running)

    async def answer(request: bytes, context: Any) -> bytes:
        nonlocal num_running
        counts[cost_s] += 1
        num_running += 1
        await asyncio.sleep(cost_s)
        num_running -= 1
        statistics.success.add(1)
        return b""

    server = make_server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", {"M": handler}),))
    LoadReporter(lambda: [statistics]).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def test_reports_come_at_the_interval_that_the_client_asks_for() -> None:
    """Which cannot be too short."""
    server, port = await serve(0.0, Counter())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = load_report_pb2.LoadReportRequest()
            request.report_interval.FromNanoseconds(1)
            method = channel.unary_stream(
                "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
                request_serializer=load_report_pb2.LoadReportRequest.SerializeToString,
                response_deserializer=load_report_pb2.LoadReport.FromString,
            )
            stream = method(request, timeout=10)
            assert [0.0, 0.0] == [(await stream.read()).application_utilization for _ in range(2)]  # type: ignore[attr-defined]
            stream.cancel()
    finally:
        await server.stop(None)


async def test_weighted_round_robin_follows_the_reports() -> None:
    """With the router's own service config: a server whose calls cost four times as much gets far fewer of them."""
    options = [
        (key, text.replace('"2s"', '"0s"').replace('"1s"', '"0.1s"'))
        for key, text in channel_options(BalancingPolicy("weighted_round_robin"))
    ]
    counts: Counter[float] = Counter()
    servers = [await serve(cost_s, counts) for cost_s in (0.008, 0.002)]
    address = "ipv4:" + ",".join(f"127.0.0.1:{port}" for _, port in servers)
    try:
        async with open_channel(address, options=options) as channel, asyncio.timeout(20):
            call = channel.unary_unary("/a.B/M")  # type: ignore[call-arg]
            while not 2.5 * counts[0.008] < counts[0.002] < 6 * counts[0.008]:
                counts.clear()
                for _ in range(25):
                    await asyncio.gather(*(call(b"") for _ in range(8)))
    finally:
        for server, _ in servers:
            await server.stop(None)
