"""Channel security: TLS files and a key, both reloaded when they change."""

import argparse
import asyncio
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import InvalidArgumentError
from weft.base.observing.logs import get_logger
from weft.base.security.files import ReloadingFiles, read_file, warn_if_shared
from weft.v2.security.tls import TlsContent, TlsFiles
from weft.wire.interface import grpc

#: Keys are sent as headers, and peers drop headers above 8 KiB.
_MAX_KEY_BYTES = 1024

#: Minimum connect timeout (gRPC's name is misleading): of 100 concurrent clients, some had not
#: finished their handshakes in 100 ms (2 shared cores). Lost peers are redialled as fast as before.
MIN_HANDSHAKE_MS = 5_000

_log = get_logger("weft.security")


@dataclass(frozen=True, slots=True)
class ChannelSecurity:
    """TLS files and key of a client.

    Attributes:
        key_file: Its first line is sent with each call as ``authorization: Bearer``; None: no key.
    """

    tls: TlsFiles = field(default_factory=TlsFiles)
    server_name: str = ""
    key_file: Path | None = None

    @property
    def is_encrypted(self) -> bool:
        """Whether the channel is encrypted."""
        return self.tls.ca is not None

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Channel options for gRPC."""
        if not self.is_encrypted:
            return []
        name = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        return [*name, ("grpc.min_reconnect_backoff_ms", MIN_HANDSHAKE_MS)]

    @property
    def is_plain(self) -> bool:
        """Whether there is neither TLS nor a key."""
        return not self.is_encrypted and self.key_file is None

    def check(self) -> None:
        """Validate the files. Raises InvalidArgumentError."""
        if not self.is_encrypted and (self.tls.paths or self.server_name):
            raise InvalidArgumentError("TLS needs the CA that issued the server's certificate; give it too")
        self.read()

    def read(self) -> "ChannelSecrets":
        """Read the files. Raises InvalidArgumentError."""
        content = self.tls.read() if self.is_encrypted else None
        return ChannelSecrets(content, "" if self.key_file is None else read_key(self.key_file))

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return [*self.tls.paths, *([] if self.key_file is None else [self.key_file])]


def channel_security(options: argparse.Namespace, prefix: str = "") -> ChannelSecurity | None:
    """Settings from ``add_channel_arguments``; None: plaintext without a key. Raises InvalidArgumentError."""

    def given(name: str) -> Path | None:
        return getattr(options, f"{prefix}{name}".replace("-", "_"), None)

    security = ChannelSecurity(
        TlsFiles(given("tls-cert"), given("tls-key"), given("tls-ca")),
        getattr(options, f"{prefix}tls-name".replace("-", "_"), ""),
        given("key-file"),
    )
    security.check()
    return None if security.is_plain else security


class ChannelSecrets(NamedTuple):
    """Contents of the files of a ``ChannelSecurity``; ``tls`` is None for plaintext, ``key`` "" for none."""

    tls: TlsContent | None
    key: str


class _Connection:
    """A channel with one certificate. Closing it would cancel its streams, so its calls are counted.

    It owns its multi-callables, because gRPC keeps the socket open as long as one of them exists.
    """

    __slots__ = ("callables", "channel", "num_calls")

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_calls = 0
        self.callables: dict[_Method, Any] = {}


class _Method:
    """One method of a stub; each call uses the current connection, with the key."""

    __slots__ = ("_args", "_kind", "_kwargs", "_owner")

    def __init__(self, owner: "SecuredChannel", kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._owner = owner
        self._kind = kind
        self._args = args
        self._kwargs = kwargs

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        owner = self._owner
        connection = owner.current()
        begin = connection.callables.get(self)
        if begin is None:
            begin = getattr(connection.channel, self._kind)(*self._args, **self._kwargs)
            connection.callables[self] = begin
        call = begin(*args, metadata=owner.with_key(metadata), **kwargs)
        connection.num_calls += 1
        call.add_done_callback(lambda _: owner.on_call_done(connection))
        return call


def _methods_of(kind: str) -> Any:
    def make(owner: "SecuredChannel", *args: Any, **kwargs: Any) -> _Method:
        return _Method(owner, kind, args, kwargs)

    return make


class SecuredChannel(grpc.aio.Channel):
    """A channel that reconnects when its files change; calls in flight finish on their original connection."""

    unary_unary, unary_stream, stream_unary, stream_stream = map(
        _methods_of, ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    )

    def __init__(
        self,
        address: str,
        security: ChannelSecurity,
        connect: Callable[[TlsContent | None], grpc.aio.Channel],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        security.check()
        self._secrets = ReloadingFiles(security.paths, security.read, clock_s=clock_s)
        self._current = self._secrets.get()
        self._connection = self._opened()
        self._old: set[_Connection] = set()
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()
        if security.key_file is not None and not security.is_encrypted and not is_local(address):
            _log.warning("the key in %s is sent to %s in plaintext; use TLS", security.key_file, address)

    def current(self) -> _Connection:
        """The connection for a new call."""
        secrets = self._current if self._is_closed else self._secrets.get()
        if secrets is not self._current:
            has_new_tls = _pem(secrets) != _pem(self._current)
            self._current = secrets
            if has_new_tls:
                self._old.add(self._connection)
                self._connection, old = self._opened(), self._connection
                self._close_if_idle(old)
        return self._connection

    def on_call_done(self, connection: _Connection) -> None:
        """Release a connection after a call."""
        connection.num_calls -= 1
        self._close_if_idle(connection)

    def with_key(self, metadata: Any) -> Any:
        """The metadata of a call, with the key."""
        key = self._current.key
        return (*(metadata or ()), ("authorization", f"Bearer {key}")) if key else metadata

    async def close(self, grace: float | None = None) -> None:
        """Start no more calls; cancel calls in flight after ``grace`` seconds."""
        self._is_closed = True
        old, self._old = self._old, set()
        await asyncio.gather(
            *self._closing, *(connection.channel.close(grace) for connection in (self._connection, *old))
        )

    def _close_if_idle(self, connection: _Connection) -> None:
        if connection.num_calls == 0 and connection in self._old:
            self._old.discard(connection)
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return  # it has on_call_done, and with it everything that calls
            task = loop.create_task(connection.channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """State of the connection for new calls."""
        return self.current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As ``grpc.aio.Channel``."""
        await self.current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As ``grpc.aio.Channel``."""
        await self.current().channel.channel_ready()

    async def __aenter__(self) -> "SecuredChannel":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close(None)

    def _opened(self) -> _Connection:
        return _Connection(self._connect(self._current.tls))


def is_local(address: str) -> bool:
    """Whether traffic of ``host``, ``host:port`` or a Unix socket stays on this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:").removeprefix("///")
    if host.count(":") == 1 or host.startswith("["):
        host = host.rpartition(":")[0] if not host.endswith("]") else host
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _pem(secrets: ChannelSecrets) -> object:
    return None if secrets.tls is None else secrets.tls[:3]


def read_key(path: Path) -> str:
    """The key in the first line of a file. Raises InvalidArgumentError."""
    warn_if_shared(path)
    line = read_file(path, "key file").partition(b"\n")[0].strip()
    if not line or len(line) > _MAX_KEY_BYTES or not all(0x21 <= byte <= 0x7E for byte in line):
        raise InvalidArgumentError(
            f"key file {path} must have a key in its first line: 1 to {_MAX_KEY_BYTES} printable ASCII characters, as "
            "weft key new prints it"
        )
    return line.decode("ascii")
