"""Clients in Go, Node and C++ find a gRPC server at the other end, whatever they do; README.md lists the cases."""

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from tests.certificates import Authority
from tests.foreign.clients import CannotError, ForeignClient
from tests.wire.clients.echo_model import running_echo_model
from tests.wire.echo_process import EchoService

from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

ECHO_CASES = (
    "unary", "client_stream", "server_stream", "ping_pong", "empty_stream", "first_word", "early_end", "deadline",
    "deadline_stream", "cancel", "cancel_before_messages", "cancel_after_answer", "metadata", "metadata_stream",
    "status_codes", "status_stream", "unimplemented", "gzip", "big", "concurrent_streams",
    "concurrent_large", "ten_thousand", "large_headers", "slow_reader", "many_channels",
)  # fmt: skip
SOCKET_CASES = ("unary", "ping_pong", "cancel", "metadata", "status_codes", "gzip", "big", "concurrent_streams")
TLS_CASES = ("unary", "ping_pong", "server_stream", "metadata", "big", "concurrent_streams")
MODEL_CASES = ("model", "model_infer", "model_big", "model_error", "model_stream", "health", "reflection")

#: Of each limit, its name and value among the channel options of grpcio and among the options of weft.wire.
LIMITS = {
    "grpcio": {
        "streams": {"max_concurrent_streams": 5},
        "age": {"max_connection_age_ms": 500},
        "idle": {"max_connection_idle_ms": 700},
        "pings": {"http2.min_ping_interval_without_data_ms": 100},
        "keepalive": {"keepalive_time_ms": 300, "keepalive_timeout_ms": 5000, "keepalive_permit_without_calls": 1},
    },
    "weft": {
        "streams": {"max_concurrent_streams": 5},
        "age": {"max_connection_age_s": 0.5},
        "idle": {"max_connection_idle_s": 0.7},
        "pings": {"min_ping_interval_s": 0.1},
        "keepalive": {"keepalive_time_s": 0.3, "keepalive_timeout_s": 5.0},
    },
}


def run(client: ForeignClient, case: str, **arguments: object) -> None:
    """The case holds, or is skipped."""
    try:
        client.run(case, **arguments)
    except CannotError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", ECHO_CASES)
def test_a_port(client: ForeignClient, echo: EchoService, case: str) -> None:
    """Over TCP each case holds, and the service that served them holds nothing afterwards."""
    run(client, case, address=echo.address)
    echo.wait_stats(lambda found: found["num_slow"] == 0)


def test_unknown_compression(client: ForeignClient, echo: EchoService) -> None:
    """A compression that the server does not know is UNIMPLEMENTED (grpcio: INTERNAL), and the connection goes on."""
    run(client, "unknown_compression", address=echo.address, code=12 if echo.wire == "weft" else 13)


@pytest.mark.parametrize("case", SOCKET_CASES)
def test_a_unix_socket(client: ForeignClient, echo: EchoService, case: str) -> None:
    """Over a Unix socket too."""
    run(client, case, address=echo.unix)


@pytest.mark.parametrize("case", TLS_CASES)
@pytest.mark.parametrize("is_mutual", [False, True], ids=["tls", "mtls"])
def test_tls(
    client: ForeignClient, wire: str, authority: Authority, tmp_path: Path, is_mutual: bool, case: str
) -> None:
    """Over TLS too, also where the client shows a certificate."""
    with secured(wire, tmp_path / "log", authority, is_mutual) as echo:
        run(client, case, address=echo.tls, **shown(authority, is_mutual))


def test_tls_refusals(client: ForeignClient, wire: str, authority: Authority, other_ca: Path, tmp_path: Path) -> None:
    """UNAVAILABLE: another authority, no certificate, plaintext to TLS, TLS to plaintext; the service goes on."""
    with secured(wire, tmp_path / "log", authority, True) as echo:
        run(client, "refused", address=echo.tls, **(shown(authority, True) | {"ca": other_ca}))
        run(client, "refused", address=echo.tls, **shown(authority, False))
        run(client, "refused", address=echo.tls)
        run(client, "refused", address=echo.address, **shown(authority, True))
        run(client, "unary", address=echo.tls, **shown(authority, True))


