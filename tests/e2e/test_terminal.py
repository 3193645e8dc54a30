"""`weft up` on a terminal: what a person sees."""

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.chain import write_repository
from tests.messages import request_from_call

from weft.base.core import InferCall
from weft.base.tensors import encode
from weft.cli.__main__ import main
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

WAIT_S = 90.0
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [1] }
output { name: "Y" data_type: TYPE_FP32 dims: [1] }
"""
BROKEN = {
    "imports": "import numpy\nimport no_such_module\n",
    "initializes": "class TritonPythonModel:\n    def initialize(self, args):\n        {}['weights']\n",
    "raises": "class TritonPythonModel:\n    def execute(self, requests):\n        return 1 / 0\n",
}


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *command: str, environment: Mapping[str, str]) -> None:
        self.text = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "weft.cli", *command], {**os.environ, **environment})

    def until(self, text: str) -> None:
        """Read until a text is there."""
        end_s = time.monotonic() + WAIT_S
        while text not in self.text:
            assert time.monotonic() < end_s, self.text
            self._read(end_s)

    def stop(self) -> int:
        """Ctrl-C; the exit status."""
        os.write(self._terminal, b"\x03")
        with contextlib.suppress(OSError):  # the terminal is gone
            while self._read(time.monotonic() + WAIT_S):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """End it, whatever the test did."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)

    def _read(self, end_s: float) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, end_s - time.monotonic()))
        data = os.read(self._terminal, 1 << 16) if ready else b""
        self.text += data.decode()
        return bool(data)


def call(address: str, model: str) -> str:
    """The message of the error that a call ends with."""
    request = request_from_call(InferCall(model, inputs={"X": encode(np.array([1], np.float32))}))
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failure:
        GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    return str(failure.value.details())


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The small repository with a graph and models that do not work."""
    repository = write_repository(tmp_path)
    for name, source in BROKEN.items():
        (repository / "model" / name / "1").mkdir(parents=True)
        (repository / "model" / name / "config.pbtxt").write_text(CONFIG)
        (repository / "model" / name / "1" / "model.py").write_text(source)
    graph = repository / "graphs/chain/1/graph.pbtxt"
    (repository / "graphs/lame/1").mkdir(parents=True)
    (repository / "graphs/lame/1/graph.pbtxt").write_text(graph.read_text().replace('"work"', '"wrk"'))
    return repository


def test_a_person_sees_aligned_lines_and_each_error_once(broken: Path) -> None:
    """Service, time, level; a traceback, from the model's own code on, for import and initialize; then what serves.

    With `--dev` a client gets the traceback of a model that raises; `weft restart --wait` tells how it went.
    """
    arguments = ["up", "--repository", str(broken), "--router-port", "0", "--in-process", "preprocess,postprocess"]
    terminal = Terminal(*arguments, "--dev", environment={"TERM": "xterm"})
    try:
        terminal.until("Ctrl-C stops it.")
        assert "\x1b[" in terminal.text
        text = re.sub(r"\x1b\[\d+m|\r", "", terminal.text)
        for name, error in (
            ("imports", "ModuleNotFoundError: No module named 'no_such_module'"),
            ("initializes", "KeyError: 'weights'"),
        ):
            path = broken / "model" / name / "1" / "model.py"
            line = 2 if name == "imports" else 3
            assert 1 == text.count(f'|     File "{path}", line {line}'), text
            assert 1 == text.count(f"model       |   {error}"), text
        assert not re.search(r'File ".*/weft/', text), "tracebacks begin in the model"
        logged = text[: text.index("service     gRPC")].splitlines()
        assert all(re.match(r"\S+ +\| ( |\d\d:\d\d:\d\d [A-Z]+ )", line) for line in logged), logged
        assert {"|"} == {line[12] for line in logged}
        assert '{"' not in text
        assert "\n1 graph serves, 1 does not: lame/1 (" in text
        assert re.search(r"\n4 models serve, 2 do not:\n  imports/1 \(.*\n  initializes/1 \(.*:3: KeyError", text), text
        address = re.search(r"router +([\d.:]+)", text)
        assert address is not None
        told = call(address[1], "raises")
        assert f'{broken / "model/raises/1/model.py"}", line 3, in execute' in told
        assert told.endswith("ZeroDivisionError: division by zero")
        terminal.until("ZeroDivisionError")
        assert main(["restart", "--wait", "--url", address[1]]) == 0
        assert terminal.stop() == 0, terminal.text
    finally:
        terminal.close()


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}])
def test_no_colours_where_they_are_not_wanted(tmp_path: Path, environment: dict[str, str]) -> None:
    """NO_COLOR, and a terminal that is dumb: the same lines without a control character. Clients get no traceback."""
    repository = write_repository(tmp_path)
    terminal = Terminal(
        "up", "--repository", str(repository), "--router-port", "0", "--in-process", environment=environment
    )
    try:
        terminal.until("Ctrl-C stops it.")
        assert "\x1b" not in terminal.text
        assert "router      | " in terminal.text
        assert terminal.stop() == 0
    finally:
        terminal.close()


def test_json_on_a_terminal_if_asked_for(tmp_path: Path) -> None:
    """`--json`: every line is JSON; `--log-level warning` leaves only what is wrong, of every service."""
    repository = write_repository(tmp_path)
    arguments = ["--repository", str(repository), "--router-port", "0", "--in-process", "--log-level", "warning"]
    terminal = Terminal("up", "--json", *arguments, environment={"TERM": "xterm"})
    try:
        terminal.until('"pid"')
        assert terminal.stop() == 0
        assert all(line.startswith(("{", "^C")) for line in terminal.text.splitlines()), terminal.text
        assert '"level": "info"' not in terminal.text
    finally:
        terminal.close()
