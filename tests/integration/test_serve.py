"""`weft.serve` and `weft dev`, as users run them: processes, ports, signals, files that change."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import WAIT_S, wait_until
from tests.repositories import NUMBER_BATCHES, write_model
from tritonclient import grpc as triton

import weft
from weft.mesh.preflight import MeshError

FLOW = """\
import weft
from factors import FACTOR
from weft import FP32, Tensor

m = weft.models("models")

@weft.model(max_batch_size=8, execution="thread")
def negate(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):
    return {"Y": -X}

@weft.graph(max_batch_size=8, parameters={"factor": FACTOR})
def flow(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):
    return negate(m.scale(X).Y)
"""
SCALE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * x)]) for x in inputs]
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with flow.py, a module that it imports, and a model of the repository that it calls."""
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "factors.py").write_text('FACTOR = "1"\n')
    write_model(tmp_path / "models/model", "scale", SCALE, NUMBER_BATCHES)
    write_model(tmp_path / "models/model", "unused", "raise SystemExit", NUMBER_BATCHES)
    return tmp_path


@pytest.fixture
def flow(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module flow.py."""
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    import flow  # type: ignore[import-not-found]

    yield flow
    for name in ("flow", "factors"):
        del sys.modules[name]


def ask(address: str, x: float = 1.0, model: str = "flow") -> float:
    """One request by tritonclient."""
    tensor = triton.InferInput("X", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[x]], np.float32))
    with triton.InferenceServerClient(address) as client:
        return float(client.infer(model, [tensor]).as_numpy("Y").item())


def listens(address: str) -> bool:
    """Whether something does."""
    host, _, port = address.rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def test_graphs_and_models_are_served_with_what_they_reach(flow: Any) -> None:
    """The mesh answers as a run in this process does, also over HTTP, and ends with the block."""
    with weft.serve(flow.flow, flow.negate, port=0, http_port=0) as server:
        assert ask(server.address) == flow.flow.run({"X": [1.0]}).Y.item() == -2
        with triton.InferenceServerClient(server.address) as client:
            assert {one.name for one in client.get_model_repository_index().models} == {"flow", "negate", "scale"}
        assert listens(server.http_address)
    assert not listens(server.address)
    server.stop()


def test_a_port_that_is_taken_is_an_error_with_its_number(flow: Any) -> None:
    """By another program, or by a server of this process, whose end frees it."""
    with weft.serve(flow.negate, port=0) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(MeshError, match=f"port {port} on 127.0.0.1 is in use: stop what listens there, or choose"):
            weft.serve(flow.negate, port=port)
    with weft.serve(flow.negate, port=port) as second:
        assert second.address == first.address
        assert ask(second.address, model="negate") == -1


def test_what_cannot_be_served_is_told_with_the_reason(flow: Any, home: Path) -> None:
    """A model that cannot be loaded, and things that are no graphs, models or names."""
    (home / "models/model/scale/1/model.py").write_text("raise ValueError('no weights')")
    with pytest.raises(MeshError, match="no weights"):
        weft.serve(flow.flow, port=0)
    with pytest.raises(weft.WeftError, match="has no model 'skale'; did you mean 'scale'"):
        weft.serve("skale", port=0, models="models")
    with pytest.raises(weft.WeftError, match="there is no folder 'nowhere'"):
        weft.serve(flow.flow, port=0, models="nowhere")
    with pytest.raises(weft.WeftError, match=r"1 is no graph, model or name; make one with @weft\.graph"):
        weft.serve(1)


@pytest.mark.parametrize(
    ("last_line", "signal_sent", "status"),
    [
        ("server.wait()", signal.SIGINT, 0),
        ("input()", signal.SIGINT, 1),
        ("input()", signal.SIGKILL, -9),
        ("", None, 0),
    ],
)
def test_a_mesh_ends_with_its_script(home: Path, last_line: str, signal_sent: Any, status: int) -> None:
    """At its last line, at Ctrl-C and when it is killed; ``wait`` ends a script without a traceback."""
    script = f"""
import weft, flow
if __name__ == "__main__":
    server = weft.serve(flow.flow, port=0)
    print(server.address, flush=True)
    {last_line}
"""
    (home / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    with subprocess.Popen(
        command, cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if signal_sent is not None:
            assert ask(address) == -2
            process.send_signal(signal_sent)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode in (status, -signal.SIGINT if status else status)
    assert ("Traceback" in errors) == (last_line == "input()" and signal_sent == signal.SIGINT)
    wait_until(lambda: not listens(address), "the end of the mesh")  # of a killed script it notices the end


class Dev:
    """A running `weft dev flow.py`."""

    def __init__(self, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weft.cli", "dev", "flow.py", "--port", "0"],
            cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self._stdout = self.process.stdout

    def told(self, text: str) -> str:
        """The lines up to the one with the text."""
        lines = []
        for line in self._stdout:
            lines.append(line)
            if text in line:
                return "".join(lines)
        raise AssertionError("".join(lines))


@pytest.fixture
def dev(home: Path) -> Iterator[Dev]:
    """`weft dev flow.py`, ended at last."""
    dev = Dev(home)
    yield dev
    dev.process.terminate()
    dev.process.communicate()


def change(file: Path, old: str, new: str) -> None:
    """Write a file as an editor does: the new one replaces it."""
    fresh = file.with_suffix(".new")
    fresh.write_text(file.read_text().replace(old, new))
    fresh.rename(file)


def test_dev_serves_again_what_changes(home: Path, dev: Dev) -> None:
    """A graph, a model in Python, a module beside the file, a model of the repository; Ctrl-C ends it with status 0."""
    address = dev.told(": served").rpartition(" at ")[2].removesuffix(": served\n")
    assert ask(address) == -2
    change(home / "flow.py", '"Y": -X', '"Y": -3 * X')
    dev.told(": served")
    assert ask(address) == -6
    change(home / "models/model/scale/1/model.py", "2 * x", "5 * x")
    dev.told(": served")
    assert ask(address) == -15
    change(home / "factors.py", '"1"', '"7"')
    dev.told(": served")
    with triton.InferenceServerClient(address) as client:
        assert client.get_model_config("flow").config.parameters["factor"].string_value == "7"
    change(home / "flow.py", "def flow", "def stream")
    assert "negate, stream at" in dev.told(": served")
    assert ask(address, model="stream") == -15
    with pytest.raises(triton.InferenceServerException, match="flow"):
        ask(address)
    dev.process.send_signal(signal.SIGINT)
    assert dev.process.wait(WAIT_S) == 0
    assert "Traceback" not in dev._stdout.read()
    assert not listens(address)


@pytest.mark.long
def test_dev_tells_errors_with_their_line_and_serves_the_last_good_version(home: Path, dev: Dev) -> None:
    """Of Python, of the graph, and of a model at its load; a version that never ends is left for the next."""
    address = dev.told(": served").rpartition(" at ")[2].removesuffix(": served\n")
    for old, new, expected in (
        ("m.scale", "m.skale", "flow.py:13:5: error: there is no model or graph 'skale'"),
        ("m.scale(X).Y", "m.scale(X).Z", "flow.py:13:5: error: model 'scale' has no output 'Z'"),
        ("import weft\n", "import weft\nimport nothing\n", "No module named 'nothing'"),
        ("import weft\n", "import weft; weft (\n", 'flow.py", line 1'),
    ):
        good = (home / "flow.py").read_text()
        change(home / "flow.py", old, new)
        assert expected in dev.told("what was served before goes on")
        assert ask(address) == -2
        change(home / "flow.py", new, old)
        dev.told(": served")
        assert (home / "flow.py").read_text() == good
    change(home / "flow.py", "import weft\n", "import weft, time\nopen('begun', 'w').close(); time.sleep(1000)\n")
    while not (home / "begun").exists():
        os.sched_yield()
    change(home / "flow.py", "import weft, time\nopen('begun', 'w').close(); time.sleep(1000)\n", "import weft\n")
    dev.told(": served")
    change(home / "models/model/scale/1/model.py", "class", "raise ValueError('no weights')\nclass")
    assert "no weights" in dev.told(": has errors")
    assert ask(address) == -2


def test_dev_without_a_file_or_port_ends_with_the_reason(home: Path) -> None:
    """Status 2 for a file that is not there, 1 for a port that is taken."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "weft.cli", "dev", *arguments]
        return subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=WAIT_S, check=False)

    missing = run("flaw.py")
    assert (missing.returncode, missing.stderr) == (2, "weft dev: there is no 'flaw.py'\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run("flow.py", "--port", str(port))
    assert refused.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in refused.stderr
