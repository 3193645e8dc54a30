"""``weft edge`` with the packages of ``pip install 'weft-mesh[onnx]'`` or less, as a process that serves."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pytest

from weft.base.core import InferCall, InferResult
from weft.base.errors import RemoteError, UnsupportedError
from weft.base.tensors import WireTensor, decode, encode
from weft.cli.__main__ import main
from weft.v2.client.v2_client import V2Client
from weft.v2.client.wires import WireName
from weft.v2.server.make_server import make_server

ROOT = Path(__file__).resolve().parents[3]
#: What a process of the mesh may import, and one of ``weft-mesh[onnx]`` must do without.
REFUSED = (
    "cel_expr_python", "google.api", "google.rpc", "grpc", "grpc_health", "grpc_reflection", "ml_dtypes", "numba",
    "onnx", "opentelemetry.exporter", "opentelemetry.sdk", "pyarrow", "rich", "safetensors", "scipy", "tokenizers",
    "torch", "transformers", "triton", "uvloop",
)  # fmt: skip
GRAPH = """
name: "NAME" platform: "graph" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] } ]
node { name: "root" sequence { step { name: "add" model_name: "simple" WHEN } } }
"""
WHEN = 'when: "max(inputs.INPUT0) > 3" default { output: "OUTPUT0" integer: [ ' + ", ".join("0" * 16) + " ] }"
HALF = """
name: "half" backend: "onnxruntime" max_batch_size: 8
input [ { name: "X" data_type: TYPE_BF16 dims: [ 16 ] } ]
output [ { name: "Y" data_type: TYPE_BF16 dims: [ 16 ] } ]
"""
WAIT_S = 60.0


class Edge(NamedTuple):
    """The process, and where it listens."""

    process: "subprocess.Popen[str]"
    address: str
    errors: Path


def start(repository: Path, errors: IO[str]) -> "subprocess.Popen[str]":
    """``weft edge`` with only what it may need."""
    script = Path(__file__).with_name("small_process.py")
    arguments = ["edge", "--repository", str(repository), "--router-port", "0", "--stop-with-stdin"]
    return subprocess.Popen(
        [sys.executable, str(script), ",".join(REFUSED), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "WEFT_WIRE": "weft"},
    )


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """It serves `simple`, a graph over it, one with a condition and a model with BF16 tensors."""
    folder = tmp_path_factory.mktemp("edge")
    shutil.copytree(ROOT / "model_repository" / "model" / "simple", folder / "model" / "simple")
    shutil.copytree(folder / "model" / "simple" / "1", folder / "model" / "half" / "1")
    (folder / "model" / "half" / "config.pbtxt").write_text(HALF)
    for name, when in (("sum", ""), ("sum_of_some", WHEN)):
        (folder / "graphs" / name / "1").mkdir(parents=True)
        text = GRAPH.replace("NAME", name).replace("WHEN", when)
        (folder / "graphs" / name / "1" / "graph.pbtxt").write_text(text)
    errors = folder / "errors"
    with errors.open("w") as log, start(folder, log) as process:
        try:
            line = process.stdout.readline()
            assert line, errors.read_text()
            yield Edge(process, json.loads(line)["grpc"], errors)
        finally:
            process.stdin.close()
            assert 0 == process.wait(WAIT_S)


@pytest.fixture
async def client(edge: Edge) -> AsyncIterator[V2Client]:
    """A client on Weft's own wire."""
    async with V2Client(edge.address, wire=WireName.WEFT) as client:
        yield client


def pair() -> dict[str, WireTensor]:
    """Inputs of `simple`: 0 to 15, and ones."""
    values = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    return {f"INPUT{index}": encode(value) for index, value in enumerate(values)}


@pytest.mark.parametrize("name", ["simple", "sum"])
async def test_a_model_and_a_graph_answer_without_any_optional_package(client: V2Client, name: str) -> None:
    """The sum of the inputs, over gRPC, from a process that has neither torch nor grpcio nor CEL."""
    result = await client.infer(InferCall(name, inputs=pair()), timeout_s=WAIT_S)
    assert list(range(1, 17)) == decode(result.outputs["OUTPUT0"]).ravel().tolist()


