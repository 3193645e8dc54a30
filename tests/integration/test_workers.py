"""Several processes of the router behind one port."""

import os
import select
import signal
import stat
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.integration.group import WAIT_S, channel_to, num_connections, wait_until, workers_of
from tests.integration.routing import NamingCore, Router, command_of, message, naming_service, running_router, write
from tests.ports import free_port
from tests.processes import kill_and_wait

from weft_protos.grpc_service_pb2 import ModelInferRequest, ModelStatisticsRequest
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

REQUESTS = 'nv_inference_request_success{model="named",version="1"}'


def graph(model: str, policy: str = "") -> str:
    """One step of a model."""
    return f"""name: "named" platform: "graph" {policy}
input [ {{ name: "X" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "NAME" data_type: TYPE_STRING dims: [ 1 ] }} ]
node {{ name: "root" sequence {{ step {{ name: "{model}" model_name: "{model}" }} }} }}
"""


@pytest.fixture
def core() -> NamingCore:
    """The models."""
    return NamingCore()


@pytest.fixture
def target(core: NamingCore) -> Iterator[str]:
    """Address of the models."""
    with naming_service(core) as address:
        yield address


@contextmanager
def group(root: Path, target: str, *arguments: str) -> Iterator[Router]:
    """A router of two workers."""
    write(root, graph("alpha"), "named")
    with running_router(root, target, ["--workers", "2", *arguments]) as router:
        yield router


def ask(channel: grpc.Channel, request: ModelInferRequest | None = None) -> str:
    """The path of a request, or the status of its failure."""
    try:
        _, call = GRPCInferenceServiceStub(channel).ModelInfer.with_call(request or message("named"), timeout=WAIT_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    return str(dict(call.trailing_metadata())["x-graph-path"])


def up(router: Router, worker: int) -> float:
    return router.scrape()[f'weft_worker_up{{worker="{worker}"}}']


def test_connections_spread_and_figures_are_sums(tmp_path: Path, target: str) -> None:
    """Of 32 connections each worker has some; metrics and statistics tell of all requests, processes stay apart."""
    with group(tmp_path, target) as router, ExitStack() as stack:
        port = int(router.grpc.rpartition(":")[2])
        for _ in range(32):
            channel = stack.enter_context(
                grpc.insecure_channel(router.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
            )
            assert ask(channel) == "root.alpha"
        workers = workers_of(router.process.pid)
        shares = [num_connections(pid, port) for pid in workers.values()]
        assert sum(shares) == 32
        assert min(shares) > 0
        samples = router.scrape()
        assert samples[REQUESTS] == 32
        buckets = {name: count for name, count in samples.items() if "weft_request_latency_seconds_bucket" in name}
        assert sum(n for name, n in buckets.items() if 'le="+Inf"' in name and 'model="named"' in name) == 32
        assert samples['weft_admission_limit{graph=""}'] == 2048
        for worker in workers:
            assert samples[f'process_resident_memory_bytes{{worker="{worker}"}}'] > 0
            assert samples[f'weft_worker_up{{worker="{worker}"}}'] == 1
            with channel_to(router, worker) as channel:
                (counters,) = (
                    GRPCInferenceServiceStub(channel)
                    .ModelStatistics(ModelStatisticsRequest(name="named"), timeout=WAIT_S)
                    .model_stats
                )
                assert counters.inference_stats.success.count == 32
                health = HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_worker_that_dies_takes_its_calls_and_no_others(tmp_path: Path, target: str) -> None:
    """Under load a kill of one worker fails its calls alone; it is started again, and sums never fall."""
    with group(tmp_path, target) as router, ExitStack() as stack:
        port = int(router.grpc.rpartition(":")[2])
        killed = workers_of(router.process.pid)[1]
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(router.grpc, options=options)) for _ in range(8)]
        channels.append(stack.enter_context(channel_to(router, 1)))
        outcomes = [Counter[str]() for _ in channels]
        is_over = threading.Event()

        def load(channel: grpc.Channel, counts: Counter[str]) -> None:
            while not is_over.is_set():
                counts[ask(channel)] += 1

        with ThreadPoolExecutor(len(channels)) as pool:
            for channel, counts in zip(channels, outcomes, strict=True):
                pool.submit(load, channel, counts)
            wait_until(lambda: all(counts["root.alpha"] > 5 for counts in outcomes), "load")
            num_lost, before = num_connections(killed, port), router.scrape()[REQUESTS]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: workers_of(router.process.pid).get(1, killed) != killed, "another worker")
            wait_until(lambda: up(router, 1) == 1, "an answer of it")
            is_over.set()
        failed = [counts for counts in outcomes if counts.keys() != {"root.alpha"}]
        assert 0 < len(failed) <= num_lost
        for counts in failed:
            assert counts.keys() == {"root.alpha", "UNAVAILABLE"}
        samples = router.scrape()
        assert samples[REQUESTS] >= before
        assert samples['weft_worker_restarts_total{worker="1"}'] == 1
        with channel_to(router, 1) as channel:
            assert ask(channel) == "root.alpha"


