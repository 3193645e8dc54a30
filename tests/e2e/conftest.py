"""A small mesh of three Python models, started as a user starts one: `weft up` in a process of its own."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.chain import write_repository
from tests.messages import request_from_call, result_from_response

from weft.base.core import InferCall, InferResult
from weft.base.tensors import encode
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

STOP_TIMEOUT_S = 30.0


class Up:
    """A running `weft up --json`.

    Attributes:
        endpoints: What it printed: addresses and pid of each service.
    """

    def __init__(self, repository: Path, log: Path, *arguments: str) -> None:
        self._log, self.repository = log, repository
        command = [sys.executable, "-m", "weft.cli", "up", "--json", "--repository", str(repository), *arguments]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        line = self.stdout.readline()
        self.endpoints: dict[str, dict[str, str]] = json.loads(line) if line else {}
        #: A pidfd becomes readable when its process ends; unlike a pid, it never means another process.
        self.pidfds = {name: os.pidfd_open(int(endpoint["pid"])) for name, endpoint in self.endpoints.items()}

    def log(self) -> str:
        """Everything on standard error so far."""
        return self._log.read_text()

    def call(self, model: str, source: str = "X", value: float = 1.0, service: str = "router") -> InferResult:
        """One request. Raises grpc.RpcError."""
        call = InferCall(model, inputs={source: encode(np.array([[value]], np.float32))})
        with grpc.insecure_channel(self.endpoints[service]["grpc"]) as channel:
            answer = GRPCInferenceServiceStub(channel).ModelInfer(request_from_call(call), timeout=20)
        return result_from_response(answer)

    def outcome(self, model: str) -> str:
        """Status of one request, "OK" or the error's."""
        try:
            self.call(model)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def wait_for_end(self, service: str) -> None:
        """The process of one service has ended."""
        poll = select.poll()
        poll.register(self.pidfds[service], select.POLLIN)
        assert poll.poll(20_000), f"{service} still runs"

    def running(self, timeout_s: float = 0.0) -> set[str]:
        """Services whose process still runs after at most ``timeout_s``; returns early when none does."""
        poll = select.poll()
        for pidfd in self.pidfds.values():
            poll.register(pidfd, select.POLLIN)
        left = dict(self.pidfds)
        while left:
            ended = {pidfd for pidfd, _ in poll.poll(timeout_s * 1000)}
            if not ended:
                break
            for name in [name for name, pidfd in left.items() if pidfd in ended]:
                poll.unregister(left.pop(name))
        return set(left)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def stop_under_load(self, model: str) -> tuple[int, Counter[str]]:
        """SIGTERM while 8 clients send requests: the exit status, and how often each outcome was seen.

        Each client has had three answers before the stop, and leaves with its first failure.
        """
        outcomes: Counter[str] = Counter()
        is_busy = threading.Barrier(9)

        def client() -> None:
            for number in range(100_000):
                if number == 3:
                    is_busy.wait(30)
                outcome = self.outcome(model)
                outcomes[outcome] += 1
                if outcome != "OK":
                    return

        clients = [threading.Thread(target=client) for _ in range(8)]
        for thread in clients:
            thread.start()
        is_busy.wait(30)
        status = self.stop()
        for thread in clients:
            thread.join(30)
        return status, outcomes

    def close(self) -> None:
        """Nothing is left, whatever the test did."""
        self.process.kill()
        self.process.wait()
        self.stdout.close()
        for pidfd in self.pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small repository; shared, so a test must not change it."""
    return write_repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def up(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts a mesh; what still runs at the end of the test is killed."""
    started: list[Up] = []

    def start(*arguments: str, repository: Path = repository, router_port: int = 0, must_serve: bool = True) -> Up:
        log = tmp_path / f"log{len(started)}"
        mesh = Up(repository, log, "--router-port", str(router_port), *arguments)
        started.append(mesh)
        assert bool(mesh.endpoints) == must_serve, mesh.log()
        return mesh

    yield start
    for mesh in started:
        mesh.close()
