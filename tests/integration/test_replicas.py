"""Two replicas of a model service under load: one dies, both are replaced, and nobody notices."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.integration.fleet import Load, Service, router_over, services, write_repository
from tests.processes import Running

from weft_protos import grpc_service_pb2 as pb
from weft_protos import load_report_pb2
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("replicas"))


@pytest.fixture(scope="module")
def replicas(graphs: Path) -> Iterator[list[Service]]:
    with services(graphs, 2) as started:
        yield started


@pytest.fixture(scope="module", params=["least_outstanding"])
def router(request: pytest.FixtureRequest, graphs: Path, replicas: list[Service]) -> Iterator[Running]:
    address = ",".join(replica.address for replica in replicas)
    with router_over(graphs, address, f"--target-policy=model={request.param}") as running:
        yield running


async def num_requests(replica: Service) -> int:
    """How many a replica has answered since it was started."""
    async with grpc.aio.insecure_channel(replica.address) as channel:
        answer = await GRPCInferenceServiceStub(channel).ModelStatistics(pb.ModelStatisticsRequest(name="work"))
        count: int = answer.model_stats[0].inference_stats.success.count
        return count


@pytest.mark.parametrize("router", ["weighted_round_robin"], indirect=True)
async def test_kill_9_of_one_replica_costs_no_request(router: Running, replicas: list[Service]) -> None:
    """With `retry` in the graph; and the replica is called again when it is back."""
    async with Load(router.grpc, "retrying") as load:
        await load.answered(300)
        await asyncio.to_thread(replicas[0].end, signal.SIGKILL)
        await load.answered(300)
        await asyncio.to_thread(replicas[0].start)
        async with asyncio.timeout(30):
            while await num_requests(replicas[0]) < 50:
                await load.answered(50)
    assert ({"OK"}, 0, []) == (set(load.outcomes), load.wrong, load.errors)
    samples = await asyncio.to_thread(router.scrape)
    num_retries = sum(value for key, value in samples.items() if key.startswith("weft_graph_step_retries_total"))
    assert num_retries > 0, "no call was in work at the replica that was killed"


async def test_kill_9_costs_only_what_was_begun(router: Running, replicas: list[Service]) -> None:
    """Without `retry`, of a graph and a model by its name: calls in flight at most, as errors, and none that is later.

    The same number of calls is in flight all the time, so those that were lost are at most so many.
    """
    async with Load(router.grpc, "plain") as of_graph, Load(router.grpc, "work") as of_model:
        loads = (of_graph, of_model)
        for load in loads:
            await load.answered(100)
        await asyncio.to_thread(replicas[0].end, signal.SIGKILL)
        for load in loads:
            await load.answered(2 * load.num_clients)
        num_lost = [len(load.errors) for load in loads]
        for load in loads:
            await load.answered(150)
        await asyncio.to_thread(replicas[0].start)
        for load in loads:
            await load.answered(50)
    for load, lost in zip(loads, num_lost, strict=True):
        assert (0, lost) == (load.wrong, len(load.errors)), load.errors
        assert lost <= load.num_clients
        assert {"OK"} == set(load.outcomes) - {"UNAVAILABLE"}
        assert all("cannot be reached" in error for error in load.errors)


async def test_a_rolling_restart_loses_nothing(router: Running, replicas: list[Service]) -> None:
    """SIGTERM of one, and of the other the moment the first is back, without a retry policy; each ends well."""
    async with Load(router.grpc, "plain") as load:
        await load.answered(200)
        for replica in replicas:
            assert 0 == await asyncio.to_thread(replica.end, signal.SIGTERM)
            await asyncio.to_thread(replica.start)
        await load.answered(200)
    assert ({"OK"}, 0, []) == (set(load.outcomes), load.wrong, load.errors)


async def test_a_service_reports_how_busy_it_is(replicas: list[Service]) -> None:
    """Its only instance under a closed loop is; the rate is that of the requests."""
    address = replicas[1].address
    async with Load(address, "work") as load, grpc.aio.insecure_channel(address) as channel:
        request = load_report_pb2.LoadReportRequest()
        request.report_interval.FromMilliseconds(300)
        stream = channel.unary_stream(
            "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
            request_serializer=load_report_pb2.LoadReportRequest.SerializeToString,
            response_deserializer=load_report_pb2.LoadReport.FromString,
        )(request, timeout=20)
        await load.answered(50)
        await stream.read()
        report = await stream.read()
        stream.cancel()
    assert 0.2 < report.application_utilization < 5
    assert (True, 0.0) == (report.rps_fractional > 5, report.eps)