def test_a_worker_that_hangs_is_seen_and_replaced(tmp_path: Path, target: str) -> None:
    """While one is stopped the metrics answer without it; with a limit it is killed and started again."""
    with group(tmp_path, target, "--watchdog-abort-s", "3") as router:
        with channel_to(router, 1) as channel:
            assert ask(channel) == "root.alpha"
        assert router.scrape()[REQUESTS] == 1
        hung = workers_of(router.process.pid)[1]
        os.kill(hung, signal.SIGSTOP)
        samples = router.scrape()
        assert samples['weft_worker_up{worker="1"}'] == 0
        assert samples['weft_worker_up{worker="2"}'] == 1
        assert samples[REQUESTS] == 1
        with channel_to(router, 2) as channel:
            assert ask(channel) == "root.alpha"
        wait_until(lambda: workers_of(router.process.pid).get(1, hung) != hung, "another worker")
        wait_until(lambda: up(router, 1) == 1, "an answer of it")


def test_limits_are_divided(tmp_path: Path, target: str, core: NamingCore) -> None:
    """Of three requests in flight that the router may have each worker takes two, and says so."""
    core.held = "alpha"
    with group(tmp_path, target, "--max-inflight", "3") as router, channel_to(router, 1) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        held = [infer.future(message("named", text=b"%d" % i), timeout=WAIT_S) for i in range(2)]
        wait_until(lambda: router.scrape()['weft_admission_inflight{graph=""}'] == 2, "two in flight")
        with pytest.raises(grpc.RpcError) as caught:
            infer(message("named"), timeout=WAIT_S)
        assert caught.value.code().name == "RESOURCE_EXHAUSTED"
        assert "--max-inflight, divided among 2 workers, allows 2" in caught.value.details()
        with channel_to(router, 2) as other:
            third = GRPCInferenceServiceStub(other).ModelInfer.future(message("named"), timeout=WAIT_S)
            wait_until(lambda: router.scrape()['weft_admission_inflight{graph=""}'] == 3, "three in flight")
            core.is_released.set()
            for call in (*held, third):
                call.result()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stdin"])
def test_a_stop_drains_every_worker(tmp_path: Path, target: str, core: NamingCore, how: str) -> None:
    """Calls in flight at both are answered, the status is 0, and no process is left."""
    core.held = "alpha"
    with group(tmp_path, target) as router, channel_to(router, 1) as one, channel_to(router, 2) as two:
        pids = workers_of(router.process.pid).values()
        pidfds = [os.pidfd_open(pid) for pid in pids]
        calls = [GRPCInferenceServiceStub(one).ModelInfer.future(message("named"), timeout=WAIT_S)]
        calls.append(GRPCInferenceServiceStub(two).ModelInfer.future(message("named"), timeout=WAIT_S))
        wait_until(lambda: router.scrape()['weft_admission_inflight{graph=""}'] == 2, "two in flight")
        if how == "stdin":
            assert router.process.stdin is not None
            router.process.stdin.close()
        else:
            router.process.send_signal(signal.Signals[how])
        core.is_released.set()
        for call in calls:
            assert call.result().model_name == "named"
        assert router.process.wait(WAIT_S) == 0
        for pidfd in pidfds:
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            os.close(pidfd)


