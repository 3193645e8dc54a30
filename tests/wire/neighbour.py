"""A well-behaved client of the echo service: ``python -m tests.wire.neighbour ADDRESS``.

A process of its own, so that what a test does besides delays no call. It calls ``Unary`` every 10 ms on one connection
of grpcio. Each line on standard input is a command: ``go`` begins, ``pause`` ends and is answered with a line of JSON:
``[num_calls, num_right, worst_ms, p99_ms, [error, ...]]``; the first errors are told.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple, Self

import grpc

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 20.0


class Report(NamedTuple):
    """What became of the calls since ``go``."""

    num_calls: int
    num_right: int
    worst_ms: float
    p99_ms: float
    errors: list[str]


class Neighbour:
    """Runs the program for a test.

    Args:
        address: Of the echo service.
    """

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "tests.wire.neighbour", address]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def go(self) -> None:
        """Calls are made from now on, when the first one is answered."""
        self._tell("go")
        assert self._answer() == "going"

    def pause(self) -> Report:
        """No call is made or waited for any more."""
        self._tell("pause")
        return Report(*json.loads(self._answer()))

    def close(self) -> None:
        """The process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        assert line, f"the neighbour has ended: {self._process.wait(5)}"
        return line


class _Caller:
    """Makes the calls on a thread while it may."""

    def __init__(self, address: str) -> None:
        channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._unary = channel.unary_unary("/test.Echo/Unary")
        self._may_run = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_right = 0
        self._times_ms: list[float] = []
        self._errors: list[str] = []

    def go(self) -> None:
        self._num_right, self._times_ms, self._errors = 0, [], []
        self._call()
        self._may_run.set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def pause(self) -> Report:
        self._may_run.clear()
        if self._thread is not None:
            self._thread.join()
        times_ms = sorted(self._times_ms)
        p99_ms = times_ms[int(0.99 * len(times_ms))]
        return Report(len(times_ms), self._num_right, times_ms[-1], p99_ms, self._errors[:5])

    def _run(self) -> None:
        while self._may_run.is_set():
            self._call()
            time.sleep(0.01)

    def _call(self) -> None:
        body = os.urandom(300)
        begin_s = time.monotonic()
        try:
            answer = self._unary(body, timeout=DEADLINE_S, wait_for_ready=True)
            error = "" if answer == body else f"{answer[:20]!r} for {body[:20]!r}"
        except grpc.RpcError as failure:
            error = f"{failure.code().name}: {failure.details()}"
        self._times_ms.append(1e3 * (time.monotonic() - begin_s))
        self._num_right += not error
        if error:
            self._errors.append(error)


def main() -> None:
    """Do what standard input says until it ends."""
    caller = _Caller(sys.argv[1])
    for line in sys.stdin:
        if line.strip() == "go":
            caller.go()
            print("going", flush=True)
        else:
            print(json.dumps(caller.pause()), flush=True)
    caller.pause()


if __name__ == "__main__":
    main()
