"""A service as a child process: reserved port, start, addresses, log, end, and pauses between restarts."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

_LINE_LIMIT_BYTES = 1 << 20
#: Pause before the first attempt, in seconds; drawn between the two, so that services that died together start at
#: different moments.
FIRST_PAUSE_S = (0.1, 0.5)
#: Longest pause, in seconds.
MAX_PAUSE_S = 30.0
#: A service that has served for so long counts as stable: the pauses begin anew.
STABLE_S = 60.0
#: A service that dies so often within the window cannot stay up.
MAX_DEATHS = 5
DEATH_WINDOW_S = 300.0


class Endpoint(NamedTuple):
    """Addresses of a service (``host:port``), and its process id; ``grpc`` or ``http`` is "" if it has none."""

    grpc: str
    metrics: str
    pid: int
    http: str = ""

    def as_json(self) -> dict[str, str | int]:
        """The fields; ``http`` only if the service has it."""
        fields = self._asdict()
        return fields if self.http else {name: value for name, value in fields.items() if name != "http"}


@contextlib.contextmanager
def running_child(
    command: Sequence[str],
    ended: Callable[[int], Exception],
    *,
    timeout_s: float,
    log: IO[str] | int | None = None,
) -> Iterator[tuple[Any, int]]:
    """Run a command for a ``with`` block, once it has written a line of JSON that says it is ready.

    It has a process group of its own: Ctrl-C in the terminal reaches only the caller, which ends it.

    Args:
        command: Must stop when its standard input ends, as it does even if this process is killed.
        ended: Makes the error for a command that ended without a line, from its exit status.
        timeout_s: How long to wait for its end before killing it.
        log: Its standard error, as ``subprocess`` takes it; None: that of this process.

    Yields:
        The parsed line, and the process id.
    """
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise ended(process.wait(timeout_s))
            yield json.loads(line), process.pid
        finally:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()


def describe_exit(status: int) -> str:
    """How a process ended with a status of ``subprocess``."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


class ServiceProcess:
    """A child process, by default in a process group of its own, so that Ctrl-C reaches only the parent.

    Its standard input is a pipe that this process holds open. When this process dies, in whatever way, the child reads
    the end of the pipe and stops.

    Args:
        log: Receives (service name, process id, line) for each line that the child logs.
        pass_fds: File descriptors that the child inherits, under the same numbers.
        own_group: Give it a process group of its own; if not, signals to this process's group reach it too.

    Attributes:
        lost: What its clients lost when it stopped, as it says itself; "" for nothing.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Callable[[str, int, str], None],
        *,
        pass_fds: Sequence[int] = (),
        own_group: bool = True,
    ) -> None:
        self.name = name
        self.lost = ""
        self._pass_fds = pass_fds
        self._own_group = own_group
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._endpoint: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._exit: asyncio.Task[int] | None = None
        self._is_terminated = False

    @property
    def is_started(self) -> bool:
        """Whether the process was started; it may have ended."""
        return self._exit is not None

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Its process id; 0 before the start."""
        return 0 if self._process is None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Status of the ended process, the negative signal number if a signal ended it; None before."""
        return None if self._process is None else self._process.returncode

    def has_ended(self) -> bool:
        """Whether the process has ended, even if the event loop has yet to learn of it."""
        if self._process is None or not self.is_running:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # its status was taken, and is on its way to the event loop
            return True

    async def start(self) -> None:
        """Start the process; it need not listen yet."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT_BYTES,
            process_group=0 if self._own_group else None,
            pass_fds=self._pass_fds,
        )
        self._exit = asyncio.create_task(self._follow(process))

    async def endpoint(self) -> Endpoint:
        """The addresses that the service announces; waits for ever if it ends first."""
        return await asyncio.shield(self._endpoint)

    async def wait(self) -> int:
        """Wait for the end; returns ``exit_status``."""
        return await asyncio.shield(self._watch())

    def terminate(self) -> None:
        """Send SIGTERM, once: a second one would make the process end at once."""
        if self._process is not None and self.is_running and not self._is_terminated:
            self._is_terminated = True
            self._process.terminate()

    def close_stdin(self) -> None:
        """Close the child's standard input, which tells it to stop. May be called again."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process and, if it has a group of its own, its children."""
        if self._process is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                if self._own_group:
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()

    def describe_exit(self) -> str:
        """How the process ended; what it logged last was given to ``log``."""
        status = self.exit_status
        if status is None:
            return f"{self.name} is still running"
        if status < 0:
            return f"{self.name} was ended by {signal.Signals(-status).name}"
        return f"{self.name} ended with exit status {status}"

    def _watch(self) -> "asyncio.Task[int]":
        if self._exit is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._exit

    async def _follow(self, process: asyncio.subprocess.Process) -> int:
        pumps = [
            asyncio.create_task(self._read_announcement(process)),
            asyncio.create_task(self._forward_log(process)),
        ]
        status = await process.wait()
        # What the process wrote last is still in the pipes; do not wait for a grandchild that keeps them open.
        await asyncio.wait(pumps, timeout=1.0)
        for pump in pumps:
            pump.cancel()
        return status

    async def _read_announcement(self, process: asyncio.subprocess.Process) -> None:
        async for line in _lines(process.stdout):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                fields = json.loads(line)
                if "lost" in fields:
                    self.lost = str(fields["lost"])
                    continue
                if not self._endpoint.done():
                    http, grpc = (fields["http"], "") if "http" in fields else ("", fields["grpc"])
                    self._endpoint.set_result(Endpoint(grpc, fields["metrics"], process.pid, http))
                continue
            self._log(self.name, process.pid, line)  # a user model that prints

    async def _forward_log(self, process: asyncio.subprocess.Process) -> None:
        async for line in _lines(process.stderr):
            self._log(self.name, process.pid, line)


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    while stream is not None:
        try:
            line = await stream.readline()
        except ValueError:
            yield f"(a line of more than {_LINE_LIMIT_BYTES} bytes was left out)"
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\n")


