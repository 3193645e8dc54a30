"""`weft up` when something goes wrong."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from weft.base.tensors import decode

pytestmark = pytest.mark.long

Start = Callable[..., "Up"]  # noqa: F821  # of conftest.py
#: Where one service is enough.
FUSED = ("--in-process", "preprocess,postprocess")
#: Of a model: its process aborts once a log says a text.
DIES_AFTER = """
import os, threading
def die():
    while {text!r} not in open("{log}").read():
        time.sleep(0.05)
    os.abort()
threading.Thread(target=die).start()
"""


def test_a_killed_service_is_reported_and_the_others_go_on(up: Start) -> None:
    """Requests that need the dead model get UNAVAILABLE with its name, the others are answered; the status is 1."""
    mesh = up("--no-restart")
    os.kill(int(mesh.endpoints["model"]["pid"]), signal.SIGKILL)
    mesh.wait_for_end("model")
    host, _, port = mesh.endpoints["model"]["grpc"].rpartition(":")
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind((host, int(port)))  # it stays taken for a restart
    with pytest.raises(grpc.RpcError) as failure:
        mesh.call("chain")
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "work" in failure.value.details()
    assert decode(mesh.call("prepare").outputs["A"]).tolist() == [[2.0]]
    assert decode(mesh.call("finish", "B", service="postprocess").outputs["Y"]).tolist() == [[2.0]]
    assert mesh.stop() == 1
    assert "model was ended by SIGKILL" in mesh.log()
    assert "still serving: preprocess, postprocess, router" in mesh.log()
    assert mesh.running() == set()


def test_a_stop_under_load_is_clean(up: Start) -> None:
    """SIGTERM under load: every request is answered or refused as unavailable, status 0, no process is left."""
    mesh = up("--grace-s", "20", *FUSED)
    status, outcomes = mesh.stop_under_load("chain")
    assert status == 0, mesh.log()
    assert mesh.running() == set()
    assert outcomes["OK"] >= 24
    assert set(outcomes) == {"OK", "UNAVAILABLE"}


def test_a_second_signal_kills_at_once(up: Start, repository: Path, tmp_path: Path) -> None:
    """Who does not want to wait for a model that hangs signals again; the status is 1, and nothing is left."""
    broken = shutil.copytree(repository, tmp_path / "repository")
    hang = broken / "model/work/1/hang"
    os.mkfifo(hang)
    mesh = up("--grace-s", "600", *FUSED, repository=broken)
    caller = threading.Thread(target=mesh.outcome, args=("chain",))
    caller.start()
    hang.open().close()  # the model is in work now
    mesh.process.send_signal(signal.SIGINT)
    assert mesh.stop(signal.SIGTERM) == 1
    assert mesh.running() == set()
    caller.join(30)


def test_what_does_not_end_in_time_is_killed_and_leaves_the_others_theirs(up: Start) -> None:
    """A router and a service that hang hold the stop up for the grace and no longer; the others end by themselves."""
    mesh = up("--grace-s", "6", "--in-process", "preprocess")
    for service in ("router", "postprocess"):
        os.kill(int(mesh.endpoints[service]["pid"]), signal.SIGSTOP)
    start_s = time.monotonic()
    assert mesh.stop() == 1
    assert time.monotonic() - start_s < 12  # not one after the other
    for service in ("router", "postprocess"):
        assert f"{service} did not end in time and is killed" in mesh.log()
    assert mesh.log().count("did not end in time and is killed") == 2
    assert mesh.running() == set()


def test_a_parent_that_nobody_reads_stops_what_it_started(repository: Path) -> None:
    """Standard output is a closed pipe: the reason is told without a traceback, nothing is left."""
    command = [
        *(sys.executable, "-m", "weft.cli", "up", "--json", "--router-port", "0", "--repository", str(repository)),
        *FUSED,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the endpoints cannot be written to standard output: Broken pipe" in log
    assert "Traceback" not in log


def test_a_port_in_use_is_refused_before_anything_starts(up: Start) -> None:
    """Status 1, nothing on standard output, the port and the cure on standard error."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mesh = up(router_port=port, must_serve=False)
        assert mesh.process.wait(20) == 1
    (line,) = map(json.loads, mesh.log().splitlines())
    assert ("weft", "error") == (line["service"], line["level"])
    assert line["message"].startswith(f"port {port} on 127.0.0.1 is in use")


