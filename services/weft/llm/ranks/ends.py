"""The engine's ends of its ranks: child processes, and processes elsewhere that connect and prove who they are."""

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

from weft.base.errors import InvalidArgumentError
from weft.base.observing.logs import get_logger
from weft.base.processes.process import describe_exit
from weft.base.security.files import read_file, warn_if_shared

_LOG = get_logger("weft.llm.ranks")

#: Starts a rank; behind it come the index of its GPU and the descriptor of its connection.
COMMAND = (sys.executable, "-P", "-m", "weft.backends.llm.rank")
#: First byte of a message: plans and adapters (JSON) go to a rank, behind a first message of JSON; replies (JSON),
#: tokens, statistics (JSON) and the error of a load (JSON) come from it.
PLAN, ADAPT, REPLY, TOKENS, STATS, FAILED = (bytes([number]) for number in range(6))
#: Largest message, in bytes.
MAX_BYTES = 1 << 30
_NONCE_BYTES = _DIGEST_BYTES = 32
_PROOF_S = 5.0
_EXIT_S = 2.0


class RankEnd:
    """One rank, as the engine's process sees it; ``process`` is None if it is elsewhere.

    Attributes:
        replies: What it answers outside of steps, and its errors, with the first byte; None: it is lost.
        results: Tokens of steps, as bytes; None: it is lost.
        stats: Its latest statistics.
    """

    def __init__(
        self, number: int, link: socket.socket, timeout_s: float, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self.number, self.process = number, process
        self.replies: SimpleQueue[bytes | None] = SimpleQueue()
        self.results: SimpleQueue[memoryview | None] = SimpleQueue()
        self.stats: dict[str, float] = {}
        # Of a rank that takes no messages.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout_s) or 1, 0))
        self.connection = Connection(os.dup(link.fileno()))
        self._link = link
        self._sending = threading.Lock()

    @classmethod
    def child(
        cls, number: int, timeout_s: float, device: int, environment: dict[str, str], descriptors: Sequence[int]
    ) -> "RankEnd":
        """Start a child process, which inherits ``descriptors``."""
        mine, its = socket.socketpair()
        with its:
            process = subprocess.Popen(  # noqa: S603  # our own module
                [*COMMAND, str(device), str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the service
                pass_fds=[its.fileno(), *descriptors],
                env={**os.environ, **environment},
            )
        return cls(number, mine, timeout_s, process)

    def send(self, message: bytes) -> None:
        """Send a message. Raises OSError if the rank has ended, or takes none for ``timeout_s``."""
        with self._sending:
            self.connection.send_bytes(message)

    def describe_end(self) -> str:
        """How a rank ended that has closed its connection."""
        if self.process is None:
            return f"rank {self.number}, on another machine, closed its connection"
        how = "closed its connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            how = describe_exit(self.process.wait(_EXIT_S))
        return f"rank {self.number} (pid {self.process.pid}) {how}"

    def hang_up(self) -> None:
        """Shut the connection, which ends the rank."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float = 0.0) -> None:
        """Hang up, and kill the process if it has not ended after ``grace_s``; no zombie is left."""
        self.hang_up()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Close the connection, which nobody uses any more."""
        self.connection.close()
        self._link.close()


class Reception:
    """Where ranks of other machines connect. Raises InvalidArgumentError if address or key cannot be used."""

    def __init__(self, address: str, key_file: Path) -> None:
        host, port = split_address(address)
        self._key = read_key(key_file)
        self._server = listen(host, port)

    def accept(self, number: int, timeout_s: float) -> RankEnd:
        """Wait for the next process that has the key, and make it rank ``number``. Raises OSError once it is closed."""
        while True:
            link, peer = self._server.accept()
            try:
                prove(link, self._key, is_leader=True)
            except (OSError, ValueError) as error:
                _LOG.warning("a process at %s that wanted to be a rank was refused: %s", peer[0], error)
                link.close()
            else:
                return RankEnd(number, link, timeout_s)

    def close(self) -> None:
        """Accept no more; wakes ``accept``."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def prove(link: socket.socket, key: bytes, *, is_leader: bool) -> None:
    """Let both ends show that they have the key, which is not sent. Raises ValueError if the other one does not.

    The connection is then blocking, and ends when the other machine is gone for half a minute.
    """
    link.settimeout(_PROOF_S)
    own = secrets.token_bytes(_NONCE_BYTES)
    link.sendall(own)
    other = _received(link, _NONCE_BYTES)
    mine, its = (b"leader", b"rank") if is_leader else (b"rank", b"leader")
    link.sendall(hmac.digest(key, mine + own + other, "sha256"))
    if not hmac.compare_digest(_received(link, _DIGEST_BYTES), hmac.digest(key, its + other + own, "sha256")):
        raise ValueError("it has another key; both must have the same rank_key_file")
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _received(link: socket.socket, num_bytes: int) -> bytes:
    data = link.recv(num_bytes)
    if len(data) < num_bytes:  # not waited for: a slow sender would keep others from being accepted
        raise ValueError(f"it sent {len(data)} of the {num_bytes} bytes of its proof, and is no rank or has ended")
    return data


def read_key(path: Path) -> bytes:
    """The first line of a file. Raises InvalidArgumentError if it is too short."""
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


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises InvalidArgumentError if it cannot."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InvalidArgumentError(f"engine: rank_listen_address must be free, got {host}:{port}: {error}") from None