class RestartPolicy:
    """Pauses between restarts of one service, doubling up to a cap.

    Args:
        clock_s: Monotonic seconds.
        draw: Returns a number from 0 to 1, for the jitter.

    Attributes:
        attempt: Number of the next start since the service was last stable.
    """

    def __init__(
        self, clock_s: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        self.attempt = 0
        self._clock_s = clock_s
        self._draw = draw
        self._deaths: deque[float] = deque()
        self._serving_since_s: float | None = None

    @property
    def num_deaths(self) -> int:
        """Deaths within the last ``DEATH_WINDOW_S``."""
        return len(self._deaths)

    @property
    def is_hopeless(self) -> bool:
        """Whether it died so often that it needs an operator; restarts continue, at the longest pause."""
        return self.num_deaths >= MAX_DEATHS

    def serves(self) -> None:
        """Note that the service now serves."""
        self._serving_since_s = self._clock_s()

    def died(self) -> float:
        """Note that the service died or could not start; return the pause before the next start, in seconds."""
        now_s = self._clock_s()
        if self._serving_since_s is not None and now_s - self._serving_since_s >= STABLE_S:
            self.attempt = 0
            self._deaths.clear()
        self._serving_since_s = None
        self._deaths.append(now_s)
        while now_s - self._deaths[0] > DEATH_WINDOW_S:
            self._deaths.popleft()
        self.attempt += 1
        if self.attempt == 1:
            least_s, most_s = FIRST_PAUSE_S
        else:
            doubled_s = FIRST_PAUSE_S[1] * 2.0 ** min(self.attempt - 1, 10)  # unbounded it would overflow one day
            most_s = MAX_PAUSE_S if self.is_hopeless else min(doubled_s, MAX_PAUSE_S)
            least_s = most_s / 2
        return least_s + (most_s - least_s) * self._draw()


def reserve_port(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Reserve a port (a free one for 0) with a socket that does not listen, until it is closed.

    Sockets of this user with SO_REUSEPORT, as services that share ports have, may listen on the port meanwhile. Unless
    ``is_shared``, a port in use, by such sockets too, is an error.

    Raises:
        OSError: The port is in use or not allowed, or the host is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, kind, protocol)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection in TIME_WAIT may have it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
        reserved.bind(address)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        reserved.close()
        raise
    return reserved
