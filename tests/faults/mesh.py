"""A mesh of processes that can be killed, stopped, replaced and cut off one by one."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.certificates import Authority
from tests.chain import write_repository
from tests.faults.load import Record
from tests.faults.relay import Relay
from tests.ports import free_port

START_S = 120.0
#: A second try for what fails, and a second call for what hangs.
GRAPH = """
name: "chain"
platform: "graph"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
node { name: "root" sequence {
  step { name: "pre" model_name: "prepare" policy { retry { attempts: 3 } } }
  step { name: "run" model_name: "work" policy { retry { attempts: 3 } hedge { after_ms: 200 } } }
  step { name: "post" model_name: "finish" policy { retry { attempts: 3 } } }
} }
"""


class Service:
    """One process of the mesh, on ports that stay the same when it is started again.

    Args:
        module: What is run, for example ``weft.services.model``.
        arguments: First ``--repository DIR``; without host and ports.
        log: File for standard error.
        host: Address to listen on.
        wrap: Makes of a command line one that runs it elsewhere.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        host: str = "127.0.0.1",
        wrap: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.address = f"{host}:{self.port}"
        self.metrics_address = f"{host}:{self.metrics_port}"
        self.repository = arguments[1]
        self.log = log
        self._module = ["-m", module]
        listen = ["--host", host, f"--grpc-port={self.port}", f"--metrics-port={self.metrics_port}", "--grace-s=5"]
        self._arguments = [*arguments, *listen]
        self._wrap = wrap
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    def start(self, program: Path | None = None, log: Path | None = None) -> Self:
        """The process runs; ``wait_serving`` waits for it.

        Args:
            program: Is run instead of the module, with the module's name before the arguments.
            log: For standard error this time.
        """
        run = self._module if program is None else [str(program), *self._module[1:]]
        with (log or self.log).open("ab") as stderr:
            self._process = subprocess.Popen(
                self._wrap([sys.executable, "-P", *run, *self._arguments]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        return self

    def send(self, number: signal.Signals) -> None:
        """The signal is sent."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The process has ended by a signal; its exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        return self._process.wait(30)

    def restart(
        self, number: signal.Signals = signal.SIGTERM, program: Path | None = None, log: Path | None = None
    ) -> None:
        """It has ended by a signal, was started as ``start`` does, and serves."""
        self.end(number)
        self.start(program, log)
        wait_serving(self.address)


class Mesh:
    """Router, preprocess, postprocess, and some replicas of model; each model replica behind a relay.

    Args:
        folder: For the repository and logs.
        num_models: Replicas of the model service.
        router_arguments: Beside repository and targets.
        authority: Issues certificates for the model replicas, named as they are; None: they take plaintext.
    """

    def __init__(
        self,
        folder: Path,
        num_models: int = 2,
        router_arguments: Sequence[str] = (),
        authority: Authority | None = None,
    ) -> None:
        graphs = write_repository(folder / "repository", GRAPH) / "graphs"

        def service(kind: str, name: str) -> Service:
            """With models of its own, so that one replica can be told to misbehave."""
            arguments = ["--repository", str(write_repository(folder / name) / kind)]
            if authority is not None and kind == "model":
                pair = authority.issue(name)
                arguments += [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"]
            return Service(f"weft.services.{kind}", arguments, folder / f"{name}.log")

        self.preprocess, self.postprocess = (service(kind, kind) for kind in ("preprocess", "postprocess"))
        self.models = [service("model", f"model{i}") for i in range(num_models)]
        self.relays = [Relay(model.address) for model in self.models]
        targets = {
            "preprocess": self.preprocess.address,
            "model": ",".join(f"127.0.0.1:{relay.port}" for relay in self.relays),
            "postprocess": self.postprocess.address,
        }
        given = [f"--target={name}={address}" for name, address in targets.items()]
        trust = [] if authority is None else [f"--target-tls-ca=model={authority.ca}"]
        arguments = ["--repository", str(graphs), *given, *trust, *router_arguments]
        self.router = Service("weft.services.router", arguments, folder / "router.log")

    @property
    def services(self) -> list[Service]:
        """Every process, the router last."""
        return [self.preprocess, *self.models, self.postprocess, self.router]

    def start(self) -> None:
        """Everything serves."""
        for service in self.services:
            service.start()
        until_s = time.monotonic() + START_S
        for service in self.services:
            while '"serving"' not in service.log.read_text():  # also of those that take no plaintext
                assert time.monotonic() < until_s, service.log.read_text()
                time.sleep(0.05)
        wait_serving(self.router.address)

    def close(self) -> None:
        """Nothing is left."""
        for service in self.services:
            service.end(signal.SIGKILL)
        for relay in self.relays:
            relay.close()


class RunningLoad:
    """Requests to the graph `chain` that go on until ``finish``."""

    def __init__(self, address: str, *, rate_per_s: float = 25.0, deadline_s: float = 4.0,
                 wrap: Callable[[Sequence[str]], list[str]] = list) -> None:  # fmt: skip
        command = [sys.executable, "-m", "tests.faults.load", address, "chain"]
        flags = [f"--rate-per-s={rate_per_s}", f"--deadline-s={deadline_s}"]
        self._process = subprocess.Popen(
            wrap([*command, *flags]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "sending\n"

    def finish(self) -> list[Record]:
        """No more is sent; what became of every request."""
        written, _ = self._process.communicate(timeout=60)
        return [Record(*fields) for fields in json.loads(written)]

    def close(self) -> None:
        """The process is gone."""
        self._process.kill()
        self._process.communicate()


def wait_serving(address: str, timeout_s: float = START_S) -> None:
    """Health says SERVING. Raises AssertionError when it does not in time."""
    until_s = time.monotonic() + timeout_s
    with grpc.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 200)]) as channel:
        while time.monotonic() < until_s:
            with contextlib.suppress(grpc.RpcError):
                answer = HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.05)
    raise AssertionError(f"{address} does not serve after {timeout_s:g} s")
