"""The simulator of benchmarks/ against a real mesh of the same shape."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from benchmarks.simulator import Topology, simulate
from tests.faults.mesh import Service, wait_serving
from tests.messages import request_from_call
from tests.repositories import NUMBERS, THREAD, write_model

from weft.base.core import InferCall
from weft.base.tensors import encode
from weft.capacity.tuning.load import Bounds, Load, caller, closed_loop, open_loop
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.long

#: Sleeping costs no CPU, so that a busy machine changes little; long enough that scheduling noise is small beside it.
BASE_MS, ROW_MS, MAX_BATCH_SIZE = 80.0, 10.0, 8
MODEL = f'''
"""Sleeps as long as the simulator says."""
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(({BASE_MS} + {ROW_MS} * len(requests)) / 1e3)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros((1, 1), np.float32))]) for _ in requests]
'''
CONFIG = THREAD + NUMBERS + f"max_batch_size: {MAX_BATCH_SIZE} dynamic_batching {{ }}"
#: Requests that are sent one after the other before the load.
NUM_ALONE = 15
#: Of the load; what is simulated arrives when its requests were sent.
BOUNDS, SEED = Bounds(10_000, 6.0), 7
REQUEST = request_from_call(InferCall("sleep", inputs={"X": encode(np.zeros((1, 1), np.float32))})).SerializeToString()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """A router and two replicas of the model, the router first."""
    folder = tmp_path_factory.mktemp("simulator")
    (folder / "graphs").mkdir()
    write_model(folder / "model", "sleep", MODEL, CONFIG)
    with contextlib.ExitStack() as stack:
        replicas = [
            Service("weft.services.model", ["--repository", str(folder / "model")], folder / f"{number}.log")
            for number in range(2)
        ]
        target = f"--target=model={','.join(replica.address for replica in replicas)}"
        router = Service(
            "weft.services.router", ["--repository", str(folder / "graphs"), target], folder / "router.log"
        )
        for service in (*replicas, router):
            stack.callback(service.end)
            service.start()
        for service in (*replicas, router):
            wait_serving(service.address)
        yield [router, *replicas]


class Executed(NamedTuple):
    """What the replicas have run: batches, and how long all of these took."""

    num_batches: int
    total_ms: float


def executed(replicas: list[Service]) -> Executed:
    """What the replicas have run until now."""
    found = []
    for replica in replicas:
        with grpc.insecure_channel(replica.address) as channel:
            answer = GRPCInferenceServiceStub(channel).ModelStatistics(pb.ModelStatisticsRequest(name="sleep"))
        found += [batch.compute_infer for model in answer.model_stats for batch in model.batch_stats]
    return Executed(sum(batch.count for batch in found), sum(batch.ns for batch in found) / 1e6)


class Measured(NamedTuple):
    """An open loop: its requests as they were sent, which a busy machine does later than planned.

    ``overhead_ms`` is what a request takes beside the model, alone.
    """

    load: Load
    sent_s: list[float]
    latencies_ms: list[float]
    overhead_ms: float


def measure(router: Service, rate_per_s: float) -> Measured:
    """Send requests one after the other, then at random times."""

    async def run() -> Measured:
        async with grpc.aio.insecure_channel(router.address) as channel:
            call = caller(channel)
            sent_s: list[float] = []
            latencies_ms: list[float] = []

            async def timed(request: bytes) -> None:
                sent_s.append(time.perf_counter())
                start_s = sent_s[-1]
                await call(request)
                latencies_ms.append((time.perf_counter() - start_s) * 1e3)

            alone = await closed_loop(call, [REQUEST], Bounds(NUM_ALONE, 5.0), concurrency=1)
            overhead_ms = max(median(alone.latencies_s) * 1e3 - BASE_MS - ROW_MS, 1.0)
            begin_s = time.perf_counter()
            load = await open_loop(timed, [REQUEST], BOUNDS, rate_per_s=rate_per_s, seed=SEED)
            return Measured(load, [at_s - begin_s for at_s in sent_s], latencies_ms, overhead_ms)

    return asyncio.run(run())


@pytest.mark.parametrize("rate_per_s", [25.0, 45.0])
def test_the_simulator_says_what_is_measured(mesh: list[Service], rate_per_s: float) -> None:
    """At a quarter of what the replicas can carry, and at half: rate, median and batch size are within a quarter."""
    router, *replicas = mesh
    before = executed(replicas)
    load, sent_s, latencies_ms, overhead_ms = measure(router, rate_per_s)
    after = executed(replicas)
    num_batches = after.num_batches - before.num_batches
    mean_batch = (len(load.latencies_s) + NUM_ALONE) / num_batches
    # On a busy machine a sleep lasts longer than it was asked to.
    stretch = (after.total_ms - before.total_ms) / num_batches / (BASE_MS + ROW_MS * mean_batch)
    simulated = simulate(
        Topology(
            rate_per_s,
            replicas=2,
            router_cpu_ms=overhead_ms / 3,
            service_cpu_ms=overhead_ms / 3,
            network_ms=overhead_ms / 12,
            base_ms=BASE_MS * stretch,
            row_ms=ROW_MS * stretch,
            max_batch_size=MAX_BATCH_SIZE,
            duration_s=BOUNDS.duration_s,
        ),
        sent_s,
    )
    mean_batch = len(load.latencies_s) / (num_batches - NUM_ALONE)
    assert not load.errors
    assert load.rate_per_s == pytest.approx(simulated.rate_per_s, rel=0.25)
    assert median(latencies_ms) == pytest.approx(simulated.p50_ms, rel=0.25)
    assert mean_batch == pytest.approx(simulated.mean_batch, rel=0.25)


def test_the_simulator_knows_the_bounds() -> None:
    """It never promises more than the slowest part can do, and twice the replicas carry twice the load."""
    asked = Topology(10_000, routers=16, replicas=4, router_cpu_ms=0.5, duration_s=3.0)
    capacity_per_s = 4 * 32 / (5.0 + 32 * 0.5) * 1e3
    assert simulate(asked).rate_per_s == pytest.approx(capacity_per_s, rel=0.05)
    one_router = Topology(1_100, replicas=8, router_cpu_ms=1.0, duration_s=3.0)
    assert simulate(one_router).rate_per_s == pytest.approx(1000, rel=0.05)


def test_a_seed_gives_the_same_figures() -> None:
    """So a change of a rule can be told from noise."""
    assert simulate(Topology(500, replicas=3, duration_s=2.0)) == simulate(Topology(500, replicas=3, duration_s=2.0))
