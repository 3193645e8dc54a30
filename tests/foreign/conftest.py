"""Clients of other languages, and the services that they call. Collected by ``make foreign-clients`` alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.foreign.clients import LANGUAGES, ForeignClient, MissingToolError, built
from tests.wire.echo_process import EchoService, has_weft_server

collect_ignore_glob = [] if os.environ.get("WEFT_FOREIGN") else ["test_*.py"]

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
"""
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""


@pytest.fixture(scope="session", params=["grpcio", "weft"])
def wire(request: pytest.FixtureRequest) -> str:
    """The wire of the services."""
    if request.param == "weft" and not has_weft_server():
        pytest.skip("no server yet")
    return str(request.param)


@pytest.fixture(scope="session", params=LANGUAGES)
def client(request: pytest.FixtureRequest) -> ForeignClient:
    """A client in each language whose tools are installed."""
    try:
        return built(request.param)
    except MissingToolError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def echo(wire: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoService]:
    """The echo service with limits of the default, on a port and a Unix socket; it must not fail in silence."""
    folder = tmp_path_factory.mktemp("echo")
    with EchoService(wire, folder / "log", f"--unix={folder}/socket") as service:
        yield service


@pytest.fixture(scope="session")
def model_address(wire: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model service with the model ``echo``: OUTPUT0 is INPUT0, UINT8 of any length."""
    folder = tmp_path_factory.mktemp("repository")
    version = folder / "echo" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (folder / "echo" / "config.pbtxt").write_text(CONFIG)
    command = [
        sys.executable, "-P", "-m", "weft_model", "--repository", str(folder), "--grpc-port", "0", "--metrics-port",
        "0", "--wire", wire, "--stop-with-stdin", "--log-level", "error",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["grpc"]
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Certificates."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of an authority that nobody here trusts."""
    return Authority(tmp_path_factory.mktemp("other"), "other").ca
