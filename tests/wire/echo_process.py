"""The echo service as a process of its own, and what can be seen of it from outside."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import grpc

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0


def wires() -> list[str]:
    """Which wires tests run on: those of WEFT_TEST_WIRES, by default ``weft``."""
    return os.environ.get("WEFT_TEST_WIRES", "weft").split(",")


class EchoService:
    """A running echo service.

    Args:
        wire: ``weft`` or ``grpcio``.
        arguments: Of ``tests.wire.echo_service``.
        log: File for its standard error.
        limits: Each becomes a ``--limit``.
        environment: Is added to that of this process.

    Attributes:
        address, unix, tls: Where it listens; "" where it does not.
    """

    def __init__(
        self,
        wire: str,
        log: Path,
        *arguments: str,
        limits: Mapping[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.wire, self.log = wire, log
        command = [sys.executable, "-X", "dev"] if os.environ.get("WEFT_TEST_DEV") else [sys.executable]
        command += ["-m", "tests.wire.echo_service", "--wire", wire, *arguments]
        command += [f"--limit={name}={value}" for name, value in (limits or {}).items()]
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | (environment or {}),
            )
        try:
            assert self._process.stdout is not None
            listening = json.loads(self._process.stdout.readline() or "null")
            assert listening is not None, log.read_text()[-2000:]
        except BaseException:
            self.kill()
            raise
        self.pid = int(listening["pid"])
        self.address, self.unix, self.tls = (str(listening.get(key, "")) for key in ("grpc", "unix", "tls"))
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def any_address(self) -> str:
        """The plain port, or the Unix socket."""
        return self.address or self.unix

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def call(self, method: str, request: bytes = b"", timeout_s: float = 10.0) -> bytes:
        """The answer of a unary call over grpcio, on a channel that is kept."""
        if self._channel is None:
            options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
            self._channel = grpc.insecure_channel(self.any_address, options)
        answer = self._channel.unary_unary(f"/test.Echo/{method}")(request, timeout=timeout_s, wait_for_ready=True)
        assert isinstance(answer, bytes)
        return answer

    def stats(self, request: bytes = b"") -> dict[str, Any]:
        """What the process holds; with ``b"collect"`` after a garbage collection."""
        found = json.loads(self.call("Stats", request, timeout_s=60.0))
        assert isinstance(found, dict)
        return found

    def wait_stats(self, is_so: Callable[[dict[str, Any]], bool], timeout_s: float = 10.0) -> dict[str, Any]:
        """What the process holds, once it is so after a garbage collection.

        Raises:
            AssertionError: It was not so in time; the message has the last figures.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_so(found := self.stats(b"collect")):
            assert time.monotonic() < deadline_s, found
            time.sleep(0.05)
        return found

    def log_lines(self) -> list[str]:
        """What it has logged."""
        return self.log.read_text(errors="replace").splitlines()

    def disconnect(self) -> None:
        """The channel of ``call`` is closed; the next call opens it again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def stop(self, timeout_s: float = 15.0) -> int:
        """Its exit status after SIGTERM; if it does not stop it is killed, and the status is -9."""
        self.disconnect()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()
        return self._process.returncode

    def kill(self) -> None:
        """It has ended."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
