"""A stranger's first hour with the wheel, by the clock: installed into a fresh environment, outside the checkout.

`make first-hour` prints the seconds. What a typo is answered with is in first_hour.txt beside this file.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.case_files import Case, cases
from tests.guide import Reader, steps_of

ROOT = Path(__file__).parents[2]
WAIT_S = 300.0
FILES = {
    "model/flowers/config.pbtxt": """\
name: "flowers"
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "SCORES" data_type: TYPE_FP32 dims: [ 3 ] } ]
""",
    "graphs/sort/1/graph.pbtxt": """\
name: "sort"
platform: "graph"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "SCORES" data_type: TYPE_FP32 dims: [ 3 ] } ]
node {
  name: "root"
  sequence {
    step { name: "classify" model_name: "flowers" }
  }
}
""",
}
pytestmark = pytest.mark.long


class Environment:
    """A virtual environment with Weft's wheel; ``seconds`` says what took how long."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "") -> None:
        self.seconds: dict[str, float] = {}
        self.python = str(folder / "bin/python")
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WEFT"))}
        self.variables["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        what = f"weft-mesh[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        self.timed("python -m venv", [sys.executable, "-m", "venv", str(folder)])
        self.timed(
            f"pip install weft-mesh{f'[{extra}]' * bool(extra)}", [str(folder / "bin/pip"), "install", "-q", what]
        )

    def timed(self, name: str, command: list[str]) -> None:
        """Run a command that must succeed."""
        started_s = time.monotonic()
        subprocess.run(command, check=True, timeout=WAIT_S, env=self.variables, stdout=subprocess.DEVNULL)
        self.seconds[name] = time.monotonic() - started_s

    def run(self, line: str, folder: Path) -> "subprocess.CompletedProcess[str]":
        """One command of ``weft`` to its end, both outputs in one."""
        return subprocess.run(
            shlex.split(line), env=self.variables, cwd=folder, timeout=WAIT_S, check=False,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def up(self, line: str, folder: Path) -> "subprocess.Popen[str]":
        """``weft up``, which prints one line of JSON, or ends."""
        with (folder / "log").open("w") as log:
            return subprocess.Popen(
                [*shlex.split(line), "--json", "--stop-with-stdin", "--metrics-port", "0"], env=self.variables,
                cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of `make wheel`, or a new one."""
    if built := os.environ.get("WEFT_WHEEL"):
        return ROOT / built
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=WAIT_S)
    return next(folder.glob("weft_mesh-*.whl"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """``pip install weft_mesh-*.whl``."""
    return Environment(tmp_path_factory.mktemp("plain"), wheel)


@pytest.fixture(scope="module")
def with_onnx(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """The same with the extra `onnx`."""
    return Environment(tmp_path_factory.mktemp("onnx"), wheel, "onnx")


def write_repository(folder: Path) -> None:
    """An own model of ONNX, its configuration, and a graph over it."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    weights = helper.make_tensor("W", TensorProto.FLOAT, [4, 3], [float(index % 5) for index in range(12)])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["X", "W"], ["H"]), helper.make_node("Softmax", ["H"], ["SCORES"])],
        "flowers",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("SCORES", TensorProto.FLOAT, ["batch", 3])],
        [weights],
    )
    (folder / "model/flowers/1").mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "model/flowers/1/model.onnx")


def told(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    """Print the seconds, past pytest."""
    with capsys.disabled():
        print()
        for name, seconds in environment.seconds.items():
            print(f"{seconds:8.1f} s  {name}")


def answered(environment: Environment, folder: Path, name: str, request: str) -> str:
    """What `weft infer` prints of a mesh that is started for it."""
    started_s = time.monotonic()
    with environment.up("weft up --repository mine --router-port 0", folder) as mesh:
        address = json.loads(mesh.stdout.readline())["router"]["grpc"]
        done = environment.run(f"{request} --url {address} --json", folder)
        environment.seconds[name] = time.monotonic() - started_s
        mesh.communicate(timeout=60)  # closes its standard input
    assert (0, 0) == (done.returncode, mesh.returncode), done.stdout
    return done.stdout


def test_what_init_writes_answers_with_the_plain_package(
    plain: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`weft init`, `check`, `up`, `infer`: no extra, no checkout; the version names the distribution."""
    for line in ("weft init mine", "weft check mine"):
        plain.timed(line, ["sh", "-c", f"cd {tmp_path} && {line}"])
    assert re.fullmatch(r"weft-mesh \S+\n", plain.run("weft --version", tmp_path).stdout)
    text = answered(plain, tmp_path, "weft up to the answer of weft infer", "weft infer quadruple --input X=[3]")
    assert [12.0] == json.loads(text)["outputs"][0]["data"]
    told(plain, capsys)


def test_an_own_model_of_onnx_answers(
    with_onnx: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over gRPC, through a graph, with the values of numpy."""
    write_repository(tmp_path / "mine")
    assert "2 files, 0 errors, 0 warnings\n" == with_onnx.run("weft check mine", tmp_path).stdout
    request = "weft infer sort --input X=[5.1,3.5,1.4,0.2]"
    text = answered(with_onnx, tmp_path, "weft up to the answer of an own model.onnx", request)
    exact = np.exp(np.array([[5.1, 3.5, 1.4, 0.2]]) @ np.array([float(index % 5) for index in range(12)]).reshape(4, 3))
    assert np.allclose((exact / exact.sum()).ravel(), json.loads(text)["outputs"][0]["data"], rtol=1e-5)
    told(with_onnx, capsys)


def test_a_model_and_graph_in_python_answer(
    tmp_path_factory: pytest.TempPathFactory, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By docs/python.md, from `pip install` to the first answer of a server in three minutes; and the whole page."""
    started_s = time.monotonic()
    environment = Environment(tmp_path_factory.mktemp("python"), wheel)
    seconds = environment.seconds
    with Reader(tmp_path, environment.python, environment.variables, skipped=("pip install dist/",)) as reader:
        for step in steps_of((ROOT / "docs/python.md").read_text()):
            reader.follow(step)
            if step.name.startswith("weft infer"):
                seconds.setdefault("pip install to the first answer", time.monotonic() - started_s)
    seconds["pip install to the end of docs/python.md"] = time.monotonic() - started_s
    told(environment, capsys)
    assert seconds["pip install to the first answer"] < 180


@pytest.fixture
def port() -> Iterator[int]:
    """One that another program has."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@cases(Path(__file__).with_name("first_hour.txt"))
def test_a_typo_is_answered(case: Case, request: pytest.FixtureRequest, tmp_path: Path, port: int) -> None:
    """With what is wrong, the value, what is allowed, the cure, and the place."""
    environment: Environment = request.getfixturevalue(case.option("environment", "with_onnx"))
    write_repository(tmp_path / "mine")
    line_of_up, running = "", []

    def serving() -> str:
        """Address of the mesh, which is started for the first request."""
        if not running:
            mesh = environment.up(line_of_up, tmp_path)
            running.append((mesh, json.loads(mesh.stdout.readline())["router"]["grpc"]))
        return running[0][1]

    def run(line: str) -> list[str]:
        nonlocal line_of_up
        verb, *arguments = shlex.split(line)
        if verb == "edit":
            file = tmp_path / "mine" / arguments[0]
            text = file.read_text()
            assert arguments[1] in text
            file.write_text(text.replace(arguments[1], arguments[2], 1))
            return []
        if verb == "rename":
            (tmp_path / "mine" / arguments[0]).rename(tmp_path / "mine" / arguments[1])
            return []
        if line.startswith("weft up"):
            line_of_up = line.replace("PORT", str(port)) if "PORT" in line else f"{line} --router-port 0"
            mesh = environment.up(line_of_up, tmp_path)
            mesh.stdout.readline()  # it serves, or it has ended
            mesh.communicate(timeout=60)
            log = (tmp_path / "log").read_text().splitlines()
            entries = [json.loads(text) for text in log if text.startswith("{")]
            said = [one["message"] for one in entries if one["service"] == "weft" and one["level"] != "info"]
            said = [text for message in said for text in f"weft: {message}".splitlines()]
            return cleaned([*said, *(text for text in log if text.startswith("weft"))])
        done = environment.run(f"{line} --url {serving()}" if "infer" in line else line, tmp_path)
        return cleaned([*done.stdout.splitlines(), f"status {done.returncode}"])

    def cleaned(lines: list[str]) -> list[str]:
        return [text.replace(str(tmp_path), "~").replace(str(port), "PORT") for text in lines]

    try:
        case.check_script(run)
    finally:
        for mesh, _ in running:
            mesh.communicate(timeout=60)
