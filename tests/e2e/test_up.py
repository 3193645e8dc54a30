"""`weft up` from the first line to the last process."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tritonclient.grpc

from weft_cli.__main__ import main
from weft_cli.running import running_mesh
from weft_common import healthcheck
from weft_common.tensors import decode

Start = Callable[..., "Up"]  # noqa: F821  # of conftest.py
SERVICES = ["router", "preprocess", "model", "postprocess"]


def test_a_mesh_serves_and_ends_without_a_trace(up: Start, capsys) -> None:  # type: ignore[no-untyped-def]
    """One line of JSON, four SERVING services with metrics, an answer; SIGTERM ends all of it with status 0."""
    mesh = up()
    assert list(mesh.endpoints) == SERVICES, mesh.log()
    assert all(set(endpoint) == {"grpc", "metrics", "pid"} for endpoint in mesh.endpoints.values())
    for endpoint in mesh.endpoints.values():
        assert healthcheck.main([endpoint["grpc"]]) == 0
        with urllib.request.urlopen(f"http://{endpoint['metrics']}/metrics", timeout=10) as page:
            assert b"nv_inference_count" in page.read()
    assert decode(mesh.call("chain", value=1.0).outputs["Y"]).tolist() == [[4.0]]
    assert main(["infer", "chain", "--url", mesh.endpoints["router"]["grpc"], "--input", "X=2", "--trace"]) == 0
    printed = capsys.readouterr().out
    assert "Y  FP32[1, 1]  [[5.]]" in printed
    assert "path: root.pre;run;post" in printed
    assert "work@1 on model" in printed
    assert mesh.stop() == 0, mesh.log()
    assert mesh.running() == set()
    assert mesh.stdout.read() == ""


def test_without_json_a_table_is_printed(repository: Path) -> None:
    """A person sees each service's addresses, and logs with the service's name before each line; Ctrl-C ends it."""
    command = [sys.executable, "-m", "weft_cli", "up", "--repository", str(repository), "--router-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert [line.split()[0] for line in lines] == ["service", *SERVICES, "The"]
    assert "SERVING" in lines[-1]
    assert all(any(line.startswith(f"{service} ") for line in log.splitlines()) for service in SERVICES)
    assert "weft: SIGINT: stopping" in log


def test_a_running_mesh_ends_with_its_block(repository: Path, tmp_path: Path) -> None:
    """`running_mesh` gives endpoints and leaves nothing behind; its log is where it was told to be."""
    with (tmp_path / "log").open("w") as log, running_mesh(repository, log=log) as endpoints:
        assert healthcheck.main([endpoints["router"].grpc]) == 0
    assert healthcheck.main([endpoints["router"].grpc]) == 1
    assert all(
        json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if not line.startswith("weft: ")
    )


def test_a_repository_of_triton_inference_server_is_served_as_it_stands(tmp_path: Path) -> None:
    """Models and an ensemble side by side: both answer through the router, and every service is ready."""
    repository = Path(__file__).parents[2] / "benchmarks" / "tis_repository"
    with (tmp_path / "log").open("w") as log, running_mesh(repository, log=log) as endpoints:
        assert ["router", "model"] == list(endpoints)
        assert [0, 0] == [healthcheck.main([endpoint.grpc]) for endpoint in endpoints.values()]
        with tritonclient.grpc.InferenceServerClient(endpoints["router"].grpc) as client:
            row = np.arange(16, dtype=np.float32).reshape(1, 16)
            tensor = tritonclient.grpc.InferInput("INPUT0", [1, 16], "FP32")
            tensor.set_data_from_numpy(row)
            for name in ("identity_py", "identity3_py"):
                assert row.tolist() == client.infer(name, [tensor]).as_numpy("OUTPUT0").tolist()
            index = {model.name: model.state for model in client.get_model_repository_index().models}
    assert {"identity3_py": "READY", "identity_py": "READY", "mlp_py": "READY"} == index
    checked = ["check", str(repository), "--repository", str(repository)]
    assert 0 == main(checked)