def secured(wire: str, log: Path, authority: Authority, is_mutual: bool) -> EchoService:
    pair = authority.issue("server")
    arguments = [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"]
    return EchoService(wire, log, *arguments, *([f"--tls-ca={authority.ca}"] if is_mutual else []))


def shown(authority: Authority, is_mutual: bool) -> dict[str, object]:
    if not is_mutual:
        return {"ca": authority.ca}
    pair = authority.issue("client")
    return {"ca": authority.ca, "cert": pair.cert, "key": pair.key}


def test_limits(client: ForeignClient, wire: str, tmp_path: Path) -> None:
    """A message that is too large is RESOURCE_EXHAUSTED; calls beyond the streams that are allowed wait."""
    with EchoService(wire, tmp_path / "log", "--max-message-bytes=100000", limits=LIMITS[wire]["streams"]) as echo:
        run(client, "too_large", address=echo.address)
        if wire == "weft":  # the C core counts streams for a moment after their end, and refuses Go's calls
            run(client, "few_streams", address=echo.address)


def test_keepalive(client: ForeignClient, wire: str, tmp_path: Path) -> None:
    """PINGs that a server allows, and PINGs of the server, keep a quiet call."""
    with EchoService(wire, tmp_path / "log", limits=LIMITS[wire]["pings"] | LIMITS[wire]["keepalive"]) as echo:
        run(client, "keepalive_kept", address=echo.address)


def test_connections_that_are_idle(client: ForeignClient, wire: str, tmp_path: Path) -> None:
    """A connection that is closed while it is idle loses no call, also of clients that do not wait for another one."""
    with EchoService(wire, tmp_path / "log", limits=LIMITS[wire]["idle"]) as echo:
        run(client, "idle", address=echo.address)


def test_too_many_pings(client: ForeignClient, wire: str, tmp_path: Path) -> None:
    """A client that pings ten times a second ends with GOAWAY and the word that clients know."""
    with EchoService(wire, tmp_path / "log") as echo:
        run(client, "keepalive_punished", address=echo.address)


def test_restarts_under_load(client: ForeignClient, wire: str, tmp_path: Path) -> None:
    """A service that drains and is started again four times loses no call of clients that wait for it."""
    if wire == "grpcio":
        pytest.skip("grpc.aio's stop cancels calls that come while it stops")
    address = free_address()
    start: Callable[[], EchoService] = lambda: EchoService(wire, tmp_path / "log", f"--address={address}")  # noqa: E731
    echo = start()
    try:
        with client.running("load", address=address):
            for _ in range(4):
                assert echo.stop() == 0
                echo = start()
                wait_for_calls(echo)
    finally:
        echo.kill()


def test_connections_that_age_under_load(client: ForeignClient, wire: str, tmp_path: Path) -> None:
    """Connections that are closed after half a second lose no call."""
    with (
        EchoService(wire, tmp_path / "log", limits=LIMITS[wire]["age"]) as echo,
        client.running("load", address=echo.address),
    ):
        wait_for_calls(echo, 5000)


def test_a_model_service_that_restarts_under_load(client: ForeignClient, wire: str, tmp_path: Path) -> None:
    """A model service that drains and is started again twice loses no call, with either wire."""
    address = free_address()
    port = ("--grpc-port", address.rpartition(":")[2])
    request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(16)])
    request.inputs.add(name="INPUT0", datatype="UINT8", shape=[16])
    path = "/inference.GRPCInferenceService/ModelInfer"
    with ExitStack() as client_run:
        for number in range(3):
            with running_echo_model(wire, tmp_path, *port):
                if number == 0:
                    run = client.running("load", address=address, path=path, request=request.SerializeToString().hex())
                    client_run.enter_context(run)
                wait_for_inferences(address)
                if number == 2:
                    client_run.close()


def wait_for_inferences(address: str, number: int = 200) -> None:
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for _ in range(600):
            found = stub.ModelStatistics(pb.ModelStatisticsRequest(name="echo"), wait_for_ready=True, timeout=30)
            if found.model_stats[0].inference_stats.success.count >= number:
                return
            time.sleep(0.05)
        raise AssertionError(found)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def wait_for_calls(echo: EchoService, number: int = 300) -> None:
    echo.wait_stats(lambda found: found["counts"].get("unary", 0) >= number, 60)


@pytest.mark.parametrize("case", MODEL_CASES)
def test_a_model_service(client: ForeignClient, model_address: str, case: str) -> None:
    """The V2 protocol with generated code, health and reflection."""
    run(client, case, address=model_address)
