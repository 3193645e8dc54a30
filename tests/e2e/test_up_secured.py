"""A mesh with certificates and keys, as the documentation sets one up: by commands."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Authority
from tests.repositories import NUMBERS, THREAD, write_model

from weft.cli.__main__ import main

#: Calls the graph `chain` through the router.
ASKS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        tensor = pb_utils.Tensor("X", request.inputs()[0].as_numpy())
        asked = pb_utils.InferenceRequest(model_name="chain", inputs=[tensor], requested_output_names=["Y"])
        answer = asked.exec()
        if answer.has_error():
            return [pb_utils.InferenceResponse(error=answer.error())]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer.output_tensors()[0].as_numpy())])]
"""


@pytest.fixture
def asking(repository: Path, tmp_path: Path) -> Path:
    """The repository with one more model, which calls the graph."""
    root = shutil.copytree(repository, tmp_path / "repository")
    write_model(root / "model", "asks", ASKS, THREAD + NUMBERS.replace("[ 1 ]", "[ 1, 1 ]"))
    return root


def test_closed_mesh_serves_who_may_enter(
    up: Callable[..., Any], asking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With mTLS and keys a client that has both is answered, also where a model calls a graph; nobody else is."""

    def weft(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    authority = Authority(tmp_path)
    server, client = authority.issue("router"), authority.issue("client")
    keys, key, lesser = tmp_path / "weft.keys", tmp_path / "admin.key", tmp_path / "lesser.key"
    for name, path in (("admin", key), ("lesser", lesser)):
        path.write_text(weft("key", "new", name, "--add-to", keys)[1])
    text = keys.read_text().replace('"name": "admin"', '"name": "admin", "control": true')
    keys.write_text(text.replace('"name": "lesser"', '"name": "lesser", "models": ["work"]'))
    mesh = up(
        *("--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", authority.ca),
        *("--auth-keys", keys, "--router-workers", "2"),
        repository=asking,
    )
    address = mesh.endpoints["router"]["grpc"]
    tls = ("--tls-ca", authority.ca, "--tls-cert", client.cert, "--tls-key", client.key)
    for graph in ("chain", "asks"):
        status, out, err = weft("infer", graph, "--input", "X=[[1]]", "--url", address, *tls, "--key-file", key)
        assert status == 0, err + mesh.log()
        assert "[[4.]]" in out
    for arguments, error in (
        ((), "UNAVAILABLE"),
        (tls[:2], "UNAVAILABLE"),
        (tls, "UNAUTHENTICATED"),
        ((*tls, "--key-file", lesser), "PERMISSION_DENIED"),
        ((*tls, "--key-file", tmp_path / "missing"), "key file"),
    ):
        status, _, err = weft("infer", "chain", "--input", "X=[[1]]", "--url", address, *arguments)
        assert status == 1
        assert error in err
    status, out, _ = weft("lock", "--url", address, *tls, "--key-file", key)
    assert status == 0
    assert "work" in out
    status, _, err = weft("lock", "--url", address, *tls, "--key-file", lesser)
    assert status == 1
    assert 'its line needs "control": true' in err
    url = f"https://{mesh.endpoints['router']['metrics']}/metrics"
    for arguments, is_answered in ((tls, True), (tls[:2], False)):
        status, out, _ = weft("top", "--json", "--service", f"router={url}", "--interval-s", "0.1", *arguments)
        assert (status == 0) is is_answered, out
    assert mesh.stop() == 0
    for path in (key, lesser):
        assert path.read_text().strip().partition(".")[2] not in mesh.log()
