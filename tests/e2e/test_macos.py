"""Commands on macOS, or on what of it Weft can notice: `tests/e2e/macos` takes away what only Linux has."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.conftest import Up

from weft.base.tensors import decode

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture
def weft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs a command there, in an empty folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent / "macos"), *sys.path]))

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "weft.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)

    return run


def test_a_repository_is_made_checked_drawn_and_served(
    weft: Callable[..., "subprocess.CompletedProcess[str]"], up: Callable[..., Up], tmp_path: Path
) -> None:
    """`weft init`, `check`, `draw`, `explain`, and `weft up` with a Python model in a process of its own."""
    graph = "mine/graphs/quadruple/1/graph.pbtxt"
    for arguments in (["init", "mine"], ["check", "mine"], ["draw", graph], ["explain", graph, "--input", "X=[3]"]):
        done = weft(*arguments)
        assert (0, False) == (done.returncode, "Traceback" in done.stderr), done.stderr
    mesh = up(repository=tmp_path / "mine")
    assert [[4.0]] == decode(mesh.call("quadruple").outputs["Y"]).tolist()
    assert 0 == mesh.stop()
    assert "Traceback" not in mesh.log()


def test_onnx_models_are_served_in_one_process(
    weft: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    """`weft edge` with a model of ONNX, and `weft infer`."""
    shutil.copytree(ROOT / "model_repository/model/simple", tmp_path / "model/simple")
    (tmp_path / "graphs").mkdir()
    command = [sys.executable, "-m", "weft.cli", "edge", "--repository", str(tmp_path), "--router-port", "0"]
    with subprocess.Popen(
        [*command, "--stop-with-stdin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as edge:
        address = json.loads(edge.stdout.readline())["grpc"]
        inputs = [text for name in ("INPUT0", "INPUT1") for text in ("--input", f"{name}={list(range(16))}")]
        done = weft("infer", "simple", "--url", address, *inputs)
        edge.communicate(timeout=60)  # closes its standard input
    assert (0, True) == (done.returncode, "[ 0,  2,  4," in done.stdout), done
    assert 0 == edge.returncode


SCRIPT = """
import sys
import weft
from weft import INT32, Tensor

m = weft.models("mine")

@weft.model(max_batch_size=8)
def double(X: Tensor[INT32, 16]) -> weft.Outputs(Y=Tensor[INT32, 16]):
    return {"Y": 2 * X}

@weft.graph(max_batch_size=8)
def sums(A: Tensor[INT32, 16], B: Tensor[INT32, 16]) -> weft.Outputs(Y=Tensor[INT32, 16]):
    return double(m.simple(INPUT0=A, INPUT1=B).OUTPUT0)

if __name__ == "__main__":
    given = {"A": [range(16)], "B": [range(16)]}
    print(sys.platform, sums.run(given).Y.max())
    print(sums.run(given, {"simple": weft.fake(OUTPUT0=[1] * 16, OUTPUT1=[0] * 16)}).Y.max())
    with weft.serve(sums, port=0) as server:
        print(server.address)
"""


def test_a_graph_in_python_is_run_and_served(
    weft: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    """With a model of ONNX, one in a process of its own, and fakes."""
    shutil.copytree(ROOT / "model_repository/model/simple", tmp_path / "mine/model/simple")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.stdout.splitlines()[:2] == ["darwin 60", "2"], done.stderr
    assert done.stdout.splitlines()[2].startswith("127.0.0.1:")
    assert (0, False) == (done.returncode, "Traceback" in done.stderr), done.stderr


@pytest.mark.parametrize(
    ("command", "status"),
    [("tune digits --slo p99=50ms --data d", 1), ("plan --repository m", 1), ("up --allow-client-shm", 2)],
)
def test_what_needs_linux_says_so(
    weft: Callable[..., "subprocess.CompletedProcess[str]"], command: str, status: int
) -> None:
    """In one sentence, at its start."""
    done = weft(*command.split())
    assert status == done.returncode
    assert re.search(r"^weft.* needs Linux, .*$", done.stderr, re.MULTILINE), done.stderr
