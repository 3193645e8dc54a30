"""HTTP/2 clients that others wrote: curl, nghttp and h2load, where they are installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.wire.echo_process import EchoService
from tests.wire.peer import message, split_messages

GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")


def ran(tool: str, *arguments: str) -> bytes:
    """What a tool prints; skips where it is not installed or cannot do HTTP/2."""
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed")
    if tool == "curl" and b"HTTP2" not in subprocess.run([path, "--version"], capture_output=True, check=True).stdout:
        pytest.skip("this curl has no HTTP/2")
    done = subprocess.run([path, *arguments], capture_output=True, timeout=60, check=False)
    assert 0 == done.returncode, done.stderr.decode(errors="replace")
    return done.stdout


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    file = tmp_path / "request"
    file.write_bytes(message(b"hello"))
    return file


@pytest.mark.parametrize("is_unix", [False, True])
def test_curl(echo: EchoService, request_file: Path, is_unix: bool) -> None:
    """Curl gets the message, the headers and the trailers, over a port and a Unix socket."""
    head = request_file.with_suffix(".head")
    socket = ["--unix-socket", echo.unix.removeprefix("unix:")] if is_unix else []
    body = ran(
        "curl", "-sS", "--http2-prior-knowledge", "-m", "30", *socket, *GRPC, "--data-binary", f"@{request_file}",
        "-D", str(head), f"http://{echo.address}/test.Echo/Unary",
    )  # fmt: skip
    assert [b"hello"] == split_messages(body)
    lines = head.read_text().lower().splitlines()
    assert lines[0].startswith("http/2 200")
    assert "grpc-status: 0" in [line.strip() for line in lines]


def test_curl_as_a_browser(echo: EchoService) -> None:
    """A GET is answered with 405."""
    if echo.wire == "grpcio":
        pytest.skip("grpcio resets the stream")
    code = ran(
        "curl", "-s", "-o", "/dev/null", "--http2-prior-knowledge", "-m", "30", "-w", "%{http_code}",
        f"http://{echo.address}/",
    )  # fmt: skip
    assert b"405" == code


def test_nghttp(echo: EchoService, request_file: Path) -> None:
    """nghttp, which decodes strictly, gets answers to twenty requests at once, with a table of its own size."""
    out = ran(
        "nghttp", "-nv", "--no-dep", "-m20", "-c0", "-t30", *GRPC, "-d", str(request_file),
        f"http://{echo.address}/test.Echo/Unary",
    ).decode(errors="replace")  # fmt: skip
    assert 20 == len(re.findall(r"recv \(stream_id=\d+\) grpc-status: 0", re.sub(r"\x1b\[[0-9;]*m", "", out)))
    assert "error_code=PROTOCOL_ERROR" not in out


@pytest.mark.parametrize(("connections", "streams"), [(1, 1), (4, 32)])
def test_h2load(echo: EchoService, request_file: Path, connections: int, streams: int) -> None:
    """All requests of h2load succeed."""
    out = ran(
        "h2load", "-n640", f"-c{connections}", f"-m{streams}", "-t1", *GRPC, "-d", str(request_file),
        f"http://{echo.address}/test.Echo/Unary",
    ).decode()  # fmt: skip
    assert "640 total, 640 started, 640 done, 640 succeeded, 0 failed, 0 errored, 0 timeout" in out
    assert "status codes: 640 2xx" in out
