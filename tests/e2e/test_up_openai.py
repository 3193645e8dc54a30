"""`weft up --openai-port`: the gateway as a part of the mesh."""

import http.client
import json
import os
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Authority
from tests.processes import wait_until

from weft.cli.__main__ import main


def get(address: str, path: str, context: ssl.SSLContext, key: str = "") -> tuple[int, Any]:
    """Status and body of an answer over TLS; OSError where nobody listens."""
    connection = http.client.HTTPSConnection(address, timeout=20, context=context)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_a_closed_mesh_has_a_gateway(
    up: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same certificate; keys are asked for through it; it is started again, and replaced, on its port.

    And it ends before the router, so that the mesh ends well.
    """
    authority = Authority(tmp_path)
    server = authority.issue("router")
    keys = tmp_path / "weft.keys"
    assert main(["key", "new", "admin", "--add-to", str(keys)]) == 0
    key = capsys.readouterr().out.strip()
    security = ("--tls-cert", str(server.cert), "--tls-key", str(server.key), "--auth-keys", str(keys))
    mesh = up("--http-port", "0", "--batch-dir", str(tmp_path / "batches"), *security)
    assert list(mesh.endpoints)[-1] == "gateway"
    address = mesh.endpoints["gateway"]["http"]
    context = ssl.create_default_context(cafile=str(authority.ca))
    assert (200, {"status": "ok"}) == get(address, "/health", context)
    assert (200, {"object": "list", "data": []}) == get(address, "/v1/models", context, key)
    assert 401 == get(address, "/v1/models", context)[0]
    assert (200, {"ready": True}) == get(address, "/v2/health/ready", context)
    assert "weft.router" == get(address, "/v2", context, key)[1]["name"]
    assert 200 == get(address, "/v1/batches", context, key)[0]
    assert 401 == get(address, "/v2", context)[0]
    assert 401 == get(address, "/v1/models", context, key[:-1])[0]

    os.kill(mesh.endpoints["gateway"]["pid"], signal.SIGKILL)
    mesh.wait_for_end("gateway")
    wait_until(lambda: get(address, "/health", context)[0] == 200)
    wait_until(lambda: "gateway serves again" in mesh.log())

    mesh.process.send_signal(signal.SIGUSR1)
    while "every service was told to restart" not in mesh.log():
        assert 200 == get(address, "/v1/models", context, key)[0] or "router is replaced" in mesh.log()
    assert "gateway was replaced" in mesh.log()
    wait_until(lambda: get(address, "/v1/batches", context, key)[0] == 200)
    assert 200 == get(address, "/v1/models", context, key)[0]
    assert 0 == mesh.stop(), mesh.log()
    assert key.partition(".")[2] not in mesh.log()