async def test_what_needs_a_missing_package_says_which_extra_has_it(client: V2Client) -> None:
    """A condition and BF16 tensors are refused at load, with the condition's name and place, and what to install."""
    reasons = {entry.name: entry.reason for entry in await client.index(timeout_s=WAIT_S) if entry.state != "READY"}
    assert {"half", "sum_of_some"} == reasons.keys()
    assert "'when' is a condition" in reasons["sum_of_some"]
    assert "pip install cel-expr-python" in reasons["sum_of_some"]
    assert "graph.pbtxt:5" in reasons["sum_of_some"]
    assert "pip install 'weft-mesh[bf16]'" in reasons["half"]


async def test_health_is_served(client: V2Client) -> None:
    """SERVING with one graph of two, but not ready. Reflection, which needs grpcio, is UNIMPLEMENTED."""
    assert await client.is_serving(timeout_s=WAIT_S)
    assert not await client.is_ready(timeout_s=WAIT_S)
    channel: Any = client.channel
    reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with pytest.raises(Exception, match="UNIMPLEMENTED"):
        await reflect(iter((b"",))).read()


async def test_an_error_has_its_status(client: V2Client) -> None:
    """NOT_FOUND for an unknown model, INVALID_ARGUMENT for a wrong shape."""
    with pytest.raises(RemoteError, match="nothing") as unknown:
        await client.infer(InferCall("nothing", inputs=pair()), timeout_s=WAIT_S)
    assert "NOT_FOUND" == unknown.value.code
    with pytest.raises(RemoteError) as wrong:
        await client.infer(InferCall("simple", inputs={"INPUT0": pair()["INPUT0"]}), timeout_s=WAIT_S)
    assert "INVALID_ARGUMENT" == wrong.value.code


async def test_streams_and_cancelled_calls_leave_it_serving(client: V2Client) -> None:
    """A stream has its one final response; calls whose caller gives up end nothing else."""
    results = [result async for result in client.stream(InferCall("simple", inputs=pair()), timeout_s=WAIT_S)]
    assert [True] == [result.is_final for result in results]
    tasks = [asyncio.ensure_future(client.infer(InferCall("sum", inputs=pair()), timeout_s=WAIT_S)) for _ in range(32)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert 16 <= sum(isinstance(end, InferResult) for end in ended)


def test_the_client_needs_nothing_optional_either(edge: Edge) -> None:
    """``weft infer`` gets an answer, and an error with its status, where neither end has grpcio."""
    values = ["--input", f"INPUT0={list(range(16))}", "--input", f"INPUT1={[1] * 16}"]
    good, unknown = ["infer", "simple", "--url", edge.address], ["infer", "nothing", "--url", edge.address]
    named = ["infer", "simple", "--url", f"dns:///{edge.address}"]
    script = Path(__file__).with_name("small_process.py")
    done = subprocess.run(
        [
            sys.executable,
            str(script),
            ",".join(REFUSED),
            *good,
            *values,
            "then",
            *unknown,
            *values,
            "then",
            *named,
            *values,
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert "statuses [0, 1, 1]" in done.stdout, done.stderr
    assert "16" in done.stdout
    assert "NOT_FOUND" in done.stderr
    assert "pip install 'weft-mesh[grpcio]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_exporter_that_is_not_there_is_told(edge: Edge) -> None:
    """A warning at the start names the extra; the process serves."""
    assert "pip install 'weft-mesh[telemetry]'" in edge.errors.read_text()


def test_the_other_wire_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of grpcio is refused with the name of the extra where it is not installed."""
    monkeypatch.setattr("weft.v2.server.make_server.HAS_GRPCIO", False)
    with pytest.raises(UnsupportedError, match=r"pip install 'weft-mesh\[grpcio\]'"):
        make_server(wire=WireName.GRPCIO)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--repository", "nowhere"], "there is no folder 'nowhere'"),
        (["--max-inflight", "-1"], "at least 0"),
        (["--tls-cert", "nowhere.pem"], "--tls-key"),
        (["--load-model", "simple"], "--model-control-mode explicit"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and what is wrong with it, before anything is served."""
    assert 2 == main(["edge", *arguments])
    assert reason in capsys.readouterr().err


def test_the_base_package_requires_little() -> None:
    """Whoever adds a requirement of every process decides about its size."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    base = {"argcomplete", "hpack", "numpy", "opentelemetry-api", "prometheus-client", "protobuf", "typing-extensions"}
    assert (
        base | {"cel-expr-python", "jinja2", "starlette", "uvicorn", "zstandard"} == names
    )  # also conditions, gateway
    assert ["onnxruntime>=1.22"] == project["optional-dependencies"]["onnx"]
