"""Several processes of the router behind one port."""

import os
import select
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.integration.group import (
    OWN_CONNECTION,
    channel_to,
    end_worker,
    num_connections,
    wait_for_another,
    workers_of,
)
from tests.integration.routing import (
    Client,
    NamingCore,
    command_of,
    graph,
    message,
    naming_service,
    running_router,
    write,
)
from tests.ports import free_port
from tests.processes import WAIT_S, Running, kill_and_wait, wait_until

from weft_protos.grpc_service_pb2 import ModelStatisticsRequest
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.long

REQUESTS = 'nv_inference_request_success{model="named",version="1"}'
IN_FLIGHT = 'weft_admission_inflight{graph=""}'


@pytest.fixture(scope="module")
def core() -> NamingCore:
    """The models."""
    return NamingCore()


@pytest.fixture(scope="module")
def target(core: NamingCore) -> Iterator[str]:
    """Address of the models."""
    with naming_service(core) as address:
        yield address


@pytest.fixture
def held(core: NamingCore) -> Iterator[NamingCore]:
    """The models, of which `alpha` does not answer before it is released."""
    core.held = "alpha"
    core.is_released.clear()
    yield core
    core.held = ""


@contextmanager
def group(root: Path, target: str, *arguments: str) -> Iterator[Running]:
    """A router of two workers."""
    write(root, graph("named", "alpha"), "named")
    with running_router(root, target, ["--workers", "2", *arguments]) as router:
        yield router


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, target: str) -> Iterator[Running]:
    """A router of two workers for several tests, which leave it with two."""
    with group(tmp_path_factory.mktemp("graphs"), target) as router:
        yield router


def ask(channel: grpc.Channel) -> str:
    """The path of a request, or the status of its failure."""
    return Client(channel).ask()


@contextmanager
def load(channels: Sequence[grpc.Channel]) -> Iterator[list[Counter[str]]]:
    """What came of the requests over each channel, one after the other, until the block is left."""
    outcomes = [Counter[str]() for _ in channels]
    is_over = threading.Event()

    def run(channel: grpc.Channel, counts: Counter[str]) -> None:
        while not is_over.is_set():
            counts[ask(channel)] += 1

    with ThreadPoolExecutor(len(channels)) as pool:
        for channel, counts in zip(channels, outcomes, strict=True):
            pool.submit(run, channel, counts)
        try:
            yield outcomes
        finally:
            is_over.set()


def test_connections_spread_and_figures_are_sums(shared: Running) -> None:
    """Of 32 connections each worker has some; metrics and statistics tell of all requests, processes stay apart."""
    with ExitStack() as stack:
        port = int(shared.grpc.rpartition(":")[2])
        for _ in range(32):
            channel = stack.enter_context(grpc.insecure_channel(shared.grpc, options=OWN_CONNECTION))
            assert ask(channel) == "root.alpha"
        workers = workers_of(shared.process.pid)
        shares = [num_connections(pid, port) for pid in workers.values()]
        assert sum(shares) == 32
        assert min(shares) > 0
        samples = shared.scrape()
        assert samples[REQUESTS] == 32
        buckets = {name: count for name, count in samples.items() if "weft_request_latency_seconds_bucket" in name}
        assert sum(n for name, n in buckets.items() if 'le="+Inf"' in name and 'model="named"' in name) == 32
        assert samples['weft_admission_limit{graph=""}'] == 2048
        for worker in workers:
            assert samples[f'process_resident_memory_bytes{{worker="{worker}"}}'] > 0
            assert samples[f'weft_worker_up{{worker="{worker}"}}'] == 1
            with channel_to(shared, worker) as channel:
                request = ModelStatisticsRequest(name="named")
                (counters,) = GRPCInferenceServiceStub(channel).ModelStatistics(request, timeout=WAIT_S).model_stats
                assert counters.inference_stats.success.count == 32
                health = HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_worker_that_dies_takes_its_calls_and_no_others(shared: Running) -> None:
    """Under load a kill of one worker fails its calls alone; it is started again, and sums never fall."""
    with ExitStack() as stack:
        port = int(shared.grpc.rpartition(":")[2])
        killed = workers_of(shared.process.pid)[1]
        channels = [stack.enter_context(grpc.insecure_channel(shared.grpc, options=OWN_CONNECTION)) for _ in range(8)]
        channels.append(stack.enter_context(channel_to(shared, 1)))
        with load(channels) as outcomes:
            wait_until(lambda: all(counts["root.alpha"] > 5 for counts in outcomes), "load")
            num_lost, before = num_connections(killed, port), shared.scrape()[REQUESTS]
            end_worker(shared, 1, signal.SIGKILL)
        failed = [counts for counts in outcomes if counts.keys() != {"root.alpha"}]
        assert 0 < len(failed) <= num_lost
        assert all(counts.keys() == {"root.alpha", "UNAVAILABLE"} for counts in failed)
        samples = shared.scrape()
        assert samples[REQUESTS] >= before
        assert samples['weft_worker_restarts_total{worker="1"}'] == 1
        with channel_to(shared, 1) as channel:
            assert ask(channel) == "root.alpha"


def test_a_worker_told_to_stop_drains_and_is_started_again(shared: Running) -> None:
    """SIGTERM to one process, as for an update of one after another, loses none of its calls."""
    with channel_to(shared, 2) as channel:
        told = workers_of(shared.process.pid)[2]
        os.kill(told, signal.SIGTERM)
        while workers_of(shared.process.pid).get(2, told) == told:
            assert ask(channel) == "root.alpha"
        wait_for_another(shared, 2, told)
        assert shared.scrape()['weft_worker_restarts_total{worker="2"}'] == 1


