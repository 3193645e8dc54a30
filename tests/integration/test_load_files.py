"""Loads that bring the model's files, at a service, and by gRPC and HTTP through a router at both of its replicas."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tests.integration.talking import GatewayProcess, running_gateway
from tests.processes import WAIT_S, running, wait_until
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.long

#: Adds a number to its input.
CODE = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() + {})]) for r in requests]
"""
CONFIG = json.dumps(
    {
        "backend": "python",
        "input": [{"name": "X", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "Y", "data_type": "TYPE_INT32", "dims": [1]}],
    }
)
PREFIX = "failed to load 'new', failed to poll from model repository"


def files(number: int, version: int = 1) -> dict[str, bytes]:
    """The files of a model that adds this number."""
    return {f"file:{version}/model.py": CODE.format(number).encode()}


class Mesh(NamedTuple):
    """Where its processes listen, and where the services have their temporary files."""

    router: str
    gateway: GatewayProcess
    replicas: list[str]
    temporary: Path

    def answers(self, model: str) -> list[int]:
        """What each replica, and the router, answers to 1."""
        found = []
        for address in (*self.replicas, self.router):
            with tritonclient.grpc.InferenceServerClient(address) as client:
                tensor = tritonclient.grpc.InferInput("X", [1], "INT32")
                tensor.set_data_from_numpy(np.ones(1, np.int32))
                found.append(int(client.infer(model, [tensor], client_timeout=WAIT_S).as_numpy("Y")[0]))
        return found

    def folders(self) -> list[str]:
        return [entry for entry in os.listdir(self.temporary) if entry.startswith("weft-load-")]

    def index(self) -> set[tuple[str, str, str]]:
        with tritonclient.grpc.InferenceServerClient(self.router) as client:
            return {(one.name, one.version, one.state) for one in client.get_model_repository_index().models}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("load_files")
    for name in ("models/kept/3", "graphs", "temporary"):
        (folder / name).mkdir(parents=True)
    (folder / "models/kept/config.pbtxt").write_text(
        'backend: "python" input { name: "X" data_type: TYPE_INT32 dims: 1 } '
        'output { name: "Y" data_type: TYPE_INT32 dims: 1 }'
    )
    (folder / "models/kept/3/model.py").write_text(CODE.format(30))
    serve = (
        "weft.services.model", "--repository", str(folder / "models"), "--model-control-mode", "explicit",
        "--load-model", "*", "--allow-load-files", "1",
    )  # fmt: skip
    environment = {"TMPDIR": str(folder / "temporary")}
    with (
        running(*serve, environment=environment) as a,
        running(*serve, environment=environment) as b,
        running(
            "weft.services.router", "--repository", str(folder / "graphs"), "--target", f"model={a.grpc},{b.grpc}"
        ) as router,
        running_gateway(router.grpc) as gateway,
    ):
        yield Mesh(router.grpc, gateway, [a.grpc, b.grpc], folder / "temporary")
    assert [] == [entry for entry in os.listdir(folder / "temporary") if entry.startswith("weft-load-")]


