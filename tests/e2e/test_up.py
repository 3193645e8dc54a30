"""`weft up` from the first line to the last process."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tests.messages import request_from_call, result_from_response
from tests.ports import free_port
from tests.processes import scrape, wait_until
from tritonclient.utils import InferenceServerException, shared_memory

from weft.base.core import InferCall
from weft.base.tensors import decode, encode
from weft.cli.__main__ import main
from weft.mesh.running import running_mesh
from weft.v2 import healthcheck
from weft.v2.client.wires import WireName
from weft_protos.grpc_service_pb2 import ServerLiveRequest
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

Start = Callable[..., "Up"]  # noqa: F821  # of conftest.py
_CONNECTED = "03"
SERVICES = ["router", "preprocess", "model", "postprocess"]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process and those it starts have temporary files; short enough for sockets."""
    with TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_a_mesh_serves_and_ends_without_a_trace(up: Start, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON, four SERVING services with metrics, an answer; SIGTERM ends all of it with status 0.

    They talk over sockets in a folder that only this user may enter, through which `weft top` finds all of them. What
    models count for themselves is on the router's page.
    """
    mesh = up()
    assert list(mesh.endpoints) == SERVICES, mesh.log()
    assert all(set(endpoint) == {"grpc", "metrics", "pid"} for endpoint in mesh.endpoints.values())
    for endpoint in mesh.endpoints.values():
        assert healthcheck.main([endpoint["grpc"]]) == 0
        assert any(name.startswith("nv_inference_count") for name in scrape(endpoint["metrics"]))
    assert decode(mesh.call("chain", value=1.0).outputs["Y"]).tolist() == [[4.0]]
    samples = scrape(mesh.endpoints["router"]["metrics"])
    counted = {f'chain_batches{{model="{model}"}}': 1.0 for model in ("prepare", "work", "finish")}
    assert counted == {name: value for name, value in samples.items() if name.startswith("chain_batches")}
    router = int(mesh.endpoints["router"]["pid"])
    assert Path(f"/proc/{router}/task/{router}/children").read_text() == "", "one worker is one process"
    assert not [name for name in samples if "worker" in name]
    assert mesh.call("work", "A", service="model").outputs, "without keys a load generator can call one service alone"
    assert main(["infer", "chain", "--url", mesh.endpoints["router"]["grpc"], "--input", "X=2", "--trace"]) == 0
    printed = capsys.readouterr().out
    assert "Y  FP32[1, 1]  [[5.]]" in printed
    assert "path: root.pre;run;post" in printed
    assert "work@1 on model" in printed
    sockets = {path.stem: path for path in temporary.glob("*/*.sock")}
    assert sockets.keys() == set(SERVICES[1:])
    for path in sockets.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    connected = {row[-1].rpartition(".")[0] for row in table if row[5] == _CONNECTED and str(temporary) in row[-1]}
    assert connected == {str(path) for path in sockets.values()}, "the router calls each service there"
    assert all(":" in endpoint["grpc"] for endpoint in mesh.endpoints.values())
    assert main(["top", "--json", "--interval-s", "0.1"]) == 0
    seen = json.loads(capsys.readouterr().out)["services"]
    assert [(name, mesh.endpoints[name]["metrics"], True) for name in SERVICES] == [
        (row["name"], row["address"], row["is_up"]) for row in seen
    ]
    assert mesh.stop() == 0, mesh.log()
    assert mesh.running() == set()
    assert mesh.stdout.read() == ""
    assert list(temporary.iterdir()) == []
    assert main(["restart"]) == 1
    assert "no `weft up` of this user runs" in capsys.readouterr().err


@pytest.mark.parametrize("wire", WireName)
def test_wire_and_limits_arrive_at_every_service(up: Start, wire: WireName) -> None:
    """Each process serves on the wire that `weft up` was given and keeps its limits; requests pass all of them.

    With `--max-message-bytes` a request of that size is answered through all services, one byte more is refused.
    """
    limit_bytes = 100_000
    mesh = up("--wire", wire, "--max-header-list-bytes", "2000", "--max-message-bytes", str(limit_bytes))

    def wires() -> list[str]:
        """Of those that have said so: a service is found ready before it has written its line."""
        lines = [json.loads(line) for line in mesh.log().splitlines(keepends=True) if line.endswith("\n")]
        return [line["wire"] for line in lines if line.get("message") == "serving"]

    wait_until(lambda: len(wires()) == len(SERVICES), "a line of each service")
    assert [wire] * len(SERVICES) == wires()
    for service in SERVICES:
        with grpc.insecure_channel(mesh.endpoints[service]["grpc"]) as channel:
            live = GRPCInferenceServiceStub(channel).ServerLive
            live(ServerLiveRequest(), timeout=20, metadata=[("x-size", "x" * 1000)])
            with pytest.raises(grpc.RpcError) as caught:
                live(ServerLiveRequest(), timeout=20, metadata=[("x-size", "x" * 3000)])
            assert grpc.StatusCode.RESOURCE_EXHAUSTED is caught.value.code(), service
    request = request_from_call(InferCall("chain", inputs={"X": encode(np.array([[1]], np.float32))}))
    padding = request.parameters["padding"]
    padding.string_param = "x" * 90_000
    padding.string_param += "x" * (limit_bytes - request.ByteSize())
    assert request.ByteSize() == limit_bytes
    with grpc.insecure_channel(mesh.endpoints["router"]["grpc"]) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        assert decode(result_from_response(infer(request, timeout=20)).outputs["Y"]).tolist() == [[4.0]]
        padding.string_param += "x"
        with pytest.raises(grpc.RpcError) as caught:
            infer(request, timeout=20)
        assert grpc.StatusCode.RESOURCE_EXHAUSTED is caught.value.code()


def test_without_json_a_table_is_printed(repository: Path) -> None:
    """A person sees each service's addresses, and what serves; in a file the log is JSON, each line with its service.

    Ctrl-C ends it; the end of the terminal, which is a SIGHUP, does not under nohup.
    """
    command = [
        "nohup", sys.executable, "-m", "weft.cli", "up", "--repository", str(repository), "--router-port", "0"
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(8)]
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert [line.split()[0] for line in lines] == ["service", *SERVICES, "1", "3", "Ctrl-C"]
    assert ["1 graph serves\n", "3 models serve\n"] == lines[-3:-1]
    told = [json.loads(line) for line in log.splitlines()]
    assert {*SERVICES, "weft"} == {line["service"] for line in told}
    assert all(line["pid"] for line in told)
    assert "SIGINT: stopping" in log
    assert "SIGHUP" not in log


def share_tensors(client: Any, model: str, row: "np.typing.NDArray[np.float32]") -> None:
    """Input and output of a request lie in memory that client and server share; without the region it is refused."""
    with ExitStack() as stack:
        regions = []
        for name in ("sent", "received"):
            region = shared_memory.create_shared_memory_region(name, f"/weft_{os.getpid()}_{name}", row.nbytes)
            stack.callback(shared_memory.destroy_shared_memory_region, region)
            client.register_system_shared_memory(name, f"/weft_{os.getpid()}_{name}", row.nbytes)
            regions.append(region)
        shared_memory.set_shared_memory_region(regions[0], [row])
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 16], "FP32")
        tensor.set_shared_memory("sent", row.nbytes)
        output = tritonclient.grpc.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("received", row.nbytes)
        answer = client.infer(model, [tensor], outputs=[output])
        (written,) = answer.get_response().outputs
        assert written.parameters["shared_memory_region"].string_param == "received"
        assert list(answer.get_response().raw_output_contents) == [b""]
        found = shared_memory.get_contents_as_numpy(regions[1], np.float32, [1, 16])
        assert found.tolist() == row.tolist()
        del found  # it holds the region
        assert set(client.get_system_shared_memory_status(as_json=True)["regions"]) == {"sent", "received"}
        client.unregister_system_shared_memory()
        with pytest.raises(InferenceServerException, match="sent"):
            client.infer(model, [tensor])


def settings_at(address: str) -> list[Any]:
    """The settings of traces and logs at a service, after a change of each."""
    with tritonclient.grpc.InferenceServerClient(address) as client:
        client.update_trace_settings(settings={"trace_rate": "5"})
        client.update_log_settings(settings={"log_verbose_level": 1})
        found = [client.get_trace_settings(as_json=True), client.get_log_settings(as_json=True)]
        client.update_log_settings(settings={"log_verbose_level": 0})
    assert (["5"], {"uint32_param": 1}) == (
        found[0]["settings"]["trace_rate"]["value"],
        found[1]["settings"]["log_verbose_level"],
    )
    return found


def test_a_repository_of_triton_inference_server_is_served_as_it_stands(tmp_path: Path) -> None:
    """Models and an ensemble side by side: both answer through the router, and every service is ready.

    The router takes tensors in shared memory where `weft up` allows it, and tells settings as the model service does.
    `running_mesh` leaves nothing behind; its log is where it was told to be.
    """
    repository = Path(__file__).parents[2] / "benchmarks" / "tis_repository"
    shared = ["--allow-client-shm"]
    with (tmp_path / "log").open("w") as log, running_mesh(repository, shared, log=log) as endpoints:
        assert ["router", "model"] == list(endpoints)
        assert [0, 0] == [healthcheck.main([endpoint.grpc]) for endpoint in endpoints.values()]
        with tritonclient.grpc.InferenceServerClient(endpoints["router"].grpc) as client:
            row = np.arange(16, dtype=np.float32).reshape(1, 16)
            tensor = tritonclient.grpc.InferInput("INPUT0", [1, 16], "FP32")
            tensor.set_data_from_numpy(row)
            for name in ("identity_py", "identity3_py"):
                assert row.tolist() == client.infer(name, [tensor]).as_numpy("OUTPUT0").tolist()
                share_tensors(client, name, np.flip(row))
            index = {model.name: model.state for model in client.get_model_repository_index().models}
        assert settings_at(endpoints["router"].grpc) == settings_at(endpoints["model"].grpc)
    assert dict.fromkeys(("identity3_py", "identity_py", "mlp_py", "sum_py"), "READY") == index
    assert [1, 1] == [healthcheck.main([endpoint.grpc]) for endpoint in endpoints.values()]
    assert all(json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    checked = ["check", str(repository), "--repository", str(repository)]
    assert 0 == main(checked)


def test_metrics_have_the_same_ports_at_each_start(up: Start) -> None:
    """Behind the router's, so many for each service; one that is taken by another program is replaced and named."""
    first = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 31))
        mesh = up("--http-port", "0", "--replicas", "model=2", router_port=first)
    ports = {name: int(endpoint["metrics"].rpartition(":")[2]) - first for name, endpoint in mesh.endpoints.items()}
    assert ports.pop("postprocess") not in (0, 31)
    assert {"router": 1, "gateway": 2, "preprocess": 11, "model": 21, "model-2": 22} == ports
    assert f"port {first + 31} on 127.0.0.1 is in use: the metrics of postprocess have another" in mesh.log()
