"""The engine's ends of its ranks: child processes, and processes elsewhere that connect and show that they may."""

import contextlib
import hmac
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from weft.base.errors import InvalidArgumentError
from weft.base.observing.logs import get_logger
from weft.base.processes.process import describe_exit
from weft.base.security.files import read_file, warn_if_shared

_LOG = get_logger("weft.llm.ranks")

#: Starts a rank; behind it come the index of its GPU and the number of its connection.
COMMAND = (sys.executable, "-P", "-m", "weft.backends.llm.rank")
#: First byte of a message to a rank: begin, numbers to agree on, an adapter and log settings are JSON; and of one from
#: a rank: replies, statistics and errors are JSON.
BEGIN, AGREED, PLAN, ADAPT, LOG_SETTINGS = (bytes([number]) for number in range(5))
REPLY, TOKENS, STATS, FAILED = (bytes([number]) for number in range(16, 20))
#: Largest message, in bytes.
MAX_BYTES = 1 << 30
_NONCE_BYTES = 32
_HELLO_S = 5.0
_EXIT_S = 2.0


class RankEnd:
    """One rank, as the engine's process sees it.

    Args:
        number: Of the rank.
        connection: To it; owned by this.
        process: Its process; None: it is elsewhere.
        where: For messages.

    Attributes:
        replies: What it answers outside of steps, and its errors, with the first byte; None: it is lost.
        results: Tokens of steps, as bytes; None: it is lost.
        stats: Its latest statistics.
    """

    def __init__(
        self, number: int, connection: socket.socket, process: "subprocess.Popen[bytes] | None", where: str
    ) -> None:
        self.number = number
        self.process = process
        self.replies: SimpleQueue[bytes | None] = SimpleQueue()
        self.results: SimpleQueue[memoryview | None] = SimpleQueue()
        self.stats: dict[str, float] = {}
        self.connection = Connection(os.dup(connection.fileno()))
        self._socket = connection
        self._where = where
        self._sending = threading.Lock()

    @classmethod
    def child(cls, number: int, command: Sequence[str], environment: dict[str, str]) -> "RankEnd":
        """Start a child process, which gets the number of its end of the connection as its last argument."""
        mine, its = socket.socketpair()
        with its:
            process = subprocess.Popen(  # noqa: S603  # our own module
                [*command, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the service
                pass_fds=[its.fileno()],
                env={**os.environ, **environment},
            )
        return cls(number, mine, process, f"pid {process.pid}")

    def limit(self, seconds: float) -> None:
        """Let ``send`` wait so long at most."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds) or 1, 0))

    def send(self, message: bytes) -> None:
        """Send a message. Raises OSError if the rank has ended, or takes nothing for ``limit``."""
        with self._sending:
            self.connection.send_bytes(message)

    def describe_end(self) -> str:
        """How the rank ended, once its end of the connection is closed."""
        how = "closed its connection"
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                how = describe_exit(self.process.wait(_EXIT_S))
        return f"rank {self.number} ({self._where}) {how}"

    def hang_up(self) -> None:
        """Shut the connection, which ends the rank."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float = 0.0) -> None:
        """End the rank: hang up, and kill its process if it has not ended after ``grace_s``. Leaves no zombie."""
        self.hang_up()
        if self.process is not None:
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def close(self) -> None:
        """Close the connection, which nobody may use any more."""
        self.connection.close()
        self._socket.close()


class Reception:
    """Where ranks of other machines connect. Raises InvalidArgumentError if address or key cannot be used."""

    def __init__(self, address: str, key_file: Path) -> None:
        self._key = read_key(key_file)
        host, port = split_address(address)
        try:
            self._server = socket.create_server((host, port), family=family_of(host))
        except (OSError, OverflowError) as error:
            raise InvalidArgumentError(f"engine: rank_listen_address must be free, got '{address}': {error}") from None
        self._ends: list[socket.socket] = []

    def accept(self, number: int) -> RankEnd:
        """Wait for the next process that has the key, and make it rank ``number``. Raises OSError once it is closed."""
        while True:
            connection, peer = self._server.accept()
            try:
                connection.settimeout(_HELLO_S)
                prove(connection, self._key, is_leader=True)
            except (OSError, EOFError, ValueError) as error:
                _LOG.warning("a process at %s that wanted to be a rank was refused: %s", peer[0], error)
                connection.close()
                continue
            keep_alive(connection)
            return RankEnd(number, connection, None, f"at {peer[0]}")

    def close(self) -> None:
        """Accept no more; wakes ``accept``."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def prove(connection: socket.socket, key: bytes, *, is_leader: bool) -> None:
    """Let both ends show that they have the key, which is not sent. Raises ValueError if the other one has another."""
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own)
    other = _receive(connection, _NONCE_BYTES)
    roles = (b"leader", b"rank") if is_leader else (b"rank", b"leader")
    connection.sendall(hmac.digest(key, roles[0] + own + other, "sha256"))
    if not hmac.compare_digest(_receive(connection, 32), hmac.digest(key, roles[1] + other + own, "sha256")):
        raise ValueError("it has another key; both must have the same rank_key_file")


def keep_alive(connection: socket.socket) -> None:
    """Make a connection blocking, and let it end when the other machine is gone for half a minute."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def read_key(path: Path) -> bytes:
    """The first line of a file. Raises InvalidArgumentError if there is none."""
    key = read_file(path, "rank_key_file").partition(b"\n")[0].strip()
    if len(key) < 16:
        raise InvalidArgumentError(f"rank_key_file {path}: its first line must have at least 16 bytes, got {len(key)}")
    warn_if_shared(path)
    return key


def split_address(address: str) -> tuple[str, int]:
    """Host and port. Raises InvalidArgumentError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgumentError(f"the address of a group's ranks must be HOST:PORT, got '{address:.80}'")
    return host.strip("[]"), int(port)


def family_of(host: str) -> Any:
    """The family of addresses of a host that is listened on."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := connection.recv(count - len(data))):
            raise EOFError("it hung up")
        data += part
    return data