def test_a_graph_that_cannot_be_loaded_ends_the_start(up: Start, repository: Path, tmp_path: Path) -> None:
    """The router's reason is shown with its place in the file, and a service that died meanwhile is named."""
    broken = shutil.copytree(repository, tmp_path / "repository")
    graph = broken / "graphs/chain/1/graph.pbtxt"
    graph.write_text(graph.read_text().replace('"work"', '"wrk"'))
    model = broken / "postprocess/finish/1/model.py"
    model.write_text(f"{model.read_text()}\n{DIES_AFTER.format(log=tmp_path / 'log0', text='graph.pbtxt:9:')}")
    mesh = up("--exit-on-error", repository=broken, must_serve=False)
    assert mesh.process.wait(30) == 1
    told = ("router at ", "graph.pbtxt:9:", "did you mean 'work'?", "postprocess was ended by SIGABRT")
    for text in told:
        assert text in mesh.log()


def test_services_that_cannot_start_are_told_at_once(up: Start, repository: Path, tmp_path: Path) -> None:
    """With `--exit-on-error` a model that cannot be loaded, with its reason, and one that dies, with its last words."""
    broken = shutil.copytree(repository, tmp_path / "repository")
    (broken / "model/work/1/model.py").rename(broken / "model/work/1/other.py")
    model = broken / "postprocess/finish/1/model.py"
    model.write_text(model.read_text().replace("config = ", "import os; os.abort(); config = "))
    mesh = up("--exit-on-error", repository=broken, must_serve=False)
    assert mesh.process.wait(30) == 1
    assert "model at " in mesh.log()
    assert "work is UNAVAILABLE: " in mesh.log()
    assert "`make models`" in mesh.log()
    assert "postprocess was ended by SIGABRT" in mesh.log()


def test_why_a_load_failed_is_told_to_who_asked(up: Start, repository: Path, tmp_path: Path) -> None:
    """File and line, through the router, by gRPC and by HTTP; no traceback without `--dev`, which the log has."""
    broken = shutil.copytree(repository, tmp_path / "repository")
    mesh = up("--model-control-mode", "explicit", "--http-port", "0", *FUSED, repository=broken)
    path = broken / "model/work/1/model.py"
    path.write_text("import numpy\nimport no_such_module\n")
    url = f"http://{mesh.endpoints['gateway']['http']}/v2/repository/models/work/load"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, b"{}", timeout=60)
    told = [json.loads(refused.value.read())["error"]]
    with (
        tritonclient.grpc.InferenceServerClient(mesh.endpoints["router"]["grpc"]) as client,
        pytest.raises(InferenceServerException) as failure,
    ):
        client.load_model("work")
    for text in (*told, failure.value.message()):
        assert f"{path}:2: ModuleNotFoundError: No module named 'no_such_module'" in text
        assert "Traceback" not in text
    lines = [line for line in map(json.loads, mesh.log().splitlines()) if line["level"] == "error"]
    assert 2 == len([line for line in lines if f'File "{path}", line 2, in <module>' in line["exception"]])


def test_a_model_that_cannot_be_loaded_leaves_the_others_theirs(up: Start, repository: Path, tmp_path: Path) -> None:
    """The mesh serves; what does not is told with its reason, and calls of it fail.

    `kill -9` of `weft up` ends every service: each reads the end of its standard input.
    """
    broken = shutil.copytree(repository, tmp_path / "repository")
    (broken / "model/work/1/model.py").rename(broken / "model/work/1/other.py")
    mesh = up(repository=broken)
    (line,) = [line for line in map(json.loads, mesh.log().splitlines()) if line["level"] == "error"]
    assert ("model", "work") == (line["service"], line["model"])
    assert "has no file 'model.py'" in line["message"]
    assert decode(mesh.call("prepare").outputs["A"]).tolist() == [[2.0]]
    for name in ("work", "chain"):
        assert mesh.outcome(name) in ("UNAVAILABLE", "NOT_FOUND")
    assert mesh.running() == set(mesh.endpoints)
    mesh.process.kill()
    mesh.process.wait()
    assert mesh.running(20.0) == set()
