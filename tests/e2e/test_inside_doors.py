"""The ports of the model services behind a mesh whose clients need keys."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.processes import wait_until

from weft.cli.__main__ import main
from weft_protos.grpc_service_pb2 import (
    ModelInferRequest,
    RepositoryIndexRequest,
    RepositoryModelLoadRequest,
    RepositoryModelUnloadRequest,
    ServerReadyRequest,
)
from weft_protos.grpc_service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    GRPCInferenceServiceStub,
    add_GRPCInferenceServiceServicer_to_server,
)


class Foreign(GRPCInferenceServiceServicer):
    """A V2 server without models that keeps the metadata of calls."""

    def __init__(self) -> None:
        self.metadata: list[tuple[str, str]] = []
        self.was_asked = threading.Event()

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802  # gRPC's name
        """Keep the metadata; answer that it has nothing to say."""
        self.metadata += [(name, str(value)) for name, value in context.invocation_metadata()]
        self.was_asked.set()
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no index")


def code_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Status and message of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


def check_closed(endpoint: dict[str, str]) -> None:
    """Infer, index, load and unload are refused without a key and with wrong or several ones; probes are answered."""
    with grpc.insecure_channel(endpoint["grpc"]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for method, request in (
            (stub.ModelInfer, ModelInferRequest(model_name="work")),
            (stub.RepositoryIndex, RepositoryIndexRequest()),
            (stub.RepositoryModelLoad, RepositoryModelLoadRequest(model_name="work")),
            (stub.RepositoryModelUnload, RepositoryModelUnloadRequest(model_name="work")),
        ):
            for metadata, text in (
                ((), "a key is needed; send it as"),
                ((("x-api-key", "mesh-router.wrong"),), "the key is not valid; send one of the service's --auth-keys"),
                ((("x-api-key", "a"), ("x-api-key", "b")), "several keys were sent; send one"),
            ):
                code, message = code_of(lambda: method(request, metadata=metadata, timeout=20))  # noqa: B023
                assert (code, text in message) == ("UNAUTHENTICATED", True), message
        assert stub.ServerReady(ServerReadyRequest(), timeout=20).ready
        health = HealthStub(channel).Check(HealthCheckRequest(), timeout=20)
        assert health.status == HealthCheckResponse.SERVING


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [(), ("--replicas", "model=2"), ("--router-workers", "2"), ("--in-process", "postprocess")]
)
def test_services_of_a_mesh_with_keys_take_calls_of_the_mesh_alone(
    up: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """Over Unix sockets and TCP, also after a restart; a target that is not the mesh's is sent neither of the keys.

    The mesh's keys are in files of mode 0600, and in no argument, environment or log line.
    """
    keys, key_file = tmp_path / "weft.keys", tmp_path / "client.key"
    assert main(["key", "new", "client", "--add-to", str(keys)]) == 0
    key_file.write_text(capsys.readouterr().out)
    foreign, pool = Foreign(), ThreadPoolExecutor(4)
    server = grpc.server(pool)
    add_GRPCInferenceServiceServicer_to_server(foreign, server)
    target = f"--target=other=127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    control = ("--model-control-mode", "explicit", "--load-model", "*")
    arguments = f"--service-args=router={target} --strict-readiness=false"
    mesh = up("--auth-keys", str(keys), *control, arguments, *options)
    try:
        infer = ["infer", "chain", "--input", "X=[[1]]", "--url", mesh.endpoints["router"]["grpc"]]

        def check_serves() -> None:
            assert main([*infer, "--key-file", str(key_file)]) == 0, mesh.log()
            assert "[[4.]]" in capsys.readouterr().out

        check_serves()
        services = [endpoint for name, endpoint in mesh.endpoints.items() if name != "router"]
        assert len(services) == (4 if "model=2" in options else 3)
        for endpoint in services:
            check_closed(endpoint)
        assert foreign.was_asked.wait(20)
        assert not {"authorization", "x-api-key"} & {name for name, _ in foreign.metadata}

        listed = Path(f"/proc/{mesh.endpoints['router']['pid']}/cmdline").read_text().split("\0")
        files = {Path(text.rpartition("=")[2]) for text in listed if text.startswith("--target-key-file=model=")}
        (own,) = files
        assert {own.stat().st_mode & 0o777, own.with_suffix(".keys").stat().st_mode & 0o777} == {0o600}
        secrets = [path.read_text().strip().partition(".")[2] for path in (own, own.with_name("mesh.key"))]
        shown = mesh.log() + "".join(
            Path(f"/proc/{endpoint['pid']}/{file}").read_text(errors="replace")
            for endpoint in mesh.endpoints.values()
            for file in ("cmdline", "environ")
        )
        assert not [secret for secret in secrets if secret in shown]

        os.kill(int(mesh.endpoints["model"]["pid"]), signal.SIGKILL)
        mesh.wait_for_end("model")
        wait_until(lambda: "model serves again" in mesh.log())
        check_closed(mesh.endpoints["model"])
        check_serves()
        assert mesh.stop() == 0, mesh.log()
    finally:
        server.stop(None)
        pool.shutdown()
