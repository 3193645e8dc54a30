"""The process: wrong usage, a model that fails, a clean end."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from weft.serving.main import main
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

PROGRAM = """
import sys
from weft.serving.backends.base import TensorBackend
from weft.serving.main import main

class Echo(TensorBackend):
    def load(self):
        pass

    def run(self, inputs, num_rows):
        return {"Y": inputs["X"]}

sys.exit(main("model", {"echo": Echo}, sys.argv[1:]))
"""
CONFIG = """\
backend: "echo"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--repository", "absent"], "weft.services.model: error: --repository absent: there is no such folder"),
        (["--repository", ".", "--load-model", "m"], "--load-model needs --model-control-mode explicit"),
        (["--repository", ".", "--repository-poll-secs", "0"], "--repository-poll-secs must be above 0 and at most"),
        (
            ["--repository", ".", "--warm-models", "2"],
            "--warm-models, --warm-mib and --warm-idle-s need --load-on-demand",
        ),
        (["--repository", ".", "--load-on-demand", "--warm-idle-s", "-1"], "must be at least 0, got -1"),
        (
            ["--repository", ".", "--rate-limit-resource", "R:1"],
            "--rate-limit-resource needs --rate-limit execution_count",
        ),
    ],
)
def test_wrong_usage(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot work ends at once with status 2 and the reason."""
    assert main("model", {}, arguments) == 2
    assert text in capsys.readouterr().err


def test_repository_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a repository there is nothing to serve: status 2, and the usage."""
    with pytest.raises(SystemExit) as caught:
        main("model", {}, [])
    assert caught.value.code == 2
    assert "--repository" in capsys.readouterr().err


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that serves ``good``, and ``bad``, which cannot be loaded."""
    for name, config in (("good", CONFIG), ("bad", CONFIG.replace("dims: 1", "dims: 0", 1))):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    arguments = ["--repository", str(tmp_path / "models"), "--grpc-port", "0", "--metrics-port", "0"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,  # type: ignore[list-item]
        )
        yield process
        process.kill()
        process.communicate()


def test_process_serves_what_loads(process: subprocess.Popen[str], tmp_path: Path) -> None:
    """A model that fails leaves the process up but not ready; log and index say why; SIGTERM ends it with status 0."""
    assert process.stdout is not None
    endpoint = json.loads(process.stdout.readline())["grpc"]
    with grpc.insecure_channel(endpoint) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert not stub.ServerReady(pb.ServerReadyRequest()).ready
        assert stub.ModelReady(pb.ModelReadyRequest(name="good")).ready
        bad, good = stub.RepositoryIndex(pb.RepositoryIndexRequest()).models
    assert (good.name, good.version, good.state) == ("good", "1", "READY")
    assert (bad.name, bad.state) == ("bad", "UNAVAILABLE")
    assert "config.pbtxt:2:46: error: input 'X' dimension must be integer >= 1" in bad.reason
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    messages = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert bad.reason in [line["message"] for line in messages if line["level"] == "error"]