def test_workers_end_with_their_parent(tmp_path: Path, target: str) -> None:
    """When the parent is killed each worker reads the end of its standard input, and stops."""
    with group(tmp_path, target) as router:
        pidfds = [os.pidfd_open(pid) for pid in workers_of(router.process.pid).values()]
        router.kill()
        for pidfd in pidfds:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert poll.poll(WAIT_S * 1000)
            os.close(pidfd)


def test_a_worker_told_to_stop_drains_and_is_started_again(tmp_path: Path, target: str) -> None:
    """SIGTERM to one process, as for an update of one after another, loses none of its calls."""
    with group(tmp_path, target) as router, channel_to(router, 2) as channel:
        told = workers_of(router.process.pid)[2]
        os.kill(told, signal.SIGTERM)
        while workers_of(router.process.pid).get(2, told) == told:
            assert ask(channel) == "root.alpha"
        wait_until(lambda: up(router, 2) == 1, "an answer of it")
        assert router.scrape()['weft_worker_restarts_total{worker="2"}'] == 1


def test_a_group_that_cannot_start_ends(tmp_path: Path, target: str) -> None:
    """When no worker can load, or the port is taken, the status is 1 and the log says why."""
    write(tmp_path, graph("alpha"), "named")
    missing = ["--model-control-mode", "explicit", "--load-model", "nobody"]
    command = [*command_of(tmp_path, target), "--workers", "2"]
    ended = subprocess.run([*command, *missing], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 1
    assert "failed to load 'nobody'" in ended.stderr
    assert ended.stdout == ""
    with group(tmp_path, target) as router:
        port = router.grpc.rpartition(":")[2]
        taken = subprocess.run([*command, "--grpc-port", port], capture_output=True, timeout=WAIT_S, check=False)
        assert taken.returncode == 1
        assert b"choose another --grpc-port" in taken.stderr


@pytest.mark.parametrize("wire", ["grpcio", "weft"])
def test_a_unix_socket_is_served(tmp_path: Path, target: str, wire: str) -> None:
    """By the first worker on grpcio's wire, by whichever is there on Weft's; nothing is left of it after a stop."""
    path = tmp_path / "router.sock"
    with group(tmp_path / "graphs", target, "--unix-socket", str(path), "--wire", wire) as router:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        killed = workers_of(router.process.pid)[1]
        if wire == "weft":
            kill_and_wait(killed)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            assert ask(channel) == "root.alpha"
    assert list(tmp_path.iterdir()) == [tmp_path / "graphs"]


def test_a_group_takes_over_from_a_group(tmp_path: Path, target: str) -> None:
    """On the same ports, while clients go on: none of their calls fails."""
    ports = ["--grpc-port", str(free_port()), "--metrics-port", str(free_port()), "--share-ports"]
    with ExitStack() as stack:
        old = stack.enter_context(group(tmp_path, target, *ports))
        channels = [stack.enter_context(grpc.insecure_channel(old.grpc)) for _ in range(4)]
        outcomes: Counter[str] = Counter()
        is_over = threading.Event()

        def load(channel: grpc.Channel) -> None:
            while not is_over.is_set():
                outcomes[ask(channel)] += 1

        with ThreadPoolExecutor(len(channels)) as pool:
            for channel in channels:
                pool.submit(load, channel)
            wait_until(lambda: outcomes["root.alpha"] > 20, "load")
            new = stack.enter_context(group(tmp_path, target, *ports, "--take-over"))
            assert (new.grpc, new.metrics) == (old.grpc, old.metrics)
            old.process.terminate()
            assert old.process.wait(WAIT_S) == 0
            num_before = outcomes["root.alpha"]
            wait_until(lambda: outcomes["root.alpha"] > num_before + 20, "answers of the new one")
            is_over.set()
        assert outcomes.keys() == {"root.alpha"}
