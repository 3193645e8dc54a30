"""`weft up` keeps its services running: after deaths and hangs, and through a rolling restart."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.messages import request_from_call
from tests.processes import WAIT_S, wait_until

from weft.base.core import InferCall
from weft.base.tensors import decode, encode
from weft.cli.__main__ import main
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.long

Start = Callable[..., "Up"]  # noqa: F821  # of conftest.py


@contextmanager
def load(address: str, num_clients: int = 8) -> Iterator[Counter[str]]:
    """Outcomes of plain clients that call `chain` one request after another, without retries, until the block ends."""
    outcomes: Counter[str] = Counter()
    is_over = threading.Event()
    request = request_from_call(InferCall("chain", inputs={"X": encode(np.array([[1.0]], np.float32))}))

    def client() -> None:
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = GRPCInferenceServiceStub(channel)
            while not is_over.is_set():
                try:
                    stub.ModelInfer(request, timeout=20)
                    outcomes["OK"] += 1
                except grpc.RpcError as error:
                    outcomes[f"{error.code().name}: {error.details()}"] += 1

    clients = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in clients:
        thread.start()
    try:
        yield outcomes
    finally:
        is_over.set()
        for thread in clients:
            thread.join(30)


def test_dead_and_hung_services_come_back_on_their_ports(up: Start) -> None:
    """After `kill -9` of two and SIGSTOP of a third the old addresses answer, all is told, the stop is clean."""
    mesh = up("--hang-timeout-s", "4", "--in-process", "preprocess")
    for service in ("model", "router"):
        os.kill(int(mesh.endpoints[service]["pid"]), signal.SIGKILL)
    for service in ("model", "router"):
        wait_until(lambda service=service: f"{service} serves again after" in mesh.log(), mesh.log)
        assert f"{service} was ended by SIGKILL" in mesh.log()
        assert f"{service} is started again in 0." in mesh.log()
    wait_until(lambda: mesh.outcome("chain") == "OK", "an answer")
    os.kill(int(mesh.endpoints["postprocess"]["pid"]), signal.SIGSTOP)
    wait_until(lambda: "postprocess serves again after" in mesh.log(), mesh.log)
    log = mesh.log()
    silent = log.index("postprocess does not answer health checks")
    assert silent < log.index("postprocess has not answered for 4 s and was killed")
    wait_until(lambda: mesh.outcome("chain") == "OK", "an answer")
    assert mesh.stop() == 0, mesh.log()


def test_a_rolling_restart_under_load_loses_nothing(up: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """`weft restart` replaces every service, one replica of each, while plain clients call: each call is answered.

    With `--wait` it returns when all are replaced, and tells the process ids of each and that nothing was lost.
    """
    mesh = up()
    with load(mesh.endpoints["router"]["grpc"]) as outcomes:
        wait_until(lambda: outcomes["OK"] >= 50, "load")
        assert main(["restart", "--wait", "--url", mesh.endpoints["router"]["grpc"]]) == 0
        num_before = outcomes["OK"]
        wait_until(lambda: outcomes["OK"] >= num_before + 50, "load after the restart")
    assert set(outcomes) == {"OK"}, outcomes
    told = capsys.readouterr().out
    for service, endpoint in mesh.endpoints.items():
        line = rf"(?m)^{service} +pid {endpoint['pid']} -> \d+, \d+\.\d s, lost nothing$"
        assert re.search(line, told), told
        assert not Path(f"/proc/{endpoint['pid']}").exists()
    assert mesh.stop() == 0, mesh.log()


def test_what_a_restart_loses_is_told(
    up: Start, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that hangs for longer than the grace is lost; the line of its service says so."""
    hanging = shutil.copytree(repository, tmp_path / "repository")
    hang = hanging / "model/work/1/hang"
    os.mkfifo(hang)
    mesh = up("--grace-s", "4", "--in-process", "preprocess,postprocess", repository=hanging)
    caller = threading.Thread(target=mesh.outcome, args=("chain",))
    caller.start()
    hang.open().close()  # the model is in work now
    hang.unlink()
    assert main(["restart", "--wait", "--json", "--url", mesh.endpoints["router"]["grpc"]]) == 0
    rolls = {roll["service"]: roll for roll in json.loads(capsys.readouterr().out)["services"]}
    caller.join(30)
    assert ["model", "router"] == list(rolls)
    assert "1" in rolls["model"]["lost"] or "killed" in rolls["model"]["lost"]
    assert "" == rolls["router"]["lost"]
    assert int(mesh.endpoints["model"]["pid"]) == rolls["model"]["old_pid"] != rolls["model"]["new_pid"]


def test_a_service_that_cannot_start_any_more(
    up: Start, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not replaced; once it dies it is tried with growing pauses, which do not hold up a stop of status 1."""
    broken = shutil.copytree(repository, tmp_path / "repository")
    mesh = up("--in-process", "preprocess,postprocess", repository=broken)
    (broken / "model/work/1/model.py").write_text("import os; os.abort()\n")
    assert main(["restart", "--wait", "--url", mesh.endpoints["router"]["grpc"]]) == 1
    told = "model was not replaced; the process before goes on serving"
    assert told in mesh.log()
    assert f"model       pid {mesh.endpoints['model']['pid']} stays, " in (out := capsys.readouterr().out)
    assert told in out
    assert decode(mesh.call("chain").outputs["Y"]).tolist() == [[4.0]]
    os.kill(int(mesh.endpoints["model"]["pid"]), signal.SIGKILL)
    wait_until(lambda: "attempt 2" in mesh.log(), mesh.log)
    start_s = time.monotonic()
    assert mesh.stop() == 1
    assert time.monotonic() - start_s < 15
    assert mesh.running() == set()


def test_logs_that_nobody_reads_stop_nothing(repository: Path, tmp_path: Path) -> None:
    """Standard error is a pipe that nobody reads, models print 10 kB a request: all are answered, the end is clean."""
    chatty = shutil.copytree(repository, tmp_path / "repository")
    for model in chatty.glob("*/*/1/model.py"):
        model.write_text(model.read_text().replace("time.sleep(0.01)", "print('x' * 10_000)"))
    command = [
        *(sys.executable, "-m", "weft.cli", "up", "--json", "--router-port", "0", "--repository", str(chatty)),
        *("--in-process", "preprocess,postprocess"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoints = json.loads(process.stdout.readline())
        with load(endpoints["router"]["grpc"]) as outcomes:
            wait_until(lambda: outcomes["OK"] >= 300, "answers")
        process.terminate()
        assert process.wait(WAIT_S) == 0
    assert set(outcomes) == {"OK"}