def test_a_port_that_is_taken_ends_a_group(shared: Running, tmp_path: Path, target: str) -> None:
    """The status is 1 and the log says what to choose."""
    refused = refusal(tmp_path, target, "--grpc-port", shared.grpc.rpartition(":")[2])
    assert (refused.returncode, "choose another --grpc-port" in refused.stderr) == (1, True)


def test_a_graph_that_no_worker_can_load_ends_a_group(tmp_path: Path, target: str) -> None:
    """The status is 1, the log says why, and nothing is announced."""
    refused = refusal(tmp_path, target, "--model-control-mode", "explicit", "--load-model", "nobody")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "failed to load 'nobody'" in refused.stderr


def refusal(root: Path, target: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A group of two workers that ends by itself."""
    write(root, graph("named", "alpha"), "named")
    module, *of_router = command_of(root, target)
    command = [sys.executable, "-P", "-m", module, *of_router, "--metrics-port", "0", "--workers", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_a_worker_that_hangs_is_seen_and_replaced(tmp_path: Path, target: str) -> None:
    """While one is stopped the metrics answer without it; with a limit it is killed and started again."""
    with group(tmp_path, target, "--watchdog-abort-s", "3") as router:
        with channel_to(router, 1) as channel:
            assert ask(channel) == "root.alpha"
        assert router.scrape()[REQUESTS] == 1
        hung = workers_of(router.process.pid)[1]
        os.kill(hung, signal.SIGSTOP)
        samples = router.scrape()
        figures = ('weft_worker_up{worker="1"}', 'weft_worker_up{worker="2"}', REQUESTS)
        assert [0, 1, 1] == [samples[name] for name in figures]
        with channel_to(router, 2) as channel:
            assert ask(channel) == "root.alpha"
        wait_for_another(router, 1, hung)


def stop_of(how: str) -> Callable[[Running], None]:
    """What tells a router to stop: a signal, or the end of its standard input."""
    if how != "stdin":
        return lambda router: router.process.send_signal(signal.Signals[how])
    return lambda router: router.process.stdin.close() if router.process.stdin is not None else None


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stdin"])
def test_a_stop_drains_every_worker(tmp_path: Path, target: str, held: NamingCore, how: str) -> None:
    """Calls in flight at both are answered, the status is 0, and no process is left.

    Before that, of three requests in flight that the router may have each worker takes two, and says so.
    """
    with (
        group(tmp_path, target, "--max-inflight", "3") as router,
        channel_to(router, 1) as one,
        channel_to(router, 2) as two,
    ):
        pidfds = [os.pidfd_open(pid) for pid in workers_of(router.process.pid).values()]
        infer = GRPCInferenceServiceStub(one).ModelInfer
        calls = [infer.future(message("named", text=b"%d" % i), timeout=WAIT_S) for i in range(2)]
        wait_until(lambda: router.scrape()[IN_FLIGHT] == 2, "two in flight")
        with pytest.raises(grpc.RpcError, match="--max-inflight, divided among 2 workers, allows 2") as caught:
            infer(message("named"), timeout=WAIT_S)
        assert caught.value.code().name == "RESOURCE_EXHAUSTED"
        calls.append(GRPCInferenceServiceStub(two).ModelInfer.future(message("named"), timeout=WAIT_S))
        wait_until(lambda: router.scrape()[IN_FLIGHT] == 3, "three in flight")
        stop_of(how)(router)
        held.is_released.set()
        assert ["named"] * 3 == [call.result().model_name for call in calls]
        assert router.process.wait(WAIT_S) == 0
        for pidfd in pidfds:
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            os.close(pidfd)


@pytest.mark.parametrize("wire", ["grpcio", "weft"])
def test_a_unix_socket_is_served(tmp_path: Path, target: str, wire: str) -> None:
    """By the first worker on grpcio's wire, by whichever is there on Weft's; nothing is left of it after a stop."""
    path = tmp_path / "router.sock"
    with group(tmp_path / "graphs", target, "--unix-socket", str(path), "--wire", wire) as router:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if wire == "weft":
            kill_and_wait(workers_of(router.process.pid)[1])
        with grpc.insecure_channel(f"unix:{path}") as channel:
            assert ask(channel) == "root.alpha"
    assert list(tmp_path.iterdir()) == [tmp_path / "graphs"]


def test_a_group_takes_over_from_a_group(tmp_path: Path, target: str) -> None:
    """On the same ports, while clients go on: none of their calls fails."""
    ports = ["--grpc-port", str(free_port()), "--metrics-port", str(free_port()), "--share-ports"]
    with ExitStack() as stack:
        old = stack.enter_context(group(tmp_path, target, *ports))
        channels = [stack.enter_context(grpc.insecure_channel(old.grpc)) for _ in range(4)]
        with load(channels) as outcomes:
            wait_until(lambda: all(counts["root.alpha"] > 5 for counts in outcomes), "load")
            new = stack.enter_context(group(tmp_path, target, *ports, "--take-over"))
            assert (new.grpc, new.metrics) == (old.grpc, old.metrics)
            old.process.terminate()
            assert old.process.wait(WAIT_S) == 0
            before = [counts["root.alpha"] for counts in outcomes]
            wait_until(
                lambda: sum(counts["root.alpha"] for counts in outcomes) > sum(before) + 20, "answers of the new"
            )
        assert all(counts.keys() == {"root.alpha"} for counts in outcomes)


def test_workers_end_with_their_parent(shared: Running) -> None:
    """When the parent is killed each worker reads the end of its standard input, and stops; this test is the last."""
    pidfds = [os.pidfd_open(pid) for pid in workers_of(shared.process.pid).values()]
    shared.kill()
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(WAIT_S * 1000)
        os.close(pidfd)
