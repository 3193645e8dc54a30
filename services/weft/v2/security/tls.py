"""TLS from PEM files, validated before use, for gRPC and for the metrics port."""

import argparse
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from weft.base.errors import InvalidArgumentError
from weft.base.security.files import ReloadingFiles, read_file, warn_if_shared
from weft.wire.interface import grpc

#: Of TLS 1.2, those that HTTP/2 allows (RFC 9113, appendix A, lists the others); those of TLS 1.3 it allows all.
_HTTP2_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end of a connection.

    Attributes:
        cert: Certificate of this end, followed by intermediate ones; None: no certificate.
        ca: CA of the other end's certificates. None: a server requests none, a client trusts gRPC's default roots.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """The given files."""
        return [path for path in (self.cert, self.key, self.ca) if path is not None]

    def read(self) -> "TlsContent":
        """Read and validate the files. Raises InvalidArgumentError."""
        if (self.cert is None) != (self.key is None):
            raise InvalidArgumentError("a TLS certificate needs its key and a key its certificate; give both")
        http, grpc_server = (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) for _ in range(2))
        grpc_channel = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        contexts = (http, grpc_server, grpc_channel)
        cert = key = ca = None
        if self.cert is not None and self.key is not None:
            cert, key = read_file(self.cert, "TLS certificate"), read_file(self.key, "TLS key")
            try:
                for context in contexts:
                    context.load_cert_chain(self.cert, self.key, _no_password)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise InvalidArgumentError(
                    f"TLS certificate {self.cert} and key {self.key} are no pair that can be used: {_reason(error)}"
                ) from None
            warn_if_shared(self.key)
            if (cert, key) != (read_file(self.cert, "TLS certificate"), read_file(self.key, "TLS key")):
                raise InvalidArgumentError(f"TLS certificate {self.cert} changed while it was read")
        if self.ca is not None:
            ca = read_file(self.ca, "TLS CA")
            try:
                for context in contexts:
                    context.load_verify_locations(cadata=ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise InvalidArgumentError(f"TLS CA {self.ca} has no certificates in PEM: {_reason(error)}") from None
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
        for context in (grpc_server, grpc_channel):
            context.set_alpn_protocols(["h2"])
            context.set_ciphers(_HTTP2_CIPHERS)
        # A client whose certificate is no longer accepted must not come back with a ticket from before.
        grpc_server.options |= ssl.OP_NO_TICKET
        grpc_server.num_tickets = 0
        return TlsContent(cert, key, ca, http, grpc_server, grpc_channel)


class TlsContent(NamedTuple):
    """Contents of ``TlsFiles``."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    http: ssl.SSLContext
    grpc_server: ssl.SSLContext
    grpc_channel: ssl.SSLContext


def server_tls_files(options: argparse.Namespace) -> TlsFiles | None:
    """Files from ``security.arguments.add_server_arguments``; None: plaintext."""
    files = TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
    return files if files.paths else None


class ServerTls:
    """Certificate of a server, for its gRPC and its metrics port; changed files are used from the next handshake on.

    Existing connections are not affected.

    Args:
        files: ``cert`` and ``key`` are required; with ``ca`` clients must present a certificate that it issued.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.requires_client_certificate = files.ca is not None
        self._content = ReloadingFiles(files.paths, files.read)
        self._last_sent: TlsContent | None = None  # last content passed to gRPC
        self._lock = threading.Lock()  # gRPC's threads and those of the metrics port do handshakes concurrently

    def content(self) -> TlsContent:
        """The current content."""
        with self._lock:
            return self._content.get()

    def credentials(self) -> "grpc.ServerCredentials":
        """Credentials for ``add_secure_port``; gRPC fetches the certificate at each handshake."""
        self._last_sent = self.content()
        fetch: Any = self._changed_configuration  # the stubs lack None as a result
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._last_sent), fetch, require_client_authentication=self.requires_client_certificate
        )

    def http_context(self) -> ssl.SSLContext:
        """Context of an HTTP/1.1 server, which uses the current content at each handshake."""
        return self._followed(lambda content: content.http)

    def grpc_context(self) -> ssl.SSLContext:
        """Context of a gRPC server that is not grpcio's, which uses the current content at each handshake."""
        return self._followed(lambda content: content.grpc_server)

    def _followed(self, context_of: Callable[[TlsContent], ssl.SSLContext]) -> ssl.SSLContext:
        current, since_unix_s = self.content(), 0.0
        context = context_of(current)

        def choose(connection: ssl.SSLObject, server_name: str | None, listening: ssl.SSLContext) -> int | None:
            # Called without a server name too. From here on certificate, CA and protocols are those of the new context;
            # whether a client must show a certificate stays, and cannot change.
            nonlocal current, since_unix_s
            content = self.content()
            if content is not current:
                current, since_unix_s = content, time.time()
            session = connection.session if connection.session_reused else None
            if session is not None and session.time <= since_unix_s:
                return ssl.AlertDescription.ALERT_DESCRIPTION_HANDSHAKE_FAILURE  # verified by a CA of before
            connection.context = context_of(content)
            return None

        context.sni_callback = choose
        return context

    def _changed_configuration(self) -> "grpc.ServerCertificateConfiguration | None":
        """The configuration if it changed since the last call, else None.

        Each configuration makes gRPC drop the previous one, also for handshakes in progress: with a new configuration
        per handshake, half of the runs with 100 concurrent clients had one accepted without ALPN, and thus rejected
        (grpcio 1.85).
        """
        content = self.content()
        if content is self._last_sent:
            return None
        self._last_sent = content
        return _configuration(content)


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS context of an https client that trusts only ``files.ca``, and presents its certificate if it has one."""
    content = files.read()
    context = ssl.create_default_context(cadata=(content.ca or b"").decode("ascii"))
    if files.cert is not None:
        context.load_cert_chain(files.cert, files.key)
    return context


def _configuration(content: TlsContent) -> "grpc.ServerCertificateConfiguration":
    pair: Any = (content.key, content.cert)
    return grpc.ssl_server_certificate_configuration([pair], content.ca)


def channel_credentials(content: TlsContent) -> "grpc.ChannelCredentials":
    """Credentials of a channel."""
    return grpc.ssl_channel_credentials(content.ca, content.key, content.cert)


def _no_password() -> NoReturn:
    raise ValueError("the key is encrypted; give one that is not, readable by this service only")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error) or type(error).__name__
