"""The router as a process."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from weft.router.targets.specification import parse_target
from weft.services.router import main
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


def test_the_router_starts_without_its_targets_and_stops_cleanly(tmp_path: Path) -> None:
    """It prints its ports, is live, is ready when it has no graph that waits, and exits 0 on SIGTERM."""
    arguments = [
        "--repository",
        str(tmp_path),
        "--target",
        "model=127.0.0.1:1",
        "--grpc-port",
        "0",
        "--metrics-port",
        "0",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "weft.services.router", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        endpoints = json.loads(line)
        with grpc.insecure_channel(endpoints["grpc"]) as channel:
            stub = GRPCInferenceServiceStub(channel)
            assert stub.ServerLive(pb.ServerLiveRequest()).live
            assert stub.ServerReady(pb.ServerReadyRequest()).ready
            assert "weft.router" == stub.ServerMetadata(pb.ServerMetadataRequest()).name
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert 0 == process.returncode
    assert "target 'model' (127.0.0.1:1) does not answer" in log


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--repository", "/nowhere"], "--repository /nowhere: there is no such folder"),
        ([], "--target is missing"),
        (["--target", "a=h:1", "--target", "a=h:2"], "--target: each name may be given once, got a, a"),
        (["--target", "a=h:1", "--load-model", "g"], "--load-model needs --model-control-mode explicit"),
        (["--target", "a=h:1", "--max-inflight", "-1"], "--max-inflight must be at least 0, got -1"),
        (["--target", "a=h:1", "--max-inflight-per-client", "-1"], "--max-inflight-per-client must be at least 0, got"),
        (["--target", "a=h:1", "--default-priority", "0"], "--default-priority must be at least 1, got 0"),
        (["--target", "a=h:1", "--client-key-header", "X-Id"], "--client-key-header 'X-Id' must be a name of ASCII"),
        (["--target", "a=h:1", "--client-key-header", "x-bin"], "--client-key-header 'x-bin' must be a name of ASCII"),
        *(
            (
                ["--target", "a=h:1", "--repository-poll-secs", value],
                f"--repository-poll-secs must be above 0 and at most 86400, got {value}",
            )
            for value in ("0", "-1", "nan", "inf", "86401")
        ),
        (["--target", "a=h:1", "--state-dir", __file__], f"--state-dir {__file__} is no folder"),
    ],
)
def test_wrong_usage_is_told_and_ends_with_2(
    arguments: list[str], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the value and the cure."""
    assert 2 == main(["--repository", str(tmp_path), *arguments])
    assert f"weft.router: error: {fault}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "host:0", "host:65536", "host:²", ":8021", "http://host:8021", "https://host:8021", "host:port"],
)
def test_an_address_that_grpc_would_take_for_another_is_refused(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GRPC cuts a port to 16 bits, and adds port 443 where there is none."""
    with pytest.raises(SystemExit) as caught:
        main(["--repository", str(tmp_path), "--target", f"model={address}"])
    assert 2 == caught.value.code
    assert f"address '{address}' of 'model' must be HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["h:1", "model.weft.svc:8021", "[::1]:8021", "dns:///h:1", "unix:/tmp/s", "ipv4:127.0.0.1:1,127.0.0.2:2"]
)
def test_every_address_that_grpc_resolves_is_taken(address: str) -> None:
    """Host and port, or a name with its scheme."""
    assert ("model", address) == parse_target(f"model={address}")


def test_a_target_without_a_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message shows how it is written."""
    with pytest.raises(SystemExit) as caught:
        main(["--repository", str(tmp_path), "--target", "127.0.0.1:8021"])
    assert 2 == caught.value.code
    assert "'127.0.0.1:8021' must be NAME=ADDRESS, for example model=127.0.0.1:8021" in capsys.readouterr().err