@pytest.fixture(params=["grpc", "http"])
def client(mesh: Mesh, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client of tritonclient by either protocol, through the router."""
    if request.param == "grpc":
        with tritonclient.grpc.InferenceServerClient(mesh.router) as grpc_client:
            yield grpc_client
    else:
        with tritonclient.http.InferenceServerClient(mesh.gateway.address, network_timeout=WAIT_S) as http_client:
            yield http_client


def test_a_model_without_a_folder_lives_from_load_to_unload(mesh: Mesh, client: Any) -> None:
    """Every replica serves what was sent; the index has it; its files are gone with it."""
    client.load_model("new", config=CONFIG, files=files(1))
    assert [2, 2, 2] == mesh.answers("new")
    assert ("new", "1", "READY") in mesh.index()
    client.load_model("new", config=CONFIG, files=files(2, version=7))
    assert [3, 3, 3] == mesh.answers("new")
    wait_until(lambda: len(mesh.folders()) == 2, "the end of the folders that were replaced")
    with pytest.raises(InferenceServerException, match="the repository has no folder 'new'"):
        client.load_model("new")
    client.load_model("kept")
    client.load_model("kept", config=CONFIG, files=files(4))
    assert [5, 5, 5] == mesh.answers("kept")
    assert {("kept", "1", "READY"), ("kept", "3", "UNAVAILABLE")} <= mesh.index()
    client.load_model("kept")
    assert [31, 31, 31] == mesh.answers("kept")
    client.unload_model("new")
    assert not client.is_model_ready("new")
    wait_until(lambda: not mesh.folders(), "the end of all folders")


def test_a_failed_load_keeps_what_serves(mesh: Mesh, client: Any) -> None:
    """Code that raises, a configuration that is none, or no configuration; nothing of them stays on the disk."""
    client.load_model("new", config=CONFIG, files=files(1))
    before = mesh.folders()
    for config, sent, message in (
        (CONFIG, {"file:1/model.py": b"raise RuntimeError('no')"}, "RuntimeError: no"),
        ("{backend", files(2), "parameter 'config' is not a model configuration in JSON"),
        (None, files(2), f"{PREFIX}: load parameter 'config' must be specified with files"),
        (CONFIG, {"file:model.py": b""}, "has no version folder"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("new", config=config, files=sent)
        assert message in str(caught.value.message())
        assert [2, 2, 2] == mesh.answers("new")
        assert before == mesh.folders()
    client.unload_model("new")
    with pytest.raises(InferenceServerException, match="no"):
        client.load_model("never", config=CONFIG, files={"file:1/model.py": b"raise RuntimeError('no')"})
    assert "never" not in {name for name, _, _ in mesh.index()}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"file:../x/model.py": b""}, "'file:../x/model.py' must name a file within the model's folder"),
        ({"file:/etc/x": b""}, "must name a file within the model's folder"),
        ({"file:1/../../x": b""}, "must name a file within the model's folder"),
        ({"file:1//x": b""}, "must name a file within"),
        ({"file:1/..\\x": b""}, "must name a file within"),
        ({"file:1/a\nb": b""}, "must name a file within"),
        ({"file:": b""}, "must name a file within"),
        ({f"file:1/{'x' * 300}": b""}, "must name a file within"),
        ({"file:1/" + "a/" * 40 + "x": b""}, "must name a file within"),
        ({"file:1": b"", "file:1/model.py": b""}, "is a file and a folder at once"),
        ({"file:1/model.py": bytes((1 << 20) + 1)}, "1048576 are allowed in all; unload such models, or start"),
        ({f"file:1/{number}": b"" for number in range(1025)}, "1025 files are sent, 1024 are allowed"),
    ],
)
def test_files_that_are_refused(mesh: Mesh, client: Any, sent: dict[str, bytes], message: str) -> None:
    """The message has file and limit; nothing is written, and the model is not there."""
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("fresh", config=CONFIG, files=sent)
    assert message in str(caught.value.message())
    assert not mesh.folders()
    assert not any(name == "fresh" for name, _, _ in mesh.index())


def test_what_is_no_file_is_refused_over_http(mesh: Mesh) -> None:
    """Text that is not base64, a number, and a configuration that is none."""
    for parameters, message in (
        ({"config": CONFIG, "file:1/model.py": "@@@"}, "'file:1/model.py' must be the content of a file in base64"),
        ({"config": CONFIG, "file:1/model.py": 7}, "'file:1/model.py' must be the content of a file in base64"),
        ({"config": {"backend": "python"}, "file:1/model.py": ""}, "parameter 'config'"),
        ({"config": CONFIG, "fiel:1/model.py": ""}, "unknown parameter 'fiel:1/model.py'"),
    ):
        status, body, _ = mesh.gateway.ask("POST", "/v2/repository/models/kept/load", {"parameters": parameters})
        assert 400 == status, body
        assert message in body["error"]
    assert not mesh.folders()


async def test_loads_at_once_leave_one_of_them(mesh: Mesh) -> None:
    """Eight of one model at the same time: all are done, one after another; of the last one the folder stays."""
    async with aio.InferenceServerClient(mesh.replicas[0]) as client:
        await asyncio.gather(*(client.load_model("busy", config=CONFIG, files=files(number)) for number in range(8)))
        assert await client.is_model_ready("busy")
        await asyncio.to_thread(wait_until, lambda: len(mesh.folders()) == 1, "the end of those replaced")
        await client.unload_model("busy")
    await asyncio.to_thread(wait_until, lambda: not mesh.folders(), "the end of all")


def test_files_are_refused_where_they_are_not_allowed(tmp_path: Path) -> None:
    """The message names the argument; a model that is not there is an error as of Triton Inference Server."""
    arguments = ("--repository", str(tmp_path), "--model-control-mode", "explicit")
    with (
        running("weft.services.model", *arguments) as service,
        tritonclient.grpc.InferenceServerClient(service.grpc) as client,
    ):
        with pytest.raises(InferenceServerException, match=r"start the service with --allow-load-files"):
            client.load_model("new", config=CONFIG, files=files(1))
        with pytest.raises(
            InferenceServerException, match="failed to load 'new', failed to poll from model repository"
        ):
            client.load_model("new")
        with pytest.raises(InferenceServerException, match=r"Invalid model name '\.\./new'"):
            client.load_model("../new", config=CONFIG, files=files(1))
